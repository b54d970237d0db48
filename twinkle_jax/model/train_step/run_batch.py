"""The decoder over the rows of a batch, as scoring and training both run it."""

from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Float

from twinkle_jax.data.batch import Batch
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.forward import hidden_states
from twinkle_jax.model.decoder.parameters import Params


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
