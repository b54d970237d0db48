"""Settings without an effect on a run are refused before it, by name; no others are."""

import re

import pytest

from tests.training.options import config_of
from twinkle_jax.training import train
from twinkle_jax.training.effects import check_effects

LEARNS = {"model": "m", "examples": "x.jsonl"}
PENALISED = {"model": "m", "update.kl_beta": 0.1, "update.kl_in": "reward"}
WITHOUT_EFFECT = [  # the last option of each, beside the others
    {"lora.alpha": 32.0},
    {"lora.dropout": 0.1},
    {"lora.target_modules": ["q_proj"]},
    {"update.credit": "turn"},
    {"update.discount": 0.9},
    {"update.gae_lambda": 0.9},
    {"update.advantage": "maxrl", "update.scale": "batch"},
    {"update.advantage": "reinforce_plus_plus", "update.scale": "none"},
    {"update.correction_cap": 5.0},
    {"update.loss": "sapo", "update.epsilon": 0.1},
    {"update.loss": "SAPOLoss", "update.epsilon_high": 0.3},
    {"update.loss": "dppo", "update.epsilon": 0.1},
    {"update.loss": "vespo", "update.epsilon_high": 0.3},
    {"update.loss": "cispo", "update.epsilon_high": 4.0, "update.epsilon": 0.1},
    {"logging.traces_every": 1},
    {"evaluation.path": "held_out.jsonl"},
    {"model": "m", "task": "x.jsonl", "evaluation.pass_k": 2},
    {"model": "m", "task": "gsm8k:x.jsonl", "evaluation.reward": "math"},
    {"model": "m", "task": "x.jsonl", "level": 5},
    {"model": "m", "warm_start": 0.5},
    {"environment": "x.py:X", "warm_start": 0.5},
    {"model": "m", "task": "x.jsonl", "evaluation.every": 5},
    {"environment": "x.py:X", "rollout.max_turns": 1, "update.credit": "turn"},
    {"environment": "x.py:X", "rollout.max_turns": 1, "update.discount": 0.9},
    {"tools": "x.py", "rollout.max_turns": 1, "rollout.history": "template"},
    {"tools": "x.py", "update.credit": "turn", "update.discount": 0.0, "update.gae_lambda": 0.9},
    {"rollout.max_turns": 3},
    {"rollout.history": "template"},
    {"rollout.tool_format": "react"},
    {"rollout.max_episode_tokens": 2000},
    {"rollout.cohorts": 1},
    {"rollout.environment_timeout": 5.0},
    {"rollout.environment_threads": 8},
    {"rollout.max_failed": 0.0},
    {"rollout.max_observation": 100},
    {"rollout.tools_in": "thread"},
    {"environment": "x.py:X", "rollout.tools_in": "thread"},
    {"rollout.environment_in": "process"},
    {"tools": "x.py", "rollout.environment_in": "process"},
    {"environment": "openenv:http://localhost:8000", "rollout.environment_in": "process"},
    {"update.mini_batches": 1, "update.replay_routing": "trainer"},
    {"rollout.process_megabytes": 64},
    {"environment": "x.py:X", "rollout.process_megabytes": 64},
    {"tools": "x.py", "rollout.tools_in": "thread", "rollout.process_megabytes": 64},
    {"teacher.weight": 2.0},
    {"teacher.reward_weight": 1.0},
    {"teacher.url": "http://localhost:8000"},
    {"teacher.model": "t", "teacher.served_name": "x"},
    {"teacher.model": "t", "teacher.timeout": 5.0},
    {"teacher.model": "t", "teacher.patience": 5.0},
    {"teacher.model": "t", "update.dynamic_sampling": 4},
    {"teacher.model": "t", "update.advantage": "opo"},
    {"teacher.model": "t", "update.scale": "batch"},
    {"teacher.model": "t", "update.kl_beta": 0.1, "update.kl_in": "reward"},
    {**PENALISED, "update.advantage": "remax", "update.scale": "group"},
    {"teacher.model": "t", "reward": ["exact", "math"], "reward_weights": [1.0, 2.0]},
    {"environment": "x.py:X", "teacher.model": "t", "update.discount": 0.9},
    {"model": "m", "task": "x.jsonl", "update.kl_in": "reward"},
    {**LEARNS, "rollout.num_samples": 4},
    {**LEARNS, "rollout.temperature": 0.7},
    {**LEARNS, "update.loss": "dpo", "update.epsilon": 0.1},
    {**LEARNS, "update.epsilon": 0.1},
    {**LEARNS, "update.kl_beta": 0.1},
    {**LEARNS, "update.advantage": "rloo"},
    {**LEARNS, "update.correction": "token_mask"},
    {**LEARNS, "update.replay_routing": "sampler"},
    {**LEARNS, "update.on_mismatch": "warn"},
    {**LEARNS, "update.max_logp_diff": 0.5},
    {**LEARNS, "dtype": "bfloat16", "update.max_logp_diff": 0.001},
    {**LEARNS, "logging.samples_every": 5},
    {**LEARNS, "task": "y.jsonl"},
    {**LEARNS, "task": "gsm8k:y.jsonl"},
    {**LEARNS, "reward": "exact"},
    {**LEARNS, "rollout.top_p": 0.9},
    {**LEARNS, "rollout.slots": 8},
    {**LEARNS, "rollout.max_prompt_tokens": 64},
    {**LEARNS, "rollout.max_new_tokens": 16},
    {**LEARNS, "evaluation.every": 5},
    {**LEARNS, "evaluation.path": "y.jsonl", "evaluation.pass_k": 2},
    {**LEARNS, "evaluation.path": "y.jsonl", "evaluation.reward": "math"},
    {**LEARNS, "warm_start": 0.5},
]


@pytest.mark.parametrize("options", WITHOUT_EFFECT, ids=str)
def test_settings_without_effect_are_refused_before_a_run(options, tmp_path):
    run = {"output_dir": str(tmp_path / "run"), "steps": 0, "warm_start": 0.0}
    *_, name = options
    with pytest.raises(ValueError, match=rf"^{re.escape(name)} must go with "):
        train(config_of(run | options))
    assert not list(tmp_path.iterdir())


LENGTHS = {"rollout.max_prompt_tokens": 64, "rollout.max_new_tokens": 16}
WITH_EFFECT = [
    {
        "tools": "x.py",
        "update.credit": "turn",
        "update.discount": 0.9,
        "update.gae_lambda": 0.9,
        "logging.traces_every": 1,
    },
    {
        "environment": "x.py:X",
        "rollout.max_episode_tokens": 2000,
        "rollout.cohorts": 1,
        "rollout.max_failed": 0.0,
        "rollout.max_observation": 100,
        "rollout.environment_timeout": 5.0,
        "rollout.environment_threads": 8,
        "rollout.environment_in": "process",
        "rollout.process_megabytes": 64,
    },
    {"tools": "x.py", "rollout.tools_in": "thread"},
    {"tools": "x.py", "rollout.process_megabytes": 64},
    # The longest episode follows from these; a resumed run with longer prompts keeps what it was.
    LENGTHS,
    {"resume": "auto", **LENGTHS, "rollout.max_episode_tokens": 99},
    {
        "model": "m",
        "task": "x.jsonl",
        "lora.rank": 4,
        "lora.alpha": 1.0,
        "lora.dropout": 0.1,
        "lora.target_modules": ["q_proj"],
        "update.scale": "none",
        "update.correction": "token_mask",
        "update.correction_cap": 5.0,
        "evaluation.path": "held_out.jsonl",
        "evaluation.every": 5,
        "evaluation.pass_k": 2,
    },
    {"model": "m", "task": "x.jsonl", "evaluation.every": 0},
    {
        **LEARNS,
        "dtype": "bfloat16",
        "evaluation.path": "y.jsonl",
        "evaluation.every": 5,
        "rollout.prompts": 32,
        "rollout.max_episode_tokens": 99,
        "update.mini_batches": 4,
        "update.epochs": 2,
        "lora.rank": 4,
        "logging.samples_every": 0,
    },
    {**LEARNS, "dtype": "float32", "task": "y.jsonl", "evaluation.path": "z.jsonl"},
    {**LEARNS, "task": "arithmetic", "level": 5},
    {**LEARNS, **LENGTHS, "task": "gsm8k", "reward": "math", "evaluation.pass_k": 2},
    {"environment": "x.py:X", "warm_start": 0.0},
    {"model": "m", "task": "gsm8k", "evaluation.pass_k": 2, "evaluation.reward": "math"},
    {"model": "m", "level": 5, "update.loss": "cispo", "update.epsilon": 0.1},
    {"model": "m", "warm_start": 0.0, "update.loss": "cispo", "update.epsilon_high": 4.0},
    {**PENALISED, "update.advantage": "remax"},
    {**PENALISED, "update.advantage": "rloo", "update.scale": "group"},
    {**PENALISED, "teacher.model": "t", "teacher.reward_weight": 1.0},
]


@pytest.mark.parametrize("options", WITH_EFFECT, ids=lambda options: next(iter(options)))
def test_settings_with_an_effect_are_not_refused(options):
    check_effects(config_of(options))
