"""What a decoder is made of, and how the model families differ.

Configurations are frozen and hashable, so they can be static arguments of `jax.jit`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

        Sliding layers do, or those without rotary positions.
        """
        return self.sliding | np.isin(np.arange(self.layers), self.unrotated_layers)


def _shortest_block(kinds: tuple[str, ...]) -> tuple[str, ...]:
    sizes = range(1, len(kinds) + 1)
    size = next(n for n in sizes if kinds[:n] * (len(kinds) // n) == kinds)
    return kinds[:size]


# Projections that some families store in one tensor, side by side, with one adapter for all.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


# The model families, as differences from Llama: RMS norms, rotary positions over whole heads,
# grouped heads, biases only where the configuration asks for them, SwiGLU. No other code compares a
# `model_type`: a new family is a row in this table, and one in the table of the tests.


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama, and which keys its `config.json` has.

    Attributes:
        architecture: transformers' class, written into exported configurations.
        head_dim: default width of a head; None: the model's width divided by the number of heads.
        fixed_bias: whether queries, keys and values always have a bias; otherwise `attention_bias`
            says it.
        output_bias: whether the output projection has one if they do.
        qk_norm: whether queries and keys are normalised; None: `use_qk_norm` says it.
        joint_qk_norm: whether that norm is over all heads together.
        output_gate: whether attention has an output gate.
        value_norm: whether values are normalised.
        attention_multiplier: attention logits are multiplied by it; None: as keys of the
            configuration or the width of a head say.
        global_heads: whether full layers have heads of their own, by `global_head_dim`,
            `num_global_key_value_heads` and `attention_k_eq_v`. Sliding layers then do not share
            their parameters, and the last layer must be full.
        layer_scalars: whether each layer's output is multiplied by a number of its own.
        centred_norms: whether norms are stored as their distance from 1.
        float32_norms: whether norms multiply by their weight in float32.
        linear_layers: whether layers may be linear; their keys are `linear_…`.
        linear_by_key_head: whether their projections are stored by key head.
        experts: whether feed-forward layers consist of experts.
        expert_width: key of the width of an expert.
        normalised: whether the weights of the chosen experts always add up to 1; otherwise
            `norm_topk_prob` says it.
        shared_expert: whether all tokens go through one more expert.
        added_experts: whether experts are added to dense feed-forward layers where
            `enable_moe_block` is true.
        clamped_experts: whether feed-forward layers consist of experts with `swiglu_limit`, which
            checkpoints may store in MXFP4.
        corrected_experts: whether feed-forward layers, but for the first `first_k_dense_replace`,
            consist of experts that are chosen by scores with corrections, and a shared one.
        expert_layers: a key that also says, layer by layer, which of them are dense.
        sinks: whether attention has sinks.
        latent: whether attention is latent; its keys are `kv_lora_rank` and those of the widths.
        window_keys: whether there are keys for sliding windows, which no layer may use.
        window_pattern: default pattern: of so many layers the last is full and the others slide;
            None: no layer slides.
        sliding_keys: keys that say how they slide, where there is a pattern.
        rope_by_kind: whether sliding and full layers have rotary settings of their own, where there
            is a pattern.
        soft_caps: keys that bound the logits of attention, or of tokens.
        uniform_window: whether all layers slide, by `sliding_window`, unless it is null.
        fused: names of tensors that hold several projections, of those in `FUSED`.
        unrotated_interval: default interval of layers without rotary positions; None: all have
            them.
        input_norms: whether the inputs of attention and feed-forward are normalised.
        output_norms: whether their outputs are.
        norm_names: names of these norms in checkpoints, where they are not Gemma's.
        scaled_embedding: whether embeddings are multiplied by the square root of the model's width.
        multipliers: whether keys say what embeddings, attention logits, outputs of half a layer
            and logits are multiplied or divided by; each is 1 by default.
        activation_key: key of the activation.
        activation: the value that it must have.
        rotary_part: default fraction of a head that is rotated; None: the whole head, and no other
            value is supported.
        interleaved: whether rotated pairs are neighbours.
        rope_types: supported values of `rope_type`.
        query_growth: whether YaRN may have `llama_4_scaling_beta`.
        defaults: values of missing keys, where transformers' defaults differ for this family.
        other_keys: keys that no other family has, and the values with which they change nothing.
        enclosing: `model_type` of a configuration that holds this one as its `text_config`.
        carried: prefixes of tensors of the enclosing model, or for further tokens, which are copied
            unchanged; `{layers}` stands for the number of layers.
    """

    architecture: str
    head_dim: int | None = None
    fixed_bias: bool = False
    output_bias: bool = True
    qk_norm: bool | None = False
    joint_qk_norm: bool = False
    output_gate: bool = False
    value_norm: bool = False
    attention_multiplier: float | None = None
    global_heads: bool = False
    layer_scalars: bool = False
    centred_norms: bool = False
    float32_norms: bool = False
    linear_layers: bool = False
    linear_by_key_head: bool = False
    experts: bool = False
    expert_width: str = "moe_intermediate_size"
    normalised: bool = False
    shared_expert: bool = False
    added_experts: bool = False
    clamped_experts: bool = False
    corrected_experts: bool = False
    expert_layers: str | None = None
    sinks: bool = False
    latent: bool = False
    window_keys: bool = False
    window_pattern: int | None = None
    sliding_keys: tuple[str, ...] = ("sliding_window",)
    rope_by_kind: bool = True
    soft_caps: tuple[str, ...] = ()
    uniform_window: bool = False
    fused: tuple[str, ...] = ()
    unrotated_interval: int | None = None
    input_norms: bool = True
    output_norms: bool = False
    norm_names: Mapping[str, str] = field(default_factory=dict)
    scaled_embedding: bool = False
    multipliers: bool = False
    activation_key: str = "hidden_act"
    activation: Activation = "silu"
    rotary_part: float | None = None
    interleaved: bool = False
    rope_types: tuple[str, ...] = ("default", "yarn")
    query_growth: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    enclosing: str | None = None
    carried: tuple[str, ...] = ()


_EXPERTS_EVERYWHERE: dict[str, tuple[Any, ...]] = {  # in all layers, and no loss for their balance
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "output_router_logits": (False,),
}
_OLMO2 = Family(
    "Olmo2ForCausalLM",
    qk_norm=True,
    joint_qk_norm=True,
    float32_norms=True,
    input_norms=False,
    output_norms=True,
    defaults={
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
    },
)
_QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    head_dim=256,
    qk_norm=True,
    output_gate=True,
    centred_norms=True,
    linear_layers=True,
    rotary_part=0.25,
    defaults={"num_key_value_heads": 4},
    other_keys={
        "attn_output_gate": (True,),
        "output_gate_type": ("swish",),  # Qwen3.6's name for the gate of the linear layers
        "mamba_ssm_dtype": ("float32",),
        "mlp_only_layers": ([],),
    },
    enclosing="qwen3_5",
    carried=("model.visual.", "visual.", "mtp.", "model.mtp."),
)
_GLM = Family(
    "GlmForCausalLM",
    head_dim=128,
    output_bias=False,
    fused=("gate_up_proj",),
    rotary_part=0.5,
    interleaved=True,
    defaults={
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
)
_PHI3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
_LATENT_MIXTURE = {
    "n_shared_experts": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "norm_topk_prob": True,
}
_LATENT_MIXTURE_KEYS: dict[str, tuple[Any, ...]] = {
    "output_router_logits": (False,),
    "topk_method": ("noaux_tc",),
    "scoring_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "pretraining_tp": (1,),
}
_DEEPSEEK_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
_TOWER = (  # of images, beside a text model
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "vision_tower.",
    "multi_modal_projector.",
)
_GEMMA_KEYS: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (False, None),
    "cache_implementation": ("hybrid",),  # of transformers' generation
}
_GEMMA3 = Family(
    "Gemma3ForCausalLM",
    head_dim=256,
    qk_norm=True,
    centred_norms=True,
    window_pattern=6,
    sliding_keys=(
        "sliding_window",
        "sliding_window_pattern",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
    ),
    output_norms=True,
    scaled_embedding=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    rope_types=("default", "linear"),
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    other_keys={
        **_GEMMA_KEYS,
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
    },
    enclosing="gemma3",
    carried=_TOWER,
)
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        rope_types=("default", "llama3", "yarn", "linear"),
        other_keys={
            "mlp_bias": (False,),
            "pretraining_tp": (1,),
            "is_llama_config": (True,),  # SmolLM2
            "rope_interleaved": (False,),
        },
    ),
    "granite": Family(
        "GraniteForCausalLM",
        multipliers=True,
        defaults={
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        # Dropout of the pretraining, 0.1 in some checkpoints: there is none here.
        other_keys={"mlp_bias": (False,), "attention_dropout": (0.0, 0, 0.1, None)},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        unrotated_interval=4,
        defaults={
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        other_keys={"mlp_bias": (False,), "use_sliding_window": (False,)},
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        window_pattern=4,
        defaults={**_OLMO2.defaults, "rope_theta": 5e5},
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        output_norms=True,
        norm_names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
    "youtu": Family(
        "YoutuForCausalLM",
        latent=True,
        defaults={
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        output_bias=False,
        qk_norm=None,
        corrected_experts=True,
        rotary_part=0.5,
        defaults={
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        other_keys={"output_router_logits": (False,)},
        carried=("model.layers.{layers}.",),
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        latent=True,
        corrected_experts=True,
        expert_layers="mlp_layer_types",
        defaults={
            **_LATENT_MIXTURE,
            "vocab_size": 154_880,
            "hidden_size": 2048,
            "intermediate_size": 10_240,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
        },
        other_keys=_LATENT_MIXTURE_KEYS,
        carried=("model.layers.{layers}.",),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        latent=True,
        corrected_experts=True,
        defaults={
            **_LATENT_MIXTURE,
            "vocab_size": 129_280,
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
        },
        other_keys=_LATENT_MIXTURE_KEYS | {"auto_map": (None, _DEEPSEEK_CODE)},
        carried=("model.layers.{layers}.",),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        qk_norm=True,
        joint_qk_norm=True,
        experts=True,
        expert_width="intermediate_size",
        defaults={
            "vocab_size": 50_304,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        other_keys={"clip_qkv": (None,), "output_router_logits": (False,)},
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        head_dim=128,
        output_bias=False,
        defaults={"num_key_value_heads": 8, "attention_bias": True},
        other_keys={
            "attention_out_bias": (False,),
            "mlp_bias": (False,),
            "pretraining_tp": (1,),
            # Dropout of the pretraining: there is none here.
            "attention_dropout": (0.1, 0.0, 0, None),
            "residual_dropout": (0.1, 0.0, 0, None),
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        uniform_window=True,
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
        enclosing="mistral3",
        carried=_TOWER,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        uniform_window=True,
        head_dim=128,
        query_growth=True,
        defaults={
            "vocab_size": 131_072,
            "intermediate_size": 14_336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        carried=_TOWER,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        uniform_window=True,
        fused=("qkv_proj", "gate_up_proj"),
        rotary_part=1.0,
        rope_types=("default", "longrope", "su"),  # the last is an older name of the second
        defaults={
            "vocab_size": 32_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        other_keys={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "lm_head_bias": (False,),
            "embd_pdrop": (0.0, 0),
            "resid_pdrop": (0.0, 0),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
            # The authors' copies of transformers' classes, which need not be run.
            "auto_map": (None, _PHI3_CODE, {**_PHI3_CODE, "AutoTokenizer": "Xenova/gpt-4o"}),
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        fixed_bias=True,
        output_bias=False,
        window_keys=True,
        other_keys={"use_mrope": (False,)},
    ),
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128, qk_norm=True, window_keys=True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        experts=True,
        window_keys=True,
        defaults={"num_key_value_heads": 4},
        # With it all layers of transformers' model slide, whatever the other keys say.
        other_keys={
            **_EXPERTS_EVERYWHERE,
            "use_sliding_window": (False,),
            # Of Qwen3-Coder, without effect in transformers.
            "qkv_bias": (False,),
            "use_qk_norm": (True,),
            "shared_expert_intermediate_size": (0,),
        },
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        fixed_bias=True,
        output_bias=False,
        experts=True,
        shared_expert=True,
        window_keys=True,
        defaults={"num_key_value_heads": 16},
        other_keys={
            **_EXPERTS_EVERYWHERE,
            "use_sliding_window": (False,),
            "qkv_bias": (True,),
        },
    ),
    "qwen3_next": replace(
        _QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        linear_by_key_head=True,
        experts=True,
        shared_expert=True,
        defaults={"norm_topk_prob": True, "num_key_value_heads": 2},
        other_keys={**_EXPERTS_EVERYWHERE, "use_sliding_window": (False,)},
        enclosing=None,
        carried=("mtp.",),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        experts=True,
        normalised=True,
        shared_expert=True,
        defaults={"num_key_value_heads": 2},
        other_keys={**_QWEN3_5.other_keys, **_EXPERTS_EVERYWHERE},
        enclosing="qwen3_5_moe",
    ),
    "gemma2": replace(
        _GEMMA3,
        architecture="Gemma2ForCausalLM",
        qk_norm=False,
        window_pattern=2,
        sliding_keys=("sliding_window", "query_pre_attn_scalar"),
        rope_by_kind=False,
        soft_caps=("attn_logit_softcapping", "final_logit_softcapping"),
        rope_types=("default",),
        defaults={
            **_GEMMA3.defaults,
            "vocab_size": 256_000,
            "rope_theta": 1e4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        other_keys={
            **_GEMMA_KEYS,
            "hidden_act": ("gelu_pytorch_tanh",),  # without effect beside `hidden_activation`
            "sliding_window_size": (4096,),  # without effect beside `sliding_window`
        },
        enclosing=None,
        carried=(),
    ),
    "gemma3_text": _GEMMA3,
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        head_dim=256,
        qk_norm=True,
        value_norm=True,
        attention_multiplier=1.0,
        global_heads=True,
        layer_scalars=True,
        soft_caps=("final_logit_softcapping",),
        added_experts=True,
        normalised=True,
        float32_norms=True,
        window_pattern=6,
        output_norms=True,
        scaled_embedding=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        rope_types=("default", "proportional"),
        defaults={
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "global_head_dim": 512,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.25,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        other_keys={
            "use_bidirectional_attention": (None, "vision", False),  # of the tokens of an image
            "rope_scaling": (None,),
        },
        enclosing="gemma4",
        carried=tuple(
            f"{prefix}{name}."
            for prefix in ("model.", "")
            for name in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        head_dim=64,
        sinks=True,
        clamped_experts=True,
        expert_width="intermediate_size",
        normalised=True,
        float32_norms=True,
        window_pattern=2,
        rope_by_kind=False,
        defaults={
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        other_keys={
            "swiglu_alpha": (1.702,),
            "output_router_logits": (False,),
            # The authors' names, without effect in transformers.
            "experts_per_token": (4,),
            "initial_context_length": (4096,),
        },
    ),
}
ENCLOSING = {family.enclosing: name for name, family in FAMILIES.items() if family.enclosing}
