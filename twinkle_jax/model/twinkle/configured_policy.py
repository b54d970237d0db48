"""The verbs that set a policy up and report on it: adapter, loss, template, metrics."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from twinkle_jax.loss import Loss, LossFunction, get_loss
from twinkle_jax.model.decoder.forward import Remat
from twinkle_jax.model.decoder.module import Decoder
from twinkle_jax.model.twinkle.metric_log import MetricLog
from twinkle_jax.model.twinkle.saved_policy import SavedPolicy

Precision = Literal["no", "bf16"]
_DTYPES = {"no": "float32", "bf16": "bfloat16"}


class ConfiguredPolicy(SavedPolicy):
    """A policy with a loss, a template and metrics."""

    def __init__(
        self,
        model_id: str | Path | Decoder,
        *,
        dtype: DTypeLike | None = None,
        mixed_precision: Precision | None = None,
        mesh: Mesh | None = None,
        remat: Remat = True,
        seed: int = 0,
    ) -> None:
        super().__init__(model_id, _compute_dtype(dtype, mixed_precision), mesh, seed=seed)
        self.remat = remat
        self._loss: Loss | None = None
        self._template: Any = None
        self._log = MetricLog()

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any,
        *,
        gradient_accumulation_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        """Freeze the parameters, and train low-rank adapters instead.

        Args:
            adapter_name: a name for it; there can be one adapter.
            config_or_dir: a [`LoraConfig`][twinkle_jax.model.LoraConfig], or PEFT's; or a directory
                with an adapter. `lora_dropout` is applied while training, and only then.
            gradient_accumulation_steps: how many calls of `forward_backward` make an update.
            seed: of the random A; B starts at 0, so nothing changes yet.

        Raises:
            ValueError: if there is an adapter, or an option or target is not supported.
        """
        self._set_accumulation(gradient_accumulation_steps)
        if isinstance(config_or_dir, str | Path):
            self._load_adapter(adapter_name, config_or_dir)
        else:
            self._add_adapter(adapter_name, config_or_dir, seed)

    def set_loss(
        self,
        loss: str | type[Loss] | Loss | LossFunction,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose a loss.

        Args:
            loss: a name, `'grpo'` or `'GRPOLoss'`; a class of `twinkle_jax.loss` or its object; or
                a function, as [`get_loss`][twinkle_jax.loss.get_loss] takes it.
            adapter_name: of the adapter, if there is one.
            options: arguments of the class.

        Raises:
            ValueError: for an unknown name, and losses that need values or logits.
            TypeError: for what is no loss, and arguments that it does not have.
        """
        self._check_name(adapter_name)
        made = get_loss(loss, **options)
        needs = "values" if made.require_values else "logits" if made.require_logits else None
        if needs:
            raise ValueError(
                f"loss must need log-probabilities only, got {type(made).__name__}, "
                f"which needs {needs}"
            )
        self._loss = made

    @property
    def template(self) -> Any:
        """What `set_template` was given; None before that."""
        return self._template

    def set_template(
        self,
        template: Callable[[Any], Mapping[str, Any]] | Any,
        *,
        adapter_name: str | None = None,
    ) -> None:
        """Choose what makes an input feature of a trajectory: an object's `encode`, or a call."""
        self._check_name(adapter_name)
        if isinstance(template, str) or not callable(getattr(template, "encode", template)):
            raise TypeError(
                f"template must be a function or an object with 'encode', got {template!r}"
            )
        self._template = template

    def add_metric(
        self,
        metric: Any,
        is_training: bool | None = None,
        *,
        adapter_name: str | None = None,
        **options: Any,
    ) -> None:
        """Add a metric of your own, which `calculate_metric` reports.

        Args:
            metric: an object with `accumulate(inputs, outputs, **facts)` and `calculate()`, or its
                class. It sees the input features of each pass and what came out: the `loss` of
                `forward_backward` with `lr`, `step` and `grad_norm`, or all of `forward_only`.
            is_training: True for training passes, False for `forward_only`, None for both.
            adapter_name: of the adapter, if there is one.
            options: arguments of the class.
        """
        self._check_name(adapter_name)
        self._log.add_metric(metric, is_training, options)

    def calculate_metric(
        self, is_training: bool = True, *, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """Summarise what happened since the last call, as plain numbers.

        Args:
            is_training: False reports added metrics of `forward_only` alone.
            adapter_name: of the adapter, if there is one.
        """
        self._check_name(adapter_name)
        numbers = self._log.report(is_training)
        if not is_training:
            return numbers
        metrics = {"learning_rate": self.learning_rate, "step": float(self.state.step), **numbers}
        if self._norm is not None:
            metrics["grad_norm"] = float(self._norm)
        metrics["skipped_updates"] = float(sum(not info.applied for info in self._updates))
        self._norm, self._updates = None, []
        return metrics


def _compute_dtype(dtype: DTypeLike | None, mixed_precision: str | None) -> DTypeLike:
    if mixed_precision is None:
        return "float32" if dtype is None else dtype
    if mixed_precision not in _DTYPES:
        raise ValueError(f"mixed_precision must be 'no' or 'bf16', got {mixed_precision!r}")
    named = _DTYPES[mixed_precision]
    if dtype is not None and jnp.dtype(dtype) != jnp.dtype(named):
        raise ValueError(
            f"dtype must be {named} with mixed_precision={mixed_precision!r}, got {dtype}"
        )
    return named
