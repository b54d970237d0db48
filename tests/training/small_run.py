"""A policy of 20,000 parameters, six problems, four to judge by, and a run in this process.

Tests that train use these sizes, so that sampling, scoring and an update compile once for all.
"""

import json
import shutil

import jax
import numpy as np

from tests.model.huggingface.tensors import rewrite
from twinkle_jax.data import ArithmeticTask, Template, small_tokenizer
from twinkle_jax.model import init_params, parse_config
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    Policy,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    save_policy,
)

WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
STEPS = 4
EVERY_STEP = LoggingConfig(checkpoint_every=1, samples_every=0, keep_checkpoints=9)


def make_files(folder):
    template = Template(small_tokenizer("0123456789+-*()="))
    size = {"vocab_size": len(template.tokenizer)}
    config = parse_config({"model_type": "qwen3", **WIDTHS, **HEADS, **size})
    policy = Policy(init_params(jax.random.key(1), config), config, template)
    save_policy(policy, str(folder / "model"))
    problems = [ArithmeticTask(1, size=10).problem(i) for i in range(10)]
    lines = [json.dumps({"prompt": f"{p}=", "answer": a}) for p, a in problems]
    (folder / "task.jsonl").write_text("\n".join(lines[:6]))
    (folder / "held_out.jsonl").write_text("\n".join(lines[6:]))


def make_reward_model(folder, directory):
    """Write the policy's decoder with a random head."""
    shutil.copytree(folder / "model", directory)
    head = np.random.default_rng(0).standard_normal((1, WIDTHS["hidden_size"]))
    rewrite(directory, {"score.weight": head.astype(np.float32), "lm_head.weight": None})
    return str(directory)


def update(**changes):
    settings = {"mini_batches": 1, "micro_batch_tokens": 64, "kl_beta": 0.01}
    return UpdateConfig(**(settings | {"advantage": "rloo", "scale": "none"} | changes))


def evaluation(folder, every):
    return EvaluationConfig(every=every, problems=4, path=str(folder / "held_out.jsonl"))


def config(folder, directory, **changes):
    """Two of six problems a step, so that an epoch has three steps; four completions each."""
    settings = {
        "model": str(folder / "model"),
        "task": str(folder / "task.jsonl"),
        "reward": "exact",
        "steps": STEPS,
        "output_dir": str(directory),
        "rollout": RolloutConfig(prompts=2, num_samples=4, max_new_tokens=4, max_prompt_tokens=32),
        "update": update(),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=1, max_skipped=2),
        "evaluation": EvaluationConfig(every=0),
        "logging": LoggingConfig(checkpoint_every=99, samples_every=0, keep_checkpoints=9),
    }
    return TrainConfig(**(settings | changes))


class Scorer:
    """Likes short answers; in some calls it does something else."""

    def __init__(self, **otherwise):
        self.otherwise = {int(name.removeprefix("call")): f for name, f in otherwise.items()}
        self.calls = 0

    def __call__(self, trajectories, truths):
        self.calls += 1
        lengths = [len(t["messages"][-1]["content"]) for t in trajectories]
        if self.calls in self.otherwise:
            return self.otherwise[self.calls](lengths)
        return self.usual(lengths)

    @staticmethod
    def usual(lengths):
        return [float(length < 3) for length in lengths]
