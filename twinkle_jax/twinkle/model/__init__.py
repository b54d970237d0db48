"""Twinkle's `model`: `TransformersModel` with its verbs, and Megatron's names for it."""

from twinkle_jax.twinkle.model.megatron import MegatronModel, MultiLoraMegatronModel
from twinkle_jax.twinkle.model.transformers import TransformersModel

MultiLoraTransformersModel = TransformersModel

__all__ = [
    "MegatronModel",
    "MultiLoraMegatronModel",
    "MultiLoraTransformersModel",
    "TransformersModel",
]
