"""Twinkle's `checkpoint_engine`: takes a model's weights to its sampler."""

import inspect

from twinkle_jax.sampler import JaxSampler, vLLMSampler
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.names import add_submodules


class CheckpointEngineManager:
    """Calls `sync_weights` of a sampler with a model; `platform` changes nothing."""

    def __init__(
        self, model: TransformersModel, sampler: JaxSampler | vLLMSampler, platform: str = "GPU"
    ) -> None:
        self.model, self.sampler = model, sampler

    def sync_weights(self, merge_and_sync: bool = True) -> None:
        """Take the weights over; `merge_and_sync=False` loads adapters on a server separately."""
        takes_merge = "merge" in inspect.signature(self.sampler.sync_weights).parameters
        options = {"merge": merge_and_sync} if takes_merge else {}
        self.sampler.sync_weights(self.model, **options)


add_submodules(__name__, "manager")
