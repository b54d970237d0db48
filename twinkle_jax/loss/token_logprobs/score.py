"""Log-probabilities of given tokens from hidden states, without logits of [tokens, vocabulary]."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.loss.token_logprobs.token_shards import on_token_shards
from twinkle_jax.loss.token_logprobs.vocabulary_tiles import Rows, tile_logprobs, tiling

PerToken = Float[Array, " time"]
Mask = Bool[Array, " time"]
Temperature = float | Float[Array, ""] | PerToken


def token_logprobs(
    hidden: Float[Array, "time feature"],
    head: Float[Array, "feature vocab"],
    tokens: Int[Array, " time"],
    *,
    mask: Mask | None = None,
    temperature: Temperature = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> PerToken | tuple[PerToken, PerToken]:
    r"""Score tokens under the head of a language model, without holding all logits.

    $$\log \pi_t = z_{t, a_t} - \log \sum_v e^{z_{t, v}}, \qquad
      H_t = -\sum_v \pi_{t, v} \log \pi_{t, v}, \qquad z_t = h_t W / \tau_t$$

    Logits exist one tile at a time, a chunk of tokens against a block of the vocabulary; the
    gradient computes each tile again. Masked tokens are left out before chunks are made, so they
    cost next to nothing, however they are spread.

    Gradients flow to `hidden`, `head` and `temperature`, from log-probabilities and entropies. What
    is not differentiated, a frozen head for one, costs nothing. There is no `jvp`, and no second
    `grad`; a Hessian-vector product is the `jvp` of the gradient.

    Flatten `[batch, time, feature]` rather than `vmap` over it: each member would take as long as
    the fullest, and its gradient would hold a head of its own. Pass a tied embedding as
    `embedding.T`; under `jit` it is not copied. With tokens spread over devices, call this inside
    `shard_map`, or on a mesh with explicit axes: each device then scores its own tokens. On a mesh
    with automatic axes the result is the same, but every device may compute all of it.

    Where `hidden` and `head` are bfloat16, so are the factors of each product, summed in float32.
    Otherwise all is float32 (or float64), multiplied as `jax.default_matmul_precision` says; on
    accelerators, only `"highest"` is accurate to float32.

    See [Cut Your Losses](https://arxiv.org/abs/2411.09009) and
    [online softmax](https://arxiv.org/abs/1805.02867).

    Args:
        hidden: $h$, hidden states from which `tokens` are predicted.
        head: $W$, output matrix.
        tokens: $a$, the tokens to score. Where an unmasked one is outside the vocabulary and its
            value is in a JAX array, and so not looked at, log-probability and gradients are NaN.
        mask: True where a token counts; all do if None. What is masked may hold anything.
        temperature: $\tau$, above zero, one for all tokens or one for each.
        chunk_size: the most tokens in a chunk; None means half of them, and at most 1,024 (a third
            where all logits together have at most 4 MiB). Larger chunks take more memory, smaller
            ones more time to add up the gradient of the head.
        with_entropy: whether to return entropies as well.

    Returns:
        Log-probabilities, or a pair of log-probabilities and entropies in nats; zero where masked
        out; in float32, or in float64 if `hidden` or `head` is.

    Raises:
        ValueError: if shapes don't fit, `chunk_size` is not positive, or an unmasked token in host
            data (a list, NumPy) is outside the vocabulary.
        TypeError: if an array has the wrong type, or `chunk_size` is not an integer.

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
    kept = None if mask is None else _checked_mask(mask, time)
    results = _score(
        hidden,
        head,
        _checked_tokens(tokens, mask, time, vocab),
        kept,
        _checked_temperature(temperature, time),
        chunk_size=_checked_chunk_size(chunk_size),
        with_entropy=bool(with_entropy),
    )
    return results if with_entropy else results[0]


@partial(jax.jit, static_argnames=("chunk_size", "with_entropy"))
def _score(
    hidden: jax.Array, head: jax.Array, *per_token: Any, chunk_size: int | None, with_entropy: bool
) -> tuple[PerToken, ...]:
    run = partial(_score_kept, chunk_size=chunk_size, with_entropy=with_entropy)
    return on_token_shards(run, hidden, head, *per_token)


def _score_kept(
    hidden: Float[Array, "time feature"],
    head: Float[Array, "feature vocab"],
    tokens: Int[Array, " time"],
    mask: Mask | None,
    temperature: Float[Array, ""] | PerToken,
    *,
    chunk_size: int | None,
    with_entropy: bool,
) -> tuple[PerToken, ...]:
    """Move the kept tokens to the front, fill up the last chunk, and put the results back."""
    (time, feature), vocab = hidden.shape, head.shape[1]
    types = {hidden.dtype, head.dtype}
    dtype = jnp.float64 if jnp.dtype("float64") in types else jnp.float32
    nothing = jnp.zeros_like(tokens, dtype)
    if time == 0:
        return (nothing, nothing)
    tiles = tiling(time, feature, vocab, chunk_size)
    padded = -(-time // tiles.rows) * tiles.rows
    order, count = jnp.arange(padded), jnp.full((), time)
    if mask is not None:
        (order,) = jnp.nonzero(mask, size=padded, fill_value=time)
        count = jnp.sum(mask)
        temperature = jnp.where(mask, temperature, 1)
    known = (tokens >= 0) & (tokens < vocab)

    def take(values: jax.Array, fill: int) -> jax.Array:
        return values.at[order].get(mode="fill", fill_value=fill, indices_are_sorted=True)

    rows = Rows(
        hidden=take(hidden, 0).astype(jnp.bfloat16 if types == {jnp.dtype("bfloat16")} else dtype),
        tokens=take(jnp.where(known, tokens.astype(jnp.int32), -1), 0),
        scale=take(1 / jnp.broadcast_to(temperature.astype(dtype), (time,)), 1),
    )
    results = tile_logprobs(rows, head, count, tiles, with_entropy)
    put = partial(nothing.at[order].set, mode="drop", indices_are_sorted=True)
    return tuple(put(result) for result in results)


def _matrix(name: str, values: Any) -> jax.Array:
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{name} must be a matrix (flatten batch and time), got {array.shape}")
    return array


def _checked_mask(mask: Any, time: int) -> jax.Array:
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean (True = keep), got {mask.dtype}; try mask != 0")
    if mask.shape != (time,):
        raise ValueError(f"mask must have shape {(time,)}, one a hidden state, got {mask.shape}")
    return mask


def _checked_tokens(tokens: Any, mask: Any, time: int, vocab: int) -> jax.Array:
    array = jnp.asarray(tokens)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {array.dtype}")
    if array.shape != (time,):
        raise ValueError(f"tokens must have shape {(time,)}, one a hidden state, got {array.shape}")
    values, kept = _visible(tokens), True if mask is None else _visible(mask)
    if values is not None and kept is not None:
        beyond = np.flatnonzero(kept & ((values < 0) | (values >= vocab)))
        if beyond.size:
            raise ValueError(
                f"tokens must lie in [0, {vocab}), the columns of head, got "
                f"{values[beyond[0]]} at {beyond[0]}; leave out with mask what is not to be scored"
            )
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.int32)


def _visible(values: Any) -> Any:
    """Give host data as NumPy; what is on a device is not read back to be checked."""
    return None if isinstance(values, jax.Array) else np.asarray(values)


def _checked_temperature(temperature: Any, time: int) -> jax.Array:
    # A Python number becomes a float32 like any other, so as not to be compiled for separately.
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    array = jnp.asarray(temperature, float if number else None)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"temperature must be floating point, got {array.dtype}")
    if array.shape not in ((), (time,)):
        raise ValueError(f"temperature must have shape () or {(time,)}, got {array.shape}")
    return array


def _checked_chunk_size(chunk_size: Any) -> int | None:
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer):
        raise TypeError(f"chunk_size must be an int or None, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return int(chunk_size)
