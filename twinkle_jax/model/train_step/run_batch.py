"""The decoder over the rows of a batch, as scoring and training both run it."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from twinkle_jax.data.batch import Batch
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.forward import hidden_states
from twinkle_jax.model.decoder.parameters import Params


def run_batch(
    params: Params, config: DecoderConfig, batch: Batch, mesh: Mesh | None, **options: Any
) -> Float[Array, "batch time width"]:
    """Run the decoder over the rows of a batch.

    On a mesh, the embedding is gathered first: looking up rows of one that is spread over the same
    devices as the tokens would gather what was looked up, on every device.
    """
    if mesh is not None:
        table = params["embed_tokens"]["embedding"]
        table = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, PartitionSpec()))
        params = {**params, "embed_tokens": {"embedding": table}}
    return hidden_states(
        params,
        config,
        batch.tokens,
        batch.mask,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        **options,
    )
