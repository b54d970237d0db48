"""The policy on a server: which model and adapter it is, and that its weights are right."""

import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from twinkle_jax.model.decoder.lora import walk
from twinkle_jax.model.twinkle.transformers_model import TransformersModel
from twinkle_jax.sampler.vllm.budget import Budget
from twinkle_jax.sampler.vllm.probe import (
    Probe,
    Scores,
    check_mode,
    check_unchanged,
    first_tokens,
    prove,
)
from twinkle_jax.sampler.vllm.request import ServerError
from twinkle_jax.sampler.vllm.served_model import Served, models_request
from twinkle_jax.sampler.vllm.server import Server
from twinkle_jax.sampler.vllm.weights import (
    load_adapter,
    load_checkpoint,
    save_for_server,
    unload_adapter,
)

_TOLERANCES = {"float32": 1e-3}
_OTHER_TYPES = 0.1  # have fewer digits


class ServedPolicy:
    """What a server is to sample from.

    Args:
        server: the server.
        names: what it may call the model.
        vocab: token ids lie below it.
        max_length: the most tokens of a row.
        tolerance: by how much scores may differ on average; None: by the actor's type.
    """

    def __init__(
        self,
        server: Server,
        names: Sequence[str],
        vocab: int,
        max_length: int,
        tolerance: float | None,
    ) -> None:
        self._server, self._names = server, names
        self._vocab, self._max_length, self._tolerance = vocab, max_length, tolerance
        self._adapter: Path | None = None
        self._proved: tuple[Probe, Scores, float] | None = None
        self._failed = self._asked_for_mode = False

    def check(self, budget: Budget) -> Served:
        """Ask a server whether it has the model, its weights, and the right log-probabilities.

        Returns:
            The name to ask for, and the most tokens of a row.

        Raises:
            ServerError: if not.
        """
        url = self._server.url
        if self._failed:
            raise ServerError(
                f"{url} must have the actor's weights, got an error from the last sync_weights: "
                "call it again"
            )
        served = self._served(budget)
        if self._adapter is not None:
            served = served._replace(name=self._adapter.name)
        if self._proved is None:
            if not self._asked_for_mode:
                question = self._probe(served).without_choice(served.name)
                check_mode(url, self._server.call(budget, question))
                self._asked_for_mode = True
            return served
        probe, scores, tolerance = self._proved
        answers = self._server.call_all(budget, probe.looking(served.name))
        check_unchanged(url, first_tokens(answers), scores, tolerance)
        return served

    def load(
        self, budget: Budget, actor: TransformersModel, shared_dir: Path, *, merge: bool
    ) -> None:
        """Have the server load an actor's checkpoint or adapter, and prove it.

        Raises:
            ServerError: if it cannot, or does not; `check` raises one too from then on, until a
                later call succeeds.
        """
        self._failed = True
        served = self._served(budget)
        old = self._adapter
        if not merge and any(path[-1] == "lora_A" for path, _ in walk(actor.params)):
            self._adapter = self._load_adapter(budget, actor, shared_dir, served)
        else:
            place = shared_dir / "checkpoint"
            save_for_server(actor, place)
            load_checkpoint(self._server, budget, place)
            self._prove(budget, actor, served)
            self._adapter = None
        self._failed = False
        if old is not None:
            self._forget(budget, old)

    def _load_adapter(
        self, budget: Budget, actor: TransformersModel, shared_dir: Path, served: Served
    ) -> Path:
        """Load it under a name of its own: what is cached under another one stays apart."""
        place = shared_dir / f"adapter-{secrets.token_hex(4)}"
        actor.save(place)
        try:
            load_adapter(self._server, budget, place.name, place)
            self._prove(budget, actor, served._replace(name=place.name))
        except BaseException:
            self._forget(budget, place)
            raise
        return place

    def _prove(self, budget: Budget, actor: TransformersModel, served: Served) -> None:
        tolerance = self._tolerance or _TOLERANCES.get(actor.dtype.name, _OTHER_TYPES)
        probe = self._probe(served)
        scores = prove(self._server, budget, probe, served.name, actor, tolerance)
        self._proved = probe, scores, tolerance

    def _forget(self, budget: Budget, adapter: Path) -> None:
        with suppress(ServerError):  # it may not have been loaded, and costs memory only
            unload_adapter(self._server, budget, adapter.name)
        shutil.rmtree(adapter, ignore_errors=True)

    def _served(self, budget: Budget) -> Served:
        served: Served = self._server.call(budget, models_request(self._names))
        return served

    def _probe(self, served: Served) -> Probe:
        return Probe(self._vocab, min(self._max_length, served.max_length))
