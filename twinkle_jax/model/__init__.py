"""Policies: Qwen2, Qwen2.5, Qwen3 and Qwen3.5 (text) as pure functions and as a Flax NNX module."""

from twinkle_jax.model._attention import AttentionImplementation, default_attention
from twinkle_jax.model._checkpoint_read import load_pretrained
from twinkle_jax.model._checkpoint_write import save_pretrained
from twinkle_jax.model._config import AttentionConfig, DecoderConfig, DeltaNetConfig
from twinkle_jax.model._decode import Cache, KeyValues, decode_step, prefill, take_rows
from twinkle_jax.model._decoder import hidden_states, output_logits, output_matrix
from twinkle_jax.model._delta_net import DeltaState
from twinkle_jax.model._initialise import init_params
from twinkle_jax.model._module import Decoder
from twinkle_jax.model._parameters import parameter_shapes
from twinkle_jax.model._parse_config import parse_config

__all__ = [
    "AttentionConfig",
    "AttentionImplementation",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "DeltaNetConfig",
    "DeltaState",
    "KeyValues",
    "decode_step",
    "default_attention",
    "hidden_states",
    "init_params",
    "load_pretrained",
    "output_logits",
    "output_matrix",
    "parameter_shapes",
    "parse_config",
    "prefill",
    "save_pretrained",
    "take_rows",
]
