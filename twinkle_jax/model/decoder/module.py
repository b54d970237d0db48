"""The decoder as a Flax NNX module: thin, its parameters the same tree that the functions take."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.forward import hidden_states
from twinkle_jax.model.decoder.layers import output_logits


class Decoder(nnx.Module):  # type: ignore[misc]  # mypy does not follow Flax: its Module is Any
    """A policy: a configuration and its parameters.

    `nnx.split(decoder)` gives a graph definition and a state whose pure dict is
    [`params`][twinkle_jax.model.Decoder.params]: what `hidden_states`, `prefill` and
    `decode_step` take, and what optimizers, sharding rules and adapters work on.

    Args:
        config: the decoder.
        params: the tree that `parameter_shapes` describes.
        source: the directory that it was read from, where a later export finds the tokenizer.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from twinkle_jax.model import Decoder, init_params, parse_config
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> decoder = Decoder(config, init_params(jax.random.key(0), config))
        >>> decoder(jnp.array([[5, 6, 7]])).shape
        (1, 3, 64)
        >>> graph, state = nnx.split(decoder)
        >>> state["layers"]["0"]["mlp"]["up_proj"]["kernel"].shape
        (2, 32, 48)
    """

    def __init__(
        self, config: DecoderConfig, params: Mapping[str, Any], *, source: Path | None = None
    ) -> None:
        self.config = config
        self.source = source
        for name, value in params.items():
            setattr(self, name, _variables(value))

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as nested dicts of arrays."""
        params: dict[str, Any] = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        return params

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        mask: Bool[Array, "batch time"] | None = None,
        **options: Any,
    ) -> Float[Array, "batch time vocab"]:
        """Compute float32 logits at every position.

        Args:
            tokens: token ids.
            mask: True for tokens, False for padding.
            options: keyword arguments of [`hidden_states`][twinkle_jax.model.hidden_states].
        """
        params = self.params
        hidden = hidden_states(params, self.config, tokens, mask, **options)
        return output_logits(params, hidden)


def _variables(value: Any) -> Any:
    """Wrap the arrays of a nested dict."""
    if isinstance(value, Mapping):
        return nnx.Dict({key: _variables(child) for key, child in value.items()})
    return nnx.Param(value)
