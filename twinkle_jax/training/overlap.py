"""The rollout of the next step, sampled on a server while the update of this step runs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

import jax

from twinkle_jax.data import PromptBatch
from twinkle_jax.model import Params
from twinkle_jax.rollout import Rollout, RolloutSource, ServerEngine

_POLL = 0.2  # seconds between looks for a signal
_JOIN_SECONDS = 5.0


class Sampled(NamedTuple):
    """A rollout without rewards, and its prompts."""

    prompts: PromptBatch
    rollout: Rollout


class NextRollout:
    """Samples one rollout in a thread, by a policy that the server has.

    The update that runs meanwhile deletes the parameters: what samples must not read them once the
    server has loaded them.

    Args:
        source: samples.
        engine: what the source samples with.
    """

    def __init__(self, source: RolloutSource, engine: ServerEngine) -> None:
        self._source, self._engine = source, engine
        self._prompts: PromptBatch | None = None
        self._result: Future[Rollout] = Future()
        self._thread: threading.Thread | None = None

    def start(self, params: Params, prompts: PromptBatch, key: jax.Array) -> None:
        """Have the server load these parameters, and begin to sample.

        Raises:
            ServerError: if it cannot load them.
        """
        self._engine.load(params)
        self._prompts, self._result = prompts, Future()

        def sample() -> None:
            try:
                self._result.set_result(self._source.sample(params, prompts, key))
            except BaseException as error:
                self._result.set_exception(error)

        # A daemon: the process may end while a server takes its time.
        self._thread = threading.Thread(target=sample, name="next rollout", daemon=True)
        self._thread.start()

    def take(self, check: Callable[[], None]) -> Sampled | None:
        """Wait for what was begun, and return it; None if nothing was.

        Args:
            check: called while waiting; may raise.

        Raises:
            Exception: what sampling has raised.
        """
        if self._prompts is None:
            return None
        while not wait([self._result], timeout=_POLL).done:
            check()
        prompts, self._prompts = self._prompts, None
        return Sampled(prompts, self._result.result())

    def close(self) -> None:
        """Cancel what was begun."""
        if self._thread is not None and self._thread.is_alive():
            self._engine.cancel()
            self._thread.join(_JOIN_SECONDS)
