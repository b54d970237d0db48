"""Twinkle's `checkpoint_engine`: the sampler takes over the model's weights."""

import inspect
from typing import Any

from twinkle_jax.sampler import JaxSampler, vLLMSampler
from twinkle_jax.twinkle.model import TransformersModel


class CheckpointEngineManager:
    """Takes the weights of a model to its sampler.

    Args:
        model: what is trained.
        sampler: what samples; one on the model itself has nothing to take over.
        platform: unused: JAX knows its devices.
    """

    def __init__(
        self, model: TransformersModel, sampler: JaxSampler | vLLMSampler, platform: str = "GPU"
    ) -> None:
        self.model, self.sampler = model, sampler

    def sync_weights(self, merge_and_sync: bool = True) -> None:
        """Take the weights over.

        Args:
            merge_and_sync: whether a server loads adapters added to the weights, or by themselves.
        """
        options: dict[str, Any] = {}
        if "merge" in inspect.signature(self.sampler.sync_weights).parameters:
            options["merge"] = merge_and_sync
        self.sampler.sync_weights(self.model, **options)
