"""What a Hugging Face checkpoint holds: its files, and which tensor each parameter is.

Parameters here are [in, out], and a convolution's kernel is [time, channels]. Checkpoints store
[out, in] and [channels, 1, time]. Experts are stacked here, in one tensor of a checkpoint or in a
tensor for each expert and projection. Projections are apart here, and side by side in one tensor in
checkpoints of some families. No other file depends on any of this.
"""

import itertools
import json
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from twinkle_jax.data.tokenizer import NAMED_TEMPLATES
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.families import FAMILIES, FUSED
from twinkle_jax.model.decoder.parameters import EXPERTS, Parameter, parameter_table

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    NAMED_TEMPLATES,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LARGEST_JSON = 64 * 2**20
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_INSTALL = "pip install 'twinkle-jax[checkpoints]'"

EMBEDDING = "embed_tokens.weight"
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
"""Names of the head; the second one is beside tensors with the prefix `language_model.model.`."""
SCORE = "score.weight"  # the head of transformers' models for sequence classification
PREFIX = "model."
OTHER_PREFIXES = ("model.language_model.", "language_model.model.", "")
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}  # others keep their name
_TRANSPOSED = ("kernel", "lora_A", "lora_B")


class Scales(NamedTuple):
    """The scales of a tensor in MXFP4 or FP8: file, name, and rows and columns that share one."""

    file: Path
    name: str
    block: tuple[int, int] | None = None  # None in MXFP4


class StoredTensor(NamedTuple):
    """A tensor's file, shape and type, from the header of the file.

    Where it has scales, shape and type are those that it is converted to.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scales: Scales | None = None


def import_safetensors() -> ModuleType:
    """Import safetensors, or say how to get it."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(f"checkpoints need safetensors: {_INSTALL}") from error
    module: ModuleType = safetensors
    return module


def read_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return a type that tensors of a checkpoint have; refuse others, and names of none."""
    try:
        named: np.dtype[Any] | None = jnp.dtype(dtype)
    except TypeError:  # such as "bf16"
        named = None
    if named is None or named.name not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES.values())}, got {dtype!r}")
    return named


def locate(path_or_id: str | Path, *, argument: str = "path_or_id", weights: bool = True) -> Path:
    """Return a local directory as it is; download a hub id, unless it is in the cache.

    Args:
        path_or_id: a directory or a hub id.
        argument: the user's name for it, for errors: `"model_id"`, `"--model"`.
        weights: whether to download its weights, too.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if not isinstance(path_or_id, str) or not _HUB_ID.fullmatch(path_or_id) or path.exists():
        raise ValueError(
            f"{argument} must be a directory or a hub id 'owner/name', got {str(path_or_id)!r}"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{argument} is a hub id, {path_or_id!r}, which needs huggingface_hub: {_INSTALL}"
        ) from error
    patterns = [CONFIG, ADAPTER_CONFIG, *TOKENIZER_FILES, f"{NAMED_TEMPLATES}/*.jinja"]
    patterns += ["model*.safetensors", INDEX, ADAPTER_WEIGHTS] if weights else []
    try:
        directory = Path(snapshot_download(path_or_id, allow_patterns=patterns))
        if not weights or not (directory / INDEX).exists():
            return directory
        shards = sorted(set(_weight_map(directory).values()))
        others = [name for name in shards if not (directory / name).exists()]
        if others:  # such as layers-0.safetensors, as Qwen3.6 in FP8 has them
            snapshot_download(path_or_id, revision=directory.name, allow_patterns=others)
        return directory
    except Exception as error:  # of the hub, the network or the disk
        raise ValueError(
            f"{argument} must be a directory, or a hub id that can be downloaded, got "
            f"{path_or_id!r}, which is no directory here: {error}"
        ) from error


def inside(directory: Path, name: str, *, folder: str = "") -> Path:
    """Join a file name to a directory, or to a folder in it.

    Refuses paths, and links that lead out of the directory.
    """
    if not name or name in (".", "..") or Path(name).name != name or "\\" in name:
        raise ValueError(f"file names must be plain, and inside {directory}, got {name!r}")
    resolved = directory.resolve()
    roots = [resolved]
    if resolved.parent.name == "snapshots":  # the hub's cache links to files in `blobs`
        roots.append(resolved.parent.parent / "blobs")
    path = directory / folder / name
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise ValueError(f"{name!r} must stay inside {directory}, got a link to {path.resolve()}")
    return path


def regular_file(path: Path) -> Path:
    """Refuse anything but a regular file before it is opened: a FIFO would block forever."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ValueError(f"{path.parent} must hold {path.name}, got no such file") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} must be a file, got {_KINDS.get(stat.S_IFMT(mode), 'a device')}")
    return path


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read a JSON object."""
    path = regular_file(inside(directory, name))
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{path} must have at most {LARGEST_JSON} bytes, got more")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too many digits
        raise ValueError(f"{path} must be JSON, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """List the tensors of a checkpoint from the headers of its files, reading no data.

    Raises:
        ValueError: if there are no safetensors (pickled weights are never read), a shard is
            missing, truncated or outside the directory, or the index does not match the shards.
    """
    if inside(directory, SINGLE).exists():
        return read_headers(inside(directory, SINGLE))
    if not inside(directory, INDEX).exists():
        pickled = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLED)
        hint = f"; {pickled[0]} is pickled, and pickles are never read" if pickled else ""
        raise ValueError(f"{directory} must hold {SINGLE} or {INDEX}, got neither{hint}")
    shards = _weight_map(directory)
    tensors: dict[str, StoredTensor] = {}
    headers = {name: read_headers(inside(directory, name)) for name in sorted(set(shards.values()))}
    for name, header in headers.items():
        for tensor in header.keys() & tensors.keys() - shards.keys():
            raise ValueError(
                f"{INDEX} must name the file of each tensor, got {tensor!r} in "
                f"{tensors[tensor].file.name} and in {name}, and not in the index"
            )
        tensors |= header
    for tensor, name in shards.items():  # which decides where several hold a tensor
        if tensor not in headers[name]:
            raise ValueError(
                f"{INDEX} must name the file of each tensor, got {tensor!r} in {name}, "
                "which does not hold it"
            )
        tensors[tensor] = headers[name][tensor]
    return tensors


def _weight_map(directory: Path) -> Mapping[str, str]:
    shards = read_json(directory, INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
        raise ValueError(
            f"weight_map must be an object from tensors to files in {directory / INDEX}, "
            f"got {type(shards).__name__}"
        )
    return shards


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one file."""
    safetensors = import_safetensors()
    regular_file(path)
    try:
        with safetensors.safe_open(path, framework="np") as file:
            names = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            return {
                name: StoredTensor(path, tuple(x.get_shape()), x.get_dtype())
                for name, x in slices.items()
            }
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} must be a whole safetensors file, got {error}") from None


# Tensors: name, shape and orientation of each parameter.


def layer_number(config: DecoderConfig, path: tuple[str, ...], repeat: int) -> int:
    """Return the number, in the checkpoint, of one repetition of a member of the block."""
    stack, member = config.stack_of(path[1]), int(path[1])
    return stack.first_layer + repeat * len(stack.block) + member - stack.first_member


def stored_name(path: tuple[str, ...]) -> str:
    """Return a tensor's name without the prefix of the model or the layer."""
    *module, leaf = path
    if EXPERTS in path:
        return ".".join(module) + ("" if leaf == "kernel" else f"_{leaf}")
    return ".".join([*module, leaf if module == ["router"] else LEAVES.get(leaf, leaf)])


def _fused_name(config: DecoderConfig, path: tuple[str, ...]) -> str | None:
    """Return the module of the tensor that a projection shares with others; None: it does not."""
    if EXPERTS in path or path[-1] != "kernel":
        return None
    names = FAMILIES[config.model_type].fused
    return next((name for name in names if path[-2] in FUSED[name]), None)


def stored_together(config: DecoderConfig, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List the parameters in a parameter's tensor, side by side: itself, and others if fused."""
    name = _fused_name(config, path)
    return [path] if name is None else [(*path[:-2], part, path[-1]) for part in FUSED[name]]


def stored_outputs(
    config: DecoderConfig, path: tuple[str, ...], table: Mapping[tuple[str, ...], Parameter]
) -> tuple[int, int]:
    """Return where in its tensor a parameter's outputs begin, and how many the tensor has."""
    together = stored_together(config, path)
    sizes = [table[other].shape[-1] for other in together]
    return sum(sizes[: together.index(path)]), sum(sizes)


def stored_names(
    config: DecoderConfig, path: tuple[str, ...], parameter: Parameter, prefix: str
) -> list[str]:
    """Return the names of one leaf's tensors: one, or one per repetition of the block."""
    module = parameter.path
    if fused := _fused_name(config, path):
        module = (*module[:-2], fused, module[-1])
    norms = FAMILIES[config.model_type].norm_names
    name = stored_name(tuple(norms.get(part, part) for part in module))
    if path[0] == "layers":
        repeats = config.stack_of(path[1]).repeats
        numbers = (layer_number(config, path, r) for r in range(repeats))
        return [f"{prefix}layers.{number}.{name}" for number in numbers]
    if path[0] == "lm_head":
        return [HEADS[1] if prefix == "language_model.model." else HEADS[0]]
    return [prefix + name]


def names_by_expert(name: str, experts: int) -> list[tuple[str, ...]]:
    """Return the names of the tensors of each expert, where they are not stored in one."""
    layer, projection = name.rsplit(".", 1)
    split = {"gate_up_proj": ("gate_proj", "up_proj")}.get(projection, (projection,))
    return [tuple(f"{layer}.{e}.{part}.weight" for part in split) for e in range(experts)]


def stored_prefix(stored: Collection[str]) -> str:
    """Return the prefix of the text model's tensors.

    It may be part of a larger model, or saved without its head, as Qwen3-Embedding is.
    """
    return next((p for p in OTHER_PREFIXES if p + EMBEDDING in stored), PREFIX)


def carried_tensors(config: DecoderConfig, stored: Iterable[str]) -> list[str]:
    """List the tensors that the text model does not read.

    These are those of an enclosing model, those that predict further tokens, and the projections of
    layers that reuse keys and values: some checkpoints have them.
    """
    names, further = sorted(stored), f"{PREFIX}layers.{config.layers}."
    carried = tuple(x.format(layers=config.layers) for x in FAMILIES[config.model_type].carried)
    if f"{further}eh_proj.weight" not in names:  # a layer like those before: these alone are read
        carried = tuple(x for x in carried if x != further)
    reusing = config.stacks[-1].layers if config.reusing_layers else slice(0)
    numbers = range(config.layers)[reusing]
    unused = tuple(
        f"layers.{number}.self_attn.{name}."
        for number in numbers
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    prefix = stored_prefix(names)
    return [
        name
        for name in names
        if name.startswith(carried) or name.startswith(tuple(prefix + x for x in unused))
    ]


def first_layers(stored: Mapping[str, StoredTensor], count: int) -> dict[str, StoredTensor]:
    """Leave out the tensors of further layers."""
    start = f"{stored_prefix(stored)}layers."
    return {
        name: tensor
        for name, tensor in stored.items()
        if not name.startswith(start) or int(name.removeprefix(start).partition(".")[0]) < count
    }


def match_tensors(
    config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """Pair every parameter with its tensors; refuse missing, extra and misshapen ones.

    Returns:
        For each parameter the tensors of each layer: one, or those of all experts.
    """
    prefix = stored_prefix(stored)
    names: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    table = parameter_table(config)
    for path, p in table.items():
        p = p._replace(shape=(*p.shape[:-1], stored_outputs(config, path, table)[1]))
        names[path], shape = [], stored_shape(p)
        for name in stored_names(config, path, p, prefix):
            group: tuple[str, ...] = (name,)
            if EXPERTS in path and p.transposed and name not in stored:
                by_expert = names_by_expert(name, shape[0])
                group = tuple(itertools.chain(*by_expert))
                shape = (shape[1] // len(by_expert[0]), shape[2])
            names[path].append(group)
            wanted |= dict.fromkeys(group, shape)
            shape = stored_shape(p)
    ignored = set(carried_tensors(config, stored))
    # Llama 2's checkpoints have rotary frequencies, which transformers computes anew as well.
    ignored |= {name for name in stored if name.endswith(".rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.update(HEADS)
    _refuse("hold all tensors of the model, got none named", wanted.keys() - stored.keys())
    _refuse("hold no tensors but the model's, got", stored.keys() - wanted.keys() - ignored)
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {stored[name].shape}")
        check_dtype(name, stored[name])
    return names


def check_dtype(name: str, tensor: StoredTensor) -> None:
    """Refuse tensors of a type that parameters do not have."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} must have a type of {', '.join(DTYPES)}, got {tensor.dtype}")


def _refuse(requirement: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        raise ValueError(f"the checkpoint must {requirement} {', '.join(listed[:3])}{rest}")


def stored_shape(parameter: Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter's tensor (of one layer)."""
    values = np.broadcast_to(np.False_, parameter.shape)
    return to_stored(parameter.path, values, transposed=parameter.transposed).shape


def to_stored(path: tuple[str, ...], values: np.ndarray, *, transposed: bool = True) -> np.ndarray:
    """Transpose a parameter of one layer to the orientation of checkpoints; a view if possible."""
    if "conv1d" in path:
        return values.T[:, None]
    return values.swapaxes(-1, -2) if transposed and is_transposed(path) else values


def is_transposed(path: tuple[str, ...]) -> bool:
    """Whether checkpoints hold a matrix with exchanged axes."""
    return "conv1d" not in path and path[-1] in _TRANSPOSED


def read_part(
    path: tuple[str, ...],
    tensors: Sequence[Any],
    part: tuple[slice, ...],
    width: int,
    first: int = 0,
    transposed: bool = True,
) -> np.ndarray:
    """Read a part of a parameter from its tensors, and only that part of the files.

    Args:
        path: keys from the root.
        tensors: one, or those of all experts.
        part: of the parameter, of one layer.
        width: the size of the parameter's last axis.
        first: the parameter's first output in a tensor that holds others, too.
        transposed: see `Parameter`.
    """
    if len(tensors) > 1:
        return np.stack([_read_expert(path, tensors, e, part[1:], width) for e in _range(part[0])])
    (stored,) = tensors
    if "conv1d" in path:
        return stored[part[1], :, part[0]][:, 0].T
    if path[-1] not in _TRANSPOSED or not transposed:
        return stored[part]
    outputs = slice(part[-1].start + first, part[-1].stop + first)
    return stored[*part[:-2], outputs, part[-2]].swapaxes(-1, -2)


def _range(part: slice) -> range:
    return range(part.start, part.stop)


def _read_expert(
    path: tuple[str, ...], tensors: Sequence[Any], expert: int, part: tuple[slice, ...], width: int
) -> np.ndarray:
    """Read a part of one expert's matrix from its tensors, which lie side by side in it."""
    each = 2 if "gate_up_proj" in path else 1
    rows, columns = part
    size, pieces = width // each, []
    for i, tensor in enumerate(tensors[expert * each : (expert + 1) * each]):
        start, stop = max(columns.start - i * size, 0), min(columns.stop - i * size, size)
        if start < stop:
            pieces.append(tensor[start:stop, rows].T)
    return np.concatenate(pieces, axis=1)
