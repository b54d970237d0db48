"""A pass without gradients: log-probabilities of labels, and logits for those who want them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twinkle_jax.data.batch import Batch, check_batch
from twinkle_jax.model.decoder.attention_choice import AttentionImplementation
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.layers import output_logits
from twinkle_jax.model.decoder.mesh_layout import spread_batch
from twinkle_jax.model.decoder.parameters import Params, merge_params
from twinkle_jax.model.decoder.sharding import find_mesh
from twinkle_jax.model.train_step.label_scores import label_scores
from twinkle_jax.model.train_step.run_batch import run_batch
from twinkle_jax.model.train_step.scalars import Scalar, positive_scalar


class Scores(NamedTuple):
    """What the policy thinks of the labels; 0 where the label is −100.

    Attributes:
        logps: log-probability of each label.
        entropies: entropy of the policy at each label, in nats; None unless asked for.
        logits: over the whole vocabulary, at every position; None unless asked for.
    """

    logps: Float[Array, "batch time"]
    entropies: Float[Array, "batch time"] | None = None
    logits: Float[Array, "batch time vocab"] | None = None


def score_batch(
    params: Params,
    batch: Batch,
    config: DecoderConfig,
    *,
    frozen: Params | None = None,
    temperature: Scalar = 1.0,
    with_entropy: bool = False,
    with_logits: bool = False,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    mesh: Mesh | None = None,
) -> Scores:
    """Score the labels of a batch; compiled, nothing is donated.

    Args:
        params: a decoder's, or adapters'.
        batch: tokens and labels; what a loss needs besides is not read.
        config: the decoder.
        frozen: parameters over which `params` are laid.
        temperature: at which log-probabilities and entropies are taken; logits are as they are.
        with_entropy: whether to compute entropies.
        with_logits: whether to compute all logits, [batch, time, vocabulary] in float32.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: likewise.
        mesh: what the parameters live on. None: what their arrays say, or one device. Arrays that
            are traced do not say it: inside a compiled function of yours, give it.

    Returns:
        The scores, at every position with a label.
    """
    batch = check_batch(batch, config.vocab_size)
    return _score_batch(
        params,
        frozen,
        batch._replace(advantages=None, old_logps=None, ref_logps=None, rows=None),
        positive_scalar("temperature", temperature),
        config=config,
        with_entropy=with_entropy,
        with_logits=with_logits,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        mesh=find_mesh(mesh, params),
    )


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "with_entropy",
        "with_logits",
        "compute_dtype",
        "attention",
        "mesh",
    ),
)
def _score_batch(
    params: Params,
    frozen: Params | None,
    batch: Batch,
    temperature: Float[Array, ""],
    *,
    config: DecoderConfig,
    with_entropy: bool,
    with_logits: bool,
    mesh: Mesh | None,
    **options: Any,
) -> Scores:
    weights = merge_params(frozen, params)
    batch = spread_batch(batch, config, mesh)
    hidden = run_batch(weights, config, batch, mesh, remat=False, **options)
    scores = label_scores(
        weights,
        hidden,
        batch.labels,
        temperature=temperature,
        with_entropy=with_entropy,
        mesh=mesh,
    )
    return Scores(
        scores[0],
        scores[1] if with_entropy else None,
        output_logits(weights, hidden) if with_logits else None,
    )
