"""Twinkle's `loss`."""

from twinkle_jax.loss import (
    BNPOLoss,
    ChunkedCrossEntropyLoss,
    CISPOLoss,
    CrossEntropyLoss,
    DPOLoss,
    DRGRPOLoss,
    GKDLoss,
    GRPOLoss,
    GSPOLoss,
    Loss,
    MSELoss,
    SAPOLoss,
)

__all__ = [
    "BNPOLoss",
    "CISPOLoss",
    "ChunkedCrossEntropyLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DRGRPOLoss",
    "GKDLoss",
    "GRPOLoss",
    "GSPOLoss",
    "Loss",
    "MSELoss",
    "SAPOLoss",
]
