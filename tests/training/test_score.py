"""Scores of labels: against the logits at every position, whatever places tokens have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import config_of, params_of
from tests.model.training import random_batch
from twinkle_jax.model import hidden_states, output_logits
from twinkle_jax.training import score_batch

BATCH = random_batch()
COLUMNS = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), BATCH.tokens.shape)
PLACES = {
    "mask": COLUMNS >= 2,  # padding in front
    "positions": 3 * COLUMNS,
    "segment_ids": 1 + COLUMNS // 4,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"), [*((name, "qwen3") for name in PLACES), ("mask", "gemma2")]
)
def test_scores_are_those_of_the_places_of_tokens(name, family):
    params, config = params_of(family), config_of(family)
    labels = jnp.where(PLACES["mask"], BATCH.labels, -100)
    batch = BATCH._replace(labels=labels, **{name: PLACES[name]})
    scored = score_batch(params, batch, config).logps
    hidden = hidden_states(
        params,
        config,
        batch.tokens,
        batch.mask,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
    )
    logprobs = jax.nn.log_softmax(output_logits(params, config, hidden))
    picked = jnp.take_along_axis(logprobs, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(scored, jnp.where(labels == -100, 0, picked), atol=1e-5)
    without = score_batch(params, batch._replace(**{name: None}), config).logps
    assert np.abs(scored - without).max() > 1e-3
