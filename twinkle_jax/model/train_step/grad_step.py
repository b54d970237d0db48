"""One micro-batch: the gradient of its loss, added to the gradients that wait for a step."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twinkle_jax.data.batch import IGNORE, Batch, check_batch
from twinkle_jax.loss import LossOutput, PolicyMetrics
from twinkle_jax.model.decoder.attention import AttentionImplementation
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.forward import Remat, hidden_states
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.sharding import constrain
from twinkle_jax.model.train_step.label_scores import label_scores
from twinkle_jax.model.train_step.loss_coefficients import (
    Static,
    join_loss,
    loss_denominator,
    split_loss,
    traced_scalar,
)
from twinkle_jax.model.train_step.train_state import TrainState, merge_params


class StepSummary(NamedTuple):
    """What a micro-batch adds up to.

    Attributes:
        loss_sum: the loss before it is divided.
        denominator: what to divide it by.
        tokens: positions with a label.
        metrics: means over these tokens; None where the loss has none.
    """

    loss_sum: Float[Array, ""]
    denominator: Float[Array, ""]
    tokens: Float[Array, ""]
    metrics: PolicyMetrics | None

    @property
    def loss(self) -> Float[Array, ""]:
        """The loss; 0 where there is nothing to divide by."""
        return divided(self.loss_sum, self.denominator)


@jax.jit
def divided(total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """Divide, and let nothing over nothing be nothing."""
    return total / jnp.where(count == 0, 1, count)


def grad_step(
    state: TrainState,
    batch: Batch,
    config: DecoderConfig,
    loss_fn: Callable[..., LossOutput],
    *,
    frozen: Params | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    remat: Remat = True,
    mesh: Mesh | None = None,
) -> tuple[TrainState, StepSummary]:
    r"""Add the gradient of a micro-batch to the state; compiled, and the state is donated.

    $$G \leftarrow G + \nabla_\theta \sum \ell, \qquad N \leftarrow N + n$$

    with the losses' sum before any division, and $n$ the tokens or the sequences that this loss
    divides by. [`apply_gradients`][twinkle_jax.model.apply_gradients] divides once, so how a batch
    is cut into micro-batches changes nothing. Logits are never held: log-probabilities are computed
    in chunks, at labelled positions.

    Args:
        state: what is trained; gone afterwards, as it is updated in place.
        batch: a micro-batch.
        config: the decoder.
        loss_fn: a loss of `twinkle_jax.loss`, or one that subclasses its `Loss`. Coefficients are
            traced; a change of them compiles nothing, unless from or to 0.
        frozen: parameters that are not trained, over which those of the state are laid.
        temperature: at which log-probabilities are taken, as the sampler did.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: likewise, and as for `score_batch`: the ratio of a policy to itself is 1.
        remat: likewise.
        mesh: what the state lives on; None for one device.

    Returns:
        The state with the gradients, and the sums that the loss is made of.

    Raises:
        ValueError: if shapes differ.
        TypeError: if tokens or labels are not integers, or the loss cannot be called.
    """
    check_batch(batch)
    static, traced = split_loss(loss_fn)
    return _grad_step(
        state,
        batch,
        frozen=frozen,
        traced=traced,
        temperature=traced_scalar(temperature),
        config=config,
        loss=static,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        remat=remat,
        mesh=mesh,
    )


@partial(
    jax.jit,
    static_argnames=("config", "loss", "compute_dtype", "attention", "remat", "mesh"),
    donate_argnums=0,
)
def _grad_step(
    state: TrainState,
    batch: Batch,
    frozen: Params | None,
    traced: dict[str, Any],
    temperature: Float[Array, ""],
    *,
    config: DecoderConfig,
    loss: Static,
    mesh: Mesh | None,
    **options: Any,
) -> tuple[TrainState, StepSummary]:
    loss_fn = join_loss(loss, traced)
    labelled = batch.labels != IGNORE

    def loss_sum(params: Params) -> tuple[Float[Array, ""], PolicyMetrics | None]:
        weights = merge_params(frozen, params)
        hidden = run_batch(weights, config, batch, mesh, **options)
        scores = label_scores(
            weights,
            hidden,
            batch.labels,
            temperature=temperature,
            with_entropy=getattr(loss_fn, "require_entropy", False),
            mesh=mesh,
        )
        output = loss_fn(
            {"labels": jnp.where(labelled, batch.labels, getattr(loss_fn, "ignore_index", IGNORE))},
            dict(zip(("logps", "entropies"), scores, strict=False)),
            advantages=batch.advantages,
            old_logps=batch.old_logps,
            ref_logps=batch.ref_logps,
            denominator=1.0,
        )
        return output.loss.astype(jnp.float32), output.metrics

    (total, metrics), gradient = jax.value_and_grad(loss_sum, has_aux=True)(state.params)
    rows = jnp.ones(len(labelled), bool) if batch.rows is None else batch.rows
    denominator = loss_denominator(loss_fn, labelled, rows)
    state = state._replace(
        gradient_sum=jax.tree.map(
            lambda total, g: total + g.astype(total.dtype), state.gradient_sum, gradient
        ),
        denominator=state.denominator + denominator,
    )
    tokens = jnp.sum(labelled, dtype=jnp.float32)
    return constrain(state, mesh), StepSummary(total, denominator, tokens, metrics)


def run_batch(
    params: Params, config: DecoderConfig, batch: Batch, mesh: Mesh | None, **options: Any
) -> Float[Array, "batch time width"]:
    """Run the decoder over the rows of a batch.

    On a mesh, the embedding is gathered first: looking up rows of one that is spread over the same
    devices as the tokens would gather what was looked up, on every device.
    """
    if mesh is not None:
        table = params["embed_tokens"]["embedding"]
        table = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, PartitionSpec()))
        params = {**params, "embed_tokens": {"embedding": table}}
    return hidden_states(
        params,
        config,
        batch.tokens,
        batch.mask,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        **options,
    )


@jax.jit
def add_summaries(a: StepSummary, b: StepSummary) -> StepSummary:
    """Add up two micro-batches; their means weigh as many tokens as they are of."""
    metrics = None
    if a.metrics is not None and b.metrics is not None:
        tokens = a.tokens + b.tokens

        def mean(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
            return divided(x * a.tokens + y * b.tokens, tokens)

        def extreme(pick: Callable[..., Array], x: Array, y: Array) -> Array:
            """Leave out the ratio of 1 that stands where there are no tokens."""
            return jnp.where(a.tokens == 0, y, jnp.where(b.tokens == 0, x, pick(x, y)))

        metrics = jax.tree.map(mean, a.metrics, b.metrics)._replace(
            ratio_min=extreme(jnp.minimum, a.metrics.ratio_min, b.metrics.ratio_min),
            ratio_max=extreme(jnp.maximum, a.metrics.ratio_max, b.metrics.ratio_max),
        )
    return StepSummary(
        a.loss_sum + b.loss_sum, a.denominator + b.denominator, a.tokens + b.tokens, metrics
    )
