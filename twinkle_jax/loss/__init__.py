"""Policy losses: log-probabilities, advantages and a mask in, a number to minimise out.

A loss is a ratio, a surrogate and a reduction, each a function:
`token_mean(clipped_surrogate(token_log_ratio(...), advantages, mask), mask)`.

Public is what this file lists; all else in this folder is private and may change. One file a
concept: its functions, and the objects that a train step takes, under Twinkle's names.
"""

from twinkle_jax.loss.contrastive import InfonceLoss, info_nce
from twinkle_jax.loss.loss_object import Loss, LossOutput, LossUnit, SampleValues
from twinkle_jax.loss.masked_inputs import Advantages, Coefficient, Mask, PerToken
from twinkle_jax.loss.named_losses import LOSSES, LossFunction, get_loss
from twinkle_jax.loss.off_policy import (
    Correction,
    CorrectionMode,
    ImportanceCorrection,
    binary_kl_mask,
    masked_importance_weights,
    masked_sequence_importance_weights,
    off_policy_sequence_mask,
    total_variation_mask,
    truncated_importance_weights,
    truncated_sequence_importance_weights,
)
from twinkle_jax.loss.penalties import entropy_bonus, kl_k1, kl_k2, kl_k3, top_entropy_mask
from twinkle_jax.loss.policy_losses import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DRGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
    PPOLoss,
    SAPOLoss,
)
from twinkle_jax.loss.policy_metrics import (
    PolicyMetrics,
    SamplerMismatch,
    policy_metrics,
    sampler_mismatch,
)
from twinkle_jax.loss.preference import (
    CPOLoss,
    DPOLoss,
    ORPOLoss,
    PerPair,
    SimPOLoss,
    cpo_preference,
    hinge_preference,
    ipo_preference,
    kto_pair_preference,
    orpo_preference,
    sigmoid_preference,
    simpo_preference,
)
from twinkle_jax.loss.reduction import constant_length, sequence_mean, token_mean
from twinkle_jax.loss.supervised import (
    ChunkedCrossEntropyLoss,
    CrossEntropyLoss,
    GKDLoss,
    LigerFusedLinearCrossEntropyLoss,
    MSELoss,
    PPOValueLoss,
    clipped_value_loss,
    cross_entropy,
    dynamic_fine_tuning,
    generalised_jsd,
)
from twinkle_jax.loss.surrogate import (
    clipped_importance_surrogate,
    clipped_surrogate,
    policy_gradient,
    sequence_log_ratio,
    soft_gate_surrogate,
    token_log_ratio,
)
from twinkle_jax.loss.token_logprobs import token_logprobs

__all__ = [
    "LOSSES",
    "Advantages",
    "BNPOLoss",
    "CISPOLoss",
    "CPOLoss",
    "ChunkedCrossEntropyLoss",
    "Coefficient",
    "Correction",
    "CorrectionMode",
    "CrossEntropyLoss",
    "DAPOLoss",
    "DPOLoss",
    "DRGRPOLoss",
    "GKDLoss",
    "GRPOLoss",
    "GSPOLoss",
    "ImportanceCorrection",
    "InfonceLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "Loss",
    "LossFunction",
    "LossOutput",
    "LossUnit",
    "MSELoss",
    "Mask",
    "ORPOLoss",
    "PPOLoss",
    "PPOValueLoss",
    "PerPair",
    "PerToken",
    "PolicyLoss",
    "PolicyMetrics",
    "SAPOLoss",
    "SampleValues",
    "SamplerMismatch",
    "SimPOLoss",
    "binary_kl_mask",
    "clipped_importance_surrogate",
    "clipped_surrogate",
    "clipped_value_loss",
    "constant_length",
    "cpo_preference",
    "cross_entropy",
    "dynamic_fine_tuning",
    "entropy_bonus",
    "generalised_jsd",
    "get_loss",
    "hinge_preference",
    "info_nce",
    "ipo_preference",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kto_pair_preference",
    "masked_importance_weights",
    "masked_sequence_importance_weights",
    "off_policy_sequence_mask",
    "orpo_preference",
    "policy_gradient",
    "policy_metrics",
    "sampler_mismatch",
    "sequence_log_ratio",
    "sequence_mean",
    "sigmoid_preference",
    "simpo_preference",
    "soft_gate_surrogate",
    "token_log_ratio",
    "token_logprobs",
    "token_mean",
    "top_entropy_mask",
    "total_variation_mask",
    "truncated_importance_weights",
    "truncated_sequence_importance_weights",
]
