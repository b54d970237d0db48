"""What a server is asked, and the error when it does not do it."""

from collections.abc import Callable
from typing import Any, NamedTuple

_SMALL = 2**20


class ServerError(RuntimeError):
    """A server is not there, or did not do what it must; the message says what it said."""


class Request(NamedTuple):
    """What is asked, and how an answer is taken.

    Attributes:
        method: GET or POST.
        path: the route.
        body: what to send as JSON; None for nothing.
        read: takes the JSON of an answer; raises ValueError, as "what it must be, got what it is".
            None: there is nothing to know but that it worked.
        purpose: what it is for, where there are several of a route.
        most: the longest answer, in bytes.
        hint: what to do if the server does not know the route.
        repeat: whether it may be sent again.
    """

    method: str
    path: str
    body: Any = None
    read: Callable[[Any], Any] | None = None
    purpose: str = ""
    most: int = _SMALL
    hint: str = ""
    repeat: bool = True
