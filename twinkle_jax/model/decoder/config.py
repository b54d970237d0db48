"""What a decoder is made of: frozen, hashable, and so usable as a static argument of `jax.jit`."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rotary scaling: long wavelengths are stretched, short ones stay.

    Attributes:
        factor: by how much wavelengths are stretched of pairs that turn fewer than `low_frequency`
            times over the original length.
        low_frequency: see `factor`.
        high_frequency: pairs that turn more often than this are not stretched.
        original_length: tokens that the model was first trained on.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_length: int


@dataclass(frozen=True)
class LinearScaling:
    """Rotary scaling of all wavelengths alike: positions count as if they were closer.

    Attributes:
        factor: how much slower every pair turns.
    """

    factor: float


@dataclass(frozen=True)
class Window:
    """The window of sliding layers, and the rotary base that they have instead of the full layers'.

    Attributes:
        size: tokens that a token sees, itself included.
        rope_theta: base of their rotary wavelengths, which nothing stretches.
    """

    size: int
    rope_theta: float


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped heads and rotary positions.

    Attributes:
        query_heads: number of query heads, a multiple of `key_value_heads`.
        key_value_heads: number of heads of keys and values.
        head_dim: width of one head; the heads together need not be as wide as the model.
        rotary_dim: how many of the first entries of a head are rotated.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: what stretches them; None for nothing.
        query_width: by whose root products of queries and keys are divided; None: `head_dim`.
        window: the window of sliding layers; None where there are none.
        bias: whether queries, keys and values have a bias.
        output_bias: whether the output projection has one.
        qk_norm: whether queries and keys are normalised per head before the rotation.
        output_gate: whether a sigmoid gate, the second half of each query head's projection,
            multiplies the attention output.
    """

    query_heads: int
    key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    rope_scaling: RopeScaling | LinearScaling | None = None
    query_width: int | None = None
    window: Window | None = None

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return 1 / math.sqrt(self.query_width or self.head_dim)


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet: linear attention with a matrix-valued state per value head.

    Attributes:
        key_heads: heads of queries and keys; each serves `value_heads // key_heads` value heads.
        value_heads: heads of values, gates and states.
        key_dim: width of one key head.
        value_dim: width of one value head.
        kernel: length of the causal depthwise convolution, in tokens.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Width of queries, keys and values next to each other: what the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only language model of one of the families of `families.py`.

    Build one from the contents of a `config.json` with
    [`parse_config`][twinkle_jax.model.parse_config], with Hugging Face's names.

    Attributes:
        model_type: Hugging Face's name of the family, such as `"qwen3"` or `"qwen3_5_text"`.
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layers.
        layer_kinds: `"full_attention"`, `"sliding_attention"` or `"linear_attention"` for each
            layer.
        attention: the attention of the full and sliding layers.
        delta_net: the mixer of the linear layers; None where there are none.
        norm_epsilon: added to the mean square before the root.
        centred_norms: whether norms multiply by 1 + weight (and weights start at 0).
        output_norms: whether attention and feed-forward have a norm behind them too, before they
            are added to the residual stream.
        activation: of the gate of feed-forward layers.
        scaled_embedding: whether embeddings are multiplied by √hidden_size.
        tie_embeddings: whether the output matrix is the embedding, transposed.
        original: the `config.json` this was read from, as text; takes no part in comparisons.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[str, ...]
    attention: AttentionConfig
    delta_net: DeltaNetConfig | None = None
    norm_epsilon: float = 1e-6
    centred_norms: bool = False
    output_norms: bool = False
    activation: Activation = "silu"
    scaled_embedding: bool = False
    tie_embeddings: bool = False
    original: str = field(default="", repr=False, compare=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)

    @property
    def block(self) -> tuple[str, ...]:
        """The shortest run of layer kinds that the stack repeats; layers are stacked block-wise.

        Layer `i` is member `i % len(block)` of repetition `i // len(block)`. Sliding layers count
        as full ones, as they have the same parameters: which ones slide is data of the loop.
        """
        kinds = tuple(FULL if kind == SLIDING else kind for kind in self.layer_kinds)
        for size in range(1, self.layers + 1):
            repeats, rest = divmod(self.layers, size)
            if not rest and kinds[:size] * repeats == kinds:
                return kinds[:size]
        raise ValueError("layer_kinds must name at least one layer, got ()")

    @property
    def repeats(self) -> int:
        """How often the block is repeated: the length of the leading axis of stacked parameters."""
        return self.layers // len(self.block)

    @property
    def sliding(self) -> np.ndarray:
        """Which layers slide, as booleans of the shape [repeats, members of the block]."""
        slides = [kind == SLIDING for kind in self.layer_kinds]
        if any(slides) and self.attention.window is None:
            raise ValueError(
                "window must be given where there are sliding_attention layers, got None"
            )
        return np.array(slides).reshape(self.repeats, -1)
