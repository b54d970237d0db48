"""Log-probabilities of given tokens from hidden states, without logits of [tokens, vocabulary]."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.loss.token_logprobs.score_inputs import (
    checked_chunk_size,
    checked_mask,
    checked_temperature,
    checked_tokens,
    matrix,
)
from twinkle_jax.loss.token_logprobs.tiling import tiling
from twinkle_jax.loss.token_logprobs.token_shards import on_token_shards
from twinkle_jax.loss.token_logprobs.vocabulary_tiles import Tokens, tile_logprobs

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
    hidden, head = matrix("hidden", hidden), matrix("head", head)
    if hidden.shape[1] != head.shape[0] or head.shape[1] == 0:
        raise ValueError(
            f"head must be [feature, vocab] with the feature of hidden, {hidden.shape} (a tied "
            f"embedding is passed transposed), got {head.shape}"
        )
    time, vocab = len(hidden), head.shape[1]
    counted = None if mask is None else checked_mask(mask, time)
    results = _score(
        hidden,
        head,
        checked_tokens(tokens, mask, time, vocab),
        counted,
        checked_temperature(temperature, time),
        chunk_size=checked_chunk_size(chunk_size),
        with_entropy=bool(with_entropy),
    )
    return results if with_entropy else results[0]


@partial(jax.jit, static_argnames=("chunk_size", "with_entropy"))
def _score(
    hidden: jax.Array, head: jax.Array, *per_token: Any, chunk_size: int | None, with_entropy: bool
) -> tuple[PerToken, ...]:
    run = partial(_score_masked, chunk_size=chunk_size, with_entropy=with_entropy)
    return on_token_shards(run, hidden, head, *per_token)


def _score_masked(
    hidden: Float[Array, "time feature"],
    head: Float[Array, "feature vocab"],
    tokens: Int[Array, " time"],
    mask: Mask | None,
    temperature: Float[Array, ""] | PerToken,
    *,
    chunk_size: int | None,
    with_entropy: bool,
) -> tuple[PerToken, ...]:
    """Move the unmasked tokens to the front, fill up the last chunk, and put the results back."""
    (time, feature), vocab = hidden.shape, head.shape[1]
    types = {hidden.dtype, head.dtype}
    dtype = jnp.float64 if jnp.dtype("float64") in types else jnp.float32
    nothing = jnp.zeros_like(tokens, dtype)
    if time == 0:
        return (nothing, nothing)
    tiles = tiling(time, feature, vocab, chunk_size)
    padded = -(-time // tiles.chunk) * tiles.chunk
    order, count = jnp.arange(padded), jnp.full((), time)
    if mask is not None:
        (order,) = jnp.nonzero(mask, size=padded, fill_value=time)
        count = jnp.sum(mask)
        temperature = jnp.where(mask, temperature, 1)
    known = (tokens >= 0) & (tokens < vocab)

    def take(values: jax.Array, fill: int) -> jax.Array:
        return values.at[order].get(mode="fill", fill_value=fill, indices_are_sorted=True)

    scored = Tokens(
        hidden=take(hidden, 0).astype(jnp.bfloat16 if types == {jnp.dtype("bfloat16")} else dtype),
        ids=take(jnp.where(known, tokens.astype(jnp.int32), -1), 0),
        scale=take(1 / jnp.broadcast_to(temperature.astype(dtype), (time,)), 1),
    )
    results = tile_logprobs(scored, head, count, tiles, with_entropy)
    put = partial(nothing.at[order].set, mode="drop", indices_are_sorted=True)
    return tuple(put(result) for result in results)
