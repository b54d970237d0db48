"""What a run may change when a new process goes on with it, and what it may not."""

import dataclasses
from typing import Any

from twinkle_jax.training.configuration.train_config import TrainConfig

# What a run may change when it goes on: all else must be as it was.
_MAY_CHANGE = {"steps", "output_dir", "resume", "overwrite", "logging", "evaluation"}
_MAY_CHANGE |= {"reward_timeout", "mesh"}


def check_resumable(saved: dict[str, Any], config: TrainConfig) -> None:
    """Refuse to go on with other settings than a run was begun with.

    Args:
        saved: `dataclasses.asdict` of the configuration in the checkpoint.
        config: the one to go on with.

    Raises:
        ValueError: with the name of the first setting that differs.
    """
    now = _flat(dataclasses.asdict(config))
    for name, before in _flat(saved).items():
        top = name.split(".")[0]
        depends = name == "steps" and config.optimizer.decay  # the learning rate does
        if (depends or top not in _MAY_CHANGE) and now.get(name) != before:
            raise ValueError(f"{name} must be {before!r}, as it was, got {now.get(name)!r}")


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Name each setting as the command does."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, setting in parts:
            own = list(setting) if isinstance(setting, tuple) else setting
            flat[f"{name}.{part}".rstrip(".")] = own
    return flat
