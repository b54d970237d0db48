"""The entropy bonus, and the mask of tokens with high entropy."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.loss.cases import random_batch
from tests.loss.cases import top_entropy_mask as reference
from twinkle_jax.loss import entropy_bonus, top_entropy_mask

compiled = jax.jit(top_entropy_mask)


def test_bonus_worked_by_hand():
    entropies, mask = jnp.array([[2.0, 4.0, jnp.nan]]), jnp.array([[True, True, False]])
    total, gradient = jax.value_and_grad(lambda x: entropy_bonus(x, mask, coefficient=0.25).sum())(
        entropies
    )
    losses = entropy_bonus(entropies, mask, coefficient=0.25)
    np.testing.assert_array_equal(losses, [[-0.5, -1.0, 0.0]])
    assert total == -1.5
    np.testing.assert_array_equal(gradient, [[-0.25, -0.25, 0.0]])


def test_top_entropy_worked_by_hand():
    # The two highest of ten, as TRL has it at quantile 0.8; ties come along.
    entropies = jnp.array([[0.1, 0.2, 0.3, 1.4, 0.5, 0.14], [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]])
    mask = jnp.array([[True] * 6, [True] * 4 + [False] * 2])
    kept = top_entropy_mask(entropies, mask)
    np.testing.assert_array_equal(np.argwhere(kept), [[0, 3], [1, 3]])
    assert (top_entropy_mask(entropies, mask, fraction=1.0) == mask).all()
    np.testing.assert_array_equal(
        np.argwhere(top_entropy_mask(entropies, mask, fraction=0.0)), [[0, 3]]
    )
    assert (top_entropy_mask(jnp.ones((2, 6)), mask) == mask).all()
    assert not top_entropy_mask(entropies, jnp.zeros((2, 6), bool)).any()
    assert top_entropy_mask(jnp.zeros((0, 3)), jnp.zeros((0, 3), bool)).shape == (0, 3)


@given(seed=st.integers(0, 10**6), fraction=st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.7, 0.9]))
def test_top_entropy_matches_reference(seed, fraction):
    batch = random_batch(seed, 5, 7)
    actual = compiled(batch.entropies, batch.mask, fraction=fraction)
    desired = reference(batch.entropies, batch.mask, fraction)
    np.testing.assert_array_equal(actual, np.array(desired, bool))
    assert int(actual.sum()) == 1 + np.floor(fraction * (batch.mask.sum() - 1) + 1e-6)
