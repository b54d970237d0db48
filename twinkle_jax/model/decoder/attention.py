"""Softmax attention with grouped heads, rotary positions, head norms and an output gate."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.arithmetic import project, rms_norm
from twinkle_jax.model.decoder.config import AttentionConfig, DecoderConfig
from twinkle_jax.model.decoder.rotary import RotaryTable, rotate

AttentionImplementation = Literal["xla", "cudnn"]


class Heads(NamedTuple):
    """Queries, keys and values by head, rotated; the gate of the output, where there is one."""

    query: Float[Array, "batch time heads width"]
    key: Float[Array, "batch time groups width"]
    value: Float[Array, "batch time groups width"]
    gate: Float[Array, "tokens out"] | None


def default_attention(
    config: AttentionConfig,
    dtype: DTypeLike,
    *,
    segmented: bool = False,
    backend: str | None = None,
    compute_capability: float | None = None,
) -> AttentionImplementation:
    """Choose the implementation of attention: cuDNN where it applies, else XLA.

    Both are those of `jax.nn.dot_product_attention`. Scoring and training take the same one, so
    that the ratio of a policy to itself is 1.

    cuDNN's fused attention runs on NVIDIA GPUs from compute capability 8.0, in 16-bit types, for
    heads whose width is a multiple of 8 of at most 128 (256 from 9.0), without segments. It cannot
    be traced without such a GPU.

    Args:
        config: the attention.
        dtype: type that the decoder computes in.
        segmented: whether rows hold several segments.
        backend: `"cpu"`, `"gpu"` or `"tpu"`; by default, JAX's.
        compute_capability: of the GPU; by default, of the first one.

    Returns:
        `"cudnn"` or `"xla"`.

    Example:
        >>> from twinkle_jax.model import AttentionConfig, default_attention
        >>> heads = AttentionConfig(8, 2, head_dim=128, rotary_dim=128, rope_theta=1e6)
        >>> default_attention(heads, "bfloat16", backend="gpu", compute_capability=9.0)
        'cudnn'
        >>> default_attention(heads, "float32", backend="gpu", compute_capability=9.0)
        'xla'
    """
    backend = jax.default_backend() if backend is None else backend
    if backend != "gpu" or segmented or jnp.dtype(dtype).itemsize != 2 or config.head_dim % 8:
        return "xla"
    if compute_capability is None:
        # Other vendors' GPUs report no number here, and have no cuDNN.
        reported = str(getattr(jax.local_devices()[0], "compute_capability", ""))
        numeric = reported.replace(".", "", 1).isdigit()
        compute_capability = float(reported) if numeric else 0.0
    widest = 256 if compute_capability >= 9 else 128 if compute_capability >= 8 else 0
    return "cudnn" if config.head_dim <= widest else "xla"


def project_heads(
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    config: DecoderConfig,
    rotary: RotaryTable,
    batch: int,
) -> Heads:
    """Project rows of activations to heads, normalise them and rotate queries and keys."""
    a = config.attention

    def heads(y: Float[Array, "tokens out"], count: int) -> Float[Array, "batch time heads width"]:
        return y.reshape(batch, -1, count, y.shape[-1] // count)

    query = heads(project(x, weights["q_proj"]), a.query_heads)
    key = heads(project(x, weights["k_proj"]), a.key_value_heads)
    value = heads(project(x, weights["v_proj"]), a.key_value_heads)
    gate = None
    if a.output_gate:  # each head's projection is [query, gate]
        query, gate = jnp.split(query, 2, axis=-1)
        gate = gate.reshape(x.shape[0], -1)
    if a.qk_norm:
        query, key = (
            rms_norm(
                y,
                weights[name]["scale"],
                epsilon=config.norm_epsilon,
                centred=config.centred_norms,
            )
            for y, name in ((query, "q_norm"), (key, "k_norm"))
        )
    return Heads(rotate(query, rotary), rotate(key, rotary), value, gate)


def project_out(
    attended: Float[Array, "batch time heads width"],
    gate: Float[Array, "tokens out"] | None,
    weights: Mapping[str, Any],
) -> Float[Array, "tokens width"]:
    """Gate what the heads attended to, and project it back to the residual stream."""
    batch, time, heads, width = attended.shape
    y = attended.reshape(batch * time, heads * width)
    if gate is not None:
        y = y * jax.nn.sigmoid(gate)
    return project(y, weights["o_proj"])


def attend(
    query: Float[Array, "batch time heads width"],
    key: Float[Array, "batch source groups width"],
    value: Float[Array, "batch source groups width"],
    *,
    mask: Bool[Array, "#batch 1 #time source"] | None,
    causal: bool,
    implementation: AttentionImplementation,
    scale: float,
    window: int | None = None,
) -> Float[Array, "batch time heads width"]:
    """Call `jax.nn.dot_product_attention`, which mixes types inside."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=scale,
            is_causal=causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation,
        )


def attend_causally(
    heads: Heads,
    config: AttentionConfig,
    sliding: Bool[Array, ""],
    *,
    mask: Bool[Array, "#batch 1 #time source"] | None,
    implementation: AttentionImplementation,
) -> Float[Array, "batch time heads width"]:
    """Let each token of whole rows see those before it: all of them, or a sliding layer's window.

    Which of the two is data, so that a stack of both kinds stays one loop over one layer.
    """

    def see(window: int | None, *given: Array) -> Array:
        return attend(
            *given,
            mask=mask,
            causal=True,
            implementation=implementation,
            scale=config.scale,
            window=window,
        )

    given = heads[:3]
    if config.window is None or config.window.size >= heads.key.shape[1]:
        return see(None, *given)
    return jax.lax.cond(sliding, partial(see, config.window.size), partial(see, None), *given)


def same_segment(segment_ids: Int[Array, "batch time"]) -> Bool[Array, "batch 1 time time"]:
    """Say which pairs of positions of a row are in the same segment."""
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
