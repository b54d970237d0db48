"""The losses under test, random batches for them, and one compiled gradient for each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.loss import reference
from twinkle_jax.loss import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DRGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PPOLoss,
    SAPOLoss,
)

GARBAGE = [np.float32(x) for x in (np.nan, np.inf, -np.inf, 1e30)]
EXTRAS = {"beta": 0.04, "entropy_coef": 0.01}
OBJECTS = {
    "grpo": GRPOLoss(epsilon=0.2, epsilon_high=0.28, **EXTRAS),
    "gspo": GSPOLoss(epsilon=0.1, **EXTRAS),
    "sapo": SAPOLoss(tau_pos=1.0, tau_neg=1.25, **EXTRAS),
    "cispo": CISPOLoss(epsilon=0.2, **EXTRAS),
    "bnpo": BNPOLoss(epsilon=0.2, **EXTRAS),
    "dr_grpo": DRGRPOLoss(max_completion_length=16, **EXTRAS),
    "ppo": PPOLoss(epsilon=0.2, **EXTRAS),
    "ppo_sequence": PPOLoss("seq-mean-token-mean", epsilon=0.2, **EXTRAS),
    "dapo": DAPOLoss(**EXTRAS),
}
PER_TOKEN_MEANS = {"cispo", "bnpo", "ppo", "dapo"}


class Batch(NamedTuple):
    """What a policy loss reads. `logprobs` comes first: gradients are taken of it."""

    logprobs: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray

    @property
    def denominators(self):
        """The numbers that a reduction of the whole batch divides by, for tokens and sequences."""
        return np.float32(self.mask.sum()), np.float32(len(self.mask))


def random_batch(seed, rows=4, time=6, *, per_token=False, spread=0.4):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, time)) < 0.6
    mask[0, 0], mask[-1] = True, False  # never nothing, and always a sequence without tokens
    logprobs = -rng.exponential(1.0, (rows, time))
    arrays = (
        logprobs,
        logprobs + spread * rng.normal(size=mask.shape),
        logprobs + spread * rng.normal(size=mask.shape),
        rng.exponential(1.0, mask.shape),
        rng.normal(size=mask.shape if per_token else rows),
    )
    return Batch(*(array.astype(np.float32) for array in arrays), mask)


def call(loss_fn, logprobs, old, ref, entropies, advantages, mask, denominator=None, **kwargs):
    labels = jnp.where(mask, 7, loss_fn.ignore_index)
    return loss_fn(
        {"labels": labels},
        {"logps": logprobs, "entropies": entropies},
        old_logps=old,
        ref_logps=ref,
        advantages=advantages,
        denominator=denominator,
        **kwargs,
    )


@jax.jit
def every_gradient(batch, denominators):
    """Value, metrics and gradients of every loss: compiled together, which takes half the time."""

    def one(name):
        denominator = denominators and denominators[name not in PER_TOKEN_MEANS]

        def loss(*arrays):
            output = call(OBJECTS[name], *arrays, batch.mask, denominator)
            return output.loss, output.metrics

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(*batch[:5])

    return {name: one(name) for name in OBJECTS}


def gradients(name, batch, denominators=None):
    """Value, metrics, and gradients in all that is not the mask."""
    (value, metrics), gradient = every_gradient(Batch(*batch), denominators)[name]
    return value, metrics, gradient


def expected(name, batch):
    """The same loss from the reference."""
    new, old, ref, entropies, advantages, mask = batch
    settings = OBJECTS[name]
    compare = reference.sequence_log_ratio if name == "gspo" else reference.token_log_ratio
    ratio = compare(new, old, mask)
    if name == "sapo":
        losses = reference.soft_gate(ratio, advantages, mask, settings.tau_pos, settings.tau_neg)
    elif name == "cispo":
        losses = reference.clipped_importance(ratio, new, advantages, mask)
    else:
        losses = reference.clipped(ratio, advantages, mask, settings.epsilon, settings.epsilon_high)
    losses = reference.added(losses, reference.k3(new, ref, mask), EXTRAS["beta"], mask)
    losses = reference.added(losses, entropies, -EXTRAS["entropy_coef"], mask)
    if name in PER_TOKEN_MEANS:
        return reference.token_mean(losses, mask)
    if name == "dr_grpo":
        return reference.constant_length(losses, mask, 16)
    return reference.sequence_mean(losses, mask)


def same_bits(first, second):
    first, second = np.asarray(first), np.asarray(second)
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()
