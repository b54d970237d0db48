"""Checkpoints in FP8 and MXFP4: their keys in `config.json`, and their tensors, read in parts."""

import functools
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from twinkle_jax.model.huggingface.checkpoint_files import (
    DTYPES,
    Scales,
    StoredTensor,
    import_safetensors,
)
from twinkle_jax.model.huggingface.config_values import (
    one_of,
    read_section,
    shown,
)

# MXFP4: numbers of four bits, two in a byte, and a power of two for each group of inputs.


_BLOCKS, _SCALES, _GROUP = "_blocks", "_scales", 32


@functools.cache
def _pairs() -> np.ndarray:
    """Two numbers in bfloat16, as one integer, for each scale and byte.

    What does not fit is infinite, and a scale of 255, which stands for NaN, gives no finite number.
    """
    positive = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    numbers = np.concatenate([positive, -positive])
    pairs = np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.ldexp(np.float32(1), np.arange(256) - 127)
        values = (pairs * powers[:, None, None]).astype(jnp.bfloat16)
    return values.view(np.uint32).reshape(-1)


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Put one tensor, [experts, inputs, outputs], in the place of each pair in MXFP4."""
    tensors = dict(stored)
    for name in [name for name in stored if name.endswith(_BLOCKS)]:
        name = name.removesuffix(_BLOCKS)
        if name + _SCALES not in stored:
            continue  # refused as an extra tensor
        blocks, scales = tensors.pop(name + _BLOCKS), tensors.pop(name + _SCALES)
        if len(blocks.shape) != 4 or blocks.shape[3] != _GROUP // 2:
            raise ValueError(
                f"{name}{_BLOCKS} must have the shape [experts, outputs, groups, {_GROUP // 2}], "
                f"got {blocks.shape}"
            )
        if scales.shape != blocks.shape[:3]:
            raise ValueError(
                f"{name}{_SCALES} must have the shape {blocks.shape[:3]}, got {scales.shape}"
            )
        for end, tensor in ((_BLOCKS, blocks), (_SCALES, scales)):
            if tensor.dtype != "U8":
                raise ValueError(f"{name}{end} must have the type U8, got {tensor.dtype}")
        if name in tensors:
            raise ValueError(f"{name} must be stored once, got {name}{_BLOCKS} beside it")
        experts, outputs, groups = scales.shape
        shape = experts, groups * _GROUP, outputs
        pair = Scales(scales.file, name + _SCALES)
        tensors[name] = StoredTensor(blocks.file, shape, "BF16", pair)
    return tensors


class PackedFiles(NamedTuple):
    """The open files of a tensor in MXFP4."""

    blocks: Any
    scales: Any

    def get_slice(self, name: str) -> "PackedSlice":
        """Open the tensor for reading."""
        return PackedSlice(
            self.blocks.get_slice(name + _BLOCKS), self.scales.get_slice(name + _SCALES)
        )


@dataclass(frozen=True)
class PackedSlice:
    """A tensor in MXFP4, [experts, inputs, outputs], read in parts, in bfloat16."""

    blocks: Any
    scales: Any

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Read a part."""
        experts, inputs, outputs = part
        first, last = inputs.start // _GROUP, -(-inputs.stop // _GROUP)
        kept = slice(inputs.start - first * _GROUP, inputs.stop - first * _GROUP)
        place = experts, outputs, slice(first, last)
        blocks, scales = self.blocks[place], self.scales[place]
        pairs = _pairs()[scales.astype(np.uint16)[..., None] << 8 | blocks]
        values = pairs.view(jnp.bfloat16).reshape(*scales.shape[:2], -1)
        return values[..., kept].swapaxes(1, 2)


# FP8: numbers of eight bits, and a scale for each block of a matrix.


# Keys of `quantization_config` in FP8, by method, with the values that are understood; None: any.
_FP8_KEYS: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn"),
        "activation_scheme": ("dynamic", "static"),
        "weight_block_size": None,
        "modules_to_not_convert": None,
        "ignored_layers": None,
        "modules_to_convert": (None, []),
        "scale_fmt": ("float", "ue8m0", None),
        "expert_dtype": ("fp8",),
        "kv_cache_scheme": (None,),
        "dequantize": None,
    },
    "compressed-tensors": {
        "config_groups": None,
        "format": ("float-quantized", "naive-quantized"),
        "ignore": None,
        "kv_cache_scheme": (None,),
        "sparsity_config": None,
        "transform_config": (None, {}),
        "global_compression_ratio": None,
        "quantization_status": None,
        "version": None,
        "dequantize": None,
        "run_compressed": None,
    },
}
_GROUP_KEYS: dict[str, tuple[Any, ...] | None] = {
    "targets": None,
    "weights": None,
    "input_activations": None,
    "output_activations": (None,),
    "format": (None, "float-quantized", "naive-quantized"),
}
_WEIGHT_KEYS: dict[str, tuple[Any, ...] | None] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "strategy": ("tensor", "channel", "block"),
    "block_structure": None,
    "group_size": (None,),
    "dynamic": (False,),
    "actorder": (None,),
    "observer": None,
    "observer_kwargs": None,
    "scale_dtype": None,
    "zp_dtype": None,
}

Block = tuple[int | None, int | None]


def fp8_block(config: Mapping[str, Any]) -> Block | None:
    """Read which weights share a scale from the `quantization_config` of a checkpoint in FP8.

    Returns:
        How many outputs and inputs do, each None for all of them; None without such a key.

    Raises:
        ValueError: for another method, and for keys and values that are not understood.
    """
    name = "quantization_config"
    owner = config if name in config else read_section(config, "text_config")
    if owner.get(name) is None:
        return None
    section = read_section(owner, name)
    try:
        method = section.pop("quant_method", None)
        if not isinstance(method, str) or method not in _FP8_KEYS:
            known = " or ".join(map(repr, _FP8_KEYS))
            raise ValueError(f"quant_method must be {known}, got {shown(method)}: unsupported")
        _check_section(section, _FP8_KEYS[method], method)
        if method == "fp8":
            size = section.get("weight_block_size")
            return (None, None) if size is None else _block_size(section, "weight_block_size")
        one_of(read_section(section, "sparsity_config"), "format", ("dense",))
        groups = read_section(section, "config_groups")
        blocks = {_group_block(read_section(groups, group)) for group in groups}
        if len(blocks) != 1:
            raise ValueError(
                "config_groups must be groups with one strategy, got "
                + ("none" if not blocks else f"{len(blocks)} strategies")
            )
        return blocks.pop()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _group_block(group: Mapping[str, Any]) -> Block:
    """Read a group of compressed-tensors."""
    _check_section(group, _GROUP_KEYS, "a group")
    activations = read_section(group, "input_activations")
    one_of(activations, "num_bits", (8,))
    one_of(activations, "type", ("float",))
    weights = read_section(group, "weights")
    _check_section(weights, _WEIGHT_KEYS, "weights")
    for name in ("num_bits", "type", "strategy"):
        if name not in weights:
            raise ValueError(f"{name} must be given for weights, got none")
    if weights["strategy"] == "block":
        return _block_size(weights, "block_structure")
    return (1 if weights["strategy"] == "channel" else None), None


def _block_size(section: Mapping[str, Any], name: str) -> Block:
    """Read how many outputs and inputs a block has."""
    value = section.get(name)
    sizes = tuple(value) if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise ValueError(f"{name} must be two positive integers, got {shown(value)}")
    return sizes


def _check_section(
    section: Mapping[str, Any], known: Mapping[str, tuple[Any, ...] | None], owner: str
) -> None:
    for name in section:
        if name not in known:
            raise ValueError(f"{name!r} must be a key that {owner} has, got an unknown one")
        if (values := known[name]) is not None:
            one_of(section, name, values)


_FP8 = "F8_E4M3"
_SCALE_ENDS = ("_scale_inv", "_scale")  # in either case numbers are multiplied by it
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
_MAPPED_TYPES = {**DTYPES, _FP8: "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
_ROWS = 128  # that are multiplied by their scales at a time


@functools.cache
def _numbers() -> np.ndarray:
    """The number in float32 for each byte: a table is faster than NumPy's conversion."""
    return np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)


def scaled(stored: Mapping[str, StoredTensor], block: Block | None) -> dict[str, StoredTensor]:
    """Put one tensor in the place of each one in FP8 and its scales.

    Scales of activations are left out: activations are not rounded here.

    Args:
        stored: the tensors of a checkpoint.
        block: outputs and inputs that share a scale, None for all; None if there is no FP8.
    """
    tensors = dict(stored)
    for name, numbers in stored.items():
        if numbers.dtype == _FP8:
            if block is None:
                raise ValueError(
                    f"config.json must have a quantization_config for {name} in {_FP8}, got none"
                )
            scales = _scales(name, stored, block)
            tensors[name] = StoredTensor(numbers.file, numbers.shape, "BF16", scales)
            del tensors[scales.name]
            base = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
            for end in ("activation_scale", "input_scale"):
                tensors.pop(base + end, None)
    for name in tensors if block is not None else ():
        if name.endswith((".weight_scale", "_scale_inv")):
            of = name.removesuffix("_inv").removesuffix("_scale")
            got = stored[of].dtype if of in stored else "no such tensor"
            raise ValueError(f"{name} must be of a tensor {of} in {_FP8}, got {got}")
    return tensors


def _scales(name: str, stored: Mapping[str, StoredTensor], block: Block) -> Scales:
    """Find the scales of a tensor in FP8, and check their shape and type."""
    shape = stored[name].shape
    if len(shape) not in (2, 3):
        raise ValueError(f"{name} in {_FP8} must have two or three axes, got the shape {shape}")
    ends = [end for end in _SCALE_ENDS if name + end in stored]
    if len(ends) != 1:
        got = f"{name}{ends[1]} beside it" if ends else "none"
        raise ValueError(f"{name} in {_FP8} must have scales, {name}{_SCALE_ENDS[0]}, got {got}")
    scales = stored[name + ends[0]]
    *experts, rows, columns = shape
    size = block[0] or max(rows, 1), block[1] or max(columns, 1)
    grid = (*experts, -(-rows // size[0]), -(-columns // size[1]))
    shapes = [grid]
    while shapes[-1][-1:] == (1,):  # axes of one block may be left out
        shapes.append(shapes[-1][:-1])
    if scales.shape not in shapes:
        raise ValueError(
            f"{name}{ends[0]} must have the shape {grid}, for blocks of {size} in {shape}, "
            f"got {scales.shape}"
        )
    if scales.dtype not in _SCALE_TYPES:
        raise ValueError(
            f"{name}{ends[0]} must have a type of {', '.join(_SCALE_TYPES)}, got {scales.dtype}"
        )
    return Scales(scales.file, name + ends[0], size)


class _MappedFile:
    """A file of safetensors, whose library gives no FP8 to NumPy."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(size))
        self._bytes = np.asarray(np.memmap(path, np.uint8, "r", offset=8 + size))

    def get_slice(self, name: str) -> np.ndarray:
        """Return a tensor that is read when it is used."""
        entry = self._header[name]
        stored = self._bytes[slice(*entry["data_offsets"])]
        return stored.view(jnp.dtype(_MAPPED_TYPES[entry["dtype"]])).reshape(entry["shape"])


class ScaledFiles(NamedTuple):
    """The open files of a tensor in FP8."""

    numbers: _MappedFile
    scales: _MappedFile
    scale_name: str
    block: tuple[int, int]

    def get_slice(self, name: str) -> "ScaledSlice":
        """Open the tensor for reading."""
        return ScaledSlice(
            self.numbers.get_slice(name), self.scales.get_slice(self.scale_name), self.block
        )

    def get_tensor(self, name: str) -> np.ndarray:
        """Read the tensor."""
        return self.get_slice(name)[:]


@dataclass(frozen=True)
class ScaledSlice:
    """A tensor in FP8, read in parts, in float32: what it is converted to is rounded once."""

    numbers: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]

    def __getitem__(self, part: slice | tuple[slice, ...]) -> np.ndarray:
        """Read a part."""
        shape = self.numbers.shape
        parts = part if isinstance(part, tuple) else (part,)
        parts += (slice(None),) * (len(shape) - len(parts))
        axes = tuple(zip(parts[-2:], shape[-2:], self.block, strict=True))
        rows, columns = (np.arange(*s.indices(n)) // size for s, n, size in axes)
        grid = *shape[:-2], *(-(-n // size) for _, n, size in axes)
        scales = self.scales.reshape(grid)[parts[:-2]].astype(np.float32)
        values = _numbers()[self.numbers[parts].view(np.uint8)]
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, len(rows), _ROWS):
                some = rows[first : first + _ROWS]
                wide = scales[..., some[0] : some[-1] + 1, columns]
                values[..., first : first + _ROWS, :] *= wide[..., some - some[0], :]
        return values


# Files.


def open_files(stack: ExitStack, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Open each file once, and return the open file of each tensor."""
    safetensors = import_safetensors()

    @functools.cache
    def opened(file: Path) -> Any:
        return stack.enter_context(safetensors.safe_open(file, framework="np"))

    mapped = functools.cache(_MappedFile)
    files: dict[str, Any] = {}
    for name, tensor in stored.items():
        if (scales := tensor.scales) is None:
            files[name] = opened(tensor.file)
        elif scales.block is None:
            files[name] = PackedFiles(opened(tensor.file), opened(scales.file))
        else:
            pair = mapped(tensor.file), mapped(scales.file)
            files[name] = ScaledFiles(*pair, scales.name, scales.block)
    return files
