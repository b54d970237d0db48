"""Where a run is, and how a checkpoint holds that."""

import dataclasses
import json
import platform
from importlib import metadata
from typing import Any, NamedTuple

import jax

from twinkle_jax.data import PromptLoader
from twinkle_jax.model import TrainState
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.training.checkpoints.run_checkpoints import RunCheckpoints
from twinkle_jax.training.configuration.resumable import check_resumable
from twinkle_jax.training.configuration.train_config import TrainConfig
from twinkle_jax.training.shown.metrics_log import MetricsLog


class Progress(NamedTuple):
    """Where a run is after a step: with the reference policy, all that the next step depends on.

    Attributes:
        state: parameters, moments, number of updates.
        key: the root of all randomness on the device; step s draws with `fold_in(key, s)`.
        step: steps done.
        facts: numbers that go on: tokens so far, accuracies, seconds, skipped steps in a row; and
            `unwritten`, a step's metrics whose line waits for the evaluation that belongs to it.
        data: the loader's state: how many prompts those steps have taken, of which data.
    """

    state: TrainState
    key: jax.Array
    step: int
    facts: dict[str, Any]
    data: dict[str, Any]

    def is_whole(self) -> bool:
        """Whether the arrays are there; an update under way takes their memory for its own."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))


def save(
    checkpoints: RunCheckpoints,
    progress: Progress,
    reference: Params | None,
    config: TrainConfig,
    log: MetricsLog,
) -> None:
    """Save a checkpoint."""
    unwritten = progress.facts.get("unwritten")
    facts = progress.facts | {
        "metrics_offset": unwritten["offset"] if unwritten else log.offset,
        "data": progress.data,
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "versions": _versions(),
    }
    checkpoints.save(progress.step, arrays_of(progress, reference), facts)


def restore(
    checkpoints: RunCheckpoints,
    fresh: Progress,
    reference: Params | None,
    config: TrainConfig,
    loader: PromptLoader,
) -> tuple[Progress, Params | None]:
    """Restore the newest whole checkpoint; the loader goes on where it was.

    Args:
        checkpoints: of the run to go on with.
        fresh: arrays like those that were saved.
        reference: the same, if there is a reference policy.
        config: to go on with.
        loader: of the prompts.

    Returns:
        Where the run is, and its reference policy.

    Raises:
        ValueError: if a setting or the data are not those of the run; the message names which.
    """

    def check(facts: dict[str, Any]) -> None:
        check_resumable(facts["config"], config)
        loader.set_state(facts["data"])

    step, arrays, facts = checkpoints.restore(arrays_of(fresh, reference), check=check)
    progress = Progress(arrays["state"], arrays["key"], step, facts, facts["data"])
    return progress, arrays.get("reference")


def arrays_of(progress: Progress, reference: Params | None) -> dict[str, Any]:
    """Give the arrays of a checkpoint."""
    held = {} if reference is None else {"reference": reference}
    return {"state": progress.state, "key": progress.key, **held}


def _versions() -> dict[str, str]:
    names = ("twinkle-jax", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}
