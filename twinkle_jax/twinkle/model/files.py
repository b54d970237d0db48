"""Checkpoints, adapters and training states that a model writes and reads."""

import shutil
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from twinkle_jax.model import (
    Decoder,
    load_adapter,
    merge_adapter,
    parse_config,
    save_adapter,
    save_pretrained,
    with_adapter,
)
from twinkle_jax.model.huggingface.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    locate,
    read_json,
)
from twinkle_jax.model.huggingface.saving import check_target, replace_directory
from twinkle_jax.training.checkpoint import find_fault, read_checkpoint, write_checkpoint
from twinkle_jax.twinkle.model.policy import AdapterPolicy, OptimizerGroup

TRAINING_STATE = "training_state"  # directory of optimizer state, gradients, key and counters
REPLACED_FILES = ("*.safetensors", "*.safetensors.index.json", TRAINING_STATE)
COUNTERS = ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")


def write_weights(
    model: AdapterPolicy,
    group: OptimizerGroup,
    directory: Path,
    *,
    merge: bool = False,
    dtype: DTypeLike | None = None,
) -> None:
    """Write a checkpoint, or the adapter in PEFT's format, with the template's tokenizer."""
    if group.lora is not None and not merge:
        base = model.source if isinstance(model.model_id, Decoder) else model.model_id
        tokenizer = getattr(group.template, "tokenizer", None)
        save_adapter(
            directory,
            model.config,
            group.lora,
            group.state.params,
            base=None if base is None else str(base),
            tokenizer=tokenizer,
        )
        return
    params = jax.jit(merge_adapter)(model.merged(group))
    save_pretrained(Decoder(model.config, params, source=model.source), directory, dtype=dtype)


def save_run(
    model: AdapterPolicy, group: OptimizerGroup, target: Path, consumed_train_samples: int
) -> None:
    """Write weights and all that the next step depends on, and replace the directory at once."""
    group.needed_optimizer()
    check_target(target)
    counters = {
        "cur_step": group.cur_step,
        "gradient_accumulation_steps": group.gradient_accumulation_steps,
        "consumed_train_samples": consumed_train_samples,
        "lr": group.lr,
        "lr_steps": group.lr_steps,
    }
    with replace_directory(target) as fresh:
        if target.exists():  # keep the user's files
            shutil.copytree(
                target, fresh, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*REPLACED_FILES)
            )
        weights = fresh / ".weights"
        write_weights(model, group, weights)
        for path in weights.iterdir():
            path.replace(fresh / path.name)
        weights.rmdir()
        (fresh / TRAINING_STATE).mkdir()
        write_checkpoint(fresh / TRAINING_STATE, _training_state(model, group), counters)


def read_weights(model: AdapterPolicy, name: str | None, directory: Path | str) -> None:
    """Read parameters or an adapter; optimizer state and gradients are reset."""
    path = locate(directory)
    if (path / ADAPTER_CONFIG).exists():
        lora, adapter = load_adapter(path, model.config)
        if not model.has_adapters:
            return model.add_group(name or "default", lora, adapter)
        group = model.group(name)
        group.lora, group.frozen = lora, with_adapter(model.base, model.config, lora)
        return model.restart(group, adapter)
    group = model.group(name)
    if group.lora is not None:
        raise ValueError(f"{directory} must hold an adapter, got a checkpoint of all parameters")
    if parse_config(read_json(path, CONFIG)) != model.config:
        raise ValueError(
            f"{directory} must hold a model of this configuration, got another configuration"
        )
    group.drop_training_state()  # free its memory for the new parameters
    try:
        return model.restart(group, model.read(path).params)
    except BaseException:
        model.restart(group, group.state.params)
        raise


def resume(
    model: AdapterPolicy, name: str | None, checkpoint_dir: Path | str, only_model: bool
) -> dict[str, Any]:
    """Read weights and, unless `only_model`, the training state; return its counters."""
    path = locate(checkpoint_dir)
    saved = path / TRAINING_STATE
    if not saved.is_dir():
        raise ValueError(
            f"{path} must hold {TRAINING_STATE}, got none: save(…, save_optimizer=True) writes it"
        )
    fault = find_fault(saved)
    if fault is not None:
        raise ValueError(f"{saved} must be complete: {fault}")
    if not only_model:
        model.group(name).needed_optimizer()
    read_weights(model, name, path)
    counters = read_json(saved, "facts.json")
    if not only_model:
        _read_training_state(model, model.group(name), saved, counters)
    return {key: counters[key] for key in COUNTERS}


def _read_training_state(
    model: AdapterPolicy, group: OptimizerGroup, saved: Path, counters: dict[str, Any]
) -> None:
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        _training_state(model, group),
    )
    params = group.state.params
    group.drop_training_state()
    try:
        arrays, _ = read_checkpoint(saved, like)
    except (ValueError, TypeError) as error:
        model.restart(group, params)
        raise ValueError(f"{saved} must be of a run with this optimizer: {error}") from error
    except BaseException:
        model.restart(group, params)
        raise
    model.key = arrays.pop("key")
    group.state = group.state._replace(**arrays)
    group.cur_step = counters["cur_step"]
    group.gradient_accumulation_steps = counters["gradient_accumulation_steps"]
    group.lr, group.lr_steps = counters["lr"], counters["lr_steps"]


def _training_state(model: AdapterPolicy, group: OptimizerGroup) -> dict[str, Any]:
    state = group.state._asdict() | {"key": model.key}
    del state["params"]
    return state
