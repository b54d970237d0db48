"""Log-probabilities of the tokens of prompts, and of the likely ones at their places."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model import DecoderConfig, Params, hidden_states, output_matrix

_CHUNK = 16  # columns at a time, so that logits of all tokens are never held


@partial(jax.jit, static_argnames=("config", "top", "compute_dtype", "mesh"))
def score_prompts(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "batch time"],
    mask: Bool[Array, "batch time"],
    *,
    top: int,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> tuple[
    Float[Array, "batch time"], Float[Array, "batch time top"], Int[Array, "batch time top"]
]:
    """Score the token after each position, and find the likely ones there, at temperature 1.

    Args:
        params: of the decoder, adapters included.
        config: the decoder.
        tokens: token ids, a multiple of 16 columns or fewer.
        mask: True for tokens.
        top: how many likely tokens to find.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        mesh: likewise.

    Returns:
        Log-probabilities of the following tokens, and log-probabilities and ids of the likely ones,
        the most likely first. The last column says nothing.
    """
    hidden = hidden_states(
        params, config, tokens, mask, compute_dtype=compute_dtype, remat=False, mesh=mesh
    )
    head = output_matrix(params).astype(hidden.dtype)
    following = jnp.roll(tokens, -1, axis=1)
    chunk = _CHUNK if tokens.shape[1] % _CHUNK == 0 else tokens.shape[1]

    def score(columns: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        features, labels = columns
        logits = jnp.einsum("btd,dv->btv", features, head, preferred_element_type=jnp.float32)
        logprobs = jax.nn.log_softmax(logits)
        own = jnp.take_along_axis(logprobs, labels[..., None], axis=-1)[..., 0]
        return own, *jax.lax.top_k(logprobs, top)

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(*tokens.shape, *x.shape[3:])

    own, likely, names = jax.lax.map(score, (split(hidden), split(following)))
    return join(own), join(likely), join(names)
