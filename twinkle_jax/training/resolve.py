"""Configurations made whole: what depends on the policy is filled in, what cannot be is refused."""

import dataclasses
import math

from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.estimator import make_estimator


def resolve(config: TrainConfig) -> TrainConfig:
    """Fill in what depends on the policy, and refuse what cannot be."""
    small = config.model is None
    rollout, optimizer = config.rollout, config.optimizer
    if rollout.max_new_tokens is None:
        rollout = dataclasses.replace(rollout, max_new_tokens=8 if small else 512)
    if optimizer.learning_rate is None:
        optimizer = dataclasses.replace(optimizer, learning_rate=8e-4 if small else 1e-6)
    if optimizer.decay is None:
        optimizer = dataclasses.replace(optimizer, decay=small)
    steps = config.steps
    if steps is None:
        steps = 240 if small else 500
    config = dataclasses.replace(config, rollout=rollout, optimizer=optimizer, steps=steps)
    _check(config)
    return config


def _check(config: TrainConfig) -> None:
    rollout, update = config.rollout, config.update
    at_least = {
        "steps": (config.steps, 0),
        "seed": (config.seed, 0),
        "rollout.prompts": (rollout.prompts, 1),
        "rollout.num_samples": (rollout.num_samples, 2),
        "rollout.max_new_tokens": (rollout.max_new_tokens, 1),
        "rollout.max_prompt_tokens": (rollout.max_prompt_tokens, 1),
        "update.dynamic_sampling": (update.dynamic_sampling, 1),
        "update.epochs": (update.epochs, 1),
        "update.mini_batches": (update.mini_batches, 1),
        "update.micro_batch_rows": (update.micro_batch_rows or 1, 1),
        "optimizer.warmup_steps": (config.optimizer.warmup_steps, 0),
        "optimizer.max_skipped": (config.optimizer.max_skipped, 1),
        "mesh.data": (config.mesh.data, 1),
        "mesh.fsdp": (config.mesh.fsdp, 1),
        "mesh.tensor": (config.mesh.tensor, 1),
        "evaluation.every": (config.evaluation.every, 0),
        "evaluation.problems": (config.evaluation.problems, 1),
        "evaluation.pass_k": (config.evaluation.pass_k, 0),
        "logging.checkpoint_every": (config.logging.checkpoint_every, 1),
        "logging.keep_checkpoints": (config.logging.keep_checkpoints, 1),
        "logging.samples_every": (config.logging.samples_every, 0),
    }
    for name, (value, least) in at_least.items():
        if value is None or value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    above_zero = {
        "reward_timeout": config.reward_timeout,
        "rollout.temperature": rollout.temperature,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "optimizer.max_grad_norm": config.optimizer.max_grad_norm,
    }
    for name, number in above_zero.items():
        if number is None or not 0 < number < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {number}")
    if not 0 <= config.warm_start <= 1:
        raise ValueError(f"warm_start must be in [0, 1], got {config.warm_start}")
    if not 0 <= update.kl_beta < math.inf:
        raise ValueError(f"update.kl_beta must be at least 0 and finite, got {update.kl_beta}")
    make_estimator(update.advantage, update.advantage_options)  # refuses what it does not know
    if config.model is None and config.task != "arithmetic":
        raise ValueError(f"model must be a checkpoint for the task {config.task}, got none")
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
