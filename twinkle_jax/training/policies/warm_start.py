"""A warm start: a small policy learns from examples until it gets some answers right.

A policy that never gets an answer right has nothing to learn from rewards.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from twinkle_jax.data import Batch, Message, Template, Trajectory, bucket_size
from twinkle_jax.data.trajectory import IGNORE, user_data_get
from twinkle_jax.loss import CrossEntropyLoss
from twinkle_jax.model import apply_gradients, grad_step
from twinkle_jax.training.policies.devices import begin_training
from twinkle_jax.training.policies.text_policy import Policy


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """How long to learn from examples.

    Attributes:
        accuracy: held-out accuracy at which it ends.
        steps: the most steps.
        check_every: steps from one look at the accuracy to the next.
        rows: examples a step.
        learning_rate: of Adam.
    """

    accuracy: float = 0.3
    steps: int = 400
    check_every: int = 10
    rows: int = 128
    learning_rate: float = 3e-3


def warm_start(
    policy: Policy,
    examples: Sequence[Trajectory],
    accuracy: Callable[[Policy], float],
    settings: WarmStart,
    report: Callable[[int, float], None] = lambda step, accuracy: None,
    mesh: Mesh | None = None,
) -> Policy:
    """Teach a policy by example.

    Args:
        policy: a small one, as it began.
        examples: prompts with their ground truths, which are taken as the answers.
        accuracy: on held-out problems.
        settings: how long.
        report: told each accuracy that was measured, with its step.
        mesh: what the parameters live on; None for one device.

    Returns:
        The policy, as soon as its accuracy reaches what was asked for.
    """
    optimizer = optax.adam(1.0, b2=0.99)
    state = begin_training(policy.params, optimizer, mesh)
    for step in range(settings.steps):
        start = step * settings.rows
        batch = example_batch(policy.template, examples[start : start + settings.rows])
        state, _ = grad_step(state, batch, policy.config, CrossEntropyLoss())
        rate = settings.learning_rate * min(1.0, (step + 1) / 20)
        state, _ = apply_gradients(state, optimizer, learning_rate=rate, max_grad_norm=1.0)
        if (step + 1) % settings.check_every == 0:
            reached = accuracy(policy._replace(params=state.params))
            report(step + 1, reached)
            if reached >= settings.accuracy:
                break
    return policy._replace(params=jax.tree.map(jnp.copy, state.params))


def example_batch(template: Template, examples: Sequence[Trajectory]) -> Batch:
    """Make a batch of prompts with their answers, labelled where the assistant speaks."""
    rows: list[Any] = []
    for example in examples:
        answer = str(user_data_get(example.get("user_data"), "ground_truth"))
        said = Message(role="assistant", content=answer)
        rows.append(template.encode({"messages": [*example["messages"], said]}))
    time = bucket_size(max(len(row["input_ids"]) for row in rows), smallest=16)
    tokens = np.zeros((len(rows), time), np.int32)
    labels = np.full((len(rows), time), IGNORE, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row["input_ids"])] = row["input_ids"]
        labels[i, : len(row["labels"])] = row["labels"]
    return Batch(jnp.asarray(tokens), jnp.asarray(labels))
