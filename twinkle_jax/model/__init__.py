"""Policies: Qwen2, Qwen2.5, Qwen3 and Qwen3.5 (text) as pure functions and as a Flax NNX module."""

from twinkle_jax.data.batch import Batch, bucket_size
from twinkle_jax.model.decoder.attention_choice import AttentionImplementation, default_attention
from twinkle_jax.model.decoder.cache import Cache, DeltaState, KeyValues, take_rows, unstack_layers
from twinkle_jax.model.decoder.config import AttentionConfig, DecoderConfig, DeltaNetConfig
from twinkle_jax.model.decoder.decode import decode_step, prefill
from twinkle_jax.model.decoder.forward import hidden_states
from twinkle_jax.model.decoder.initialise import init_params
from twinkle_jax.model.decoder.layers import output_logits, output_matrix
from twinkle_jax.model.decoder.lora import LoraConfig, merge_adapter
from twinkle_jax.model.decoder.module import Decoder
from twinkle_jax.model.decoder.parameters import merge_params, parameter_shapes
from twinkle_jax.model.decoder.sharding import make_mesh, partition_rules, shard_like_params
from twinkle_jax.model.huggingface.adapter_files import load_adapter, save_adapter
from twinkle_jax.model.huggingface.checkpoint_read import load_pretrained
from twinkle_jax.model.huggingface.checkpoint_write import save_pretrained
from twinkle_jax.model.huggingface.config_json import parse_config
from twinkle_jax.model.train_step.apply_gradients import (
    UpdateInfo,
    apply_gradients,
    clip_gradients,
    zero_gradients,
)
from twinkle_jax.model.train_step.grad_step import grad_step
from twinkle_jax.model.train_step.score_batch import Scores, score_batch
from twinkle_jax.model.train_step.step_summary import StepSummary
from twinkle_jax.model.train_step.train_state import TrainState, train_state
from twinkle_jax.model.twinkle.transformers_model import TransformersModel

__all__ = [
    "AttentionConfig",
    "AttentionImplementation",
    "Batch",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "DeltaNetConfig",
    "DeltaState",
    "KeyValues",
    "LoraConfig",
    "Scores",
    "StepSummary",
    "TrainState",
    "TransformersModel",
    "UpdateInfo",
    "apply_gradients",
    "bucket_size",
    "clip_gradients",
    "decode_step",
    "default_attention",
    "grad_step",
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
    "save_adapter",
    "save_pretrained",
    "score_batch",
    "shard_like_params",
    "take_rows",
    "train_state",
    "unstack_layers",
    "zero_gradients",
]
