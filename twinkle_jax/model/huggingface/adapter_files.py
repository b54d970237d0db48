"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.lora import LoraConfig, adapted_kernels, read_lora_config, walk
from twinkle_jax.model.decoder.parameters import Params, nest
from twinkle_jax.model.huggingface.atomic_directory import check_target, replace_directory
from twinkle_jax.model.huggingface.checkpoint_files import (
    import_safetensors,
    inside,
    locate,
    read_json,
    regular_file,
)
from twinkle_jax.model.huggingface.checkpoint_names import layer_number, to_stored
from twinkle_jax.model.huggingface.checkpoint_read import all_finite
from twinkle_jax.model.huggingface.checkpoint_write import host_tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model.model.layers"


def adapter_tensors(config: DecoderConfig, adapter: Params) -> dict[str, np.ndarray]:
    """Name the adapters of each layer as PEFT does, and turn them as they stand there.

    Raises:
        ValueError: if one holds NaN or infinity.
    """
    tensors = {}
    for path, leaf in walk(adapter):
        for repeat, values in enumerate(np.asarray(leaf)):
            name = _name(config, path, repeat)
            tensors[name] = host_tensor(name, path, values, jnp.dtype(values.dtype))
    return tensors


def _name(config: DecoderConfig, path: tuple[str, ...], repeat: int) -> str:
    number = layer_number(config, path, repeat)
    return f"{_PREFIX}.{number}.{'.'.join(path[2:])}.weight"


def save_adapter(
    directory: str | Path,
    config: DecoderConfig,
    lora: LoraConfig,
    adapter: Params,
    *,
    base: str | None = None,
) -> None:
    """Write an adapter that PEFT loads; an interrupted save leaves an older one whole."""
    safetensors = import_safetensors()
    target = Path(directory).expanduser()
    check_target(target)
    strangers = {p.name for p in target.iterdir()} - {CONFIG, WEIGHTS} if target.exists() else ()
    if strangers:
        raise ValueError(
            f"directory must hold nothing but an adapter, got {sorted(strangers)[0]!r} in {target}"
        )
    targets = sorted({path[-1] for path in adapted_kernels(config, lora)})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": targets,
        "use_rslora": lora.use_rslora,
        "lora_dropout": lora.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with replace_directory(target) as fresh:
        safetensors.numpy.save_file(
            adapter_tensors(config, adapter), fresh / WEIGHTS, metadata={"format": "pt"}
        )
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (fresh / CONFIG).write_text(text, encoding="utf-8")


def load_adapter(directory: str | Path, config: DecoderConfig) -> tuple[LoraConfig, dict[str, Any]]:
    """Read an adapter in PEFT's format; every tensor must be there, and no other.

    Raises:
        ValueError: for tensors that are missing, extra, misshapen or not finite, and options of
            PEFT that are not supported.
    """
    safetensors = import_safetensors()
    place = locate(directory)
    lora = read_lora_config(read_json(place, CONFIG), new=False)
    try:
        stored = safetensors.numpy.load_file(regular_file(inside(place, WEIGHTS)))
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{place / WEIGHTS} must be a whole safetensors file, got {error}"
        ) from None
    flat: dict[tuple[str, ...], Any] = {}
    for path, (width, out) in adapted_kernels(config, lora).items():
        for leaf, shape in (("lora_A", (lora.r, width)), ("lora_B", (out, lora.r))):
            full = (*path, leaf)
            names = [_name(config, full, repeat) for repeat in range(config.repeats)]
            rows = [_checked(name, stored.pop(name, None), shape) for name in names]
            flat[full] = jnp.asarray(np.stack([to_stored(full, row) for row in rows]))
    if stored:
        raise ValueError(
            f"{place / WEIGHTS} must hold no tensors but the adapter's, got {sorted(stored)[0]}"
        )
    return lora, nest(flat)


def _checked(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    if values is None:
        raise ValueError(f"{name} must be in the adapter, got no tensor of that name")
    if values.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {values.shape}")
    with np.errstate(over="ignore"):
        array = np.asarray(values, np.float32)
    if not all_finite(array):
        raise ValueError(f"{name} must be finite in float32, got NaN, infinity or larger values")
    return array
