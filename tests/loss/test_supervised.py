"""Cross entropy, dynamic fine-tuning, the Jensen-Shannon divergence, the clipped value loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from twinkle_jax.loss import clipped_value_loss, cross_entropy, dynamic_fine_tuning, generalised_jsd


def test_fine_tuning_by_hand():
    logprobs, mask = jnp.log(jnp.array([0.5, 0.25, 0.1])), jnp.array([True, True, False])
    for function, losses, gradient in [
        (cross_entropy, [np.log(2), np.log(4), 0], [-1, -1, 0]),
        (dynamic_fine_tuning, [np.log(2) / 2, np.log(4) / 4, 0], [-0.5, -0.25, 0]),
    ]:
        np.testing.assert_allclose(function(logprobs, mask), losses, rtol=1e-6)
        actual = jax.grad(lambda x, f=function: f(x, mask).sum())(logprobs)
        np.testing.assert_allclose(actual, gradient, rtol=1e-6)


RNG = np.random.default_rng(1)
STUDENT, TEACHER = 2 * RNG.normal(size=(2, 3, 4, 6))
MASK = RNG.random((3, 4)) < 0.7
BETAS = pytest.mark.parametrize(
    "beta", [0.0, 0.3, 1.0, *(pytest.param(b, marks=pytest.mark.exhaustive) for b in (0.5, 0.9))]
)

ENDS = pytest.mark.parametrize(
    "beta", [0.3, *(pytest.param(b, marks=pytest.mark.exhaustive) for b in (0.0, 1.0))]
)


def reference(student, teacher, mask, beta=0.5, temperature=1.0):
    out = np.zeros(mask.shape)
    for index in np.argwhere(mask):
        s, t = (np.exp(x[tuple(index)] / temperature) for x in (student, teacher))
        s, t = s / s.sum(), t / t.sum()
        m = beta * t + (1 - beta) * s
        mixed = beta * np.sum(t * np.log(t / m)) + (1 - beta) * np.sum(s * np.log(s / m))
        ends = {0.0: np.sum(t * np.log(t / s)), 1.0: np.sum(s * np.log(s / t))}
        out[tuple(index)] = ends.get(beta, mixed)
    return out


@BETAS
@pytest.mark.parametrize("chunk_size", [5, 512])
def test_jsd_matches_reference(beta, chunk_size):
    run = functools.partial(generalised_jsd, temperature=1.5, chunk_size=chunk_size)
    actual = jax.jit(run)(
        STUDENT.astype(np.float32), TEACHER.astype(np.float32), MASK, beta=beta
    )  # beta is traced, its ends too
    desired = reference(STUDENT, TEACHER, MASK, beta, 1.5)
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


@ENDS
def test_gradient_of_jsd(beta):
    with jax.enable_x64(True):
        run = functools.partial(generalised_jsd, beta=beta, chunk_size=5)
        check_grads(lambda s: run(s, TEACHER, MASK), (STUDENT,), order=1, modes=["rev"])
        teacher = jax.grad(lambda t: run(STUDENT, t, MASK).sum())(jnp.asarray(TEACHER))
        assert not teacher.any()


@ENDS
def test_garbage_impossible_tokens_and_vmap(beta):
    run = functools.partial(generalised_jsd, beta=beta)
    student, teacher = STUDENT.astype(np.float32), TEACHER.astype(np.float32)
    clean = run(student, teacher, MASK)
    dirty = [np.where(MASK[..., None], x, np.float32(np.nan)) for x in (student, teacher)]
    np.testing.assert_array_equal(run(*dirty, MASK), clean)
    np.testing.assert_allclose(jax.vmap(run)(student, teacher, MASK), clean, rtol=1e-5, atol=1e-6)
    never = [np.concatenate([x, np.full_like(x[..., :1], -np.inf)], -1) for x in (student, teacher)]
    np.testing.assert_allclose(run(*never, MASK), clean, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda s: run(s, never[1], MASK).sum())(never[0])
    assert np.isfinite(gradient).all()


def test_errors_of_jsd():
    x, mask = jnp.zeros((2, 3, 5)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="teacher_logits"):
        jax.eval_shape(generalised_jsd, x, x[..., :4], mask)
    with pytest.raises(ValueError, match="student_logits"):
        jax.eval_shape(generalised_jsd, x, x, jnp.ones((2, 4), bool))
    with pytest.raises(TypeError, match="teacher_logits"):
        jax.eval_shape(generalised_jsd, x, x.astype(int), mask)
    with pytest.raises(ValueError, match="chunk_size"):
        generalised_jsd(x, x, mask, chunk_size=0)
    assert generalised_jsd(x[:0], x[:0], mask[:0]).shape == (0, 3)


def test_value_loss_by_hand():
    # Old value 0, clip range 1/2.
    #   value 1, return 2: errors 1 and 2.25, the clipped one is larger: 1.125, no gradient
    #   value 1, return 0: errors 1 and 0.25: 0.5, gradient 1
    #   value 0.25, return 1: inside the range: 0.75^2 / 2, gradient -0.75
    values, returns = jnp.array([1.0, 1.0, 0.25, 9.0]), jnp.array([2.0, 0.0, 1.0, 0.0])
    mask = jnp.array([True, True, True, False])

    def total(x):
        losses = clipped_value_loss(x, jnp.zeros(4), returns, mask, epsilon=0.5)
        return losses.sum(), losses

    gradient, losses = jax.grad(total, has_aux=True)(values)
    np.testing.assert_array_equal(losses, [1.125, 0.5, 0.28125, 0.0])
    np.testing.assert_array_equal(gradient, [0.0, 1.0, -0.75, 0.0])


def test_rounding_inside_the_range_does_not_stop_the_gradient():
    # old + (value - old) is not always the value, so one of two equal errors may look the larger.
    rng = np.random.default_rng(0)
    old = rng.uniform(-0.01, 0.01, 1000).astype(np.float32)
    values = rng.uniform(-0.1, 0.1, 1000).astype(np.float32)
    assert (old + (values - old) != values).any()
    returns, mask = np.zeros(1000, np.float32), np.ones(1000, bool)
    gradient = jax.jit(jax.grad(lambda x: clipped_value_loss(x, old, returns, mask).sum()))(values)
    np.testing.assert_array_equal(gradient, values)


def test_a_closed_range_on_an_unmoved_critic_keeps_the_gradient():
    x, mask = jnp.array([1.0]), jnp.array([True])
    gradient = jax.grad(lambda v: clipped_value_loss(v, x, 0 * x, mask, epsilon=0.0).sum())(x)
    assert gradient == 1
