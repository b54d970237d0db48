"""Configurations: what is filled in, what is refused, what a resumed run may change."""

import dataclasses
import json
import re

import pytest

from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
)
from twinkle_jax.training.configuration.learning_rate import learning_rate
from twinkle_jax.training.configuration.resolve import resolve
from twinkle_jax.training.configuration.resumable import check_resumable
from twinkle_jax.training.configuration.train_config import from_dict


def test_what_depends_on_the_policy_is_filled_in():
    small, large = resolve(TrainConfig()), resolve(TrainConfig(model="somewhere", task="x.jsonl"))
    assert (small.rollout.max_new_tokens, large.rollout.max_new_tokens) == (8, 512)
    assert (small.optimizer.learning_rate, large.optimizer.learning_rate) == (6e-4, 1e-6)
    assert (small.steps, large.steps) == (300, 500)
    assert resolve(TrainConfig(steps=7)).steps == 7
    assert resolve(TrainConfig(steps=0)).steps == 0  # not taken for "none given"


REFUSED = [
    (TrainConfig(steps=-1), "steps must be at least 0, got -1"),
    (TrainConfig(warm_start=1.5), "warm_start must be in [0, 1], got 1.5"),
    (TrainConfig(task="x.jsonl"), "model must be a checkpoint for the task x.jsonl, got none"),
    (
        TrainConfig(rollout=RolloutConfig(num_samples=1)),
        "rollout.num_samples must be at least 2, got 1",
    ),
    (
        TrainConfig(rollout=RolloutConfig(temperature=0.0)),
        "rollout.temperature must be above 0 and finite, got 0.0",
    ),
    (
        TrainConfig(optimizer=OptimizerConfig(learning_rate=float("nan"))),
        "optimizer.learning_rate must be above 0 and finite, got nan",
    ),
    (
        TrainConfig(optimizer=OptimizerConfig(max_grad_norm=-1.0)),
        "optimizer.max_grad_norm must be above 0 and finite, got -1.0",
    ),
    (
        TrainConfig(update=UpdateConfig(kl_beta=-0.1)),
        "update.kl_beta must be at least 0 and finite, got -0.1",
    ),
    (
        TrainConfig(rollout=RolloutConfig(prompts=6), update=UpdateConfig(mini_batches=4)),
        "update.mini_batches must divide rollout.prompts, 6, got 4",
    ),
    (TrainConfig(dtype="float16"), "dtype must be one of float32, bfloat16, got 'float16'"),
    (
        TrainConfig(update=UpdateConfig(recompute="all")),
        "update.recompute must be one of layers, elementwise, nothing, got 'all'",
    ),
    (
        TrainConfig(evaluation=EvaluationConfig(problems=0)),
        "evaluation.problems must be at least 1, got 0",
    ),
    (
        TrainConfig(logging=LoggingConfig(checkpoint_every=0)),
        "logging.checkpoint_every must be at least 1, got 0",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_cannot_be_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(config)


def test_json_gives_a_configuration_back():
    config = resolve(TrainConfig(seed=3, optimizer=OptimizerConfig(betas=(0.8, 0.95))))
    assert from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_the_learning_rate_rises_and_falls():
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=4, decay=True)
    config = resolve(TrainConfig(steps=8, optimizer=optimizer))
    rates = [learning_rate(config, step) for step in range(8)]
    assert rates[:2] == [0.25, 0.5 * 7 / 8]
    assert rates[4:] == [0.5, 0.375, 0.25, 0.125]
    constant = resolve(TrainConfig(optimizer=dataclasses.replace(optimizer, decay=False)))
    assert learning_rate(constant, 100) == 1.0


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (TrainConfig(seed=1), "seed"),
        (TrainConfig(level=3), "level"),
        (TrainConfig(rollout=RolloutConfig(prompts=64)), "rollout.prompts"),
        (TrainConfig(optimizer=OptimizerConfig(betas=(0.9, 0.95))), "optimizer.betas"),
    ],
)
def test_a_resumed_run_must_be_the_same_run(changed, name):
    saved = json.loads(json.dumps(dataclasses.asdict(resolve(TrainConfig()))))
    with pytest.raises(ValueError, match=f"^{re.escape(name)} must be .*, as it was, got"):
        check_resumable(saved, resolve(changed))


def test_a_resumed_run_may_log_otherwise_and_be_longer_unless_its_learning_rate_depends_on_it():
    saved = json.loads(json.dumps(dataclasses.asdict(resolve(TrainConfig()))))
    check_resumable(saved, resolve(TrainConfig(output_dir="elsewhere", resume="auto")))
    check_resumable(saved, resolve(TrainConfig(logging=LoggingConfig(samples_every=1))))
    with pytest.raises(ValueError, match="steps must be"):
        check_resumable(saved, resolve(TrainConfig(steps=1000)))
    constant = OptimizerConfig(decay=False)
    saved = json.loads(json.dumps(dataclasses.asdict(resolve(TrainConfig(optimizer=constant)))))
    check_resumable(saved, resolve(TrainConfig(steps=1000, optimizer=constant)))
