"""Policy losses: log-probabilities, advantages and a mask in, a number to minimise out.

A loss is a ratio, a surrogate and a reduction, each a function:
`token_mean(clipped_surrogate(token_log_ratio(...), advantages, mask), mask)`.

Public is what this file lists; all else in this folder is private and may change. One file a
concept; `token_logprobs/` scores tokens without holding logits, `twinkle/` has the same losses as
objects under Twinkle's names.
"""

from twinkle_jax.loss.clipped_importance import clipped_importance_surrogate
from twinkle_jax.loss.distillation import generalised_jsd
from twinkle_jax.loss.entropy import entropy_bonus, top_entropy_mask
from twinkle_jax.loss.importance_correction import (
    masked_importance_weights,
    masked_sequence_importance_weights,
    truncated_importance_weights,
)
from twinkle_jax.loss.kl import kl_k1, kl_k2, kl_k3
from twinkle_jax.loss.off_policy_mask import off_policy_sequence_mask
from twinkle_jax.loss.policy_gradient import policy_gradient
from twinkle_jax.loss.policy_metrics import PolicyMetrics, policy_metrics
from twinkle_jax.loss.preference import (
    hinge_preference,
    ipo_preference,
    kto_pair_preference,
    sigmoid_preference,
)
from twinkle_jax.loss.ratio import sequence_log_ratio, token_log_ratio
from twinkle_jax.loss.reduction import constant_length, sequence_mean, token_mean
from twinkle_jax.loss.soft_gate import soft_gate_surrogate
from twinkle_jax.loss.supervised import cross_entropy, dynamic_fine_tuning
from twinkle_jax.loss.surrogate import clipped_surrogate
from twinkle_jax.loss.token_logprobs.score import token_logprobs
from twinkle_jax.loss.trust_region import binary_kl_mask, total_variation_mask
from twinkle_jax.loss.twinkle.chunked_cross_entropy import ChunkedCrossEntropyLoss
from twinkle_jax.loss.twinkle.cispo import CISPOLoss
from twinkle_jax.loss.twinkle.critic import PPOValueLoss
from twinkle_jax.loss.twinkle.cross_entropy import CrossEntropyLoss
from twinkle_jax.loss.twinkle.dpo import DPOLoss
from twinkle_jax.loss.twinkle.dr_grpo import DRGRPOLoss
from twinkle_jax.loss.twinkle.gkd import GKDLoss
from twinkle_jax.loss.twinkle.grpo import BNPOLoss, DAPOLoss, GRPOLoss, GSPOLoss
from twinkle_jax.loss.twinkle.mse import MSELoss
from twinkle_jax.loss.twinkle.named_losses import get_loss
from twinkle_jax.loss.twinkle.output import Loss, LossOutput
from twinkle_jax.loss.twinkle.policy_loss import PolicyLoss
from twinkle_jax.loss.twinkle.ppo import PPOLoss
from twinkle_jax.loss.twinkle.sapo import SAPOLoss
from twinkle_jax.loss.value import clipped_value_loss

__all__ = [
    "BNPOLoss",
    "CISPOLoss",
    "ChunkedCrossEntropyLoss",
    "CrossEntropyLoss",
    "DAPOLoss",
    "DPOLoss",
    "DRGRPOLoss",
    "GKDLoss",
    "GRPOLoss",
    "GSPOLoss",
    "Loss",
    "LossOutput",
    "MSELoss",
    "PPOLoss",
    "PPOValueLoss",
    "PolicyLoss",
    "PolicyMetrics",
    "SAPOLoss",
    "binary_kl_mask",
    "clipped_importance_surrogate",
    "clipped_surrogate",
    "clipped_value_loss",
    "constant_length",
    "cross_entropy",
    "dynamic_fine_tuning",
    "entropy_bonus",
    "generalised_jsd",
    "get_loss",
    "hinge_preference",
    "ipo_preference",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kto_pair_preference",
    "masked_importance_weights",
    "masked_sequence_importance_weights",
    "off_policy_sequence_mask",
    "policy_gradient",
    "policy_metrics",
    "sequence_log_ratio",
    "sequence_mean",
    "sigmoid_preference",
    "soft_gate_surrogate",
    "token_log_ratio",
    "token_logprobs",
    "token_mean",
    "top_entropy_mask",
    "total_variation_mask",
    "truncated_importance_weights",
]
