"""Twinkle's `loss`."""

from twinkle_jax.loss import (
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
    Loss,
    MSELoss,
    ORPOLoss,
    SAPOLoss,
    SimPOLoss,
)

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
    "Loss",
    "MSELoss",
    "ORPOLoss",
    "SAPOLoss",
    "SimPOLoss",
]
