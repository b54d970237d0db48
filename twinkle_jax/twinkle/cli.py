"""Twinkle's `cli`: settings of a script from `.env`, environment variables, a file and flags."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twinkle_jax._package import require

_GROUPS: dict[str, dict[str, Any]] = {
    "model": {
        "model_id": None, "model_cls": None, "tokenizer_id": None, "mixed_precision": "bf16",
        "strategy": "accelerate", "memory_efficient_init": False, "gradient_checkpointing": True,
        "trust_remote_code": True, "load_weights": True, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1, "recompute_modules": None,
        "use_distributed_optimizer": True, "variable_seq_lengths": True, "ddp_config": None,
        "fsdp_config": None, "grad_scaler_config": None, "enable_liger": False,
        "enable_fused_ce": True,
    },
    "lora": {
        "use_lora": False, "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.05,
        "lora_target_modules": None, "adapter_name": "default", "lora_path": None,
    },
    "dataset": {
        "dataset_id": "", "subset_name": "default", "split": "train", "streaming": False,
        "num_proc": None, "data_slice": None, "revision": None,
    },
    "template": {
        "template_cls": None, "model_id": None, "max_length": 8192, "truncation_strategy": "raise",
        "use_chat_template": True, "enable_thinking": True, "default_system": None,
    },
    "training": {
        "max_steps": 200, "num_train_epochs": None, "batch_size": 8, "mini_batch_size": None,
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "output_dir": "./output",
        "save_steps": 50, "save_total_limit": None, "log_interval": 10, "eval_interval": None,
        "eval_samples": None, "train_samples": None, "resume_from_checkpoint": None,
        "resume_only_model": False, "ignore_data_skip": False, "seed": 42,
        "full_determinism": False, "padding_free": False,
    },
    "optimizer": {
        "optimizer_cls": "AdamW", "learning_rate": 1e-5, "weight_decay": 0.0, "adam_beta1": 0.9,
        "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
    },
    "scheduler": {
        "scheduler_cls": "CosineAnnealingLR", "num_warmup_steps": 0, "num_training_steps": None,
        "t_max": None, "eta_min": 0.0, "lr_decay_steps": None, "max_lr": None,
    },
    "loss": {
        "loss_cls": "CrossEntropyLoss", "loss_type": "sigmoid", "epsilon": 0.2,
        "epsilon_high": None, "beta": 0.1, "sft_weight": 1.0, "entropy_coef": 0.0,
        "ignore_index": -100,
    },
    "sampler": {
        "sampler_type": "vLLMSampler", "gpu_memory_utilization": 0.8, "max_model_len": None,
        "tensor_parallel_size": None, "enable_lora": False, "max_lora_rank": 32,
        "enforce_eager": False,
    },
    "sampling": {
        "max_tokens": None, "temperature": 1.0, "top_k": -1, "top_p": 1.0,
        "repetition_penalty": 1.0, "num_samples": 1, "logprobs": None, "seed": None, "stop": None,
    },
    "infra": {
        "mode": "local", "nproc_per_node": 8, "ncpu_proc_per_node": 8, "model_gpus": None,
        "sampler_gpus": None, "ref_model_gpus": None, "world_size": None, "dp_size": None,
        "fsdp_size": None, "tp_size": None, "pp_size": None, "cp_size": None, "ep_size": None,
        "etp_size": None, "ep_fsdp_size": None, "vpp_size": None, "ulysses_size": None,
        "sequence_parallel": False, "lazy_collect": True,
    },
    "server": {
        "config": None, "ray_namespace": "twinkle_cluster", "host": "0.0.0.0", "port": 8000,  # noqa: S104
        "log_level": "INFO",
    },
    "rl": {
        "num_generations": 8, "advantage_type": "GRPOAdvantage", "advantage_scale": "group",
        "reward_fns": None, "student_model_id": None, "teacher_model_id": None, "gkd_beta": 0.5,
        "gkd_temperature": 1.0, "gkd_topk": 64, "router_replay_mode": "disabled",
    },
    "checkpoint": {
        "save_optimizer": True, "merge_and_sync": True, "platform": "GPU", "lora_sync_dir": None,
    },
}  # fmt: skip
# The group and the name of a setting, by its name with the group and without; the first group that
# has a name takes it: `model_id` is the model's, `template_model_id` the template's.
_SETTINGS = {f"{group}_{name}": (group, name) for group, names in _GROUPS.items() for name in names}
for _group, _names in reversed(_GROUPS.items()):
    _SETTINGS |= {name: (_group, name) for name in _names}
_SETTINGS["lr"] = _SETTINGS["learning_rate"]
_SETTINGS["max_new_tokens"] = _SETTINGS["max_tokens"]
_SETTINGS["num_gpus"] = _SETTINGS["nproc_per_node"]
# Text without a default: `Be brief, please.` is no list, and `2024_11` no number.
_TEXTS = {
    *("model_id", "model_cls", "tokenizer_id", "lora_path", "revision", "template_cls"),
    *("default_system", "resume_from_checkpoint", "lora_sync_dir"),
    *("student_model_id", "teacher_model_id"),
}
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null", "~")),
}


class Args:
    """The settings of a script in groups, `args.model.model_id`; `extra` has unknown ones.

    `get_model_args()` and the like return the settings of a group that are not None; a model
    without `model_id` has the template's, and the reverse.
    """

    def __init__(self) -> None:
        for group, defaults in _GROUPS.items():
            setattr(self, group, SimpleNamespace(**defaults))
        self.extra: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        group = name.removeprefix("get_").removesuffix("_args")
        if name != f"get_{group}_args" or group not in _GROUPS:
            raise AttributeError(f"{name!r} must be one of {', '.join(_GROUPS)} or extra")
        known = self._group(group)
        if group in ("model", "template"):  # each takes the other's checkpoint if it has none
            other = {"model": self.template, "template": self.model}[group].model_id
            known |= {} if known.get("model_id") or not other else {"model_id": other}
        return lambda: known

    def get_lora_args(self) -> dict[str, Any]:
        """Return the arguments of PEFT's `LoraConfig`."""
        targets = {"target_modules": self.lora.lora_target_modules or "all-linear"}
        names = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
        return targets | {theirs: getattr(self.lora, name) for theirs, name in names.items()}

    def get_optimizer_args(self) -> dict[str, Any]:
        """Return the optimizer's settings, the learning rate as `lr`."""
        known = vars(self.optimizer)
        return {"lr" if name == "learning_rate" else name: x for name, x in known.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return all settings that are not None."""
        merged: dict[str, Any] = {}
        for group in _GROUPS:
            merged |= self._group(group)
        return merged | self.extra

    def _group(self, group: str) -> dict[str, Any]:
        return {k: x for k, x in vars(getattr(self, group)).items() if x is not None}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting by its name alone."""
        return self[key] if _normal(key) in _SETTINGS or key in self.extra else default

    def __getitem__(self, key: str) -> Any:
        if _normal(key) not in _SETTINGS:
            return self.extra[key]
        group, name = _SETTINGS[_normal(key)]
        return getattr(getattr(self, group), name)

    def apply(self, source: Mapping[str, Any], *, cast: bool) -> None:
        """Set the values of a source; `cast` turns strings into numbers, booleans and lists."""
        for name, raw in _flatten(source):
            value = _cast(raw) if cast else raw
            if name == "use_megatron":  # Twinkle's scripts take the strategy from it
                if _cast(value) is True:
                    self.model.strategy = "native_fsdp"
                continue
            if name not in _SETTINGS:
                self.extra[name] = value
                continue
            group, name = _SETTINGS[name]
            kind = type(_GROUPS[group][name])
            if (kind is str or name in _TEXTS) and value is not None and isinstance(raw, str):
                value = raw
            elif kind in (int, float) and isinstance(value, int | float | str):
                value = _number(name, value, kind)
            setattr(getattr(self, group), name, value)


class CLI:
    """Reads settings: flags win over `--config`, that over the environment, that over `.env`."""

    @staticmethod
    def from_args(
        argv: Sequence[str] | None = None,
        env_file: str | Path | None = None,
        config_file: str | Path | None = None,
    ) -> Args:
        """Read the settings.

        Args:
            argv: flags: `--name value`, `--name=value`, `--name` for true, `--no_name` for false;
                dashes and capitals do not matter. None for those of the program.
            env_file: a file of lines `NAME=value`; None for `.env` or `.env.local`.
            config_file: a YAML file, as `--config`.

        Raises:
            ValueError: if a setting with a number as its default gets something else.
            FileNotFoundError: if there is no such YAML file.

        Example:
            >>> args = CLI.from_args(["--model-id", "policy", "--lr=1e-4", "--rank", "4"])
            >>> args.model.model_id, args.optimizer.learning_rate, args.extra
            ('policy', 0.0001, {'rank': 4})
        """
        args = Args()
        args.apply(_read_env(env_file), cast=True)
        known = {k: x for k, x in os.environ.items() if _normal(k) in _SETTINGS}
        named = {
            k.removeprefix("TWINKLE_"): x
            for k, x in os.environ.items()
            if k.startswith("TWINKLE_") and not k.startswith("TWINKLE_JAX_")  # this package's own
        }
        args.apply(known | named, cast=True)
        flags = _read_flags(sys.argv[1:] if argv is None else argv)
        config = config_file or flags.pop("config", None)
        if config:
            args.apply(_read_yaml(Path(config)), cast=False)
        args.apply(flags, cast=True)
        return args


def _normal(key: str) -> str:
    return key.lower().replace("-", "_")


def _flatten(source: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in source.items():
        name = prefix + _normal(key)
        if isinstance(value, Mapping) and name not in ("ddp_config", "fsdp_config"):
            yield from _flatten(value, name + "_")
        else:
            yield name, value


def _cast(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return [_cast(part.strip()) for part in value.split(",")] if "," in value else value


def _number(name: str, value: float | str, kind: type) -> float:
    """Convert a setting to the type of its default; integers may be written as `1e3`."""
    if not isinstance(value, bool):  # True: a flag without a value
        with suppress(ValueError):
            if kind is float or isinstance(value, int):
                return float(value) if kind is float else int(value)
            if float(value).is_integer():
                return int(float(value))
    wanted = "an integer" if kind is int else "a number"
    raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _read_flags(argv: Sequence[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    remaining = list(argv)
    while remaining:
        flag = remaining.pop(0)
        if not flag.startswith("--"):
            continue
        name, equals, value = flag[2:].partition("=")
        if equals:
            flags[name] = value
        elif _normal(name).startswith("no_"):
            flags[name[3:]] = False
        elif remaining and not remaining[0].startswith("--"):
            flags[name] = remaining.pop(0)
        else:
            flags[name] = True
    return flags


def _read_env(path: str | Path | None) -> dict[str, str]:
    places = (".env", ".env.local") if path is None else (path,)
    file = next((Path(place) for place in places if Path(place).is_file()), None)
    if file is None:
        return {}
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = [line.partition("=") for line in lines if "=" in line and not line.startswith("#")]
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"config must be a YAML file, got {path}")
    require("yaml", "training")
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Reads `1e-4` as a number, as OmegaConf and YAML 1.2 do; PyYAML wants `1.0e-4`."""

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(path.read_text(encoding="utf-8"), Loader) or {}  # noqa: S506  (a safe one)
