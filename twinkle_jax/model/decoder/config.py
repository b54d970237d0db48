"""What a decoder is made of; how the model families differ is in `families.py`.

Configurations are frozen and hashable, so they can be static arguments of `jax.jit`.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rotary scaling: long wavelengths are stretched, short ones are not.

    Attributes:
        factor: wavelengths are multiplied by it for pairs that turn fewer than `low_frequency`
            times over the original length.
        low_frequency: see `factor`; from here to `high_frequency` the factor is interpolated.
        high_frequency: pairs that turn more often than this are not stretched.
        original_length: length that the model was first trained on, in tokens.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_length: int


@dataclass(frozen=True)
class LinearScaling:
    """Linear rotary scaling: all wavelengths are multiplied by one factor.

    Attributes:
        factor: how much slower every pair rotates.
    """

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's rotary scaling: long wavelengths are stretched, and attention is sharper.

    Attributes:
        factor: wavelengths are multiplied by it for pairs that turn fewer than `beta_slow` times
            over the original length.
        original_length: length that the model was first trained on, in tokens.
        attention_factor: cosines and sines are multiplied by it.
        beta_fast: pairs that turn more often than this are not stretched; from here to `beta_slow`
            the stretching grows linearly with the number of the pair.
        beta_slow: see `factor`.
        truncate: whether both ends of that range are widened to the next whole pair.
        query_growth: of Ministral 3: queries are multiplied by 1 + query_growth * log(1 + n) from n
            times the original length on.
        logit_factor: of latent attention: attention logits are multiplied by it.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    query_growth: float = 0.0
    logit_factor: float = 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: the wavelength of each pair has a factor of its own, and attention is sharper.

    Models have one list of factors for rows up to their original length, and another one for longer
    rows. The keys of a row would change when it grows over that length, so only the first is used,
    and longer rows are not supported, unless both lists are the same.

    Attributes:
        factors: the wavelength of each pair is multiplied by one.
        long_factors: those of longer rows.
        original_length: length that the model was first trained on, in tokens.
        max_length: length that it was made for.
    """

    factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    max_length: int

    @property
    def attention_factor(self) -> float:
        """Cosines and sines are multiplied by it."""
        stretch = max(self.max_length / self.original_length, 1.0)
        return math.sqrt(1 + math.log(stretch) / math.log(self.original_length))


@dataclass(frozen=True)
class ProportionalScaling:
    """Proportional rotary positions: of the pairs of a head, only the first ones rotate.

    Attributes:
        part: fraction of the pairs that rotate, with the wavelengths that they have without it.
    """

    part: float


@dataclass(frozen=True)
class Window:
    """Sliding layers: their window, and their rotary base.

    Attributes:
        size: tokens that a token attends to, itself included.
        rope_theta: base of their rotary wavelengths, which are then never scaled; None: these are
            the same as those of full layers.
    """

    size: int
    rope_theta: float | None = None


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: one narrow vector of a token gives keys and values to all heads.

    Only the last entries of a head rotate, and all heads have the same rotated keys. A cache holds
    the narrow vector and these.

    Attributes:
        width: of that vector.
        query_width: of another one, which queries are projected from; None: they are projected from
            the residual stream.
        value_dim: width of the values of one head.

    References:
        [DeepSeek-V2](https://arxiv.org/abs/2405.04434) (2024)
    """

    width: int
    query_width: int | None
    value_dim: int


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped heads and rotary positions.

    Attributes:
        query_heads: number of query heads, a multiple of `key_value_heads`.
        key_value_heads: number of heads of keys and values.
        head_dim: width of one head; the heads together need not be as wide as the model.
        rotary_dim: how many of the first entries of a head are rotated.
        interleaved: whether the two entries of a pair are neighbours; otherwise they are half of
            `rotary_dim` apart.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: scaling of the wavelengths; None for none.
        query_width: logits are divided by its square root; None: `head_dim`.
        multiplier: logits are multiplied by it instead; None: as `query_width` says.
        soft_cap: logits are bounded by it, with a tanh, before the softmax; None: they are not.
        shared_values: whether values are the projected keys, before their norm and rotation.
        value_norm: whether values are normalised, without a weight.
        window: the window of sliding layers; None if there are none.
        bias: whether queries, keys and values have a bias.
        output_bias: whether the output projection has one.
        qk_norm: whether queries and keys are normalised before the rotation.
        joint_qk_norm: whether that norm is over all heads together; otherwise each has its own.
        output_gate: whether a sigmoid gate, the second half of each query head's projection,
            multiplies the attention output.
        sinks: whether each query head has a sink: a trained logit in the softmax, without a value.
        latent: of latent attention, whose last `rotary_dim` entries of a head are rotated; None for
            keys and values that are projected from the residual stream.
    """

    query_heads: int
    key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    interleaved: bool = False
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    output_gate: bool = False
    rope_scaling: (
        RopeScaling | LinearScaling | YarnScaling | LongRopeScaling | ProportionalScaling | None
    ) = None
    query_width: int | None = None
    multiplier: float | None = None
    soft_cap: float | None = None
    shared_values: bool = False
    value_norm: bool = False
    window: Window | None = None
    sinks: bool = False
    latent: LatentConfig | None = None

    @property
    def scale(self) -> float:
        """Factor on the products of queries and keys."""
        if self.multiplier is not None:
            return self.multiplier
        scaling = self.rope_scaling
        sharper = scaling.logit_factor if isinstance(scaling, YarnScaling) else 1.0
        return sharper / math.sqrt(self.query_width or self.head_dim)

    @property
    def longest_row(self) -> int | None:
        """The most tokens of a row; None: any number. Beyond it hidden states are NaN."""
        scaling = self.rope_scaling
        if isinstance(scaling, LongRopeScaling) and scaling.factors != scaling.long_factors:
            return scaling.original_length
        return None


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet: linear attention with a matrix-valued state per value head.

    Attributes:
        key_heads: heads of queries and keys; each serves `value_heads // key_heads` value heads.
        value_heads: heads of values, gates and states.
        key_dim: width of one key head.
        value_dim: width of one value head.
        kernel: length of the causal depthwise convolution, in tokens.
        by_key_head: whether there are two projections, for queries, keys, values and gates, and for
            strengths and decays, whose outputs are grouped by key head; otherwise there are four.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    by_key_head: bool = False

    @property
    def channels(self) -> int:
        """Width of queries, keys and values, concatenated: the channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers of experts, of which a router chooses some for each token.

    Attributes:
        number: of experts.
        chosen: how many of them each token goes through.
        width: of one expert.
        normalised: whether the weights of the chosen experts add up to 1.
        shared_width: width of the expert that all tokens go through; None if there is none.
        beside_dense: whether a dense layer is added to them. Both then have norms of their own, the
            router reads the residual stream, and weights have a factor for each expert.
        swiglu_limit: bound of gate and up in the experts of GPT-OSS. These and their router have
            biases, and gate and up alternate in the outputs. None for other experts.
        corrected: whether scores are sigmoids, and experts are chosen by the sums of these and of
            corrections, which are not trained, and weighted without them. The shared expert then
            has no gate.
        scaling: weights of the chosen experts are multiplied by it.
        groups: so many groups of neighbouring experts; those with corrections are chosen out of
            `chosen_groups` of them, which have the largest sums of their two largest scores.
        chosen_groups: see `groups`.
    """

    number: int
    chosen: int
    width: int
    normalised: bool
    shared_width: int | None = None
    beside_dense: bool = False
    swiglu_limit: float | None = None
    corrected: bool = False
    scaling: float = 1.0
    groups: int = 1
    chosen_groups: int = 1

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds the number of each expert, and one more for none."""
        return np.min_scalar_type(self.number)


class LayerStack(NamedTuple):
    """Layers that run one after the other in a scan: a block of members, repeated.

    Attributes:
        block: the kind of each member.
        repeats: how often the block is repeated: the leading axis of stacked parameters.
        first_layer: number of its first layer.
        first_member: number of its first member, which follows those of the stack before.
        reuses: whether its layers attend to the keys and values of earlier ones.
        experts: of its feed-forward layers; None: these are dense alone.
    """

    block: tuple[str, ...]
    repeats: int
    first_layer: int
    first_member: int
    reuses: bool
    experts: ExpertsConfig | None

    @property
    def members(self) -> tuple[tuple[str, str], ...]:
        """The name and the kind of each member."""
        return tuple((str(self.first_member + i), kind) for i, kind in enumerate(self.block))

    @property
    def layers(self) -> slice:
        """Where its layers are among all layers."""
        return slice(self.first_layer, self.first_layer + self.repeats * len(self.block))

    def arranged(self, of_layers: np.ndarray) -> np.ndarray:
        """Take the entries of its layers, in the shape [repeats, members of the block]."""
        return of_layers[self.layers].reshape(self.repeats, len(self.block))


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only language model of one of the families in `FAMILIES`.

    Build one from the contents of a `config.json` with
    [`parse_config`][twinkle_jax.model.parse_config], with Hugging Face's names.

    Attributes:
        model_type: Hugging Face's name of the family, such as `"qwen3"` or `"qwen3_5_text"`.
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width of dense feed-forward layers.
        layer_kinds: `"full_attention"`, `"sliding_attention"` or `"linear_attention"` for each
            layer.
        attention: the attention of the full and sliding layers.
        full_attention: the attention of the full layers, where it differs; `attention` is then that
            of the sliding ones.
        reusing_layers: how many of the last layers have no keys and values, and attend to those of
            the last layer of their kind that has some.
        reusing_intermediate_size: width of the feed-forward layers of these; None: the same.
        token_width: width of an embedding of the token that each layer reads besides the residual
            stream; None: there is none.
        unrotated_layers: numbers of the full layers without rotary positions, counted from 0.
        delta_net: the mixer of the linear layers; None if there are none.
        experts: the experts of the feed-forward layers; None: these are dense alone.
        dense_layers: how many of the first layers have none although the others have.
        norm_epsilon: added to the mean square before the square root.
        centred_norms: whether norms multiply by 1 + weight (and weights start at 0), in float32.
        float32_norms: whether norms multiply by their weight in float32 and round afterwards.
        input_norms: whether the inputs of attention and feed-forward are normalised.
        output_norms: whether their outputs are, before they are added to the residual stream.
        layer_scalars: whether each layer's output is multiplied by a number of its own, which is
            not trained.
        activation: activation of the feed-forward gate.
        embedding_multiplier: embeddings are multiplied by it.
        residual_multiplier: outputs of attention and feed-forward are multiplied by it before they
            are added to the residual stream.
        logits_scaling: logits are divided by it, by way of the hidden states after the final norm.
        logits_soft_cap: logits are bounded by it, with a tanh; None: they are not.
        tie_embeddings: whether the output matrix is the embedding, transposed.
        original: the `config.json` this was read from, as text; ignored in comparisons.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[str, ...]
    attention: AttentionConfig
    full_attention: AttentionConfig | None = None
    reusing_layers: int = 0
    reusing_intermediate_size: int | None = None
    token_width: int | None = None
    delta_net: DeltaNetConfig | None = None
    experts: ExpertsConfig | None = None
    dense_layers: int = 0
    unrotated_layers: tuple[int, ...] = ()
    norm_epsilon: float = 1e-6
    centred_norms: bool = False
    float32_norms: bool = False
    input_norms: bool = True
    output_norms: bool = False
    layer_scalars: bool = False
    activation: Activation = "silu"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    logits_soft_cap: float | None = None
    tie_embeddings: bool = False
    original: str = field(default="", repr=False, compare=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)

    @functools.cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Dense layers before those with experts, these, and layers that reuse keys and values.

        Most families have one stack, in which all layers have experts, or none has. Layer
        `first_layer + i` of a stack is member `i % len(block)` of repetition `i // len(block)`,
        where the block is the shortest sequence of kinds that is repeated. Sliding layers count as
        full ones where their parameters are the same: which layers slide is data of the scan.
        """
        kinds = self.layer_kinds
        if self.full_attention is None:
            kinds = tuple(FULL if kind == SLIDING else kind for kind in kinds)
        own = self.layers - self.reusing_layers
        if own < 1:
            raise ValueError("layer_kinds must name at least one layer, got ()")
        dense = min(self.dense_layers, own)
        stacks: list[LayerStack] = []
        layer = member = 0
        for count, reuses, experts in (
            (dense, False, None),
            (own - dense, False, self.experts),
            (self.reusing_layers, True, self.experts),
        ):
            if not count:
                continue
            block = _shortest_block(kinds[layer : layer + count])
            stacks.append(LayerStack(block, count // len(block), layer, member, reuses, experts))
            layer, member = layer + count, member + len(block)
        return tuple(stacks)

    @property
    def block(self) -> tuple[str, ...]:
        """The kinds of the members with keys and values of their own, of all `stacks`."""
        return tuple(kind for stack in self.stacks if not stack.reuses for kind in stack.block)

    @property
    def repeats(self) -> int:
        """How often the last stack of such members is repeated."""
        return [stack for stack in self.stacks if not stack.reuses][-1].repeats

    def stack_of(self, member: str) -> LayerStack:
        """Return the stack of a member, by its name in the tree of parameters."""
        return [stack for stack in self.stacks if stack.first_member <= int(member)][-1]

    def source_of(self, kind: str) -> str:
        """Return the member whose last repetition has the keys and values that a kind reuses."""
        return str(max(i for i, own in enumerate(self.block) if own == kind))

    def attention_of(self, kind: str) -> AttentionConfig:
        """Return the attention of the members of a kind in `block`."""
        if kind == FULL and self.full_attention is not None:
            return self.full_attention
        return self.attention

    @property
    def slide_by_kind(self) -> bool:
        """Whether members slide by their kind in `stacks`; else `sliding` says which layers do."""
        return self.full_attention is not None or self.reusing_layers > 0

    @property
    def key_value_heads(self) -> int:
        """The largest number that divides the key-value heads of every layer."""
        other = self.full_attention or self.attention
        return math.gcd(self.attention.key_value_heads, other.key_value_heads)

    @property
    def sliding(self) -> np.ndarray:
        """Which layers slide, as a boolean for each."""
        slides = [kind == SLIDING for kind in self.layer_kinds]
        if any(slides) and self.attention.window is None:
            raise ValueError(
                "window must be given where there are sliding_attention layers, got None"
            )
        return np.array(slides)

    @property
    def second_rotary(self) -> np.ndarray:
        """Which layers take the second of the rotary tables, as a boolean for each.

        Those without rotary positions do, or else sliding layers.
        """
        if self.unrotated_layers:
            return np.isin(np.arange(self.layers), self.unrotated_layers)
        return self.sliding


def _shortest_block(kinds: tuple[str, ...]) -> tuple[str, ...]:
    sizes = range(1, len(kinds) + 1)
    size = next(n for n in sizes if kinds[:n] * (len(kinds) // n) == kinds)
    return kinds[:size]
