"""Log-probabilities of labels from hidden states, at labelled positions only."""

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from twinkle_jax.data.batch import IGNORE
from twinkle_jax.loss import token_logprobs
from twinkle_jax.model.decoder.gather_steps import gather_in_steps, steps_of
from twinkle_jax.model.decoder.layers import output_matrix
from twinkle_jax.model.decoder.mesh_layout import ROWS
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.decoder.sharding import partition_rules

PerToken = Float[Array, "batch time"]


def label_scores(
    params: Params,
    hidden: Float[Array, "batch time width"],
    labels: Int[Array, "batch time"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    with_entropy: bool = False,
    mesh: Mesh | None = None,
) -> tuple[PerToken, ...]:
    """Score labels, and give the entropies too if asked; 0 where the label is −100.

    On a mesh, positions are spread over all devices, and each scores its own against the whole
    head: the rows over data and fsdp, the time over tensor. The head is gathered once, in the type
    of the hidden states, and its gradient is summed and scattered.
    """

    def score(hidden: Array, head: Array, labels: Array, temperature: Any) -> tuple[PerToken, ...]:
        for dimension, axis in enumerate(spread_head):
            if mesh is not None and axis is not None:
                head = gather_in_steps(head, axis, dimension, steps_of(mesh.shape[axis]))
        flat = labels.reshape(-1)
        scores = token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            flat,
            mask=flat != IGNORE,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        several: tuple[Any, ...] = scores if isinstance(scores, tuple) else (scores,)
        return tuple(x.reshape(labels.shape) for x in several)

    head, spread_head = output_matrix(params).astype(hidden.dtype), PartitionSpec()
    if mesh is None:
        return score(hidden, head, labels, temperature)
    spread_head = partition_rules(mesh)("lm_head/kernel", head.shape)
    spread, whole = PartitionSpec(ROWS, "tensor"), PartitionSpec()
    scores: tuple[PerToken, ...] = jax.shard_map(
        score, mesh=mesh, in_specs=(spread, spread_head, spread, whole), out_specs=spread
    )(hidden, head, labels, temperature)
    return scores
