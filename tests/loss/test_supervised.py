"""Cross entropy, and dynamic fine-tuning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.cases import GARBAGE, same_bits
from twinkle_jax.loss import cross_entropy, dynamic_fine_tuning


def test_worked_by_hand():
    logprobs, mask = jnp.log(jnp.array([0.5, 0.25, 0.1])), jnp.array([True, True, False])
    for function, losses, gradient in [
        (cross_entropy, [np.log(2), np.log(4), 0], [-1, -1, 0]),
        (dynamic_fine_tuning, [np.log(2) / 2, np.log(4) / 4, 0], [-0.5, -0.25, 0]),
    ]:
        np.testing.assert_allclose(function(logprobs, mask), losses, rtol=1e-6)
        actual = jax.grad(lambda x, f=function: f(x, mask).sum())(logprobs)
        np.testing.assert_allclose(actual, gradient, rtol=1e-6)


@pytest.mark.parametrize("function", [cross_entropy, dynamic_fine_tuning])
def test_garbage_types_and_errors(function):
    logprobs, mask = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[True, False, True]])
    run = jax.jit(jax.value_and_grad(lambda x: function(x, mask).sum()))
    for garbage in GARBAGE:
        for clean, dirty in zip(
            run(logprobs), run(jnp.where(mask, logprobs, garbage)), strict=True
        ):
            assert same_bits(clean, dirty)
    assert function(logprobs.astype(jnp.bfloat16), mask).dtype == jnp.float32
    with pytest.raises(ValueError, match=r"logprobs must .* mask, \(3,\), got \(1, 3\)"):
        jax.eval_shape(function, logprobs, mask[0])
    with pytest.raises(TypeError, match="logprobs must be floating point, got int32"):
        jax.eval_shape(function, mask.astype(int), mask)
