r"""The gated delta rule: linear attention whose state forgets and corrects itself.

$$S_t = e^{g_t} S_{t-1} + k_t \, \beta_t (v_t - (e^{g_t} S_{t-1})^\top k_t)^\top,
\qquad o_t = S_t^\top q_t$$

(Gated Delta Networks, arXiv:2412.06464.) Everything is float32: in 16 bits the state degenerates.
Over many tokens at once it is computed in chunks: inside a chunk a triangular system stands for the
corrections that tokens make to each other, and the state passes from chunk to chunk in a scan.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_HIGHEST = jax.lax.Precision.HIGHEST  # accelerators round float32 products to 16 bits otherwise


class DeltaInputs(NamedTuple):
    """What the rule reads: float32, query and key normalised, heads repeated to value heads.

    Attributes:
        query: $q$, already scaled.
        key: $k$.
        value: $v$.
        log_decay: $g$, at most zero; 0 at padding.
        strength: $β$; 0 at padding, which then leaves the state alone.
    """

    query: Float[Array, "batch time heads key"]
    key: Float[Array, "batch time heads key"]
    value: Float[Array, "batch time heads value"]
    log_decay: Float[Array, "batch time heads"]
    strength: Float[Array, "batch time heads"]


def delta_rule_step(
    state: Float[Array, "batch heads key value"], inputs: DeltaInputs
) -> tuple[Float[Array, "batch 1 heads value"], Float[Array, "batch heads key value"]]:
    """Read and write one token: inputs with a time axis of length 1."""
    query, key, value, log_decay, strength = (x[:, 0] for x in inputs)
    state = state * jnp.exp(log_decay)[:, :, None, None]
    recalled = jnp.einsum("bhkv,bhk->bhv", state, key, precision=_HIGHEST)
    correction = strength[:, :, None] * (value - recalled)
    state = state + key[:, :, :, None] * correction[:, :, None, :]
    out = jnp.einsum("bhkv,bhk->bhv", state, query, precision=_HIGHEST)
    return out[:, None], state


def delta_rule(
    inputs: DeltaInputs,
    segment_ids: Int[Array, "batch time"] | None = None,
    *,
    chunk: int = 64,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    """Run the rule over whole rows from an empty state.

    Args:
        inputs: one entry per token.
        segment_ids: a number for each segment, never used twice in a row; the state is reset
            where it changes.
        chunk: tokens that are solved for together; the result does not depend on it.

    Returns:
        The outputs, and the state after the last token.
    """
    batch, time, heads, _ = inputs.key.shape
    chunk = min(chunk, time)
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, time), jnp.int32)
    pad = -time % chunk
    chunks = DeltaInputs(*(_in_chunks(x, pad, chunk) for x in inputs))
    # Padding belongs to the last segment, so that it does not reset the state that is returned.
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge").reshape(batch, -1, chunk)
    last = ids[:, :, -1]
    previous = jnp.concatenate([ids[:, 0, :1], last[:, :-1]], axis=1)
    ids, previous, last = (jnp.moveaxis(x, 1, 0) for x in (ids, previous, last))
    widths = (inputs.key.shape[-1], inputs.value.shape[-1])
    start = jnp.zeros((batch, heads, *widths), inputs.value.dtype)
    state, out = jax.lax.scan(_pass_on, start, _solve(chunks, ids, previous, last))
    out = jnp.moveaxis(out, 0, 1)  # [batch, chunks, heads, chunk, value]
    return jnp.moveaxis(out, 2, 3).reshape(batch, time + pad, heads, -1)[:, :time], state


def _in_chunks(
    x: Float[Array, "batch time heads *feature"], pad: int, chunk: int
) -> Float[Array, "chunks batch heads chunk *feature"]:
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)


class _Solved(NamedTuple):
    """One chunk with the corrections inside it solved: what the scan over chunks needs.

    `written` is what each token writes when the incoming state is empty, `recall` what it takes
    back per unit of that state, `within` the weights of the chunk's own tokens, `query` and `key`
    carry the decay from the chunk's start and to its end, `keep` is the decay across it.
    """

    written: Float[Array, "*chunks batch heads chunk value"]
    recall: Float[Array, "*chunks batch heads chunk key"]
    within: Float[Array, "*chunks batch heads chunk chunk"]
    query: Float[Array, "*chunks batch heads chunk key"]
    key: Float[Array, "*chunks batch heads chunk key"]
    keep: Float[Array, "*chunks batch heads"]


def _solve(
    x: DeltaInputs,
    ids: Int[Array, "chunks batch chunk"],
    previous: Int[Array, "chunks batch"],
    last: Int[Array, "chunks batch"],
) -> _Solved:
    """Solve all chunks at once; tokens of other segments are cut off from each other."""
    chunk = ids.shape[-1]
    total = jnp.cumsum(x.log_decay, axis=-1)
    before = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None]
    reaches = ((ids[..., :, None] == ids[..., None, :]) & before)[:, :, None]
    # Cleaned before the exponential: above the diagonal the difference is positive and unbounded.
    apart = jnp.where(reaches, total[..., :, None] - total[..., None, :], 0)
    decay = jnp.where(reaches, jnp.exp(apart), 0)
    carried = (ids == previous[..., None])[:, :, None]
    from_start = jnp.where(carried, jnp.exp(total), 0)
    survives = (ids == last[..., None])[:, :, None]
    to_end = jnp.where(survives, jnp.exp(jnp.where(survives, total[..., -1:] - total, 0)), 0)

    def products(a: Array, b: Array) -> Array:
        return jnp.einsum("nbhik,nbhjk->nbhij", a, b, precision=_HIGHEST) * decay

    system = jnp.tril(products(x.key * x.strength[..., None], x.key), -1)
    right = jnp.concatenate([x.value, x.key * from_start[..., None]], axis=-1)
    solution = jax.lax.linalg.triangular_solve(
        system, right * x.strength[..., None], left_side=True, lower=True, unit_diagonal=True
    )
    written, recall = jnp.split(solution, (x.value.shape[-1],), axis=-1)
    return _Solved(
        written=written,
        recall=recall,
        within=products(x.query, x.key),
        query=x.query * from_start[..., None],
        key=x.key * to_end[..., None],
        keep=from_start[..., -1],
    )


def _pass_on(
    state: Float[Array, "batch heads key value"], x: _Solved
) -> tuple[Float[Array, "batch heads key value"], Float[Array, "batch heads chunk value"]]:
    """Pass the state through one chunk."""

    def times(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=_HIGHEST)

    written = x.written - times(x.recall, state)
    out = times(x.query, state) + times(x.within, written)
    state = x.keep[:, :, None, None] * state + times(jnp.swapaxes(x.key, -1, -2), written)
    return state, out
