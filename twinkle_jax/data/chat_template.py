"""A tokenizer's chat template, which turns messages into text."""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle_jax._package import require
from twinkle_jax.data.worker_process import WorkerProcess

_WORKER = Path(__file__).with_name("chat_template_worker.py")
_ERRORS = {
    "limits": "chat_template must stay within its sandbox and limits",
    "syntax": "chat_template must be a Jinja template",
    "messages": "messages must suit the chat template",
    "template": "chat_template must suit the messages",
}


class ChatTemplate:
    """A chat template, run in a sandbox.

    It runs in Jinja's immutable sandbox, in a worker process that all chat templates share, and
    sees only messages and variables. A template that takes too long, needs more than 1 GiB (on
    Linux) or writes more than 10 million characters is an error.

    The process is started, not forked, when the first template is made, and does not import the
    caller's script, which needs no `if __name__ == "__main__"`. Any thread may render, and so may
    processes forked from this one.

    Args:
        source: the Jinja template of a tokenizer.
        timeout: seconds for one conversation.

    Raises:
        ValueError: if it cannot be parsed.
        ImportError: if jinja2 is not installed.

    Example:
        >>> source = "{% for m in messages %}{{ m.role }}={{ m.content }}{% endfor %}"
        >>> template = ChatTemplate(source)
        >>> template.render([{"role": "user", "content": "Hello"}])
        'user=Hello'
    """

    def __init__(self, source: str, *, timeout: float = 10.0) -> None:
        require("jinja2", "data")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout!r}")
        self.source, self.timeout = source, timeout
        _process.render(source, [], timeout)  # raises for a syntax error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation.

        Args:
            messages: dictionaries with `role` and `content`, of JSON's types.
            tools: what may be called.
            add_generation_prompt: whether to end with the start of an assistant turn.
            variables: further variables of the template, such as `enable_thinking`.

        Returns:
            The text, control tokens included.

        Raises:
            ValueError: if the template refuses the messages, accesses something unsafe, or
                exceeds its limits.
            TypeError: if something is not of JSON's types.
        """
        (text,) = self.render_all(
            [
                {
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **variables,
                }
            ]
        )
        return text

    def render_all(self, conversations: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render several conversations, which is faster than one after the other.

        Args:
            conversations: variables of the template for each, `messages` among them.

        Returns:
            A text for each.

        Raises:
            ValueError: as `render`.
            TypeError: as `render`.
        """
        return _process.render(self.source, conversations, self.timeout)


class _Process:
    """The worker process; started at the first request, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.worker = WorkerProcess(_WORKER)
        self._templates: dict[str, int] = {}  # those that the process has compiled

    def render(
        self, source: str, conversations: Sequence[Mapping[str, Any]], timeout: float
    ) -> list[str]:
        """Compile a template, unless that is done, and render it for each conversation."""
        with self._lock:
            if self.worker.process is None or self.worker.process.poll() is not None:
                self._start()
            if source not in self._templates:
                compiled = self._ask({"source": source, "seconds": timeout})
                self._templates[source] = compiled["template"]
            request = {"template": self._templates[source], "seconds": timeout}
            return list(self._ask({**request, "conversations": conversations})["texts"])

    def _ask(self, request: dict[str, Any]) -> Any:
        process = self.worker.process
        assert process is not None
        answer = self.worker.ask(json.dumps(request, default=_plain))
        if not answer:
            self.worker.end()
            raise ValueError(
                f"{_ERRORS['limits']}, got no answer within {request['seconds']} s and 1 GiB "
                f"(exit status {process.returncode})"
            )
        decoded = json.loads(answer)
        if "error" in decoded:
            raise ValueError(f"{_ERRORS[decoded['error']]}, got {decoded['cause']}")
        return decoded

    def _start(self) -> None:
        self._templates = {}
        self.worker.start()
        if not self.worker.read_line():
            raise RuntimeError(f"{_WORKER} must start, its process ended: {self.worker.end()}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"messages must be of JSON's types, got {type(value).__name__}")


_process = _Process()


def _after_fork() -> None:
    """Leave the worker to the parent process: two readers of one pipe would mix up answers."""
    global _process
    _process.worker.leave_to_parent()
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
