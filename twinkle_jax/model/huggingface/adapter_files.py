"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.lora import LoraConfig, adapted_kernels, read_lora_config, walk
from twinkle_jax.model.decoder.parameters import Params, nest
from twinkle_jax.model.huggingface.atomic_directory import replace_directory
from twinkle_jax.model.huggingface.checkpoint_files import (
    import_safetensors,
    inside,
    locate,
    read_json,
)
from twinkle_jax.model.huggingface.checkpoint_names import layer_number

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model.model.layers"


def adapter_tensors(config: DecoderConfig, adapter: Params) -> dict[str, np.ndarray]:
    """Name the adapters of each layer as PEFT does; A is [rank, in] there, and B [out, rank]."""
    tensors = {}
    for path, leaf in walk(adapter):
        stacked = np.asarray(leaf)
        for repeat, values in enumerate(stacked):
            name = _name(config, path, repeat)
            tensors[name] = np.ascontiguousarray(values.T)
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
    strangers = {p.name for p in target.iterdir()} - {CONFIG, WEIGHTS} if target.exists() else ()
    if strangers:
        raise ValueError(f"{target} holds {sorted(strangers)[0]!r}; give the adapter its own")
    targets = sorted({path[-1] for path in adapted_kernels(config, lora)})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": targets,
        "use_rslora": lora.use_rslora,
        "lora_dropout": 0.0,
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
    lora = read_lora_config(read_json(place, CONFIG))
    try:
        stored = safetensors.numpy.load_file(inside(place, WEIGHTS))
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{place / WEIGHTS} is damaged or missing: {error}") from None
    flat: dict[tuple[str, ...], Any] = {}
    for path, (width, out) in adapted_kernels(config, lora).items():
        for leaf, shape in (("lora_A", (lora.r, width)), ("lora_B", (out, lora.r))):
            full = (*path, leaf)
            names = [_name(config, full, repeat) for repeat in range(config.repeats)]
            rows = [_checked(name, stored.pop(name, None), shape).T for name in names]
            flat[full] = jnp.asarray(np.stack(rows), jnp.float32)
    if stored:
        raise ValueError(f"tensors that the adapter does not have: {sorted(stored)[0]}")
    return lora, nest(flat)


def _checked(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    if values is None:
        raise ValueError(f"missing tensor: {name}")
    if values.shape != shape:
        raise ValueError(f"expected {name} of shape {shape}, got {values.shape}")
    array = np.asarray(values, np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds NaN or infinity")
    return array
