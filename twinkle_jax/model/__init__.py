"""Policies: decoder-only language models as pure functions and as a Flax NNX module.

What is listed here is public; all else is private.
"""

from twinkle_jax.model.decoder.attention import AttentionImplementation, default_attention
from twinkle_jax.model.decoder.cache import (
    Cache,
    CacheOrParams,
    DeltaState,
    KeyValues,
    Layers,
    Pages,
    PromptPages,
    WindowedKeyValues,
    take_rows,
    unstack_layers,
)
from twinkle_jax.model.decoder.config import (
    Activation,
    AttentionConfig,
    DecoderConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LatentConfig,
    LayerStack,
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    Window,
    YarnScaling,
)
from twinkle_jax.model.decoder.decode import decode_step, extend, prefill
from twinkle_jax.model.decoder.forward import Decoder, Remat, hidden_states
from twinkle_jax.model.decoder.layers import output_logits, output_matrix
from twinkle_jax.model.decoder.lora import LoraConfig, merge_adapter, with_adapter, without_adapter
from twinkle_jax.model.decoder.parameters import (
    Params,
    init_params,
    merge_params,
    parameter_shapes,
)
from twinkle_jax.model.decoder.sharding import make_mesh, partition_rules, shard_like_params
from twinkle_jax.model.huggingface.adapter_files import (
    SavesTokenizer,
    load_adapter,
    save_adapter,
)
from twinkle_jax.model.huggingface.checkpoint import Partition, load_pretrained, save_pretrained
from twinkle_jax.model.huggingface.config_json import parse_config
from twinkle_jax.model.reward_model import RewardModel, reward_scores

__all__ = [
    "Activation",
    "AttentionConfig",
    "AttentionImplementation",
    "Cache",
    "CacheOrParams",
    "Decoder",
    "DecoderConfig",
    "DeltaNetConfig",
    "DeltaState",
    "ExpertsConfig",
    "KeyValues",
    "LatentConfig",
    "LayerStack",
    "Layers",
    "LinearScaling",
    "LongRopeScaling",
    "LoraConfig",
    "Pages",
    "Params",
    "Partition",
    "PromptPages",
    "ProportionalScaling",
    "Remat",
    "RewardModel",
    "RopeScaling",
    "SavesTokenizer",
    "Window",
    "WindowedKeyValues",
    "YarnScaling",
    "decode_step",
    "default_attention",
    "extend",
    "hidden_states",
    "init_params",
    "load_adapter",
    "load_pretrained",
    "make_mesh",
    "merge_adapter",
    "merge_params",
    "output_logits",
    "output_matrix",
    "parameter_shapes",
    "parse_config",
    "partition_rules",
    "prefill",
    "reward_scores",
    "save_adapter",
    "save_pretrained",
    "shard_like_params",
    "take_rows",
    "unstack_layers",
    "with_adapter",
    "without_adapter",
]
