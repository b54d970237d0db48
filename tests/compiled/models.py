"""Real models by their shapes, and their update compiled for TPUs that are described."""

import functools
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tests.compiled.costs import Costs, costs
from tests.compiled.described import described_mesh
from twinkle_jax.data import Batch
from twinkle_jax.loss import GRPOLoss
from twinkle_jax.model import (
    AttentionImplementation,
    DecoderConfig,
    parameter_shapes,
    parse_config,
    shard_like_params,
)
from twinkle_jax.model.decoder.sharding import backend_of
from twinkle_jax.training import grad_step, train_state
from twinkle_jax.training.score import Transfers


def _qwen(
    kind: str, vocab: int, width: int, inner: int, layers: int, heads: int, **options: Any
) -> Any:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "rope_theta": 1e6,
        **options,
    }


MODELS = {
    "Qwen2.5-0.5B": _qwen(
        "qwen2", 151936, 896, 4864, 24, 14, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "Qwen2.5-7B": _qwen(
        "qwen2", 152064, 3584, 18944, 28, 28, num_key_value_heads=4, tie_word_embeddings=False
    ),
    "Qwen3-4B": _qwen(
        "qwen3", 151936, 2560, 9728, 36, 32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Qwen3-32B": _qwen(
        "qwen3", 151936, 5120, 25600, 64, 64,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": _qwen(
        "qwen3_moe", 151936, 2048, 6144, 48, 32,
        num_key_value_heads=4, head_dim=128, tie_word_embeddings=False, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "Qwen3.5-4B": _qwen(  # three layers of linear attention, then one of full attention
        "qwen3_5_text", 248320, 2560, 9216, 32, 16,
        num_key_value_heads=4, head_dim=256, tie_word_embeddings=True, full_attention_interval=4,
        linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
    ),
    "gemma-3-1b": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256,
    },
    "Youtu-LLM-2B": {  # latent attention
        "model_type": "youtu", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_theta": 1.6e6,
    },
}  # fmt: skip


class Cut(NamedTuple):
    """What is left of a model so that it compiles sooner: all widths, but fewer of some things.

    A layer costs what two depths differ by. Most of the compiler's time goes into the vocabulary.
    """

    layers: int | None = None
    vocab: int | None = None


WHOLE = Cut()


def config_of(model: str, cut: Cut = WHOLE) -> DecoderConfig:
    """Read the configuration of a model."""
    changes = {"num_hidden_layers": cut.layers, "vocab_size": cut.vocab}
    return parse_config({**MODELS[model], **{k: v for k, v in changes.items() if v is not None}})


class Setting(NamedTuple):
    """On what an update runs: a slice, how its devices are used, and the rows of a step."""

    topology: str
    data: int
    fsdp: int
    tensor: int
    rows: int
    time: int

    @property
    def devices(self) -> int:
        """Devices of the slice."""
        return self.data * self.fsdp * self.tensor


def update_costs(
    model: str,
    setting: Setting,
    cut: Cut = WHOLE,
    *,
    bare: bool = True,
    attention: AttentionImplementation | None = None,
    transfers: Transfers = "layers",
) -> Costs:
    """Compile an update, and add it up; arguments as for `compiled_update`."""
    options: Any = {"bare": bare, "attention": attention, "transfers": transfers}
    compiled = compiled_update(model, setting, cut, **options)
    labels = setting.rows * setting.time // setting.devices
    together = 4096 if setting.topology.startswith("h100") else 1024  # tokens that are scored
    chunks = -(-labels // min(together, -(-labels // 2)))
    return costs(compiled, setting.devices, unknown_trips=chunks)


@functools.cache
def compiled_update(
    model: str,
    setting: Setting,
    cut: Cut,
    *,
    bare: bool,
    attention: AttentionImplementation | None,
    transfers: Transfers = "layers",
) -> Any:
    """Compile `grad_step` in bfloat16 on float32 parameters with AdamW's state.

    Args:
        model: one of `MODELS`.
        setting: on what it runs.
        cut: what is left of the model.
        bare: whether devices are taken in the order in which the topology lists them.
        attention: its implementation; None for the one that users get. The products of a kernel
            are not counted.
        transfers: as for `grad_step`.
    """
    s, config = setting, config_of(model, cut)
    mesh = described_mesh(s.topology, s.data, s.fsdp, s.tensor, bare=bare)

    def laid_out(shapes: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            shapes,
            shardings,
        )

    shapes = parameter_shapes(config)
    state = jax.eval_shape(lambda params: train_state(params, optax.adamw(1e-5)), shapes)
    state = laid_out(state, shard_like_params(state, mesh))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    integers, real = (jax.ShapeDtypeStruct((s.rows, s.time), t) for t in (jnp.int32, jnp.float32))
    batch = Batch(tokens=integers, labels=integers, advantages=real, old_logps=real)
    batch = laid_out(batch, jax.tree.map(lambda _: rows, batch))

    def update(state: Any, batch: Batch) -> Any:
        options: Any = {"compute_dtype": "bfloat16", "attention": attention, "mesh": mesh}
        options["transfers"] = transfers
        return grad_step(state, batch, config, GRPOLoss(), **options)

    # Moved at once, each device runs alone, on what JAX calls its backend: here that is a CPU.
    here = mock.patch.object(jax, "default_backend", return_value=backend_of(mesh))
    with here, jax.numpy_dtype_promotion("standard"):
        return jax.jit(update, donate_argnums=0).lower(state, batch).compile()
