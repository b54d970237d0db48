r"""Low-rank adapters: a projection's kernel $W$ acts as $W + s A B$, and only A and B are trained.

$$y = x W + s \, d(x) A B, \qquad d(x) = x \cdot m / (1 - p), \quad m \sim \text{Bernoulli}(1 - p)$$

Adapters are leaves next to the kernels that they change, `lora_A` [layers, in, rank] and `lora_B`
[layers, rank, out], stacked like these. `lora_scale` [layers], $s$, is not trained. Each projection
draws a dropout mask of its own, as in PEFT. The mask of a token depends on its row's key and its
place in the row alone, not on the other rows, the padding, the packing or the devices.
See [LoRA](https://arxiv.org/abs/2106.09685).
"""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.families import FAMILIES, FUSED
from twinkle_jax.model.decoder.parameters import (
    EXPERTS,
    Params,
    check_shapes,
    merge_params,
    nest,
    parameter_table,
    stacked_axis,
)
from twinkle_jax.model.decoder.precision import matmul, rounded

ALL_LINEAR = "all-linear"
# What PEFT leaves out of a model of Gemma: these projections have the names of the decoder's.
TOWERS = ".*(vision|audio)_tower.*"
LARGEST_RANK = 2**16
RATE, KEYS = "lora_dropout", "lora_dropout_keys"  # leaves beside an adapter that has dropout


@dataclass(frozen=True)
class LoraConfig:
    """Configuration of low-rank adapters, with PEFT's names and defaults.

    Attributes:
        r: rank.
        lora_alpha: the product of the two matrices is multiplied by `lora_alpha / r`.
        target_modules: names of projections, or `"all-linear"` for all but the head.
        use_rslora: whether to divide by the square root of `r` instead.
        lora_dropout: dropout rate of the adapters' inputs in training, in [0, 1).

    Raises:
        ValueError: for a value of another type, or out of range.

    Example:
        >>> LoraConfig(r=16, lora_alpha=32).scale
        2.0
    """

    r: int = 8
    lora_alpha: float = 8
    target_modules: str | tuple[str, ...] = ("q_proj", "v_proj")
    use_rslora: bool = False
    lora_dropout: float = 0.0

    def __post_init__(self) -> None:
        if type(self.r) is not int or not 1 <= self.r <= LARGEST_RANK:
            raise ValueError(f"r must be a positive int of at most {LARGEST_RANK}, got {self.r!r}")
        if type(self.lora_alpha) not in (int, float) or not abs(self.lora_alpha) <= 1e30:
            raise ValueError(f"lora_alpha must be a finite number, got {self.lora_alpha!r}")
        if type(self.use_rslora) is not bool:
            raise ValueError(f"use_rslora must be True or False, got {self.use_rslora!r}")
        targets = self.target_modules
        if not isinstance(targets, str):
            if not isinstance(targets, list | tuple | set | frozenset) or not all(
                isinstance(name, str) for name in targets
            ):
                raise ValueError(f"target_modules must be names of projections, got {targets!r}")
            object.__setattr__(self, "target_modules", tuple(sorted(targets)))
        rate = self.lora_dropout
        if type(rate) not in (int, float) or not 0 <= rate < 1:
            raise ValueError(f"lora_dropout must be a number in [0, 1), got {rate!r}")

    @property
    def scale(self) -> float:
        """Factor on the product A B."""
        return float(self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r))


def read_lora_config(config: Any, *, new: bool = True) -> LoraConfig:
    """Read this package's or PEFT's LoraConfig, or a mapping; refuse anything but plain LoRA.

    Args:
        config: the configuration.
        new: whether a new adapter will be initialised, so that `init_lora_weights` matters.
    """
    if isinstance(config, LoraConfig):
        return config
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if values is None:
        raise TypeError(f"config must be a LoraConfig or a mapping, got {type(config).__name__}")
    _check_peft_options(values, new=new)
    names = [f.name for f in fields(LoraConfig)]
    return LoraConfig(**{name: values[name] for name in names if values.get(name) is not None})


def adapted_kernels(
    config: DecoderConfig, lora: LoraConfig
) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Find the projections that adapters change: path and shape [in, out] of each kernel.

    Raises:
        ValueError: if a target is no projection of this decoder; the message lists them.
    """
    kernels = {
        path[:-1]: p.shape
        for path, p in parameter_table(config).items()
        # As in PEFT: no experts, no head, and no router except Gemma 4's.
        if path[-1] == "kernel" and path[-2] not in ("conv1d", "gate", "lm_head", "router")
        if EXPERTS not in path
    }
    for name in FAMILIES[config.model_type].fused:  # one projection, to PEFT
        for path in [path for path in kernels if path[-1] == FUSED[name][0]]:
            shapes = [kernels.pop((*path[:-1], part)) for part in FUSED[name]]
            kernels[*path[:-1], name] = (shapes[0][0], sum(out for _, out in shapes))
    if lora.target_modules == ALL_LINEAR:
        return kernels
    targets = lora.target_modules
    wanted = {targets} if isinstance(targets, str) else set(targets)
    known = {path[-1] for path in kernels}
    if not wanted or wanted - known:
        raise ValueError(
            f"target_modules must be among {sorted(known)}, or {ALL_LINEAR!r}, got {targets!r}"
        )
    return {path: shape for path, shape in kernels.items() if path[-1] in wanted}


def init_adapter(key: Key[Array, ""], config: DecoderConfig, lora: LoraConfig) -> dict[str, Any]:
    r"""Draw adapters that change nothing yet: A from $U(\pm 1/\sqrt{in})$, B all 0, float32."""
    flat: dict[tuple[str, ...], Any] = {}
    for i, (path, (width, out)) in enumerate(adapted_kernels(config, lora).items()):
        bound, axis = width**-0.5, stacked_axis(config, path)
        flat[*path, "lora_A"] = jax.random.uniform(
            jax.random.fold_in(key, i), (*axis, width, lora.r), minval=-bound, maxval=bound
        )
        flat[*path, "lora_B"] = jnp.zeros((*axis, lora.r, out), jnp.float32)
    return nest(flat)


def check_adapter(config: DecoderConfig, lora: LoraConfig, adapter: Params) -> None:
    """Raise unless an adapter has the matrices of its configuration, and nothing else.

    Raises:
        ValueError: for the first one that is missing, too many or of another shape.
    """
    expected: dict[tuple[str, ...], tuple[int, ...]] = {}
    for path, (width, out) in adapted_kernels(config, lora).items():
        axis = stacked_axis(config, path)
        expected[*path, "lora_A"] = (*axis, width, lora.r)
        expected[*path, "lora_B"] = (*axis, lora.r, out)
    shapes = {path: tuple(x.shape) for path, x in walk(adapter)}
    by = f"r={lora.r} and target_modules={lora.target_modules!r} of its configuration"
    check_shapes("adapter", expected, shapes, by=by)


def with_adapter(
    params: Params | None, config: DecoderConfig, lora: LoraConfig, adapter: Params | None = None
) -> dict[str, Any]:
    """Lay an adapter over a decoder's parameters; no array is copied.

    Args:
        params: of the decoder, without an adapter; several adapters may share them. The constants
            of another configuration are replaced.
        config: the decoder.
        lora: configuration of the adapter, which sets its scale and dropout rate.
        adapter: the tree of `lora_A` and `lora_B`, as `load_adapter` returns it; None adds the
            constants alone, for an adapter that is trained over these parameters.

    Returns:
        What the decoder's functions take; [`merge_adapter`][twinkle_jax.model.merge_adapter] adds
        the adapter to the kernels.

    Raises:
        ValueError: if a target is no projection of this decoder, the adapter is not of this rank
            and for these projections, or the parameters hold an adapter already.
    """
    if any(path[-1] in ("lora_A", "lora_B") for path, _ in walk(params or {})):
        raise ValueError(
            "params must not hold an adapter, got one: remove it with without_adapter, or add it "
            "to the kernels with merge_adapter"
        )
    if adapter is not None:
        check_adapter(config, lora, adapter)
    constants = {"lora_scale": lora.scale} | (
        {RATE: lora.lora_dropout} if lora.lora_dropout else {}
    )
    leaves = {
        (*path, name): jnp.full(stacked_axis(config, path), value, jnp.float32)
        for path in adapted_kernels(config, lora)
        for name, value in constants.items()
    }
    base = None if params is None else without_adapter(params)  # constants of another one
    return merge_params(merge_params(base, nest(leaves)), adapter or {})


def merge_adapter(params: Params) -> dict[str, Any]:
    """Add adapters to the kernels that they change, and remove them; kernels keep their type.

    Parameters without an adapter are not copied, unless this is called inside `jax.jit`.

    Raises:
        ValueError: if an adapter has no `lora_scale`, which `with_adapter` adds.
    """
    merged: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            merged[key] = merge_adapter(value)
        elif not key.startswith("lora_"):
            merged[key] = value
    if "lora_A" in params and "kernel" in params:
        (merged["kernel"],) = _merge([params["kernel"]], params)
    for name, parts in FUSED.items():
        if name not in params or "kernel" in params[name]:
            continue
        del merged[name]
        if "lora_A" not in params[name]:  # frozen parameters have its scale alone
            continue
        kernels = _merge([params[part]["kernel"] for part in parts], params[name])
        for part, kernel in zip(parts, kernels, strict=True):
            merged[part] = {**merged[part], "kernel": kernel}
    return merged


def _merge(kernels: list[Array], adapter: Mapping[str, Any]) -> list[Array]:
    """Add an adapter to the kernels, side by side, that it changes."""
    return _add(kernels, adapter["lora_A"], adapter["lora_B"], _scale(adapter))


@jax.jit
def _add(kernels: list[Array], a: Array, b: Array, scale: Array) -> list[Array]:
    """Add an adapter; layer by layer, for all layers of an 8B model are 7 GiB in float32."""
    ends = np.cumsum([kernel.shape[-1] for kernel in kernels])

    def merge(layer: tuple[list[Array], Array, Array, Array]) -> list[Array]:
        kernels, a, b, scale = layer
        # In full float32: accelerators round by default.
        change = scale * jnp.matmul(a, b, precision="highest")
        changes = jnp.split(change, ends[:-1].tolist(), axis=-1)
        return [
            (kernel.astype(jnp.float32) + change).astype(kernel.dtype)
            for kernel, change in zip(kernels, changes, strict=True)
        ]

    layers = kernels, a, b, scale
    return jax.lax.map(merge, layers) if kernels[0].ndim > 2 else merge(layers)


def _scale(weights: Mapping[str, Any]) -> Array:
    """Look up the scale of an adapter."""
    if "lora_scale" not in weights:
        raise ValueError(
            "params must have lora_scale beside lora_A and lora_B, got none: lay adapters over a "
            "decoder's parameters with with_adapter"
        )
    return weights["lora_scale"]


def without_adapter(params: Params) -> dict[str, Any]:
    """Leave out an adapter that lies over a decoder's parameters; no array is copied."""
    return nest({path: x for path, x in walk(params) if not path[-1].startswith("lora_")})


def walk(tree: Params, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Visit the leaves of nested dicts with their paths."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from walk(value, (*path, key))
        else:
            yield (*path, key), value


# Forward pass: what an adapter adds to its projection.


def adapter_change(
    x: Float[Array, "tokens into"], weights: Mapping[str, Any]
) -> Float[Array, "tokens out"]:
    r"""Compute $s \, d(x) A B$, with dropout if there are keys for it."""
    if KEYS in weights:
        x = drop_out(x, weights[RATE], weights[KEYS])
    return scaled(matmul(matmul(x, weights["lora_A"]), weights["lora_B"]), weights)


def scaled(
    change: Float[Array, "*tokens out"], weights: Mapping[str, Any]
) -> Float[Array, "*tokens out"]:
    """Multiply what an adapter adds by its scale."""
    # In bfloat16, 2/3 is a five-hundredth larger: a merged adapter would be another one.
    return _times(change, _scale(weights))


def drop_out(
    x: Float[Array, "tokens into"], rate: Float[Array, ""], keys: Key[Array, " tokens"]
) -> Float[Array, "tokens into"]:
    """Zero entries with probability `rate`, and divide the others by `1 - rate`."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, _times(x, 1 / (1 - rate)), jnp.zeros_like(x))


def _times(x: Float[Array, "*shape"], factor: Float[Array, ""]) -> Float[Array, "*shape"]:
    """Multiply by a number that is not rounded to the type of `x`."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return rounded(x.astype(wide) * factor.astype(wide), x.dtype)


def with_dropout(params: Mapping[str, Any], keys: Key[Array, "batch time"]) -> dict[str, Any]:
    """Add dropout keys beside the adapters that have a rate: for each layer, one for each token.

    Args:
        params: frozen parameters and adapters, merged.
        keys: of the tokens.
    """
    keys, projection = keys.reshape(-1), 0

    def visit(tree: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal projection
        out = {name: visit(x) if isinstance(x, Mapping) else x for name, x in sorted(tree.items())}
        if RATE in tree:
            layers = jnp.arange(tree[RATE].size, dtype=jnp.int32)
            # Each projection has its own number, so that no two of them share noise.
            of_tokens = jax.vmap(jax.random.fold_in, (0, None))(keys, projection)
            of_layers = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
            out[KEYS] = of_layers(of_tokens, layers).reshape(*tree[RATE].shape, -1)
            projection += 1
        return out

    return visit(params)


# PEFT's options: only values that mean plain LoRA are supported.


# Options, and the values with which they change nothing or describe what is implemented.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "exclude_modules": (None, [], TOWERS, ".*vision_tower.*"),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, [], ""),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "megatron_config": (None,),
    "trainable_token_indices": (None, []),
    "loftq_config": ({}, None),
    "eva_config": (None,),
    "corda_config": (None,),
    "lora_ga_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_bdlora": (None, False),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "ensure_weight_tying": (False, None),
    "_custom_modules": (None,),
    "task_type": (None, "CAUSAL_LM"),
    "peft_type": ("LORA", None),
}
_READ = frozenset({"r", "lora_alpha", "target_modules", "use_rslora", "lora_dropout"})
# Names, versions, and settings of options that are off.
_IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
_INITIAL = {
    True: (True, None),
    # A trained adapter's initialisation matters only if it also changed the frozen kernels.
    False: (True, None, False, "gaussian", "orthogonal"),
}


def _check_peft_options(options: Mapping[str, Any], *, new: bool) -> None:
    """Refuse unknown options, and values that mean anything but plain LoRA.

    Args:
        options: PEFT's names and values.
        new: whether a new adapter will be initialised.
    """
    plain = _PLAIN | {"init_lora_weights": _INITIAL[new]}
    for name, value in options.items():
        if name in plain:
            # PEFT's own objects hold enumerations, which are strings.
            value = getattr(value, "value", value)
            if not any(type(value) is type(v) and value == v for v in plain[name]):
                known = " or ".join(repr(v) for v in plain[name])
                raise ValueError(f"{name} must be {known}, got {reprlib.repr(value)}: unsupported")
        elif name not in _READ | _IGNORED:
            raise ValueError(
                f"config must have known options of LoRA only, got {name!r} with the value "
                f"{reprlib.repr(value)}"
            )
