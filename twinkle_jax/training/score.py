"""Log-probabilities of given tokens, in a pass without gradients and inside a train step."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from twinkle_jax.data import IGNORE, Batch
from twinkle_jax.data.batch import check_batch
from twinkle_jax.loss import Coefficient, PerToken, token_logprobs
from twinkle_jax.model import (
    AttentionImplementation,
    DecoderConfig,
    Params,
    hidden_states,
    merge_params,
    output_logits,
    output_matrix,
    partition_rules,
)
from twinkle_jax.model.decoder.sharding import (
    ROWS,
    find_mesh,
    gather_in_steps,
    spread_batch,
    steps_of,
)
from twinkle_jax.training.packing import Packing, pack, unpack


def traced_scalar(value: Any) -> Any:
    """Make a Python number a float32 scalar, so that all values share one compilation."""
    return np.float32(value) if isinstance(value, int | float) else value


def positive_scalar(name: str, value: Any) -> Any:
    """Like `traced_scalar`, for a number above 0; values on a device are not checked."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | np.number | np.ndarray):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if math.isnan(float(value)) or float(value) <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return np.float32(value)


def run_batch(
    params: Params, config: DecoderConfig, batch: Batch, mesh: Mesh | None, **options: Any
) -> Float[Array, "batch time width"]:
    """Run the decoder over the rows of a batch."""
    return hidden_states(
        params,
        config,
        batch.tokens,
        batch.mask,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        mesh=mesh,
        **options,
    )


def label_scores(
    params: Params,
    hidden: Float[Array, "batch time width"],
    labels: Int[Array, "batch time"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    with_entropy: bool = False,
    mesh: Mesh | None = None,
) -> tuple[PerToken, ...]:
    """Score labels, optionally with entropies; 0 where the label is −100.

    On a mesh, positions are spread over all devices, and each scores its own against the whole
    head: the rows over data and fsdp, the time over tensor. The head is gathered once, in the type
    of the hidden states, and its gradient is summed and scattered.
    """

    def score(hidden: Array, head: Array, labels: Array, temperature: Any) -> tuple[PerToken, ...]:
        for dimension, axis in enumerate(spread_head):
            if mesh is not None and axis is not None:
                head = gather_in_steps(head, axis, dimension, steps_of(mesh.shape[axis]))
        flat = labels.reshape(-1)
        scores = token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            flat,
            mask=flat != IGNORE,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        several: tuple[Any, ...] = scores if isinstance(scores, tuple) else (scores,)
        return tuple(x.reshape(labels.shape) for x in several)

    head, spread_head = output_matrix(params).astype(hidden.dtype), PartitionSpec()
    if mesh is None:
        return score(hidden, head, labels, temperature)
    spread_head = partition_rules(mesh)("lm_head/kernel", head.shape)
    spread, replicated = PartitionSpec(ROWS, "tensor"), PartitionSpec()
    scores: tuple[PerToken, ...] = jax.shard_map(
        score, mesh=mesh, in_specs=(spread, spread_head, spread, replicated), out_specs=spread
    )(hidden, head, labels, temperature)
    return scores


_TEACHER_CHUNK = 16  # columns at a time, so that logits of all tokens are never held


def gathered_logits(
    params: Params,
    hidden: Float[Array, "batch time width"],
    tokens: Int[Array, "batch time top"],
) -> Float[Array, "batch time top"]:
    """Return the logits of some tokens at each position; the others are discarded."""
    head = output_matrix(params).astype(hidden.dtype)
    time = tokens.shape[1]
    chunk = _TEACHER_CHUNK if time % _TEACHER_CHUNK == 0 else time

    @jax.checkpoint  # the backward pass recomputes a chunk's logits
    def gather(columns: tuple[Array, Array]) -> Array:
        features, names = columns
        logits = jnp.einsum("btd,dv->btv", features, head, preferred_element_type=jnp.float32)
        return jnp.take_along_axis(logits, names, axis=-1)

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, x.shape[-1]), 1, 0)

    logits = jax.lax.map(gather, (split(hidden), split(tokens)))
    return jnp.moveaxis(logits, 0, 1).reshape(tokens.shape)


class Scores(NamedTuple):
    """Scores of labels under the policy; 0 where the label is −100.

    Attributes:
        logps: log-probability of each label.
        entropies: entropy of the policy at each label, in nats; None unless asked for.
        logits: over the whole vocabulary, at every position; None unless asked for.
    """

    logps: Float[Array, "batch time"]
    entropies: Float[Array, "batch time"] | None = None
    logits: Float[Array, "batch time vocab"] | None = None


def score_batch(
    params: Params,
    batch: Batch,
    config: DecoderConfig,
    *,
    frozen: Params | None = None,
    temperature: Coefficient = 1.0,
    with_entropy: bool = False,
    with_logits: bool = False,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    mesh: Mesh | None = None,
    packing: Packing | None = None,
) -> Scores:
    """Score the labels of a batch; compiled, nothing is donated.

    Args:
        params: a decoder's, or adapters'.
        batch: tokens and labels; other fields are not read.
        config: the decoder.
        frozen: parameters that `params` are merged over.
        temperature: of log-probabilities and entropies; logits are not scaled.
        with_entropy: whether to compute entropies.
        with_logits: whether to compute all logits, [batch, time, vocabulary] in float32.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: likewise.
        mesh: of the parameters. None: that of their arrays, or one device. Traced arrays do not
            have it: inside a compiled function of yours, pass it.
        packing: as for [`grad_step`][twinkle_jax.training.grad_step]; without logits.

    Returns:
        The scores, at every position with a label.
    """
    batch = check_batch(batch, config.vocab_size)
    if packing is not None and with_logits:
        raise ValueError("with_logits must be False with a packing, got True")
    return _score_batch(
        params,
        frozen,
        batch._replace(
            advantages=None,
            old_logps=None,
            ref_logps=None,
            sampler_logps=None,
            rows=None,
            teacher_logprobs=None,
            teacher_tokens=None,
        ),
        positive_scalar("temperature", temperature),
        config=config,
        with_entropy=with_entropy,
        with_logits=with_logits,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        mesh=find_mesh(mesh, params),
        packing=packing,
    )


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "with_entropy",
        "with_logits",
        "compute_dtype",
        "attention",
        "mesh",
    ),
)
def _score_batch(
    params: Params,
    frozen: Params | None,
    batch: Batch,
    temperature: Float[Array, ""],
    packing: Packing | None,
    *,
    config: DecoderConfig,
    with_entropy: bool,
    with_logits: bool,
    mesh: Mesh | None,
    **options: Any,
) -> Scores:
    weights = merge_params(frozen, params)
    lines = spread_batch(batch if packing is None else pack(batch, packing), config, mesh)
    hidden = run_batch(weights, config, lines, mesh, remat=False, **options)
    scores = label_scores(
        weights,
        hidden,
        lines.labels,
        temperature=temperature,
        with_entropy=with_entropy,
        mesh=mesh,
    )
    if packing is not None:
        scores = tuple(unpack(values, packing) for values in scores)
    return Scores(
        scores[0],
        scores[1] if with_entropy else None,
        output_logits(weights, hidden) if with_logits else None,
    )
