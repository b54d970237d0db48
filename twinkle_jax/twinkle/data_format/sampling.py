"""What a sampler is asked for, and what it returns."""

from twinkle_jax.data import SampledSequence, SampleResponse, SamplingParams

__all__ = ["SampleResponse", "SampledSequence", "SamplingParams"]
