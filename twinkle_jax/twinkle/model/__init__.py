"""Twinkle's `model`: `TransformersModel` with its verbs, and Megatron's names for it."""

from twinkle_jax.twinkle.model.transformers import (
    MegatronModel,
    MultiLoraMegatronModel,
    TransformersModel,
)
from twinkle_jax.twinkle.names import add_submodules

MultiLoraTransformersModel = TransformersModel

__all__ = [
    "MegatronModel",
    "MultiLoraMegatronModel",
    "MultiLoraTransformersModel",
    "TransformersModel",
]

add_submodules(__name__, "megatron")
