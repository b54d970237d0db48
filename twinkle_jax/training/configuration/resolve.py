"""Configurations made whole: what depends on the policy is filled in, what cannot be is refused."""

import dataclasses

from twinkle_jax.training.configuration.limits import check
from twinkle_jax.training.configuration.train_config import TrainConfig


def resolve(config: TrainConfig) -> TrainConfig:
    """Fill in what depends on the policy, and refuse what cannot be."""
    small = config.model is None
    rollout, optimizer = config.rollout, config.optimizer
    if rollout.max_new_tokens is None:
        rollout = dataclasses.replace(rollout, max_new_tokens=8 if small else 512)
    if optimizer.learning_rate is None:
        optimizer = dataclasses.replace(optimizer, learning_rate=6e-4 if small else 1e-6)
    if optimizer.decay is None:
        optimizer = dataclasses.replace(optimizer, decay=small)
    steps = config.steps
    if steps is None:
        steps = 300 if small else 500
    config = dataclasses.replace(config, rollout=rollout, optimizer=optimizer, steps=steps)
    check(config)
    return config
