"""The files of a Hugging Face checkpoint: where they are, and which are refused."""

import json
import re
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

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


class StoredTensor(NamedTuple):
    """A tensor's file, shape and type, from the header of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def import_safetensors() -> ModuleType:
    """Import safetensors, or say how to get it."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(f"checkpoints need safetensors: {_INSTALL}") from error
    module: ModuleType = safetensors
    return module


def locate(path_or_id: str | Path, *, argument: str = "path_or_id") -> Path:
    """Return a local directory as it is; download a hub id, unless it is in the cache.

    Args:
        path_or_id: a directory or a hub id.
        argument: what the caller's user calls this, for errors: `"model_id"`, `"--model"`.
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
    weights = ["model*.safetensors", INDEX, ADAPTER_WEIGHTS]
    patterns = [CONFIG, ADAPTER_CONFIG, *weights, *TOKENIZER_FILES]
    return Path(snapshot_download(path_or_id, allow_patterns=patterns))


def inside(directory: Path, name: str) -> Path:
    """Join a file name to a directory; refuse paths, and links that lead out of it."""
    if not name or name in (".", "..") or Path(name).name != name or "\\" in name:
        raise ValueError(f"file names must be plain, and inside {directory}, got {name!r}")
    resolved = directory.resolve()
    roots = [resolved]
    if resolved.parent.name == "snapshots":  # the hub's cache links to files in `blobs`
        roots.append(resolved.parent.parent / "blobs")
    path = directory / name
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise ValueError(f"{name!r} must stay inside {directory}, got a link to {path.resolve()}")
    return path


def regular_file(path: Path) -> Path:
    """Refuse anything but a regular file before it is opened: a FIFO would block for ever."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ValueError(f"{path.parent} must hold {path.name}, got nothing of that name") from None
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
    except (ValueError, RecursionError) as error:  # of bytes, of syntax, of integers' length
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
        return _headers(inside(directory, SINGLE))
    if not inside(directory, INDEX).exists():
        pickled = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLED)
        hint = f"; {pickled[0]} is pickled, and pickles are never read" if pickled else ""
        raise ValueError(f"{directory} must hold {SINGLE} or {INDEX}, got neither{hint}")
    shards = _weight_map(directory)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(shards.values())):
        tensors |= _headers(inside(directory, name))
    for tensor, name in shards.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise ValueError(
                f"{INDEX} must name the file of each tensor, got {tensor!r} in {name}, "
                "which does not hold it"
            )
    return tensors


def _weight_map(directory: Path) -> Mapping[str, str]:
    shards = read_json(directory, INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
        raise ValueError(
            f"weight_map must be an object from tensors to files in {directory / INDEX}, "
            f"got {type(shards).__name__}"
        )
    for name in set(shards.values()):
        regular_file(inside(directory, name))
    return shards


def _headers(path: Path) -> dict[str, StoredTensor]:
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


def open_files(stack: ExitStack, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Open each file once, and return the open file of each tensor."""
    safetensors = import_safetensors()
    handles = {
        file: stack.enter_context(safetensors.safe_open(file, framework="np"))
        for file in {tensor.file for tensor in stored.values()}
    }
    return {name: handles[tensor.file] for name, tensor in stored.items()}
