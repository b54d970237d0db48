"""One micro-batch: the gradient of its loss, added to the accumulated gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from twinkle_jax.data.batch import IGNORE, Batch, check_batch
from twinkle_jax.loss import LossOutput, PolicyMetrics
from twinkle_jax.model.decoder.attention_choice import AttentionImplementation
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.forward import Remat
from twinkle_jax.model.decoder.lora_dropout import with_dropout
from twinkle_jax.model.decoder.mesh_layout import spread_batch
from twinkle_jax.model.decoder.parameters import Params, merge_params
from twinkle_jax.model.decoder.sharding import constrain, find_mesh
from twinkle_jax.model.train_step.label_scores import label_scores
from twinkle_jax.model.train_step.loss_coefficients import (
    Static,
    join_loss,
    loss_denominator,
    split_loss,
)
from twinkle_jax.model.train_step.run_batch import run_batch
from twinkle_jax.model.train_step.scalars import Scalar, positive_scalar
from twinkle_jax.model.train_step.step_summary import StepSummary
from twinkle_jax.model.train_step.train_state import TrainState


def grad_step(
    state: TrainState,
    batch: Batch,
    config: DecoderConfig,
    loss_fn: Callable[..., LossOutput],
    *,
    frozen: Params | None = None,
    temperature: Scalar = 1.0,
    key: Key[Array, ""] | None = None,
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
        temperature: above 0, at which log-probabilities are taken, as the sampler did.
        key: root key of a training run, for the dropout of adapters that have a rate. Each row has
            its own noise, by its number in the run, which the state counts. None: no dropout.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: likewise, and as for `score_batch`: the ratio of a policy to itself is 1.
        remat: likewise.
        mesh: what the state lives on. None: what its arrays say, or one device. Arrays that are
            traced do not say it: inside a compiled function of yours, give it.

    Returns:
        The state with the gradients, and the sums that the loss is made of.

    Raises:
        ValueError: if shapes differ, a token on the host is outside the vocabulary, or the mesh
            does not divide the rows or the key-value heads.
        TypeError: if tokens or labels are not integers, the loss cannot be called, or `key` is not
            a typed key.
    """
    batch = check_batch(batch, config.vocab_size)
    static, traced = split_loss(loss_fn)
    kind = getattr(key, "dtype", np.dtype(object))
    if key is not None and not jnp.issubdtype(kind, jax.dtypes.prng_key):
        raise TypeError(f"key must be a typed key such as jax.random.key(0), got {key!r}")
    return _grad_step(
        state,
        batch,
        frozen=frozen,
        traced=traced,
        temperature=positive_scalar("temperature", temperature),
        key=key,
        config=config,
        loss=static,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        remat=remat,
        mesh=find_mesh(mesh, state.params),
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
    key: Key[Array, ""] | None,
    *,
    config: DecoderConfig,
    loss: Static,
    mesh: Mesh | None,
    **options: Any,
) -> tuple[TrainState, StepSummary]:
    loss_fn = join_loss(loss, traced)
    batch = spread_batch(batch, config, mesh)
    labelled = batch.labels != IGNORE
    rows = jnp.ones(len(labelled), bool) if batch.rows is None else batch.rows

    def loss_sum(params: Params) -> tuple[Float[Array, ""], PolicyMetrics | None]:
        weights = merge_params(frozen, params)
        if key is not None:
            weights = with_dropout(weights, key, state.rows + _count(rows) - 1)
        hidden = run_batch(weights, config, batch, mesh, **options)
        scores = label_scores(
            weights,
            hidden,
            batch.labels,
            temperature=temperature,
            with_entropy=getattr(loss_fn, "require_entropy", False),
            mesh=mesh,
        )
        output = _call(loss_fn, batch, scores)
        return output.loss.astype(jnp.float32), output.metrics

    (total, metrics), gradient = jax.value_and_grad(loss_sum, has_aux=True)(state.params)
    denominator = loss_denominator(loss_fn, labelled, rows)
    tokens = jnp.sum(labelled, dtype=jnp.float32)
    state = state._replace(
        gradient_sum=jax.tree.map(
            lambda total, g: total + g.astype(total.dtype), state.gradient_sum, gradient
        ),
        denominator=state.denominator + denominator,
        tokens=state.tokens + tokens,
        rows=state.rows + _count(rows)[-1],
    )
    return constrain(state, mesh), StepSummary(total, denominator, tokens, metrics)


def _call(
    loss_fn: Callable[..., LossOutput], batch: Batch, scores: tuple[Float[Array, "batch time"], ...]
) -> LossOutput:
    """Compute the loss as a sum; "no label" is said as this loss says it."""
    ignore = getattr(loss_fn, "ignore_index", IGNORE)
    return loss_fn(
        {"labels": jnp.where(batch.labels == IGNORE, ignore, batch.labels)},
        dict(zip(("logps", "entropies"), scores, strict=False)),
        advantages=batch.advantages,
        old_logps=batch.old_logps,
        ref_logps=batch.ref_logps,
        denominator=1.0,
    )


def _count(rows: Bool[Array, " batch"]) -> Int[Array, " batch"]:
    """Number the rows from 1; those that only fill up count for nothing."""
    return jnp.cumsum(rows, dtype=jnp.int32)
