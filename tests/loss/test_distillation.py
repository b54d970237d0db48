"""The weighted Jensen-Shannon divergence, against float64 token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from twinkle_jax.loss import generalised_jsd

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
def test_matches_reference(beta, chunk_size):
    run = functools.partial(generalised_jsd, temperature=1.5, chunk_size=chunk_size)
    actual = jax.jit(run)(
        STUDENT.astype(np.float32), TEACHER.astype(np.float32), MASK, beta=beta
    )  # beta is traced, its ends too
    desired = reference(STUDENT, TEACHER, MASK, beta, 1.5)
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


@ENDS
def test_gradient(beta):
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


def test_errors():
    x, mask = jnp.zeros((2, 3, 5)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"teacher_logits must have shape \(2, 3, 5\), got"):
        jax.eval_shape(generalised_jsd, x, x[..., :4], mask)
    with pytest.raises(ValueError, match=r"student_logits must have shape \(2, 4, 5\), got"):
        jax.eval_shape(generalised_jsd, x, x, jnp.ones((2, 4), bool))
    with pytest.raises(TypeError, match="teacher_logits must be floating point, got int32"):
        jax.eval_shape(generalised_jsd, x, x.astype(int), mask)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        generalised_jsd(x, x, mask, chunk_size=0)
    assert generalised_jsd(x[:0], x[:0], mask[:0]).shape == (0, 3)
