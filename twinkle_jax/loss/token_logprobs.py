"""Log-probabilities of given tokens from hidden states, without logits of [tokens, vocabulary].

The log-softmax of `hidden @ head` is computed one tile of logits at a time, a chunk of tokens times
a block of the vocabulary. For each block, all chunks are visited. The forward pass keeps the sums
of an online softmax for each token. The backward pass recomputes the tiles and turns them into
gradients by these sums. It finishes one block of the head's gradient before the next, so that only
one block is summed in a wider type.

Two things are done for the compiler. The loop over blocks is unrolled: an operand of a compiled
loop has a fixed layout, and a head that is a transposed embedding would be copied into it. And the
start of a block is an output of the loop over the chunks of the block before: if it were known
earlier, the compiler would slice all blocks at once, which is the same copy in pieces.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.loss.per_token import Coefficient, checked_mask

LARGEST_CHUNK = {"gpu": 4096}  # tokens, by backend; a GPU is idle for part of small products
LARGEST_TILE = 2**24  # logits: 64 MiB in float32
SMALLEST_TILE = 2**20

Head = Float[Array, "feature vocab"]
OverTime = Float[Array, " time"]
Tile = Float[Array, "time vocab"]
Index = Int[Array, ""]


class Tiling(NamedTuple):
    """Sizes of tiles: `chunk` tokens, times each of `widths` columns."""

    chunk: int
    widths: tuple[int, ...]


def soft_capped(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    r"""Bound logits smoothly: $c \tanh(x / c)$; None leaves them as they are."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def tiling(time: int, feature: int, vocab: int, chunk_size: int | None) -> Tiling:
    """Choose sizes so that a tile is a small part of the logits, and a block of the head."""
    # With few logits, masked tokens in the last chunk cost more than one more chunk.
    few = chunk_size is None and time * vocab <= SMALLEST_TILE
    most = LARGEST_CHUNK.get(jax.default_backend(), 1024)
    largest = min(time, chunk_size or min(most, -(-time // (3 if few else 2))))
    chunks = -(-time // largest)
    rows = -(-time // (8 * chunks)) * 8
    rows = rows if few and largest >= 8 else min(rows, largest)
    tile = min(max(time * vocab // 48, SMALLEST_TILE), LARGEST_TILE)
    blocks = max(1 if few else 2, -(-rows * vocab // tile), -(-feature * vocab // LARGEST_TILE))
    width = -(-vocab // (128 * min(16, blocks))) * 128  # matrix units want multiples of 128
    return Tiling(rows, tuple(min(width, vocab - start) for start in range(0, vocab, width)))


class Tokens(NamedTuple):
    """Inputs of each token; `scale` is one over its temperature."""

    hidden: Float[Array, "time feature"]
    ids: Int[Array, " time"]
    scale: OverTime


class _Sums(NamedTuple):
    """An online softmax over the blocks seen so far."""

    maximum: OverTime
    total: OverTime  # of exp(logit - maximum)
    weighted: OverTime  # of exp(logit - maximum) * (logit - maximum)
    target: OverTime  # the logit of the token itself; NaN if it is outside the vocabulary


class _Slopes(NamedTuple):
    """Coefficients of each token that turn its logits into their gradient."""

    maximum: OverTime
    log_total: OverTime
    target: OverTime
    constant: OverTime
    linear: OverTime


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def tile_logprobs(
    tokens: Tokens,
    head: Head,
    count: Index,
    tiles: Tiling,
    with_entropy: bool,
    soft_cap: float | None,
) -> tuple[OverTime, ...]:
    """Score the first `count` tokens: log-probabilities, and optionally entropies."""
    return _forward(tokens, head, count, tiles, with_entropy, soft_cap)[0]


def _forward(
    tokens: Tokens,
    head: Head,
    count: Index,
    tiles: Tiling,
    with_entropy: bool,
    soft_cap: float | None,
) -> tuple[tuple[OverTime, ...], Any]:
    def visit(index: Index, carry: tuple[_Sums, Index], block: Head, start: Index) -> Any:
        chunk, sums = _chunk((tokens, carry[0]), index, tiles)
        sums = _absorb(sums, _logits(chunk, block, soft_cap), chunk.ids - start, with_entropy)
        return _put(carry[0], sums, index, tiles), start + block.shape[1]

    full = partial(jnp.full_like, tokens.scale)
    target = jnp.where(tokens.ids < 0, jnp.nan, full(0))
    sums = _Sums(full(jnp.finfo(tokens.scale.dtype).min / 2), full(0), full(0), target)
    start = jnp.int32(0)
    for width in tiles.widths:
        step = partial(visit, block=_block(tokens, head, start, width), start=start)
        sums, start = lax.fori_loop(0, _chunks(count, tiles), step, (sums, start))
    # The tokens behind the first `count` are dropped, but NaN there would stop `jax_debug_nans`.
    scored = jnp.arange(len(tokens.scale), dtype=count.dtype) < count
    total = jnp.where(scored, sums.total, 1)
    log_total = jnp.log(total)
    entropy = log_total - sums.weighted / total
    logprobs = sums.target - sums.maximum - log_total
    residuals = (tokens, head, count, sums.maximum, log_total, entropy)
    return ((logprobs, entropy) if with_entropy else (logprobs,)), residuals


def _absorb(sums: _Sums, logits: Tile, column: Int[Array, " time"], with_entropy: bool) -> _Sums:
    maximum = jnp.maximum(sums.maximum, jnp.max(logits, axis=1))
    below, fall = logits - maximum[:, None], sums.maximum - maximum
    exps, weighted = jnp.exp(below), sums.weighted
    if with_entropy:
        weighted = jnp.exp(fall) * (weighted + fall * sums.total) + jnp.sum(exps * below, axis=1)
    total = jnp.exp(fall) * sums.total + jnp.sum(exps, axis=1)
    here = (column >= 0) & (column < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(here, column, 0)[:, None], axis=1)[:, 0]
    return _Sums(maximum, total, weighted, jnp.where(here, picked, sums.target))


def _backward(
    tiles: Tiling,
    with_entropy: bool,
    soft_cap: float | None,
    residuals: Any,
    cotangents: tuple[OverTime, ...],
) -> tuple[Tokens, Head, None]:
    tokens, head, count, maximum, log_total, entropy = residuals
    dtype = tokens.scale.dtype
    d_logprob = jnp.where(tokens.ids < 0, jnp.nan, cotangents[0]) * tokens.scale
    d_entropy = cotangents[-1] * tokens.scale if with_entropy else jnp.zeros_like(d_logprob)
    constant = d_logprob + d_entropy * entropy
    slopes = _Slopes(maximum, log_total, d_logprob, constant, d_entropy)

    def visit(index: Index, carry: Any, block: Head, start: Index) -> Any:
        d_hidden, d_scale, d_block, _ = carry
        chunk, slope, d_chunk = _chunk((tokens, slopes, d_hidden), index, tiles)
        logits = _logits(chunk, block, soft_cap)
        d_logits = _d_logits(chunk, slope, logits, start, with_entropy)
        if soft_cap is not None:
            # By the scale where it is multiplied, behind the cap.
            d_part = jnp.sum(d_logits * logits, axis=1) / chunk.scale**2
            d_scale = _put(d_scale, _chunk(d_scale, index, tiles) + d_part, index, tiles)
            d_logits *= 1 - (logits / (soft_cap * chunk.scale[:, None])) ** 2
        d_logits = d_logits.astype(chunk.hidden.dtype)
        d_chunk += _product(d_logits, block.T, dtype)
        # Reset here, so that one array serves all blocks: zeros per block would all be made first.
        d_block = jnp.where(index == 0, 0, d_block) + _product(chunk.hidden.T, d_logits, dtype)
        return _put(d_hidden, d_chunk, index, tiles), d_scale, d_block, start + block.shape[1]

    d_hidden, d_head = jnp.zeros_like(tokens.hidden, dtype), jnp.zeros_like(head)
    d_scale = None if soft_cap is None else jnp.zeros_like(tokens.scale)
    d_block, start = jnp.zeros_like(head[:, : tiles.widths[0]], dtype), jnp.int32(0)
    for width in tiles.widths:
        step = partial(visit, block=_block(tokens, head, start, width), start=start)
        carry = (d_hidden, d_scale, d_block[:, :width], start)
        d_hidden, d_scale, d_block, end = lax.fori_loop(0, _chunks(count, tiles), step, carry)
        d_head = lax.dynamic_update_slice_in_dim(d_head, d_block.astype(head.dtype), start, axis=1)
        start = end
    if d_scale is None:  # logits are linear in the hidden states
        d_scale = jnp.sum(d_hidden * tokens.hidden.astype(dtype), axis=1) / tokens.scale
    no_gradient: Any = None  # of integers
    return Tokens(d_hidden.astype(tokens.hidden.dtype), no_gradient, d_scale), d_head, no_gradient


tile_logprobs.defvjp(_forward, _backward)


def _d_logits(
    chunk: Tokens, slope: _Slopes, logits: Tile, start: Index, with_entropy: bool
) -> Tile:
    """Compute the gradient of the logits before they are divided by the temperature."""
    logprobs = logits - slope.maximum[:, None] - slope.log_total[:, None]
    factor = slope.constant[:, None]
    if with_entropy:
        factor += slope.linear[:, None] * logprobs
    column = (chunk.ids - start)[:, None]
    hit = lax.broadcasted_iota(column.dtype, logprobs.shape, 1) == column
    return jnp.where(hit, slope.target[:, None], 0) - jnp.exp(logprobs) * factor


def _logits(chunk: Tokens, block: Head, soft_cap: float | None) -> Tile:
    scale = chunk.scale[:, None]
    if soft_cap is not None:
        return soft_capped(_product(chunk.hidden, block, scale.dtype), soft_cap) * scale
    if chunk.hidden.dtype == scale.dtype:  # scale the smaller array where it is not rounded
        return _product(chunk.hidden * scale, block, scale.dtype)
    return _product(chunk.hidden, block, scale.dtype) * scale


def _product(left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    precision = product_precision(left.dtype)
    return jnp.matmul(left, right, precision=precision, preferred_element_type=dtype)


def product_precision(dtype: DTypeLike, device: Any = None) -> str | None:
    """Say how to multiply arrays of a type: as JAX's setting says, else float32 as float32.

    By default JAX lets a GPU round float32 factors to TensorFloat-32, and a TPU to bfloat16:
    log-probabilities would be off by a thousandth and more. On NVIDIA GPUs of compute capability
    8.0 three products of TensorFloat-32 are as accurate as one of float32, and take less time.

    Args:
        dtype: of the factors.
        device: that multiplies; None for JAX's first one.
    """
    setting: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    platform = jax.default_backend() if device is None else device.platform
    if setting is not None or platform == "cpu" or jnp.dtype(dtype) != jnp.float32:
        return setting
    capability = compute_capability(jax.local_devices()[0] if device is None else device)
    return "TF32_TF32_F32_X3" if capability >= 8 else "highest"


def compute_capability(device: Any) -> float:
    """Return an NVIDIA GPU's compute capability; 0 for other devices, which report none."""
    reported = str(getattr(device, "compute_capability", ""))
    return float(reported) if reported.replace(".", "", 1).isdigit() else 0.0


def _block(tokens: Tokens, head: Head, start: Index, width: int) -> Head:
    return lax.dynamic_slice_in_dim(head, start, width, axis=1).astype(tokens.hidden.dtype)


def _chunk(values: Any, index: Index, tiles: Tiling) -> Any:
    """Slice a chunk out of all arrays with one entry per token."""
    take = partial(
        lax.dynamic_slice_in_dim, start_index=index * tiles.chunk, slice_size=tiles.chunk
    )
    return jax.tree.map(take, values)


def _put(values: Any, chunk: Any, index: Index, tiles: Tiling) -> Any:
    put = partial(lax.dynamic_update_slice_in_dim, start_index=index * tiles.chunk, axis=0)
    return jax.tree.map(put, values, chunk)


def _chunks(count: Index, tiles: Tiling) -> Index:
    # The barrier hides a known count: the compiler unrolls a loop that runs once, and would then
    # know where the next block begins.
    return lax.optimization_barrier((count + tiles.chunk - 1) // tiles.chunk)


def token_logprobs(
    hidden: Float[Array, "time feature"],
    head: Float[Array, "feature vocab"],
    tokens: Int[Array, " time"],
    *,
    mask: Bool[Array, " time"] | None = None,
    temperature: Coefficient | Float[Array, " time"] = 1.0,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> Float[Array, " time"] | tuple[Float[Array, " time"], Float[Array, " time"]]:
    r"""Score tokens under the head of a language model, without holding all logits.

    $$\log \pi_t = z_{t, a_t} - \log \sum_v e^{z_{t, v}}, \qquad
      H_t = -\sum_v \pi_{t, v} \log \pi_{t, v}, \qquad z_t = h_t W / \tau_t$$

    With a soft cap $c$, logits are bounded before they are divided by the temperature, as in Gemma
    2: $z_t = c \tanh(h_t W / c) / \tau_t$.

    Logits exist one tile at a time, a chunk of tokens times a block of the vocabulary; the
    gradient computes each tile again. Masked tokens are dropped before chunks are formed, so they
    cost next to nothing, wherever they are.

    Gradients flow to `hidden`, `head` and `temperature`, from log-probabilities and entropies. An
    argument that is not differentiated, such as a frozen head, costs nothing. There is no `jvp`,
    and no second `grad`; a Hessian-vector product is the `jvp` of the gradient.

    Flatten `[batch, time, feature]` rather than `vmap` over it: under `vmap` each row takes as long
    as the fullest one, and has its own gradient of the head. Pass a tied embedding as
    `embedding.T`; under `jit` it is not copied. With tokens spread over devices, call this inside
    `shard_map`, or on a mesh with explicit axes: each device then scores its own tokens. On a mesh
    with automatic axes the result is the same, but every device may compute all of it.

    Where `hidden` and `head` are bfloat16, so are the factors of each product, summed in float32.
    Otherwise all is float32 (or float64), and factors are not rounded on any device, unless
    `jax_default_matmul_precision` is set.

    Args:
        hidden: $h$, hidden states from which `tokens` are predicted.
        head: $W$, output matrix.
        tokens: $a$, the tokens to score. If an unmasked one in a JAX array, whose values are not
            checked, is outside the vocabulary, its log-probability and the gradients are NaN.
        mask: True where a token counts; all do if None. Padding may hold anything.
        temperature: $\tau$, above 0, one for all tokens or one for each.
        soft_cap: $c$, above 0; None: logits are not bounded. A decoder's is in its configuration,
            `config.logits_soft_cap`.
        chunk_size: the most tokens in a chunk; None: half of them, and at most 1,024, on GPUs 4,096
            (a third if all logits together have at most 4 MiB). Larger chunks take more memory,
            smaller ones more time, since each adds to the gradient of the head.
        with_entropy: whether to return entropies as well.

    Returns:
        Log-probabilities, or a pair of log-probabilities and entropies in nats; zero where masked
        out; in float32, or in float64 if `hidden` or `head` is.

    Raises:
        ValueError: if shapes don't fit, `chunk_size` or `soft_cap` is not positive, or an unmasked
            token in host data (a list, NumPy) is outside the vocabulary.
        TypeError: if an array has the wrong type, `chunk_size` is not an integer, or `soft_cap` not
            a number.

    References:
        [Cut Your Losses in Large-Vocabulary Language Models](https://arxiv.org/abs/2411.09009)
        (Wijmans et al., 2024);
        [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867) (Milakov and
        Gimelshein, 2018)

    Example:
        >>> import jax.numpy as jnp
        >>> hidden = jnp.array([[0.0, 0.0], [5.0, 2.0]])
        >>> head = jnp.array([[3.0, 1.0], [2.0, 2.0]])
        >>> tokens, mask = jnp.array([0, 1]), jnp.array([True, False])
        >>> jnp.exp(token_logprobs(hidden, head, tokens, mask=mask))
        Array([0.5, 1. ], dtype=float32)
    """
    hidden, head = _matrix("hidden", hidden), _matrix("head", head)
    if hidden.shape[1] != head.shape[0] or head.shape[1] == 0:
        raise ValueError(
            f"head must be [feature, vocab] with the feature of hidden, {hidden.shape} (a tied "
            f"embedding is passed transposed), got {head.shape}"
        )
    time, vocab = len(hidden), head.shape[1]
    counted = None if mask is None else _checked_mask(mask, time)
    results = _score(
        hidden,
        head,
        _checked_tokens(tokens, mask, time, vocab),
        counted,
        _checked_temperature(temperature, time),
        soft_cap=_checked_soft_cap(soft_cap),
        chunk_size=_checked_chunk_size(chunk_size),
        with_entropy=bool(with_entropy),
    )
    return results if with_entropy else results[0]


@partial(jax.jit, static_argnames=("soft_cap", "chunk_size", "with_entropy"))
def _score(
    hidden: jax.Array, head: jax.Array, *per_token: Any, **static: Any
) -> tuple[OverTime, ...]:
    run = partial(_score_masked, **static)
    return _on_token_shards(run, hidden, head, *per_token)


def _score_masked(
    hidden: Float[Array, "time feature"],
    head: Float[Array, "feature vocab"],
    tokens: Int[Array, " time"],
    mask: Bool[Array, " time"] | None,
    temperature: Float[Array, ""] | OverTime,
    *,
    soft_cap: float | None,
    chunk_size: int | None,
    with_entropy: bool,
) -> tuple[OverTime, ...]:
    """Move the unmasked tokens to the front, fill up the last chunk, and put the results back."""
    (time, feature), vocab = hidden.shape, head.shape[1]
    types = {hidden.dtype, head.dtype}
    dtype = jnp.float64 if jnp.dtype("float64") in types else jnp.float32
    zeros = jnp.zeros_like(tokens, dtype)
    if time == 0:
        return (zeros, zeros)
    tiles = tiling(time, feature, vocab, chunk_size)
    padded = -(-time // tiles.chunk) * tiles.chunk
    order, count = jnp.arange(padded), jnp.full((), time)
    if mask is not None:
        (order,) = jnp.nonzero(mask, size=padded, fill_value=time)
        count = jnp.sum(mask)
        temperature = jnp.where(mask, temperature, 1)
    in_vocabulary = (tokens >= 0) & (tokens < vocab)

    def take(values: jax.Array, fill: int) -> jax.Array:
        return values.at[order].get(mode="fill", fill_value=fill, indices_are_sorted=True)

    scored = Tokens(
        hidden=take(hidden, 0).astype(jnp.bfloat16 if types == {jnp.dtype("bfloat16")} else dtype),
        ids=take(jnp.where(in_vocabulary, tokens.astype(jnp.int32), -1), 0),
        scale=take(1 / jnp.broadcast_to(temperature.astype(dtype), (time,)), 1),
    )
    results = tile_logprobs(scored, head, count, tiles, with_entropy, soft_cap)
    put = partial(zeros.at[order].set, mode="drop", indices_are_sorted=True)
    return tuple(put(result) for result in results)


def _matrix(name: str, values: Any) -> jax.Array:
    """Check hidden states or the head: a floating-point matrix."""
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{name} must be a matrix (flatten batch and time), got {array.shape}")
    return array


def _checked_mask(mask: Any, time: int) -> jax.Array:
    """Check the mask: one boolean per token."""
    mask = checked_mask(mask)
    if mask.shape != (time,):
        raise ValueError(f"mask must have shape {(time,)}, one per hidden state, got {mask.shape}")
    return mask


def _checked_tokens(tokens: Any, mask: Any, time: int, vocab: int) -> jax.Array:
    """Check types and shapes of tokens, and the values of host data against the vocabulary."""
    array = jnp.asarray(tokens)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {array.dtype}")
    if array.shape != (time,):
        raise ValueError(
            f"tokens must have shape {(time,)}, one per hidden state, got {array.shape}"
        )
    values, counted = _host_values(tokens), True if mask is None else _host_values(mask)
    if values is not None and counted is not None:
        beyond = np.flatnonzero(counted & ((values < 0) | (values >= vocab)))
        if beyond.size:
            raise ValueError(
                f"tokens must lie in [0, {vocab}), the columns of head, got "
                f"{values[beyond[0]]} at {beyond[0]}; mask tokens that are not to be scored"
            )
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.int32)


def _host_values(values: Any) -> Any:
    """Return host data as NumPy, and None for JAX arrays: reading them back would block."""
    return None if isinstance(values, jax.Array) else np.asarray(values)


def _checked_temperature(temperature: Any, time: int) -> jax.Array:
    """Check the temperature: one number, or one per token."""
    # A Python number becomes a float32 like any other, so as not to be compiled for separately.
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    array = jnp.asarray(temperature, float if number else None)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"temperature must be floating point, got {array.dtype}")
    if array.shape not in ((), (time,)):
        raise ValueError(f"temperature must have shape () or {(time,)}, got {array.shape}")
    return array


def _checked_soft_cap(soft_cap: Any) -> float | None:
    """Check the soft cap: a positive number, or None."""
    if soft_cap is None:
        return None
    if isinstance(soft_cap, bool) or not isinstance(soft_cap, int | float | np.number):
        raise TypeError(f"soft_cap must be a number or None, got {soft_cap!r}")
    if not 0 < soft_cap < np.inf:
        raise ValueError(f"soft_cap must be finite and above 0, got {soft_cap}")
    return float(soft_cap)


def _checked_chunk_size(chunk_size: Any) -> int | None:
    """Check the chunk size: a positive int, or None."""
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer):
        raise TypeError(f"chunk_size must be an int or None, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return int(chunk_size)


def _on_token_shards(
    run: Callable[..., tuple[jax.Array, ...]], *arrays: Any
) -> tuple[jax.Array, ...]:
    """Call `run(hidden, head, *per_token)` on each device's tokens, where array types say which.

    They say so inside `shard_map`, and on a mesh with explicit axes. There `shard_map` is entered
    here, and arrays that are not sharded like the rows of `hidden`, such as the head, are gathered.
    """
    sharding = jax.typeof(arrays[0]).sharding
    kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return run(*_unreplicated(arrays))
    axes = sharding.spec[0]

    def gather(array: jax.Array) -> jax.Array:
        first = axes if array is arrays[0] or array.ndim == 1 else None
        spec = PartitionSpec(*[first, None][: array.ndim])
        return jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))

    arrays = jax.tree.map(gather, arrays)
    return jax.shard_map(
        lambda *shards: run(*_unreplicated(shards)),
        mesh=sharding.mesh,
        out_specs=PartitionSpec(axes),
        axis_names=explicit,
    )(*arrays)


def _unreplicated(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Mark replicated arrays as varying over devices, so that their gradients are summed once."""

    def varying(array: jax.Array) -> frozenset[str]:
        axes: frozenset[str] = jax.typeof(array).manual_axis_type.varying
        return axes

    all_axes = frozenset[str]().union(*map(varying, jax.tree.leaves(arrays)))

    def split(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(all_axes - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    unreplicated: tuple[Any, ...] = jax.tree.map(split, arrays)
    return unreplicated
