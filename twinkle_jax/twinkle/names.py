"""What Twinkle's names mean here: ids of hubs, classes by name, options, sub-modules."""

import inspect
import os
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = "docs/from_twinkle.md"

# Options of Twinkle's that change no result here: XLA makes kernels and places memory, JAX runs one
# process a host, and every function sees the rows of all devices.
IGNORED: dict[str, tuple[str, ...]] = {
    "DataLoader": (
        "num_workers", "persistent_workers", "pin_memory", "prefetch_factor", "timeout",
    ),
    "Dataset": (
        "batched", "desc", "keep_in_memory", "load_from_cache_file", "num_proc",
        "writer_batch_size",
    ),
    "DeviceMesh": ("sequence_parallel",),
    "MegatronModel": (
        "load_weights", "recompute_granularity", "recompute_method", "recompute_modules",
        "recompute_num_layers", "use_distributed_optimizer", "variable_seq_lengths",
    ),
    "TransformersModel": (  # sizes that do not fit are an error
        "attn_implementation", "ddp_config", "fsdp_config", "gradient_checkpointing",
        "ignore_mismatched_sizes", "low_cpu_mem_usage", "max_loras", "max_r",
        "memory_efficient_init", "strategy", "trust_remote_code",
    ),
    "set_optimizer": ("foreach", "fused"),
    "vLLMSampler": (  # in `engine_args`
        "disable_log_stats", "enable_lora", "enable_prefix_caching", "enable_sleep_mode",
        "enable_tower_connector_lora", "enforce_eager", "gpu_memory_utilization",
        "limit_mm_per_prompt", "max_lora_rank", "max_logprobs", "max_loras",
        "max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size", "trust_remote_code",
    ),
}  # fmt: skip
_WARNED: set[str] = set()


def refuse(owner: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError for options, which are not followed, unless `IGNORED` has them for the owner.

    For the owner `Dataset.map`, the entry of `Dataset` counts.
    """
    ignored = IGNORED.get(owner.partition(".")[0], ())
    for name, value in options.items():
        if name not in ignored:
            raise TypeError(f"{owner} has no option {name!r}, got {value!r}; see {PAGE}")


def warn_once(message: str) -> None:
    """Warn what a part of a script means here, the first time that it is used."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(f"{message}; see {PAGE}", UserWarning, stacklevel=3)


def add_submodules(module: str, *names: str) -> None:
    """Let Twinkle's sub-modules of a module be imported: `reward.base` is `reward` itself."""
    for name in names:
        sys.modules[f"{module}.{name}"] = sys.modules[module]


def local_id(model_id: Any, argument: str = "model_id") -> Any:
    """Return the path or the Hugging Face id for an id of Twinkle's.

    Args:
        model_id: a path, `hf://owner/name`, or `ms://owner/name`, which is a directory in
            ModelScope's cache (`MODELSCOPE_CACHE` or `~/.cache/modelscope/hub`); a model that is
            not there is downloaded by ModelScope's client, where that is installed. Anything that
            is not a string stays as it is.
        argument: its name in errors; `dataset_id` looks among data sets.

    Raises:
        ValueError: for an `ms://` id that is not in the cache and cannot be downloaded.
    """
    if not isinstance(model_id, str):
        return model_id
    if model_id.startswith("ms://"):
        return _modelscope_directory(model_id.removeprefix("ms://"), argument)
    return model_id.removeprefix("hf://")


def _modelscope_directory(name: str, argument: str) -> str:
    kind = "datasets" if argument == "dataset_id" else "models"
    root = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub").expanduser()
    # Its client writes dots in names as three underscores; older ones had no directory of a kind.
    folders = [part / x for part in (root / kind, root) for x in (name.replace(".", "___"), name)]
    for folder in folders:
        if folder.is_dir() and any(folder.iterdir()):
            return str(folder)
    if kind == "models":
        try:
            client = import_module("modelscope")
        except ImportError:
            pass
        else:
            return str(client.snapshot_download(name))
    flag = "--dataset" if kind == "datasets" else "--model"
    raise ValueError(
        f"{argument} must be a directory or an id of the Hugging Face hub, hf://owner/name, or be "
        f"in ModelScope's cache, {folders[0]}, got 'ms://{name}': download it by `modelscope "
        f"download {flag} {name} --local_dir DIRECTORY` and name that directory; see {PAGE}"
    )


def class_of(name: str, module: str) -> type:
    """Return a public class of a module by its name; raises ValueError if it has none."""
    home = import_module(f"twinkle_jax.twinkle.{module}")
    classes = {
        x: y
        for x, y in vars(home).items()
        if isinstance(y, type) and y.__module__ == home.__name__ and not x.startswith("_")
    }
    if name not in classes:
        raise ValueError(f"{name!r} must be one of {', '.join(sorted(classes))}; see {PAGE}")
    return classes[name]


def construct(kind: Any, module: str, **options: Any) -> Any:
    """Make an object of a class, or of its name in a module; return any other object as it is.

    Raises:
        ValueError: for a name that the module does not have.
        TypeError: for options with an object.
    """
    if isinstance(kind, str):
        kind = class_of(kind, module)
    if inspect.isclass(kind):
        return kind(**options)
    if options:
        raise TypeError(f"options must go with a class or a name, got {options} with {kind!r}")
    return kind
