"""One train step: a rollout's batch, gone through in mini-batches, an update for each."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from twinkle_jax.data import Batch
from twinkle_jax.data.trajectory import IGNORE
from twinkle_jax.loss import Loss, kl_k3
from twinkle_jax.model import (
    DecoderConfig,
    StepSummary,
    TrainState,
    UpdateInfo,
    apply_gradients,
    grad_step,
)
from twinkle_jax.model.train_step.step_summary import add_summaries


class Learner(NamedTuple):
    """What an update needs besides the state and the batch; fixed for a run.

    Attributes:
        config: the decoder's.
        loss: of the library's losses, or one like them.
        optimizer: with learning rate 1, as `apply_gradients` takes it.
        temperature: that completions are sampled at.
        max_grad_norm: gradients with a larger norm are scaled down.
        epochs: how often to go through a batch.
        mini_batches: updates an epoch.
        micro_batch_rows: rows whose gradient is computed at once; None for all.
        compute_dtype: type of activations.
    """

    config: DecoderConfig
    loss: Loss
    optimizer: optax.GradientTransformation
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    epochs: int = 1
    mini_batches: int = 1
    micro_batch_rows: int | None = None
    compute_dtype: DTypeLike | None = None


class Learnt(NamedTuple):
    """What the updates of a step did; arrays on the device, a list of them by update."""

    summaries: list[StepSummary]
    infos: list[UpdateInfo]


def learn(
    state: TrainState,
    batch: Batch,
    learner: Learner,
    *,
    group: int,
    learning_rate: float,
    seed: tuple[int, ...],
) -> tuple[TrainState, Learnt]:
    """Update a policy from a batch; the state is donated, nothing comes back to the host.

    Args:
        state: what is trained; gone afterwards.
        batch: rows of a prompt next to each other.
        learner: how.
        group: rows a prompt, which stay together.
        learning_rate: of these updates.
        seed: of the order in which prompts are dealt out to mini-batches.

    Returns:
        The state after `epochs * mini_batches` updates, and what they did.
    """
    learnt = Learnt([], [])
    for rows in _mini_batches(len(batch.tokens), group, learner, seed):
        whole: StepSummary | None = None
        size = learner.micro_batch_rows or len(rows)
        for start in range(0, len(rows), size):
            state, summary = grad_step(
                state,
                take_batch_rows(batch, rows[start : start + size]),
                learner.config,
                learner.loss,
                temperature=learner.temperature,
                compute_dtype=learner.compute_dtype,
            )
            whole = summary if whole is None else add_summaries(whole, summary)
        state, info = apply_gradients(
            state,
            learner.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=learner.max_grad_norm,
        )
        assert whole is not None
        learnt.summaries.append(whole)
        learnt.infos.append(info)
    return state, learnt


def _mini_batches(
    rows: int, group: int, learner: Learner, seed: tuple[int, ...]
) -> Iterator[np.ndarray[Any, Any]]:
    """Deal prompts out at random, the same way whenever the seed is the same."""
    for epoch in range(learner.epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(rows // group)
        for chosen in np.split(order, learner.mini_batches):
            members = chosen[:, None] * group + np.arange(group)[None]
            yield members.reshape(-1).astype(np.int32)


@jax.jit
def take_batch_rows(batch: Batch, rows: Int[Array, " chosen"]) -> Batch:
    """Make a batch of chosen rows."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), batch)


@jax.jit
def rollout_facts(batch: Batch) -> dict[str, Float[Array, ""]]:
    """Estimate entropy, and divergence from the reference policy if there is one, from samples."""
    assert batch.old_logps is not None
    kept = batch.labels != IGNORE
    tokens = jnp.maximum(jnp.sum(kept, dtype=jnp.float32), 1)
    facts = {"entropy": -jnp.sum(jnp.where(kept, batch.old_logps, 0)) / tokens}
    if batch.ref_logps is not None:
        divergence = kl_k3(batch.old_logps, batch.ref_logps, kept)
        facts["kl"] = jnp.sum(jnp.where(kept, divergence, 0)) / tokens
    return facts


@partial(jax.jit, static_argnames="group")
def keep_groups(batches: list[Any], chosen: Int[Array, " groups"], *, group: int) -> Any:
    """Choose groups of rows out of several trees whose rows stand one after the other."""
    rows = (chosen[:, None] * group + jnp.arange(group, dtype=chosen.dtype)[None]).reshape(-1)
    return jax.tree.map(lambda *xs: jnp.take(jnp.concatenate(xs), rows, axis=0), *batches)
