"""Which options of a PEFT configuration are taken: those that mean plain LoRA, and no others."""

import reprlib
from collections.abc import Mapping
from typing import Any

# Each option and the values with which it changes nothing, or with which it is built.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "exclude_modules": (None, []),
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
_SILENT = frozenset(
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
    # What has been trained is read, so how it began matters only where the frozen part changed.
    False: (True, None, False, "gaussian", "orthogonal"),
}


def check_peft_options(options: Mapping[str, Any], *, new: bool) -> None:
    """Refuse options that are not known, and values that ask for something else than LoRA.

    Args:
        options: PEFT's names and values.
        new: whether the adapter is to be made, and not read.
    """
    plain = _PLAIN | {"init_lora_weights": _INITIAL[new]}
    for name, value in options.items():
        if name in plain:
            # PEFT's own objects hold enumerations, which are strings.
            given = getattr(value, "value", value)
            if not any(type(given) is type(v) and given == v for v in plain[name]):
                known = " or ".join(repr(v) for v in plain[name])
                raise ValueError(f"{name} must be {known}, got {reprlib.repr(given)}: not built")
        elif name not in _READ | _SILENT:
            raise ValueError(
                f"{name!r} must be an option of LoRA that is known here, got an unknown one with "
                f"the value {reprlib.repr(value)}"
            )
