"""Cases for `token_logprobs`: a float64 reference, the plain computation, and how to compare."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.loss import token_logprobs

SMALL = 20, 5, 300  # time, feature, vocab: with chunks of six, blocks of 256 and 44


class Case(NamedTuple):
    """Hidden states, a head, tokens, a mask, temperatures, and weights that make a loss of it."""

    hidden: np.ndarray
    head: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    temperature: np.ndarray
    weights: np.ndarray  # of log-probabilities and of entropies, [2, time]


def make(time, feature, vocab, seed=0, kept=0.6, dtype=np.float32):
    draw = np.random.default_rng(seed)
    return Case(
        draw.normal(size=(time, feature)).astype(dtype),
        draw.normal(size=(feature, vocab)).astype(dtype),
        draw.integers(vocab, size=time).astype(np.int32),
        draw.random(time) < kept,
        draw.uniform(0.5, 2, time).astype(dtype),
        draw.normal(size=(2, time)).astype(dtype),
    )


def reference(case):
    """Loop over tokens in float64: scores, entropies, and gradients of the weighted sum."""
    hidden, head = case.hidden.astype(np.float64), case.head.astype(np.float64)
    time = len(hidden)
    logprobs, entropies = np.zeros(time), np.zeros(time)
    d_hidden, d_head, d_temperature = np.zeros_like(hidden), np.zeros_like(head), np.zeros(time)
    for t in np.flatnonzero(case.mask):
        tau = float(case.temperature[t])
        logits = hidden[t] @ head / tau
        logp = logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum()))
        p = np.exp(logp)
        logprobs[t], entropies[t] = logp[case.tokens[t]], -(p * logp).sum()
        chosen = np.arange(len(p)) == case.tokens[t]
        on_score, on_entropy = case.weights[:, t]
        d_logits = on_score * (chosen - p) - on_entropy * p * (logp + entropies[t])
        d_hidden[t] = head @ d_logits / tau
        d_head += np.outer(hidden[t], d_logits) / tau
        d_temperature[t] = -(d_logits @ logits) / tau
    return (logprobs, entropies), (d_hidden, d_head, d_temperature)


def plain(hidden, head, tokens, *, mask, temperature, with_entropy=True):
    """Hold all logits, and let JAX differentiate."""
    assert with_entropy
    logits = jnp.matmul(hidden, head) / jnp.reshape(temperature, (-1, 1))
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)
    return jnp.where(mask, chosen, 0), jnp.where(mask, entropies, 0)


@partial(jax.jit, static_argnames=("function", "chunk_size"))
def compute(case, function=token_logprobs, chunk_size=None):
    """Values, and gradients of the weighted sum in hidden, head and temperature."""
    chunk = {} if chunk_size is None else {"chunk_size": chunk_size}

    def loss(hidden, head, temperature):
        given = {"mask": case.mask, "temperature": temperature, "with_entropy": True}
        results = function(hidden, head, case.tokens, **given, **chunk)
        on_scores, on_entropies = case.weights
        scores, entropies = (result.astype(on_scores.dtype) for result in results)
        return jnp.sum(on_scores * scores) + jnp.sum(on_entropies * entropies), results

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    gradients, results = gradient(case.hidden, case.head, case.temperature)
    return results, gradients


def assert_close(actual, expected, tolerance=1e-5):
    """Each array to within a part of its largest entry."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        scale = np.abs(other).max(initial=1e-30)
        np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=tolerance)


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
