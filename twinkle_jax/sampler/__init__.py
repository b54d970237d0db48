"""Samplers: a policy and prompts in, completions and their log-probabilities out.

What is listed here is public; all else is private.
"""

from twinkle_jax.sampler.conversations import Conversations, conversations_memory
from twinkle_jax.sampler.generate import generate, generate_many, generate_memory
from twinkle_jax.sampler.jax_sampler import JaxSampler
from twinkle_jax.sampler.requests import Actor, Prompt
from twinkle_jax.sampler.sampling import Filters, IntScalar, RealScalar, Sampling
from twinkle_jax.sampler.slots import LENGTH, STOP, Completions
from twinkle_jax.sampler.vllm_sampler import vLLMSampler
from twinkle_jax.sampler.vllm_server import ServerError

__all__ = [
    "LENGTH",
    "STOP",
    "Actor",
    "Completions",
    "Conversations",
    "Filters",
    "IntScalar",
    "JaxSampler",
    "Prompt",
    "RealScalar",
    "Sampling",
    "ServerError",
    "conversations_memory",
    "generate",
    "generate_many",
    "generate_memory",
    "vLLMSampler",
]
