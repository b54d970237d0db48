"""The entropy bonus."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.loss import entropy_bonus


def test_worked_by_hand():
    entropies, mask = jnp.array([[2.0, 4.0, jnp.nan]]), jnp.array([[True, True, False]])
    total, gradient = jax.value_and_grad(lambda x: entropy_bonus(x, mask, coefficient=0.25).sum())(
        entropies
    )
    losses = entropy_bonus(entropies, mask, coefficient=0.25)
    np.testing.assert_array_equal(losses, [[-0.5, -1.0, 0.0]])
    assert total == -1.5
    np.testing.assert_array_equal(gradient, [[-0.25, -0.25, 0.0]])


def test_types_and_errors():
    mask = jnp.ones((2, 3), bool)
    half = entropy_bonus(jnp.ones((2, 3), jnp.bfloat16), mask, coefficient=jnp.float32(0.5))
    assert half.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"entropies must .* mask, \(2, 3\), got \(3,\)"):
        jax.eval_shape(lambda x: entropy_bonus(x, mask, coefficient=0.1), jnp.zeros(3))
    with pytest.raises(TypeError, match="entropies must be floating point, got int32"):
        jax.eval_shape(lambda x: entropy_bonus(x, mask, coefficient=0.1), mask.astype(int))
