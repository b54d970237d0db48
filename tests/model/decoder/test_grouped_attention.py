"""Our attention: values and gradients of its definition in float64, and of JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import twinkle_jax.model.train_step.grad_step as module
from tests.model.families import NAMES, config_of, params_of
from tests.model.training import random_batch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import grad_step, hidden_states, make_mesh
from twinkle_jax.model.decoder.attention import attend, same_segment

pytestmark = pytest.mark.quick_compile
CAUSAL = jnp.tril(jnp.ones((7, 7), bool))[None, None]
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 3, 3], [1, 2, 2, 2, 2, 2, 2], [1] * 7])


def both(attention, query, key, value, cotangent, *, dtype="float32", causal=True, mask=None):
    """What is attended to, and the gradients of queries, keys and values."""

    def run(*arrays):
        if attention == "definition":
            return definition(*arrays, CAUSAL if mask is None else mask)
        return attend(*arrays, mask=mask, causal=causal, implementation=attention)

    out, back = jax.vjp(run, *(jnp.asarray(x, dtype) for x in (query, key, value)))
    return out, *back(jnp.asarray(cotangent, dtype))


def definition(query, key, value, visible):
    """Each query head against the keys and values of its group."""
    heads = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, heads, axis=2) for x in (key, value))
    logits = jnp.einsum("bqnd,bknd->bnqk", query, key) / np.sqrt(query.shape[-1])
    probabilities = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf))
    return jnp.einsum("bnqk,bknd->bqnd", probabilities, value)


def random_heads(heads, groups, time=7):
    rng = np.random.default_rng(heads)
    shapes = [(3, time, heads, 8), (3, time, groups, 8), (3, time, groups, 8), (3, time, heads, 8)]
    return [2 * rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 2), (3, 3), (4, 1)])
def test_values_and_gradients(heads, groups, masked):
    arrays = random_heads(heads, groups)
    mask = same_segment(SEGMENTS) if masked else None
    ours = both("grouped", *arrays, mask=mask)
    with jax.enable_x64(True):
        visible = CAUSAL if mask is None else mask & CAUSAL
        exact = both("definition", *arrays, dtype="float64", mask=visible)
        wide = both("grouped", *arrays, dtype="float64", mask=mask)
    for a, b, c in zip(ours, exact, wide, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())
        assert c.dtype == np.float64
        np.testing.assert_allclose(c, b, rtol=0, atol=1e-14 * np.abs(b).max())


def test_every_position_sees_every_other_where_it_is_not_causal():
    arrays = random_heads(4, 2)
    ours, reference = (both(name, *arrays, causal=False) for name in ("grouped", "xla"))
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


def test_factors_are_of_the_type_of_the_arrays_and_sums_are_float32():
    arrays = random_heads(4, 2)
    ours, exact = both("grouped", *arrays, dtype="bfloat16"), both("definition", *arrays)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert 1e-4 < np.abs(a.astype(np.float32) - b).max() / np.abs(b).max() < 2e-2


def test_large_logits_do_not_overflow():
    query, *others = random_heads(4, 2)
    ours, reference = (both(name, 100 * query, *others) for name in ("grouped", "definition"))
    np.testing.assert_allclose(ours[0], reference[0], rtol=0, atol=1e-5)
    for a, b in zip(ours[1:], reference[1:], strict=True):  # of logits of some hundreds
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(others[-1]).max())


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_with_it(name, segmented):
    tokens = jnp.arange(1, 15).reshape(2, 7)
    given = {"segment_ids": SEGMENTS[:2]} if segmented else {"mask": tokens > 3}
    ours, reference = (
        hidden_states(params_of(name), config_of(name), tokens, attention=attention, **given)
        for attention in ("grouped", "xla")
    )
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-5 * np.abs(reference).max())


@pytest.mark.parametrize(
    ("backend", "name", "mesh", "asked", "expected"),
    [
        ("cpu", "qwen3", None, None, "grouped"),
        ("cpu", "qwen2", None, "xla", "xla"),
        ("cpu", "qwen3", make_mesh(), None, None),
        ("cpu", "qwen3_5_text", None, None, None),
        ("gpu", "qwen3", None, None, None),
        ("tpu", "qwen3", None, None, None),
        ("tpu", "qwen3_5_text", None, "grouped", "grouped"),
    ],
)
def test_a_step_of_training_takes_it_on_a_cpu(monkeypatch, backend, name, mesh, asked, expected):
    """None is left to `default_attention`."""
    monkeypatch.setattr(module, "_grad_step", lambda *_, attention, **__: attention)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    options = {"attention": asked, "mesh": mesh}
    assert grad_step(None, random_batch(), config_of(name), GRPOLoss(), **options) == expected
