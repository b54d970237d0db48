"""What the settings of a run may be: each by itself, and together."""

import math
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin, get_type_hints

from twinkle_jax.training.configuration.named_estimator import make_estimator
from twinkle_jax.training.configuration.named_loss import make_loss
from twinkle_jax.training.configuration.train_config import TrainConfig

_AT_LEAST = {
    "steps": 0,
    "seed": 0,
    "rollout.prompts": 1,
    "rollout.num_samples": 2,
    "rollout.max_new_tokens": 1,
    "rollout.max_prompt_tokens": 1,
    "update.dynamic_sampling": 1,
    "update.epochs": 1,
    "update.mini_batches": 1,
    "update.micro_batch_rows": 1,
    "optimizer.warmup_steps": 0,
    "optimizer.max_skipped": 1,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "evaluation.every": 0,
    "evaluation.problems": 1,
    "evaluation.pass_k": 0,
    "logging.checkpoint_every": 1,
    "logging.keep_checkpoints": 1,
    "logging.samples_every": 0,
}
_MAY_BE_NONE = {"update.micro_batch_rows"}
_ABOVE_ZERO = (
    "reward_timeout",
    "rollout.temperature",
    "optimizer.learning_rate",
    "optimizer.max_grad_norm",
)


def check(config: TrainConfig) -> None:
    """Refuse settings that cannot be.

    Args:
        config: whole: nothing is None that depends on the policy.

    Raises:
        ValueError: with the name of the first such setting.
    """
    _check_choices(config)
    _check_numbers(config)
    update = config.update
    make_estimator(update.advantage, update.advantage_options)  # refuse what they do not know
    make_loss(update, config.rollout.max_new_tokens or 1)
    if config.model is None and config.task != "arithmetic":
        raise ValueError(f"model must be a checkpoint for the task {config.task}, got none")
    _check_rows(config)


def _check_choices(config: Any, prefix: str = "") -> None:
    """Each setting whose type lists its values must have one of them."""
    hints = get_type_hints(type(config))
    for name, hint in hints.items():
        value = getattr(config, name)
        if is_dataclass(value):
            _check_choices(value, f"{prefix}{name}.")
        elif get_origin(hint) is Literal and value not in get_args(hint):
            known = ", ".join(get_args(hint))
            raise ValueError(f"{prefix}{name} must be one of {known}, got {value!r}")


def _check_numbers(config: TrainConfig) -> None:
    for name, least in _AT_LEAST.items():
        count = attrgetter(name)(config)
        if count is None and name in _MAY_BE_NONE:
            continue
        if count is None or count < least:
            raise ValueError(f"{name} must be at least {least}, got {count}")
    for name in _ABOVE_ZERO:
        number = attrgetter(name)(config)
        if number is None or not 0 < number < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {number}")
    if not 0 <= config.warm_start <= 1:
        raise ValueError(f"warm_start must be in [0, 1], got {config.warm_start}")
    kl_beta = config.update.kl_beta
    if not 0 <= kl_beta < math.inf:
        raise ValueError(f"update.kl_beta must be at least 0 and finite, got {kl_beta}")


def _check_rows(config: TrainConfig) -> None:
    """Prompts must be dealt out evenly to mini-batches, and rows to devices."""
    rollout, update = config.rollout, config.update
    if rollout.prompts % update.mini_batches:
        raise ValueError(
            f"update.mini_batches must divide rollout.prompts, {rollout.prompts}, "
            f"got {update.mini_batches}"
        )
    devices = config.mesh.data * config.mesh.fsdp
    rows = rollout.prompts // update.mini_batches * rollout.num_samples
    micro = update.micro_batch_rows or rows
    if rows % devices or micro % devices:
        raise ValueError(
            "mesh.data times mesh.fsdp must divide the rows of a mini-batch and of a micro-batch, "
            f"{rows} and {micro}, got {devices}"
        )
