"""What the tests of losses share: random batches, tables of functions and objects, recorded data.

A function of one number per token is a row of `FUNCTIONS`, a policy loss object one of `OBJECTS`, a
loss with a target (labels, a reference, a teacher, returns) one of `TARGET_LOSSES`; all laws run
over them. The references are float64, plain Python, one token after the other: they
share nothing with the package, nothing is vectorised, and a masked token is not visited.
"""

import functools
import json
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax import loss as losses

GARBAGE = [np.float32(x) for x in (np.nan, np.inf, -np.inf, 1e30)]


class Batch(NamedTuple):
    """Inputs of losses. `logprobs` comes first: gradients are taken of it."""

    logprobs: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray

    @property
    def log_ratio(self):
        return self.logprobs - self.old

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


def same_bits(first, second):
    first, second = np.asarray(first), np.asarray(second)
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


def clamp(x, low, high):
    return min(max(x, low), high)


def kept(mask):
    """Positions of the tokens that count."""
    return [(i, t) for i, row in enumerate(mask) for t, keep in enumerate(row) if keep]


def advantage(advantages, i, t):
    row = advantages[i]
    return float(row[t]) if hasattr(row, "__len__") else float(row)


def per_token(mask, value):
    out = [[0.0] * len(row) for row in mask]
    for i, t in kept(mask):
        out[i][t] = value(i, t)
    return out


def token_log_ratio(new, old, mask):
    return per_token(mask, lambda i, t: clamp(float(new[i][t]) - float(old[i][t]), -20, 20))


def sequence_log_ratio(new, old, mask):
    ratios = token_log_ratio(new, old, mask)
    lengths = [sum(bool(keep) for keep in row) for row in mask]
    return per_token(mask, lambda i, t: math.fsum(ratios[i]) / lengths[i])


def clipped(log_ratio, advantages, mask, epsilon=0.2, epsilon_high=None, dual_clip=None):
    high = epsilon if epsilon_high is None else epsilon_high

    def value(i, t):
        ratio, a = math.exp(log_ratio[i][t]), advantage(advantages, i, t)
        loss = -min(ratio * a, clamp(ratio, 1 - epsilon, 1 + high) * a)
        return min(loss, -dual_clip * a) if dual_clip is not None and a < 0 else loss

    return per_token(mask, value)


def soft_gate(log_ratio, advantages, mask, tau_pos=1.0, tau_neg=1.0):
    def value(i, t):
        a = advantage(advantages, i, t)
        tau = tau_pos if a > 0 else tau_neg
        x = tau * (math.exp(log_ratio[i][t]) - 1)
        gate = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
        return -4 / tau * gate * a

    return per_token(mask, value)


def geometric_mean(log_ratio, advantages, mask, epsilon=0.4, epsilon_high=None):
    high = epsilon if epsilon_high is None else epsilon_high

    def held(i, t):
        ratio = float(log_ratio[i][t])
        return min(ratio, high) if advantage(advantages, i, t) > 0 else max(ratio, -epsilon)

    def value(i, t):
        held_ratios = [held(i, s) for s, keep in enumerate(mask[i]) if keep]
        mean = math.fsum(clamp(x, -20, 20) for x in held_ratios) / len(held_ratios)
        return -advantage(advantages, i, t) * math.exp(mean)

    return per_token(mask, value)


def gamma_weighted(
    log_ratio, new, advantages, mask, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0
):
    def value(i, t):
        ratios = [log_ratio[i][s] for s, keep in enumerate(mask[i]) if keep]
        total = min(math.fsum(clamp(x, -20, 20) for x in ratios), 700)
        a = advantage(advantages, i, t)
        k, rate = (k_pos, lambda_pos) if a > 0 else (k_neg, lambda_neg)
        weight = math.exp(max(k * total + rate * (1 - math.exp(total)), -700))
        return -weight * a * float(new[i][t])

    return per_token(mask, value)


def within(divergence, ratio, new, advantages, mask, **settings):
    """The ratio without a clip, for tokens that a mask of divergences keeps."""
    old = per_token(mask, lambda i, t: float(new[i][t]) - ratio[i][t])
    near = divergence(new, old, advantages, mask, **settings)

    def value(i, t):
        return -math.exp(ratio[i][t]) * advantage(advantages, i, t) if near[i][t] else 0.0

    return per_token(mask, value)


def clipped_importance(log_ratio, new, advantages, mask, epsilon=None, epsilon_high=0.2):
    def value(i, t):
        weight = min(math.exp(log_ratio[i][t]), 1 + epsilon_high)
        if epsilon is not None:
            weight = max(weight, 1 - epsilon)
        return -weight * advantage(advantages, i, t) * float(new[i][t])

    return per_token(mask, value)


def policy_gradient(new, advantages, mask):
    return per_token(mask, lambda i, t: -advantage(advantages, i, t) * float(new[i][t]))


def importance_weights(trainer, sampler, mask, maximum=2.0):
    ratios = token_log_ratio(trainer, sampler, mask)
    return per_token(mask, lambda i, t: min(math.exp(ratios[i][t]), maximum))


def sequence_weights(trainer, sampler, mask, maximum=2.0):
    ratios = token_log_ratio(trainer, sampler, mask)
    return per_token(
        mask, lambda i, t: min(math.exp(clamp(math.fsum(ratios[i]), -20, 20)), maximum)
    )


def masked_weights(trainer, sampler, mask, minimum=0.5, maximum=5.0):
    def value(i, t):
        ratio = math.exp(clamp(float(trainer[i][t]) - float(sampler[i][t]), -20, 20))
        return ratio if minimum <= ratio <= maximum else 0.0

    return per_token(mask, value)


def masked_sequence_weights(trainer, sampler, mask, minimum=0.0, maximum=3.0):
    ratios = token_log_ratio(trainer, sampler, mask)

    def value(i, t):
        ratio = math.exp(clamp(math.fsum(ratios[i]), -20, 20))
        return ratio if minimum <= ratio <= maximum else 0.0

    return per_token(mask, value)


def total_variation_mask(new, old, advantages, mask, delta=0.15, delta_high=None):
    def value(i, t):
        rise = math.exp(float(new[i][t])) - math.exp(float(old[i][t]))
        if advantage(advantages, i, t) > 0:
            return rise <= (delta if delta_high is None else delta_high)
        return -rise <= delta

    return per_token(mask, value)


def binary_kl_mask(new, old, advantages, mask, delta=0.05, delta_high=None):
    def value(i, t):
        p, q = math.exp(float(old[i][t])), math.exp(float(new[i][t]))
        others = max(1 - p, 1e-8), max(1 - q, 1e-8)
        kl = p * math.log(p / q) + others[0] * math.log(others[0] / others[1])
        if advantage(advantages, i, t) > 0:
            return not (q > p and kl > (delta if delta_high is None else delta_high))
        return not (q < p and kl > delta)

    return per_token(mask, value)


def off_policy_sequence_mask(new, sampler, advantages, mask, delta):
    def value(i, t):
        tokens = [u for u, keep in enumerate(mask[i]) if keep]
        moved = math.fsum(float(sampler[i][u]) - float(new[i][u]) for u in tokens) / len(tokens)
        return advantage(advantages, i, t) >= 0 or moved <= delta

    return per_token(mask, value)


def top_entropy_mask(entropies, mask, fraction=0.2):
    chosen = sorted((float(entropies[i][t]) for i, t in kept(mask)), reverse=True)
    last = chosen[math.floor(fraction * (len(chosen) - 1) + 1e-6)] if chosen else 0.0
    return per_token(mask, lambda i, t: float(entropies[i][t]) >= last)


def k1(new, ref, mask):
    return per_token(mask, lambda i, t: float(new[i][t]) - float(ref[i][t]))


def k2(new, ref, mask):
    return per_token(mask, lambda i, t: 0.5 * (float(new[i][t]) - float(ref[i][t])) ** 2)


def k3(new, ref, mask):
    def value(i, t):
        delta = clamp(float(ref[i][t]) - float(new[i][t]), -20, 20)
        return math.exp(delta) - delta - 1

    return per_token(mask, value)


def value_loss(values, old, returns, mask, epsilon=0.2):
    def value(i, t):
        v, o, r = float(values[i][t]), float(old[i][t]), float(returns[i][t])
        held = o + clamp(v - o, -epsilon, epsilon)
        return 0.5 * max((v - r) ** 2, (held - r) ** 2)

    return per_token(mask, value)


def token_mean(losses, mask):
    tokens = kept(mask)
    return math.fsum(losses[i][t] for i, t in tokens) / max(1, len(tokens))


def sequence_mean(losses, mask):
    total = 0.0
    for row, keep in zip(losses, mask, strict=True):
        chosen = [float(x) for x, k in zip(row, keep, strict=True) if k]
        total += math.fsum(chosen) / max(1, len(chosen))
    return total / len(mask)


def constant_length(losses, mask, length):
    return math.fsum(losses[i][t] for i, t in kept(mask)) / (len(mask) * length)


def added(first, second, weight, mask):
    return per_token(mask, lambda i, t: first[i][t] + weight * float(second[i][t]))


def entropy_bonus(entropies, mask, coefficient):
    return per_token(mask, lambda i, t: -coefficient * float(entropies[i][t]))


def cross_entropy(new, mask):
    return per_token(mask, lambda i, t: -float(new[i][t]))


def dynamic_fine_tuning(new, mask):
    return per_token(mask, lambda i, t: -math.exp(float(new[i][t])) * float(new[i][t]))


@dataclass(frozen=True, eq=False)
class Function:
    """A function of arrays with one number per token, and of their mask."""

    function: Callable
    oracle: Callable
    arrays: str  # names in Batch, in the order of the arguments
    gradients: str = ""  # names of those that gradients flow into
    settings: dict[str, Any] = field(default_factory=dict)
    held: bool = False  # whether factors without gradient hide it from finite differences

    def arguments(self, batch):
        return [getattr(batch, name) for name in self.arrays.split()]

    def __call__(self, *arguments):
        return self.function(*arguments, **self.settings)


RATIO, ON_RATIO = "logprobs old", "log_ratio advantages"
WEIGHED, MASKED = "log_ratio logprobs advantages", "logprobs old advantages"
HIGHER = {"epsilon": 0.1, "epsilon_high": 0.3}
FUNCTIONS = {
    "token_log_ratio": Function(losses.token_log_ratio, token_log_ratio, RATIO, "logprobs"),
    "sequence_log_ratio": Function(
        losses.sequence_log_ratio, sequence_log_ratio, RATIO, "logprobs"
    ),
    "clipped": Function(losses.clipped_surrogate, clipped, ON_RATIO, "log_ratio"),
    "clipped_higher": Function(losses.clipped_surrogate, clipped, ON_RATIO, "log_ratio", HIGHER),
    "dual_clip": Function(
        losses.clipped_surrogate, clipped, ON_RATIO, "log_ratio", {"epsilon": 0.2, "dual_clip": 1.5}
    ),
    "soft_gate": Function(
        losses.soft_gate_surrogate,
        soft_gate,
        ON_RATIO,
        "log_ratio",
        {"tau_pos": 0.5, "tau_neg": 2.0},
    ),
    "geometric_mean": Function(
        losses.geometric_mean_surrogate, geometric_mean, ON_RATIO, "log_ratio"
    ),
    "geometric_mean_higher": Function(
        losses.geometric_mean_surrogate, geometric_mean, ON_RATIO, "log_ratio", HIGHER
    ),
    "clipped_importance": Function(
        losses.clipped_importance_surrogate, clipped_importance, WEIGHED, "logprobs"
    ),
    "clipped_importance_both": Function(
        losses.clipped_importance_surrogate, clipped_importance, WEIGHED, "logprobs", HIGHER
    ),
    "gamma_weighted": Function(
        losses.gamma_weighted_surrogate,
        gamma_weighted,
        "log_ratio logprobs advantages",
        "logprobs",
    ),
    "gamma_weighted_other": Function(
        losses.gamma_weighted_surrogate,
        gamma_weighted,
        "log_ratio logprobs advantages",
        "logprobs",
        {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.75, "lambda_neg": 1.5},
    ),
    "policy_gradient": Function(
        losses.policy_gradient, policy_gradient, "logprobs advantages", "logprobs"
    ),
    "kl_k1": Function(losses.kl_k1, k1, "logprobs ref", "logprobs"),
    "kl_k2": Function(losses.kl_k2, k2, "logprobs ref", "logprobs"),
    "kl_k3": Function(losses.kl_k3, k3, "logprobs ref", "logprobs"),
    "entropy_bonus": Function(
        losses.entropy_bonus, entropy_bonus, "entropies", "entropies", {"coefficient": 0.25}
    ),
    "cross_entropy": Function(losses.cross_entropy, cross_entropy, "logprobs", "logprobs"),
    "dynamic_fine_tuning": Function(
        losses.dynamic_fine_tuning, dynamic_fine_tuning, "logprobs", "logprobs", held=True
    ),
    "value": Function(losses.clipped_value_loss, value_loss, "logprobs old ref", "logprobs"),
    "token_truncate": Function(losses.truncated_importance_weights, importance_weights, RATIO),
    "token_mask": Function(losses.masked_importance_weights, masked_weights, RATIO),
    "sequence_truncate": Function(
        losses.truncated_sequence_importance_weights, sequence_weights, RATIO
    ),
    "sequence_mask": Function(
        losses.masked_sequence_importance_weights, masked_sequence_weights, RATIO
    ),
    "total_variation": Function(losses.total_variation_mask, total_variation_mask, MASKED),
    "total_variation_higher": Function(
        losses.total_variation_mask,
        total_variation_mask,
        MASKED,
        settings={"delta": 0.02, "delta_high": 0.1},
    ),
    "binary_kl": Function(losses.binary_kl_mask, binary_kl_mask, MASKED),
    "binary_kl_higher": Function(
        losses.binary_kl_mask, binary_kl_mask, MASKED, settings={"delta": 0.001, "delta_high": 0.02}
    ),
    "off_policy": Function(
        losses.off_policy_sequence_mask, off_policy_sequence_mask, MASKED, settings={"delta": 0.05}
    ),
    "top_entropy": Function(losses.top_entropy_mask, top_entropy_mask, "entropies"),
}


class Object(NamedTuple):
    """A policy loss object, and the references of its three parts."""

    loss_fn: losses.PolicyLoss
    losses: Callable  # (ratio, new, advantages, mask)
    reduce: Callable
    log_ratio: Callable = token_log_ratio


def surrogate(**settings):
    return lambda ratio, new, advantages, mask: clipped(ratio, advantages, mask, **settings)


EXTRAS = {"beta": 0.04, "entropy_coef": 0.01}
OBJECTS = {
    "grpo": Object(
        losses.GRPOLoss(epsilon=0.2, epsilon_high=0.28, **EXTRAS),
        surrogate(epsilon_high=0.28),
        sequence_mean,
    ),
    "gspo": Object(
        losses.GSPOLoss(epsilon=0.1, **EXTRAS),
        surrogate(epsilon=0.1),
        sequence_mean,
        sequence_log_ratio,
    ),
    "luspo": Object(
        losses.LUSPOLoss(epsilon=0.1, **EXTRAS),
        surrogate(epsilon=0.1),
        functools.partial(constant_length, length=1),
        sequence_log_ratio,
    ),
    "gmpo": Object(
        losses.GMPOLoss(epsilon=0.2, epsilon_high=0.3, **EXTRAS),
        lambda ratio, new, advantages, mask: geometric_mean(ratio, advantages, mask, 0.2, 0.3),
        sequence_mean,
    ),
    "dppo": Object(
        losses.DPPOLoss(delta=0.02, delta_high=0.1, **EXTRAS),
        functools.partial(within, total_variation_mask, delta=0.02, delta_high=0.1),
        token_mean,
    ),
    "dppo_kl": Object(
        losses.DPPOLoss(divergence="kl", delta=0.01, **EXTRAS),
        functools.partial(within, binary_kl_mask, delta=0.01),
        token_mean,
    ),
    "sapo": Object(
        losses.SAPOLoss(tau_pos=1.0, tau_neg=1.25, **EXTRAS),
        lambda ratio, new, advantages, mask: soft_gate(ratio, advantages, mask, 1.0, 1.25),
        sequence_mean,
    ),
    "cispo": Object(losses.CISPOLoss(epsilon=0.2, **EXTRAS), clipped_importance, token_mean),
    "vespo": Object(
        losses.VESPOLoss(k_pos=1.5, lambda_pos=2.5, k_neg=2.0, lambda_neg=1.0, **EXTRAS),
        functools.partial(gamma_weighted, k_pos=1.5, lambda_pos=2.5, k_neg=2.0, lambda_neg=1.0),
        token_mean,
    ),
    "bnpo": Object(losses.BNPOLoss(epsilon=0.2, **EXTRAS), surrogate(), token_mean),
    "dr_grpo": Object(
        losses.DRGRPOLoss(max_completion_length=16, **EXTRAS),
        surrogate(),
        functools.partial(constant_length, length=16),
    ),
    "ppo": Object(losses.PPOLoss(epsilon=0.2, **EXTRAS), surrogate(), token_mean),
    "ppo_sequence": Object(
        losses.PPOLoss("seq-mean-token-mean", epsilon=0.2, **EXTRAS), surrogate(), sequence_mean
    ),
    "dapo": Object(losses.DAPOLoss(**EXTRAS), surrogate(epsilon_high=0.28), token_mean),
}
POLICY_LOSSES = {name: case.loss_fn for name, case in OBJECTS.items()}


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

    def one(loss_fn):
        denominator = denominators and denominators[loss_fn.divides_by != "tokens"]

        def loss(*arrays):
            output = call(loss_fn, *arrays, batch.mask, denominator)
            return output.loss, output.metrics

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(*batch[:5])

    return {name: one(loss_fn) for name, loss_fn in POLICY_LOSSES.items()}


def gradients(name, batch, denominators=None):
    """Value, metrics, and gradients in all that is not the mask."""
    (value, metrics), gradient = every_gradient(Batch(*batch), denominators)[name]
    return value, metrics, gradient


def expected(name, batch):
    """The same loss from the references."""
    new, old, ref, entropies, advantages, mask = batch
    case = OBJECTS[name]
    per_token = case.losses(case.log_ratio(new, old, mask), new, advantages, mask)
    per_token = added(per_token, k3(new, ref, mask), EXTRAS["beta"], mask)
    return case.reduce(added(per_token, entropies, -EXTRAS["entropy_coef"], mask), mask)


GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "supervised_loss_cases.json").read_text()
)
DATA = {
    name: np.asarray(values, int if name in ("labels", "teacher_topk_indices") else np.float32)
    for name, values in GOLDEN["data"].items()
}
LABELS, LOGPS, LOGITS = DATA["labels"], DATA["logps"], DATA["logits"]
DATA["values"] = LOGPS
MASK = LABELS != -100
TEACHER = {"teacher_logits": DATA["teacher_logits"]}
REFERENCE = {"ref_logps": DATA["ref_logps"]}
CRITIC = {"old_values": DATA["ref_logps"], "returns": LOGPS - DATA["ref_logps"]}
TARGET_LOSSES = {
    "cross_entropy": (losses.CrossEntropyLoss(), "logps", {}),
    "dft": (losses.CrossEntropyLoss(dft=True), "logps", {}),
    "chunked": (losses.ChunkedCrossEntropyLoss(3), "logits", {}),
    "liger": (losses.LigerFusedLinearCrossEntropyLoss(reduction="mean"), "logps", {}),
    "dpo": (losses.DPOLoss(), "logps", REFERENCE),
    "dpo_hinge": (losses.DPOLoss(loss_type="hinge"), "logps", REFERENCE),
    "simpo": (losses.SimPOLoss(), "logps", {}),
    "cpo": (losses.CPOLoss(), "logits", {}),
    "orpo": (losses.ORPOLoss(), "logps", {}),
    "gkd": (losses.GKDLoss(chunk_size=3), "logits", TEACHER),
    "ppo_value": (losses.PPOValueLoss(), "values", CRITIC),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _value_and_gradient(loss_fn, of, labels, x, arguments):
    def loss(x):
        return loss_fn({"labels": labels}, {of: x}, **arguments).loss

    return jax.value_and_grad(loss)(x)


def value_and_gradient(loss_fn, of, labels=LABELS, data=DATA, **arguments):
    return _value_and_gradient(loss_fn, of, labels, data[of], arguments)
