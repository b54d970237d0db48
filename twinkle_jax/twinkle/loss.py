"""Twinkle's `loss`."""

from twinkle_jax.loss import (
    LOSSES,
    BNPOLoss,
    ChunkedCrossEntropyLoss,
    CISPOLoss,
    CPOLoss,
    CrossEntropyLoss,
    DPOLoss,
    DRGRPOLoss,
    GKDLoss,
    GRPOLoss,
    GSPOLoss,
    InfonceLoss,
    LigerFusedLinearCrossEntropyLoss,
    Loss,
    MSELoss,
    ORPOLoss,
    SAPOLoss,
    SimPOLoss,
)

torch_loss_mapping = LOSSES

__all__ = [
    "BNPOLoss",
    "CISPOLoss",
    "CPOLoss",
    "ChunkedCrossEntropyLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DRGRPOLoss",
    "GKDLoss",
    "GRPOLoss",
    "GSPOLoss",
    "InfonceLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "Loss",
    "MSELoss",
    "ORPOLoss",
    "SAPOLoss",
    "SimPOLoss",
    "torch_loss_mapping",
]
