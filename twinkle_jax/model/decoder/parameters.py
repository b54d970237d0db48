"""Every parameter of a decoder: its place in the tree, its shape, its initial values.

The tree is a nested dict. Layers are stacked: `layers/<member>/…` holds one member of the repeated
block of layers, with the repetitions along the leading axis. Matrices are [in, out]. Names and
orientation in checkpoints are in `huggingface/checkpoint_files.py`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from twinkle_jax.model.decoder.config import (
    LINEAR,
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    LayerStack,
)

Params = Mapping[str, Any]
EXPERTS = "experts"  # of paths whose matrices are stacked by expert
# Numbers that the checkpoint sets, and no update changes.
LAYER_SCALAR, CORRECTION = "layer_scalar", "e_score_correction_bias"
Initial = Literal["normal", "zeros", "ones", "log_uniform"]


class Parameter(NamedTuple):
    """One tensor: its place in the tree, its shape and its initial values.

    Attributes:
        path: keys from the root, or from the layer.
        shape: shape here, without the axis of stacked layers.
        initial: distribution of the initial values.
        transposed: whether checkpoints have a matrix the other way round, [out, in].
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    initial: Initial = "normal"
    transposed: bool = True


def outer_parameters(config: DecoderConfig) -> list[Parameter]:
    """List the parameters outside the layers."""
    scale: Initial = "zeros" if config.centred_norms else "ones"
    table = [
        Parameter(("embed_tokens", "embedding"), (config.vocab_size, config.hidden_size)),
        Parameter(("norm", "scale"), (config.hidden_size,), scale),
    ]
    if config.token_width is not None:
        width = config.layers * config.token_width
        table += [
            Parameter(("embed_tokens_per_layer", "embedding"), (config.vocab_size, width)),
            Parameter(("per_layer_model_projection", "kernel"), (config.hidden_size, width)),
            Parameter(("per_layer_projection_norm", "scale"), (config.token_width,), scale),
        ]
    if not config.tie_embeddings:
        head = (config.hidden_size, config.vocab_size)
        table.append(Parameter(("lm_head", "kernel"), head))
    return table


def layer_parameters(config: DecoderConfig, stack: LayerStack, kind: str) -> list[Parameter]:
    """List the parameters of one layer of a kind in a stack."""
    width = config.hidden_size
    scale: Initial = "zeros" if config.centred_norms else "ones"

    def norms(*names: str) -> list[Parameter]:
        return [Parameter((f"{name}_layernorm", "scale"), (width,), scale) for name in names]

    before = norms("input") if config.input_norms else []
    after = norms("post_attention")
    if config.output_norms:
        after += norms("pre_feedforward") if config.input_norms else []
        after += norms("post_feedforward")
    if kind == LINEAR:
        mixer = _delta_net(config)
    else:
        mixer = _attention(config.attention_of(kind), width, scale)
    if stack.reuses:
        mixer = [p for p in mixer if p.path[1] not in ("k_proj", "v_proj", "k_norm")]
    if stack.experts is not None and stack.experts.beside_dense:
        names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        after += [
            Parameter((name, "scale"), (width,), scale)
            for name in (*names, "pre_feedforward_layernorm_2")
        ]
    last = [Parameter((LAYER_SCALAR,), (1,), "ones")] if config.layer_scalars else []
    if config.token_width is not None:
        last += [
            Parameter(("per_layer_input_gate", "kernel"), (width, config.token_width)),
            Parameter(("per_layer_projection", "kernel"), (config.token_width, width)),
            Parameter(("post_per_layer_input_norm", "scale"), (width,), scale),
        ]
    inner = config.intermediate_size
    if stack.reuses:
        inner = config.reusing_intermediate_size or inner
    return [*before, *mixer, *after, *_feed_forward(width, stack.experts, inner), *last]


def _feed_forward(width: int, experts: ExpertsConfig | None, dense_width: int) -> list[Parameter]:

    def gated(path: tuple[str, ...], inner: int) -> list[Parameter]:
        return [
            Parameter((*path, "gate_proj", "kernel"), (width, inner)),
            Parameter((*path, "up_proj", "kernel"), (width, inner)),
            Parameter((*path, "down_proj", "kernel"), (inner, width)),
        ]

    if experts is None:
        return gated(("mlp",), dense_width)
    number, inner = experts.number, experts.width
    if experts.beside_dense:
        return [
            *gated(("mlp",), dense_width),
            Parameter(("router", "proj", "kernel"), (width, number)),
            Parameter(("router", "scale"), (width,), "ones"),
            Parameter(("router", "per_expert_scale"), (number,), "ones"),
            Parameter((EXPERTS, "gate_up_proj", "kernel"), (number, width, 2 * inner)),
            Parameter((EXPERTS, "down_proj", "kernel"), (number, inner, width)),
        ]
    if experts.swiglu_limit is not None:
        up, down = ("mlp", EXPERTS, "gate_up_proj"), ("mlp", EXPERTS, "down_proj")
        return [
            Parameter(("mlp", "router", "kernel"), (width, number)),
            Parameter(("mlp", "router", "bias"), (number,), "zeros"),
            Parameter((*up, "kernel"), (number, width, 2 * inner), transposed=False),
            Parameter((*up, "bias"), (number, 2 * inner), "zeros", transposed=False),
            Parameter((*down, "kernel"), (number, inner, width), transposed=False),
            Parameter((*down, "bias"), (number, width), "zeros", transposed=False),
        ]
    table = [
        Parameter(("mlp", "gate", "kernel"), (width, number)),
        Parameter(("mlp", EXPERTS, "gate_up_proj", "kernel"), (number, width, 2 * inner)),
        Parameter(("mlp", EXPERTS, "down_proj", "kernel"), (number, inner, width)),
    ]
    if experts.corrected:
        table.append(Parameter(("mlp", "gate", CORRECTION), (number,), "zeros"))
        table += gated(("mlp", "shared_experts"), experts.shared_width or 0)
    elif experts.shared_width is not None:
        table += gated(("mlp", "shared_expert"), experts.shared_width)
        table.append(Parameter(("mlp", "shared_expert_gate", "kernel"), (width, 1)))
    return table


def _attention(a: AttentionConfig, width: int, scale: Initial) -> list[Parameter]:
    if a.latent is not None:
        return _latent_attention(a, a.latent, width)
    queries, keys = a.query_heads * a.head_dim, a.key_value_heads * a.head_dim
    widths = {"q_proj": queries * (2 if a.output_gate else 1), "k_proj": keys}
    widths |= {} if a.shared_values else {"v_proj": keys}
    table = [Parameter(("self_attn", n, "kernel"), (width, out)) for n, out in widths.items()]
    if a.bias:
        table += [Parameter(("self_attn", n, "bias"), (o,), "zeros") for n, o in widths.items()]
    table.append(Parameter(("self_attn", "o_proj", "kernel"), (queries, width)))
    if a.output_bias:
        table.append(Parameter(("self_attn", "o_proj", "bias"), (width,), "zeros"))
    if a.qk_norm:
        normed = {"q_norm": queries, "k_norm": keys}
        if not a.joint_qk_norm:
            normed = dict.fromkeys(normed, a.head_dim)
        table += [Parameter(("self_attn", n, "scale"), (out,), scale) for n, out in normed.items()]
    if a.sinks:
        table.append(Parameter(("self_attn", "sinks"), (a.query_heads,)))
    return table


def _latent_attention(a: AttentionConfig, latent: LatentConfig, width: int) -> list[Parameter]:
    queries, values = a.query_heads * a.head_dim, a.query_heads * latent.value_dim
    unrotated = a.query_heads * (a.head_dim - a.rotary_dim)
    kernels = {"q_proj": (width, queries)}
    if latent.query_width is not None:
        kernels = {
            "q_a_proj": (width, latent.query_width),
            "q_b_proj": (latent.query_width, queries),
        }
    kernels |= {
        "kv_a_proj_with_mqa": (width, latent.width + a.rotary_dim),
        "kv_b_proj": (latent.width, unrotated + values),
        "o_proj": (values, width),
    }
    table = [Parameter(("self_attn", name, "kernel"), shape) for name, shape in kernels.items()]
    if a.bias:
        table += [
            Parameter(("self_attn", name, "bias"), (kernels[name][1],), "zeros")
            for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
            if name in kernels
        ]
    normed = {"q_a_layernorm": latent.query_width, "kv_a_layernorm": latent.width}
    return table + [
        Parameter(("self_attn", name, "scale"), (size,), "ones")
        for name, size in normed.items()
        if size is not None
    ]


def _delta_net(config: DecoderConfig) -> list[Parameter]:
    d, width = config.delta_net, config.hidden_size
    if d is None:
        raise ValueError(
            "delta_net must be given where there are linear_attention layers, got None"
        )
    values = d.value_heads * d.value_dim
    widths = {
        "in_proj_qkv": d.channels,
        "in_proj_z": values,
        "in_proj_b": d.value_heads,
        "in_proj_a": d.value_heads,
    }
    if d.by_key_head:
        widths = {"in_proj_qkvz": d.channels + values, "in_proj_ba": 2 * d.value_heads}
    return [
        *(Parameter(("linear_attn", n, "kernel"), (width, out)) for n, out in widths.items()),
        Parameter(("linear_attn", "conv1d", "kernel"), (d.kernel, d.channels)),
        Parameter(("linear_attn", "A_log"), (d.value_heads,), "log_uniform"),
        Parameter(("linear_attn", "dt_bias"), (d.value_heads,), "ones"),
        Parameter(("linear_attn", "norm", "scale"), (d.value_dim,), "ones"),
        Parameter(("linear_attn", "out_proj", "kernel"), (values, width)),
    ]


def parameter_table(config: DecoderConfig) -> dict[tuple[str, ...], Parameter]:
    """Map paths from the root to parameters; below `layers`, shapes lack the stacked axis."""
    table = {p.path: p for p in outer_parameters(config)}
    for stack in config.stacks:
        for member, kind in stack.members:
            for p in layer_parameters(config, stack, kind):
                table["layers", member, *p.path] = p
    return table


def parameter_shapes(config: DecoderConfig, dtype: DTypeLike = "float32") -> dict[str, Any]:
    """Describe the parameters of a decoder, without allocating any.

    Args:
        config: the decoder.
        dtype: type of the parameters.

    Returns:
        The tree of parameters, with a `jax.ShapeDtypeStruct` in the place of each array.

    Example:
        >>> from twinkle_jax.model import parse_config
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        ... })
        >>> parameter_shapes(config)["layers"]["0"]["mlp"]["up_proj"]["kernel"].shape
        (3, 32, 48)
    """
    return nest(
        {
            path: jax.ShapeDtypeStruct(stacked_shape(config, path, p), type_in(path, dtype))
            for path, p in parameter_table(config).items()
        }
    )


def init_params(
    key: Key[Array, ""], config: DecoderConfig, *, dtype: DTypeLike = "float32"
) -> dict[str, Any]:
    """Draw the parameters of a decoder: matrices from N(0, 0.02²), norms as the identity.

    Args:
        key: a typed key; each parameter is drawn with its own, folded in.
        config: the decoder.
        dtype: type of the parameters.

    Returns:
        The tree that [`parameter_shapes`][twinkle_jax.model.parameter_shapes] describes.

    Example:
        >>> import jax
        >>> from twinkle_jax.model import init_params, parse_config
        >>> config = parse_config({
        ...     "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "head_dim": 16,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ...     "num_key_value_heads": 2, "tie_word_embeddings": True,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> sorted(params), params["norm"]["scale"].shape
        (['embed_tokens', 'layers', 'norm'], (32,))
    """
    return nest(
        {
            path: _draw(
                jax.random.fold_in(key, i),
                stacked_shape(config, path, p),
                p.initial,
                type_in(path, dtype),
            )
            for i, (path, p) in enumerate(parameter_table(config).items())
        }
    )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: Key[Array, ""], shape: tuple[int, ...], initial: Initial, dtype: jnp.dtype) -> Array:
    if initial == "normal":
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)
    if initial == "log_uniform":  # decay rates between a hundredth and sixteen per token
        return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0)).astype(dtype)
    return jnp.ones(shape, dtype) if initial == "ones" else jnp.zeros(shape, dtype)


def type_in(path: tuple[str, ...], dtype: DTypeLike) -> jnp.dtype:
    """Return the type of a parameter in a tree of a type.

    Corrections are never rounded to 16 bits: sums with scores would tie, or choose other experts.
    """
    dtype = jnp.dtype(dtype)
    return jnp.dtype("float32") if path[-1] == CORRECTION and dtype.itemsize < 4 else dtype


def cast_params(params: Params, dtype: DTypeLike) -> dict[str, Any]:
    """Cast all parameters to a type, as far as they have it."""
    return {
        name: cast_params(x, dtype) if isinstance(x, Mapping) else x.astype(type_in((name,), dtype))
        for name, x in params.items()
    }


def stacked_shape(config: DecoderConfig, path: tuple[str, ...], p: Parameter) -> tuple[int, ...]:
    """Return the shape of the leaf at a path, the axis of stacked layers included."""
    return (*stacked_axis(config, path), *p.shape)


def stacked_axis(config: DecoderConfig, path: tuple[str, ...]) -> tuple[int, ...]:
    """Return the size of the axis of stacked layers, which leaves outside the layers don't have."""
    return (config.stack_of(path[1]).repeats,) if path[0] == "layers" else ()


def check_shapes(
    argument: str,
    expected: Mapping[tuple[str, ...], tuple[int, ...]],
    shapes: Mapping[tuple[str, ...], tuple[int, ...]],
    *,
    by: str,
) -> None:
    """Raise for the first array that is missing, too many or of another shape.

    Args:
        argument: whose arrays they are, for the error.
        expected: shapes by path.
        shapes: those that there are.
        by: what sets the shapes, for the error.

    Raises:
        ValueError: if they differ.
    """
    for path in sorted(expected.keys() | shapes.keys()):
        if expected.get(path) != shapes.get(path):
            wanted = f"the shape {expected[path]}" if path in expected else "none"
            raise ValueError(
                f"{argument} must have {wanted} at {'/'.join(path)}, by {by}, "
                f"got {shapes.get(path, 'none')}"
            )


def nest(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """Turn paths into nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def check_decoder(params: Any, config: Any) -> None:
    """Check what every function of a decoder begins with: parameters, and their configuration.

    Raises:
        TypeError: if they are something else, such as an object that holds them.
    """
    if not isinstance(config, DecoderConfig):
        raise TypeError(
            "config must be a DecoderConfig, which parse_config makes of the keys of a "
            f"config.json, got {type(config).__name__}"
        )
    check_tree(params)


def check_tree(params: Any) -> None:
    """Check that parameters are a tree, not an object that holds one.

    Raises:
        TypeError: if they are not.
    """
    if not isinstance(params, Mapping):
        hint = ": pass its .params" if hasattr(params, "params") else ""
        kind = type(params).__name__
        raise TypeError(f"params must be nested dictionaries of arrays, got {kind}{hint}")


def embedding_of(params: Params) -> Array:
    """Return the embedding of a whole decoder, where all functions begin or end.

    Raises:
        ValueError: if there is none, as in an adapter.
    """
    if "embed_tokens" not in params:
        raise ValueError(
            f"params must hold a whole decoder, got only {sorted(params)}: pass the parameters "
            "that adapters lie over as frozen=, or lay the adapters over them with with_adapter"
        )
    embedding: Array = params["embed_tokens"]["embedding"]
    return embedding


def merge_params(frozen: Params | None, params: Params) -> dict[str, Any]:
    """Merge two trees of parameters; where both have a leaf, take the second's."""
    if frozen is None:
        return dict(params)
    merged = dict(frozen)
    for key, value in params.items():
        old = merged.get(key)
        both_trees = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge_params(old, value) if both_trees else value
    return merged
