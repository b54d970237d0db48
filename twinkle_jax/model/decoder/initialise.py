"""Random parameters, for models that start from nothing."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.parameters import Initial, nest, parameter_table, stacked_shape


def init_params(
    key: Key[Array, ""], config: DecoderConfig, *, dtype: DTypeLike = "float32"
) -> dict[str, Any]:
    """Draw the parameters of a decoder: matrices from N(0, 0.02²), norms as the identity.

    Args:
        key: a typed key; each parameter is drawn with its own, folded in.
        config: the decoder.
        dtype: type of the parameters.

    Returns:
        The tree that [`parameter_shapes`][twinkle_jax.model.parameter_shapes] describes.

    Example:
        >>> import jax
        >>> from twinkle_jax.model import init_params, parse_config
        >>> config = parse_config({
        ...     "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "head_dim": 16,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ...     "num_key_value_heads": 2, "tie_word_embeddings": True,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> sorted(params), params["norm"]["scale"].shape
        (['embed_tokens', 'layers', 'norm'], (32,))
    """
    return nest(
        {
            path: _draw(
                jax.random.fold_in(key, i),
                stacked_shape(config, path, p),
                p.initial,
                jnp.dtype(dtype),
            )
            for i, (path, p) in enumerate(parameter_table(config).items())
        }
    )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: Key[Array, ""], shape: tuple[int, ...], initial: Initial, dtype: jnp.dtype) -> Array:
    if initial == "normal":
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)
    if initial == "log_uniform":  # decay rates between a hundredth and sixteen per token
        return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0)).astype(dtype)
    return jnp.ones(shape, dtype) if initial == "ones" else jnp.zeros(shape, dtype)
