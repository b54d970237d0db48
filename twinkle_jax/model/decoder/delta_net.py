r"""Gated DeltaNet: linear attention whose state forgets and corrects itself.

$$S_t = e^{g_t} S_{t-1} + k_t \, \beta_t (v_t - (e^{g_t} S_{t-1})^\top k_t)^\top,
\qquad o_t = S_t^\top q_t$$

Projections and a short convolution make queries, keys and values of the residual stream, and a gate
multiplies the output ([Gated Delta Networks](https://arxiv.org/abs/2412.06464)). The rule is
computed in float32: in 16 bits the state degenerates. Whole rows are computed in chunks: inside a
chunk, a triangular system is solved for the corrections that tokens make to each other; from chunk
to chunk, the state is carried by a scan.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.cache import DeltaState
from twinkle_jax.model.decoder.config import DecoderConfig, DeltaNetConfig
from twinkle_jax.model.decoder.layers import project, rms_norm
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.precision import rounded

_HIGHEST = jax.lax.Precision.HIGHEST  # accelerators round float32 products to 16 bits otherwise


class DeltaInputs(NamedTuple):
    """Inputs of the rule: float32, query and key normalised, heads repeated to value heads.

    Attributes:
        query: $q$, already scaled.
        key: $k$.
        value: $v$.
        log_decay: $g$, at most zero; 0 at padding.
        strength: $β$; 0 at padding, which then does not change the state.
    """

    query: Float[Array, "batch time heads key"]
    key: Float[Array, "batch time heads key"]
    value: Float[Array, "batch time heads value"]
    log_decay: Float[Array, "batch time heads"]
    strength: Float[Array, "batch time heads"]


def delta_net(
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    config: DeltaNetConfig,
    mask: Bool[Array, "batch time"],
    segment_ids: Int[Array, "batch time"] | None,
    state: DeltaState | None = None,
    *,
    epsilon: float,
) -> tuple[Float[Array, "tokens width"], DeltaState]:
    """Mix rows that start at column 0; padding after them does not change the state.

    With a `state`, the tokens continue the rows that it comes from, as one segment.
    """
    batch, time = mask.shape
    projected = _project_in(x, weights, config)
    mixed = projected.mixed.reshape(batch, time, -1)
    kernel = rounded(weights["conv1d"]["kernel"], x.dtype)
    past = kernel.shape[0] - 1
    if state is None:
        padded = jnp.pad(mixed, ((0, 0), (past, 0), (0, 0)))
        taps = _taps(mixed, len(kernel), segment_ids)
    else:
        padded = jnp.concatenate([state.window.astype(x.dtype), mixed], axis=1)
        taps = [padded[:, i : i + time] for i in range(len(kernel))]
    convolved = _convolve(taps, kernel)
    inputs = _inputs(projected, weights, config, convolved)
    inputs = inputs._replace(
        log_decay=jnp.where(mask[:, :, None], inputs.log_decay, 0),
        strength=jnp.where(mask[:, :, None], inputs.strength, 0),
    )
    out, memory = delta_rule(inputs, segment_ids, None if state is None else state.memory)
    length = jnp.sum(mask, axis=1, dtype=jnp.int32)
    columns = length[:, None] + jnp.arange(past, dtype=jnp.int32)[None]
    window = jnp.take_along_axis(padded, columns[:, :, None], axis=1)
    out = _project_out(rounded(out, x.dtype), projected.gate, weights, epsilon)
    return out, DeltaState(window, memory)


def delta_net_step(
    x: Float[Array, "batch width"],
    weights: Mapping[str, Any],
    config: DeltaNetConfig,
    state: DeltaState,
    *,
    epsilon: float,
) -> tuple[Float[Array, "batch width"], DeltaState]:
    """Mix one more token per row."""
    projected = _project_in(x, weights, config)
    window = jnp.concatenate([state.window.astype(x.dtype), projected.mixed[:, None]], axis=1)
    kernel = rounded(weights["conv1d"]["kernel"], x.dtype)
    convolved = _convolve(jnp.split(window, len(kernel), axis=1), kernel)
    inputs = _inputs(projected, weights, config, convolved)
    out, memory = delta_rule_step(state.memory, inputs)
    out = _project_out(rounded(out, x.dtype), projected.gate, weights, epsilon)
    return out, DeltaState(window[:, 1:], memory)


def linear_step(
    config: DecoderConfig,
    y: Float[Array, "batch width"],
    weights: Params,
    cached: DeltaState,
    repeat: Int[Array, ""],
    active: Bool[Array, " batch"],
) -> tuple[Float[Array, "batch width"], DeltaState]:
    """Mix one token per row, and update the states of active rows in the stack of layers."""
    assert config.delta_net is not None
    old = DeltaState(*(jax.lax.dynamic_index_in_dim(x, repeat, keepdims=False) for x in cached))
    mixed, new = delta_net_step(
        y, weights["linear_attn"], config.delta_net, old, epsilon=config.norm_epsilon
    )
    stacks = []
    for stack, before, after in zip(cached, old, new, strict=True):
        is_active = active.reshape(-1, *(1,) * (before.ndim - 1))
        state = jnp.where(is_active, after.astype(stack.dtype), before)
        stacks.append(jax.lax.dynamic_update_index_in_dim(stack, state, repeat, 0))
    return mixed, DeltaState(*stacks)


def _taps(
    x: Float[Array, "batch time channels"],
    number: int,
    segment_ids: Int[Array, "batch time"] | None,
) -> list[Float[Array, "batch time channels"]]:
    """Return each token and the `number - 1` before it in its segment, oldest first, else 0."""
    taps, time = [x], x.shape[1]
    for back in range(1, number):
        shifted = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :time]
        if segment_ids is not None:
            same = jnp.pad(segment_ids[:, back:] == segment_ids[:, :-back], ((0, 0), (back, 0)))
            shifted = jnp.where(same[:, :time, None], shifted, 0)
        taps.insert(0, shifted)
    return taps


def _convolve(
    taps: Sequence[Float[Array, "batch time channels"]], kernel: Float[Array, "taps channels"]
) -> Float[Array, "batch time channels"]:
    """Weight each channel's taps, sum and apply SiLU: in float32, and always in the same order.

    A running sum in bfloat16, or another order in training than in decoding, makes the sampler's
    log-probabilities differ from the trainer's.
    """
    weights = kernel.astype(jnp.float32)[:, None, None]
    oldest, *others = [
        tap.astype(jnp.float32) * weight for tap, weight in zip(taps, weights, strict=True)
    ]
    return jax.nn.silu(sum(others, oldest))


class _Projected(NamedTuple):
    """What a token's row is projected to: queries, keys and values, and numbers of value heads."""

    mixed: Float[Array, "tokens channels"]
    gate: Float[Array, "tokens values"]
    strength: Float[Array, "tokens heads"]
    decay: Float[Array, "tokens heads"]


def _project_in(
    x: Float[Array, "tokens width"], weights: Mapping[str, Any], config: DeltaNetConfig
) -> _Projected:
    if not config.by_key_head:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return _Projected(*(project(x, weights[name]) for name in names))
    key, groups = config.key_dim, config.value_heads // config.key_heads

    def split(name: str, *ends: int) -> list[Array]:
        heads = project(x, weights[name]).reshape(len(x), config.key_heads, -1)
        return [part.reshape(len(x), -1) for part in jnp.split(heads, ends, axis=-1)]

    *mixed, gate = split("in_proj_qkvz", key, 2 * key, 2 * key + groups * config.value_dim)
    return _Projected(jnp.concatenate(mixed, axis=-1), gate, *split("in_proj_ba", groups))


def _inputs(
    projected: _Projected,
    weights: Mapping[str, Any],
    config: DeltaNetConfig,
    convolved: Float[Array, "batch time channels"],
) -> DeltaInputs:
    """Split the convolved channels into heads; compute decay and strength."""
    batch, time, _ = convolved.shape
    keys, groups = config.key_heads * config.key_dim, config.value_heads // config.key_heads
    query, key, value = (
        part.reshape(batch, time, heads, -1)
        for part, heads in zip(
            jnp.split(convolved, (keys, 2 * keys), axis=-1),
            (config.key_heads, config.key_heads, config.value_heads),
            strict=True,
        )
    )
    query, key = (jnp.repeat(unit(y), groups, axis=2) for y in (query, key))
    step = projected.decay.astype(jnp.float32)
    step = jax.nn.softplus(step + weights["dt_bias"].astype(jnp.float32)[None])
    log_decay = -jnp.exp(weights["A_log"].astype(jnp.float32))[None] * step
    strength = jax.nn.sigmoid(projected.strength.astype(jnp.float32))
    return DeltaInputs(
        query=query * config.key_dim**-0.5,
        key=key,
        value=value,
        log_decay=log_decay.reshape(batch, time, -1),
        strength=strength.reshape(batch, time, -1),
    )


def unit(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """Scale vectors to length 1, nearly: 1e-6 keeps value and gradient finite at 0."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _project_out(
    out: Float[Array, "batch time heads value"],
    gate: Float[Array, "tokens values"],
    weights: Mapping[str, Any],
    epsilon: float,
) -> Float[Array, "tokens width"]:
    """Normalise each head, gate it, and project it back."""
    normed = rms_norm(out, weights["norm"]["scale"], epsilon=epsilon)
    opened = jax.nn.silu(gate.astype(jnp.float32))
    gated = normed.reshape(gate.shape).astype(jnp.float32) * opened
    return project(rounded(gated, out.dtype), weights["out_proj"])


# The gated delta rule.


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
    state: Float[Array, "batch heads key value"] | None = None,
    *,
    chunk: int = 64,
    together: int = 128,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    """Run the rule over whole rows.

    Args:
        inputs: one entry per token.
        segment_ids: a number for each segment, not used again in the row; the state is reset
            where it changes.
        state: initial state of the first segment; None for zeros.
        chunk: tokens per chunk; the result does not depend on it.
        together: the most chunks that are solved at once. Gradients of longer rows compute each
            such part twice, and hold what is between pairs of tokens for one part at a time.

    Returns:
        The outputs, and the state after the last token.
    """
    batch, time, heads, _ = inputs.key.shape
    chunk = min(chunk, time)
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, time), jnp.int32)
    number = -(-time // chunk)
    parts = -(-number // together)
    number += -number % parts
    pad = number * chunk - time
    chunks = DeltaInputs(*(_in_chunks(x, pad, chunk) for x in inputs))
    # Padding belongs to the last segment, so that it does not reset the state that is returned.
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge").reshape(batch, -1, chunk)
    previous = jnp.concatenate([ids[:, 0, :1], ids[:, :-1, -1]], axis=1)
    ids, previous = (jnp.moveaxis(x, 1, 0) for x in (ids, previous))
    widths = (inputs.key.shape[-1], inputs.value.shape[-1])
    empty = jnp.zeros((batch, heads, *widths), inputs.value.dtype)
    start = empty if state is None else state
    if parts == 1:
        end, out = _pass_chunks(start, (chunks, ids, previous))
    else:
        divided = jax.tree.map(
            lambda x: x.reshape(parts, -1, *x.shape[1:]), (chunks, ids, previous)
        )
        end, out = jax.lax.scan(jax.checkpoint(_pass_chunks), start, divided)
        out = out.reshape(number, *out.shape[2:])
    out = jnp.moveaxis(out, 0, 1)  # [batch, chunks, heads, chunk, value]
    return jnp.moveaxis(out, 2, 3).reshape(batch, time + pad, heads, -1)[:, :time], end


def _in_chunks(
    x: Float[Array, "batch time heads *feature"], pad: int, chunk: int
) -> Float[Array, "chunks batch heads chunk *feature"]:
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)


class _Solved(NamedTuple):
    """Chunks with the corrections inside them solved: what the scan over chunks needs.

    `written` is what each token writes if the incoming state is zero, `recall` what it writes less
    per unit of that state. `within` are the weights of the chunk's own tokens. `query` and `key`
    include the decay from the chunk's start and to its end; `keep` is the decay across the chunk.
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
) -> _Solved:
    """Solve all chunks at once; tokens of different segments do not reach each other."""
    chunk = ids.shape[-1]
    total = jnp.cumsum(x.log_decay, axis=-1)
    before = jnp.tril(jnp.ones((chunk, chunk), bool))
    reaches = ((ids[..., :, None] == ids[..., None, :]) & before[None, None])[:, :, None]
    # Each pair's decay is summed over the tokens between them. A difference of two running sums
    # has the rounding of the sums, which is large where tokens before the pair decay much.
    between = (before[:, None] & ~before[None]).astype(total.dtype)
    apart = jnp.einsum("nbhk,ijk->nbhij", x.log_decay, between, precision=_HIGHEST)
    decay = jnp.where(reaches, jnp.exp(apart), 0)
    # The incoming state reaches only the segment that began before the chunk; only the last
    # segment of the chunk reaches the outgoing state.
    carried = (ids == previous[..., None])[:, :, None]
    from_start = jnp.where(carried, jnp.exp(total), 0)

    def products(a: Array, b: Array) -> Array:
        return jnp.einsum("nbhik,nbhjk->nbhij", a, b, precision=_HIGHEST) * decay

    system = jnp.tril(products(x.key * x.strength[..., None], x.key), -1)
    right = jnp.concatenate([x.value, x.key * from_start[..., None]], axis=-1)
    solution = jax.lax.platform_dependent(
        system, right * x.strength[..., None], cpu=_solve_by_halves, default=_substitute
    )
    written, recall = jnp.split(solution, (x.value.shape[-1],), axis=-1)
    return _Solved(
        written=written,
        recall=recall,
        within=products(x.query, x.key),
        query=x.query * from_start[..., None],
        key=x.key * decay[..., -1, :, None],
        keep=from_start[..., -1],
    )


def _substitute(
    below: Float[Array, "*batch chunk chunk"], right: Float[Array, "*batch chunk columns"]
) -> Float[Array, "*batch chunk columns"]:
    """Solve $(I + L) x = b$ for $L$ with entries below the diagonal only."""
    return jax.lax.linalg.triangular_solve(
        below, right, left_side=True, lower=True, unit_diagonal=True
    )


def _solve_by_halves(
    below: Float[Array, "*batch chunk chunk"], right: Float[Array, "*batch chunk columns"]
) -> Float[Array, "*batch chunk columns"]:
    r"""Solve the same without `triangular_solve`, which can wait forever on CPUs (jaxlib 0.10.2).

    Diagonal blocks are inverted, and pairs of them joined until one is left:

    $$\begin{pmatrix} A & 0 \\ B & C \end{pmatrix}^{-1}
    = \begin{pmatrix} A^{-1} & 0 \\ -C^{-1} B A^{-1} & C^{-1} \end{pmatrix}$$
    """
    chunk = below.shape[-1]
    *batch, _, _ = below.shape
    missing = 2 ** (chunk - 1).bit_length() - chunk
    padded = jnp.pad(below, [(0, 0)] * len(batch) + [(0, missing)] * 2)
    inverses = jnp.ones((*batch, chunk + missing, 1, 1), below.dtype)
    while (pairs := inverses.shape[-3] // 2) > 0:
        size = inverses.shape[-1]
        blocks = padded.reshape(*batch, pairs, 2 * size, pairs, 2 * size)
        joining = jnp.stack([blocks[..., i, size:, i, :size] for i in range(pairs)], axis=-3)
        first, second = inverses[..., ::2, :, :], inverses[..., 1::2, :, :]
        corner = -_matmul(_matmul(second, joining), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverses = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    inverse = jax.lax.stop_gradient(inverses[..., 0, :chunk, :chunk])
    # The gradient is that of the linear system, with the same inverse, not that of the steps above.
    return jax.lax.custom_linear_solve(
        lambda x: x + _matmul(below, x),
        right,
        lambda _, b: _matmul(inverse, b),
        lambda _, b: _matmul(jnp.swapaxes(inverse, -1, -2), b),
    )


def _pass_chunks(
    state: Float[Array, "batch heads key value"],
    chunks: tuple[DeltaInputs, Int[Array, "chunks batch chunk"], Int[Array, "chunks batch"]],
) -> tuple[Float[Array, "batch heads key value"], Float[Array, "chunks batch heads chunk value"]]:
    """Solve chunks, and carry the state across them."""
    return jax.lax.scan(_pass_on, state, _solve(*chunks))


def _pass_on(
    state: Float[Array, "batch heads key value"], x: _Solved
) -> tuple[Float[Array, "batch heads key value"], Float[Array, "batch heads chunk value"]]:
    """Carry the state across one chunk; return it and the chunk's outputs."""
    written = x.written - _matmul(x.recall, state)
    out = _matmul(x.query, state) + _matmul(x.within, written)
    state = x.keep[:, :, None, None] * state + _matmul(jnp.swapaxes(x.key, -1, -2), written)
    return state, out


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_HIGHEST)
