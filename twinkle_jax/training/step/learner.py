"""One train step: a rollout's batch, gone through in mini-batches, an update for each."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.data import Batch
from twinkle_jax.loss import Loss, PolicyMetrics
from twinkle_jax.model import (
    DecoderConfig,
    StepSummary,
    TrainState,
    UpdateInfo,
    apply_gradients,
    grad_step,
    score_batch,
)
from twinkle_jax.model.decoder.forward import Remat
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.train_step.step_summary import add_summaries

Rows = np.ndarray[Any, np.dtype[np.int32]]


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
        remat: what is computed again in the backward pass, as for `hidden_states`.
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
    remat: Remat = True

    def score(self, params: Params, batch: Batch) -> Float[Array, "rows time"]:
        """Compute the log-probabilities of a batch's labels, as many rows at once as in updates."""
        every = np.arange(len(batch.tokens), dtype=np.int32)
        scores = [
            score_batch(
                params,
                _take_rows(batch, rows),
                self.config,
                temperature=self.temperature,
                compute_dtype=self.compute_dtype,
            ).logps
            for mini_batch in np.split(every, self.mini_batches)
            for rows in self.micro_batches(mini_batch)
        ]
        return jnp.concatenate(scores)

    def micro_batches(self, rows: Rows) -> list[Rows]:
        """Cut the rows of a mini-batch into those whose gradients are computed at once."""
        size = self.micro_batch_rows or len(rows)
        return [rows[start : start + size] for start in range(0, len(rows), size)]


class Learnt(NamedTuple):
    """What the updates of a step did; arrays on the device.

    Attributes:
        summaries: of each update's loss.
        infos: what became of each update's gradients.
        logp_diff: the largest difference between the sampler's log-probabilities and those of the
            policy before the first update; None where the loss does not compare them.
    """

    summaries: list[StepSummary]
    infos: list[UpdateInfo]
    logp_diff: Float[Array, ""] | None


def learn(
    state: TrainState,
    batch: Batch,
    learner: Learner,
    *,
    group: int,
    learning_rate: float,
    seed: tuple[int, ...],
    logp_diff: Float[Array, ""] | None = None,
    max_logp_diff: float = math.inf,
) -> tuple[TrainState, Learnt]:
    """Update a policy from a batch; the state is donated, nothing comes back to the host.

    An update whose gradient is exactly 0, since no prompt in it has a signal and the loss has no
    other term, is skipped: Adam's moments would move the parameters on without a reason. All are
    skipped where the log-probabilities of those who sampled differ too much.

    Args:
        state: what is trained; gone afterwards.
        batch: rows of a prompt next to each other.
        learner: how.
        group: rows a prompt, which stay together.
        learning_rate: of these updates.
        seed: of the order in which prompts are dealt out to mini-batches.
        logp_diff: how far log-probabilities in the batch are from the policy's, as far as that is
            known already; the rows of the first update tell too.
        max_logp_diff: how far they may be.

    Returns:
        The state after `epochs * mini_batches` updates, and what they did.
    """
    learnt = Learnt([], [], logp_diff)
    for rows in _mini_batches(len(batch.tokens), group, learner, seed):
        whole: StepSummary | None = None
        for some in learner.micro_batches(rows):
            state, summary = grad_step(
                state,
                _take_rows(batch, some),
                learner.config,
                learner.loss,
                temperature=learner.temperature,
                compute_dtype=learner.compute_dtype,
                remat=learner.remat,
            )
            whole = summary if whole is None else add_summaries(whole, summary)
        assert whole is not None
        if not learnt.infos and whole.metrics is not None:  # before any update changes the policy
            learnt = learnt._replace(logp_diff=_largest(learnt.logp_diff, whole.metrics))
        state, info = apply_gradients(
            state,
            learner.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=learner.max_grad_norm,
            when=_is_wanted(state.gradient_sum, learnt.logp_diff, np.float32(max_logp_diff)),
        )
        learnt.summaries.append(whole)
        learnt.infos.append(info)
    return state, learnt


@jax.jit
def _largest(logp_diff: Float[Array, ""] | None, metrics: PolicyMetrics) -> Float[Array, ""]:
    ratios = jnp.stack([metrics.ratio_min, metrics.ratio_max])
    found = jnp.max(jnp.abs(jnp.log(ratios)))
    return found if logp_diff is None else jnp.maximum(logp_diff, found)


@jax.jit
def _is_wanted(
    gradients: Any, logp_diff: Float[Array, ""] | None, limit: Float[Array, ""]
) -> Bool[Array, ""]:
    """Say whether there is a gradient, NaN too, of completions that the policy might have drawn."""
    anything = jnp.any(jnp.stack([jnp.any(g != 0) for g in jax.tree.leaves(gradients)]))
    return anything if logp_diff is None else anything & ~(logp_diff > limit)


def _mini_batches(rows: int, group: int, learner: Learner, seed: tuple[int, ...]) -> Iterator[Rows]:
    """Deal prompts out at random, the same way whenever the seed is the same."""
    for epoch in range(learner.epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(rows // group)
        for chosen in np.split(order, learner.mini_batches):
            members = chosen[:, None] * group + np.arange(group)[None]
            yield members.reshape(-1).astype(np.int32)


@jax.jit
def _take_rows(batch: Batch, rows: Int[Array, " chosen"]) -> Batch:
    """Make a batch of chosen rows."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), batch)
