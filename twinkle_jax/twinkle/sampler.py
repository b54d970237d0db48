"""Twinkle's `sampler`; `JaxSampler` samples in this process."""

from twinkle_jax.sampler import (
    JaxSampler,
    vLLMSampler,
)

__all__ = [
    "JaxSampler",
    "vLLMSampler",
]
