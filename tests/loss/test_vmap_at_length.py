"""Under vmap at 32,769, where jaxlib 0.10.2 has compiled other programs wrong on the CPU.

That is a product of a matrix and a vector under vmap, followed by a reduction (jax issue 39103),
when it is optimised: CI runs these with JAX_DISABLE_MOST_OPTIMIZATIONS=0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax import loss as losses
from twinkle_jax.loss import (
    clipped_surrogate,
    constant_length,
    generalised_jsd,
    sequence_mean,
    token_log_ratio,
    token_logprobs,
    token_mean,
)

LENGTH = 32_769
pytestmark = pytest.mark.exhaustive
RNG = np.random.default_rng(0)
NEW = -RNG.exponential(1.0, (3, 2, LENGTH)).astype(np.float32)
OLD = (NEW + 0.3 * RNG.normal(size=NEW.shape)).astype(np.float32)
ADVANTAGES = RNG.normal(size=(3, 2)).astype(np.float32)
MASK = RNG.random(NEW.shape) < 0.7


def surrogate(function, **settings):
    return lambda new, old, a, mask: function(token_log_ratio(new, old, mask), a, mask, **settings)


PER_TOKEN = {
    "clipped": surrogate(clipped_surrogate, dual_clip=3.0),
    "soft_gate": surrogate(losses.soft_gate_surrogate),
    "importance": lambda new, old, a, mask: losses.clipped_importance_surrogate(
        token_log_ratio(new, old, mask), new, a, mask
    ),
    "gamma_weighted": lambda new, old, a, mask: losses.gamma_weighted_surrogate(
        token_log_ratio(new, old, mask), new, a, mask
    ),
    "policy_gradient": lambda new, old, a, mask: losses.policy_gradient(new, a, mask),
    "sequence_ratio": lambda new, old, a, mask: losses.sequence_log_ratio(new, old, mask),
    "weights": lambda new, old, a, mask: losses.masked_importance_weights(new, old, mask),
    "kl": lambda new, old, a, mask: losses.kl_k3(new, old, mask),
    "value": lambda new, old, a, mask: losses.clipped_value_loss(new, old, old + 1, mask),
    "entropy": lambda new, old, a, mask: losses.entropy_bonus(
        -new, losses.top_entropy_mask(-new, mask), coefficient=0.1
    ),
    "dppo": lambda new, old, a, mask: losses.policy_gradient(
        new, a, losses.binary_kl_mask(new, old, a, mask)
    ),
    "off_policy": lambda new, old, a, mask: losses.policy_gradient(
        new, a, losses.off_policy_sequence_mask(new, old, a, mask, delta=0.0)
    ),
}
REDUCTIONS = [token_mean, sequence_mean, functools.partial(constant_length, length=64)]


@pytest.mark.parametrize("name", PER_TOKEN)
def test_losses_and_their_gradients(name):
    def total(new, old, advantages, mask):
        per_token = PER_TOKEN[name](new, old, advantages, mask)
        return sum(reduce(per_token, mask) for reduce in REDUCTIONS), per_token

    run = jax.value_and_grad(total, has_aux=True)
    arguments = NEW, OLD, ADVANTAGES, MASK
    # Operation by operation, which nothing fuses, against all at once.
    with jax.disable_jit():
        plain = [run(*row) for row in zip(*arguments, strict=True)]
    together = jax.jit(jax.vmap(run))(*arguments)
    for index, one in enumerate(plain):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(b[index], a, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("time", "feature", "vocab"), [(1, 8, LENGTH), (2, 8, LENGTH), (1, LENGTH, 5), (LENGTH, 8, 5)]
)
def test_token_logprobs(time, feature, vocab):
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(3, time, feature)).astype(np.float32)
    hidden *= np.float32(2 / np.sqrt(feature))
    head = rng.normal(size=(feature, vocab)).astype(np.float32)
    tokens = rng.integers(vocab, size=(3, time))

    def score(hidden, head, tokens):
        scores = token_logprobs(hidden, head, tokens, with_entropy=True)
        return scores[0].sum() + scores[1].sum(), scores

    run = jax.value_and_grad(score, argnums=(0, 1), has_aux=True)
    (_, scores), gradients = jax.jit(jax.vmap(run, in_axes=(0, None, 0)))(hidden, head, tokens)
    for index in range(3):
        h, w = hidden[index].astype(float), head.astype(float)
        logits = h @ w
        logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        p, chosen = np.exp(logp), logp[np.arange(time), tokens[index]]
        entropy = -(p * logp).sum(axis=1)
        np.testing.assert_allclose(scores[0][index], chosen, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(scores[1][index], entropy, rtol=1e-4, atol=1e-4)
        d_logits = -p - p * (logp + entropy[:, None])
        d_logits[np.arange(time), tokens[index]] += 1
        for actual, desired in zip(gradients, (d_logits @ w.T, h.T @ d_logits), strict=True):
            scale = np.abs(desired).max()
            np.testing.assert_allclose(actual[index] / scale, desired / scale, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, LENGTH), (2, LENGTH), (LENGTH, 3)])
def test_generalised_jsd(shape):
    student, teacher = RNG.normal(size=(2, 3, *shape)).astype(np.float32)
    run = functools.partial(generalised_jsd, mask=jnp.ones(shape[0], bool))
    together = jax.jit(jax.vmap(run))(student, teacher)
    s, t = (np.exp(x.astype(float)) for x in (student, teacher))
    s, t = s / s.sum(axis=-1, keepdims=True), t / t.sum(axis=-1, keepdims=True)
    m = (s + t) / 2
    desired = (t * np.log(t / m) + s * np.log(s / m)).sum(axis=-1) / 2
    np.testing.assert_allclose(together, desired, rtol=1e-4, atol=1e-6)
