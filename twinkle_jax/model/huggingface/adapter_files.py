"""Adapters in PEFT's format: `adapter_config.json`, `adapter_model.safetensors`, tokenizer."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from twinkle_jax.data import Template
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.lora import (
    ALL_LINEAR,
    TOWERS,
    LoraConfig,
    adapted_kernels,
    check_adapter,
    read_lora_config,
    walk,
)
from twinkle_jax.model.decoder.parameters import Params, nest, stacked_axis
from twinkle_jax.model.huggingface.checkpoint import all_finite, host_tensor, keep_files
from twinkle_jax.model.huggingface.checkpoint_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TOKENIZER_FILES,
    check_dtype,
    import_safetensors,
    inside,
    layer_number,
    locate,
    read_headers,
    read_json,
    to_stored,
)
from twinkle_jax.model.huggingface.saving import check_target, gather, replace_directory, write_once

_PREFIX = "base_model.model.model."
_NESTED = f"{_PREFIX}language_model."  # of a model with towers
_README = "README.md"  # PEFT's model card


class SavesTokenizer(Protocol):
    """A tokenizer of `twinkle_jax.data` or of transformers."""

    def save_pretrained(self, directory: str | Path) -> Any:
        """Write the tokenizer's files."""


def save_adapter(
    directory: str | Path,
    config: DecoderConfig,
    lora: LoraConfig,
    adapter: Params,
    *,
    base: str | None = None,
    tokenizer: SavesTokenizer | Template | None = None,
) -> None:
    """Write an adapter that PEFT, vLLM and `load_adapter` read.

    The directory is replaced in one step: an interrupted save leaves an older adapter intact.
    Tensors of a vision-language checkpoint of Gemma have the names of the whole model, which PEFT
    opens. Tokenizer files and a README of an older adapter are kept. If the adapter is spread over
    several processes, all of them must call this; process 0 writes.

    Args:
        directory: where to write; an earlier adapter there is replaced.
        config: the decoder that the adapter belongs to.
        lora: rank, scale and adapted projections; `all-linear` is written as their names.
        adapter: the tree of `lora_A` [layers, in, rank] and `lora_B` [layers, rank, out].
        base: directory or hub id of the checkpoint that the adapter belongs to, which PEFT loads.
        tokenizer: saved beside the adapter, if given; for a template, its tokenizer with the
            template's own chat template.

    Raises:
        ValueError: if the adapter is not of this rank and for these projections, or holds NaN or
            infinity, or the directory is a file, a mount point or the current directory, or holds
            anything but an adapter and a tokenizer.
        RuntimeError: on other processes, for an error of process 0.
        ImportError: if safetensors is not installed.

    Example:
        >>> import jax, tempfile
        >>> from twinkle_jax.model import LoraConfig, load_adapter, parse_config, save_adapter
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> lora = LoraConfig(r=4, lora_alpha=8, target_modules=("q_proj",))
        >>> pair = {"lora_A": jax.numpy.ones((2, 32, 4)), "lora_B": jax.numpy.ones((2, 4, 32))}
        >>> adapter = {"layers": {"0": {"self_attn": {"q_proj": pair}}}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(folder + "/adapter", config, lora, adapter, base="Qwen/Qwen2-0.5B")
        ...     load_adapter(folder + "/adapter", config)[0] == lora
        True
    """
    import_safetensors()
    check_adapter(config, lora, adapter)
    target = Path(directory).expanduser()
    leaves = list(walk(adapter))
    gathers = [partial(gather, leaf) for _, leaf in leaves]

    def write(gathers: Any) -> None:
        check_target(target)
        others = sorted(p.name for p in target.iterdir()) if target.exists() else []
        allowed = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, _README, *TOKENIZER_FILES}
        if unknown := [name for name in others if name not in allowed]:
            raise ValueError(
                f"directory must hold nothing but an adapter, got {unknown[0]!r} in {target}: it "
                "would be lost"
            )
        values = [(path, fetch()) for (path, _), fetch in zip(leaves, gathers, strict=True)]
        tensors = _named_tensors(config, values)
        with replace_directory(target) as fresh:
            # Its `save_file` raises no OSError, as for a full disk.
            content = import_safetensors().numpy.save(tensors, metadata={"format": "pt"})
            (fresh / ADAPTER_WEIGHTS).write_bytes(content)
            text = json.dumps(_peft_config(config, lora, base), indent=2, sort_keys=True) + "\n"
            (fresh / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
            save_tokenizer(tokenizer, fresh)
            if tokenizer is None:
                keep_files(target, fresh, TOKENIZER_FILES)
            keep_files(target, fresh, [_README])

    write_once(f"save_adapter to {directory}", adapter, gathers, write)


def adapter_tensors(config: DecoderConfig, adapter: Params) -> dict[str, np.ndarray]:
    """Copy an adapter to the host, with PEFT's names and orientation.

    Raises:
        ValueError: if it holds NaN or infinity.
    """
    return _named_tensors(config, [(path, gather(leaf)) for path, leaf in walk(adapter)])


def _named_tensors(
    config: DecoderConfig, leaves: list[tuple[tuple[str, ...], np.ndarray]]
) -> dict[str, np.ndarray]:
    prefix, tensors = _NESTED if _keeps_towers(config) else _PREFIX, {}
    for path, stacked in leaves:
        each = stacked if stacked_axis(config, path) else stacked[None]
        for name, values in zip(_tensor_names(config, path, prefix), each, strict=True):
            tensors[name] = host_tensor(name, path, values, dtype=values.dtype)
    return tensors


def _tensor_names(config: DecoderConfig, path: tuple[str, ...], prefix: str) -> list[str]:
    """Return the names of one leaf's tensors: one, or one for each layer."""
    if not stacked_axis(config, path):
        return [f"{prefix}{'.'.join(path)}.weight"]
    numbers = (layer_number(config, path, i) for i in range(*stacked_axis(config, path)))
    return [f"{prefix}layers.{number}.{'.'.join(path[2:])}.weight" for number in numbers]


def _keeps_towers(config: DecoderConfig) -> bool:
    """Whether `AutoModelForCausalLM` opens a checkpoint with its towers, as Gemma's."""
    return json.loads(config.original or "{}").get("model_type") in ("gemma3", "gemma4")


def _peft_config(config: DecoderConfig, lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`, PEFT's defaults included."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": sorted({path[-1] for path in adapted_kernels(config, lora)}),
        "use_rslora": lora.use_rslora,
        "lora_dropout": lora.lora_dropout,
        "bias": "none",
        "exclude_modules": TOWERS if _keeps_towers(config) else None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
    }


def save_tokenizer(tokenizer: SavesTokenizer | Template | None, directory: Path) -> None:
    """Write a tokenizer, if there is one; of a template, with the template's own chat template."""
    if not isinstance(tokenizer, Template):
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        return
    tokenizer.tokenizer.save_pretrained(directory)
    template = tokenizer.chat_template
    if template is not None and template.source != tokenizer.tokenizer.chat_template:
        # transformers and vLLM prefer this file to the tokenizer's own template.
        (directory / "chat_template.jinja").write_text(template.source, encoding="utf-8")


def load_adapter(directory: str | Path, config: DecoderConfig) -> tuple[LoraConfig, dict[str, Any]]:
    """Read an adapter in PEFT's format.

    Args:
        directory: of the adapter, or a hub id, which needs huggingface_hub. Its tensors have the
            names of the text model, or of the vision-language model around it.
        config: the decoder that the adapter belongs to.

    Returns:
        Its configuration, and the tree of `lora_A` [layers, in, rank] and `lora_B` [layers, rank,
        out] in float32, on the default device.

    Raises:
        ValueError: for missing, extra or misshapen tensors, types that `load_pretrained` does not
            read, values that are not finite, and unsupported options of PEFT.
        ImportError: if safetensors is not installed.
    """
    safetensors = import_safetensors()
    source = locate(directory, argument="directory")
    lora = read_lora_config(read_json(source, ADAPTER_CONFIG), new=False)
    file = inside(source, ADAPTER_WEIGHTS)
    for name, tensor in read_headers(file).items():
        check_dtype(name, tensor)
    stored = safetensors.numpy.load_file(file)
    lora = _with_named_targets(lora, config, stored)
    prefix = _NESTED if any(name.startswith(_NESTED) for name in stored) else _PREFIX
    flat: dict[tuple[str, ...], Any] = {}
    for path, (width, out) in adapted_kernels(config, lora).items():
        for leaf, shape in (("lora_A", (lora.r, width)), ("lora_B", (out, lora.r))):
            full_path = (*path, leaf)
            names = _tensor_names(config, full_path, prefix)
            layers = [_checked(name, stored.pop(name, None), shape) for name in names]
            # Transposing is its own inverse, so `to_stored` also converts back.
            values = np.stack([to_stored(full_path, x) for x in layers])
            flat[full_path] = jnp.asarray(values if stacked_axis(config, path) else values[0])
    if stored:
        raise ValueError(
            f"{source / ADAPTER_WEIGHTS} must hold no tensors but the adapter's, "
            f"got {sorted(stored)[0]}"
        )
    return lora, nest(flat)


def _with_named_targets(
    lora: LoraConfig, config: DecoderConfig, stored: Iterable[str]
) -> LoraConfig:
    """Name the projections that PEFT's whole names, ends of names or a pattern have matched.

    What a pattern matched, the tensors say: running one from a file could take forever.
    """
    targets = lora.target_modules
    names = (targets,) if isinstance(targets, str) else targets
    linear = adapted_kernels(config, replace(lora, target_modules=ALL_LINEAR))
    modules = [name.rpartition(".lora_")[0] for name in stored if ".lora_" in name]
    if targets == ALL_LINEAR or {path[-1] for path in linear}.issuperset(names) or not modules:
        return lora
    ends = ("",) if isinstance(targets, str) else tuple(f".{target}" for target in targets)
    if all(module.endswith(ends) for module in modules) and all(
        any(module.endswith(end) for module in modules) for end in ends
    ):
        return replace(lora, target_modules=tuple({name.rpartition(".")[2] for name in modules}))
    return lora


def _checked(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    if values is None:
        raise ValueError(f"{name} must be in the adapter, got no such tensor")
    if values.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {values.shape}")
    with np.errstate(over="ignore"):
        array = np.asarray(values, np.float32)
    if not all_finite(array):
        raise ValueError(f"{name} must be finite in float32, got NaN, infinity or larger values")
    return array
