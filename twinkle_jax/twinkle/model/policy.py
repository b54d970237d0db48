"""A policy and its adapters, each with its optimizer, loss, template and metrics."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twinkle_jax.loss import CrossEntropyLoss, Loss
from twinkle_jax.model import (
    Decoder,
    DecoderConfig,
    LoraConfig,
    Params,
    Remat,
    init_params,
    load_adapter,
    load_pretrained,
    merge_params,
    parse_config,
    partition_rules,
    shard_like_params,
    with_adapter,
)
from twinkle_jax.model.decoder.lora import init_adapter, read_lora_config
from twinkle_jax.model.decoder.parameters import cast_params
from twinkle_jax.model.huggingface.adapter_files import adapter_tensors
from twinkle_jax.model.huggingface.checkpoint import list_tensors
from twinkle_jax.model.huggingface.checkpoint_files import PREFIX, read_dtype
from twinkle_jax.sampler.jax_sampler import key_of_seed
from twinkle_jax.training import StepSummary, TrainState, UpdateInfo, add_summaries, begin_training
from twinkle_jax.twinkle.infra import DeviceMesh, mesh_of, note_group
from twinkle_jax.twinkle.metric import TrainMetric
from twinkle_jax.twinkle.model.optimizer import Schedule
from twinkle_jax.twinkle.names import local_id, refuse, warn_once

Precision = Literal["no", "bf16"]
_DTYPES = {"no": "float32", "bf16": "bfloat16"}


@dataclass
class OptimizerGroup:
    """Twinkle's optimizer group: an adapter or all parameters, with optimizer, loss and metrics."""

    adapter_name: str  # empty for the parameters themselves
    state: TrainState
    lora: LoraConfig | None = None
    frozen: dict[str, Any] | None = None  # parameters under the adapter, shared by all adapters
    optimizer: optax.GradientTransformation | None = None  # None before `set_optimizer`
    lr: float = 1.0  # base rate
    lr_steps: int = 0  # of the schedule so far
    schedule: Schedule = lambda _, base: base
    loss: Loss = field(default_factory=CrossEntropyLoss)
    template: Any = None
    # Of the last update, before clipping; None before one since the last report.
    gradient_norm: Float[Array, ""] | None = None
    clipped: bool = False  # whether the accumulated gradients are clipped already
    updates: list[UpdateInfo] = field(default_factory=list)
    cur_step: int = 0  # calls of `forward_backward`
    gradient_accumulation_steps: int = 1
    # Rows and outputs of the last `forward` or `forward_only`, for `calculate_loss`; and for
    # `forward` the options of its gradient.
    last_pass: Any = None
    pending: Any = None  # rows, arguments of the loss, and options that `backward` takes
    losses: list[float] = field(default_factory=list)  # of `calculate_loss` since the last report
    summary: StepSummary | None = None  # of `forward_backward` since the last report
    speed: TrainMetric = field(default_factory=TrainMetric)
    # Those that were added, for training passes (True) and for the others (False).
    metrics: dict[bool, list[Any]] = field(default_factory=lambda: {True: [], False: []})

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.schedule(self.lr_steps, self.lr))

    def set_accumulation(self, steps: int | None) -> None:
        """Set how many calls of `forward_backward` make an update; None changes nothing."""
        if steps is None:
            return
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be a positive int, got {steps!r}")
        self.gradient_accumulation_steps = steps

    def due(self, steps: int | None) -> bool:
        """Whether the methods that change the policy do something now."""
        self.set_accumulation(steps)
        n = self.gradient_accumulation_steps
        return n == 1 or (self.cur_step > 0 and self.cur_step % n == 0)

    def needed_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer; raises ValueError if there is none yet."""
        if self.optimizer is None:
            raise ValueError("an optimizer must be chosen first: call set_optimizer")
        return self.optimizer

    def drop_training_state(self) -> None:
        """Free the memory of optimizer state and gradients."""
        self.state = self.state._replace(optimizer_state=None, gradient_sum=None)

    def add_metric(self, metric: Any, is_training: bool | None, options: dict[str, Any]) -> None:
        """Add a metric, or a class of metrics with its arguments."""
        if not (hasattr(metric, "accumulate") and hasattr(metric, "calculate")):
            raise TypeError(f"metric must have accumulate and calculate, got {metric!r}")
        if isinstance(metric, type):  # Twinkle passes these to each class
            known = inspect.signature(metric).parameters
            options = {x: None for x in ("device_mesh", "process_group") if x in known} | options
        for kind in (True, False) if is_training is None else (is_training,):
            made = metric(**options) if isinstance(metric, type) else metric
            self.metrics[kind].append(made)

    def add_summary(self, summary: StepSummary) -> None:
        """Add the sums of a training pass."""
        self.summary = summary if self.summary is None else add_summaries(self.summary, summary)

    def add_pass(self, is_training: bool, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Add a pass to the metrics."""
        for metric in [self.speed] * is_training + self.metrics[is_training]:
            metric.accumulate(inputs, outputs, **facts)

    def report(self, is_training: bool) -> dict[str, Any]:
        """Report on training, or on other passes, since the last report."""
        numbers: dict[str, Any] = {}
        if is_training:
            numbers |= {"learning_rate": self.learning_rate, "step": float(self.state.step)}
            numbers |= self.speed.calculate()
            if self.summary is not None:
                means = {} if self.summary.metrics is None else self.summary.metrics._asdict()
                means = {"loss": self.summary.loss, "tokens": self.summary.tokens, **means}
                numbers |= {name: float(x) for name, x in means.items() if x is not None}
        elif self.losses:
            numbers["loss"] = sum(self.losses) / len(self.losses)
        for metric in self.metrics[is_training]:
            numbers |= metric.calculate()
        if not is_training:
            self.losses = []
            return numbers
        if self.gradient_norm is not None:
            numbers["grad_norm"] = float(self.gradient_norm)
        numbers["skipped_updates"] = float(sum(not info.applied for info in self.updates))
        self.summary, self.gradient_norm, self.updates = None, None, []
        return numbers


class Module:
    """What scripts ask of `model.model`, where Twinkle has PyTorch's module; other names raise.

    Setting `_no_split_modules`, layers that FSDP must not split, changes nothing here.
    """

    __slots__ = ("_no_split_modules", "config")

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._no_split_modules: Any = ()

    def modules(self) -> Iterator[Any]:
        """Iterate over no modules: parameters are a tree of arrays, `TransformersModel.params`."""
        return iter(())


class AdapterPolicy:
    """Parameters, adapters over them, and their mesh: the state of a `TransformersModel`."""

    def __init__(
        self,
        model_id: str | Path | Decoder | None = None,
        *,
        config: Any = None,
        device_mesh: DeviceMesh | None = None,
        dtype: DTypeLike | None = None,
        mixed_precision: Precision | None = None,
        mesh: Mesh | None = None,
        remat: Remat = True,
        seed: int = 0,
        tokenizer_id: str | Path | None = None,
        model_cls: Any = None,
        remote_group: str | None = None,
        enable_router_replay: bool = False,
        **options: Any,
    ) -> None:
        refuse("TransformersModel", options)
        note_group(remote_group)
        if model_cls is not None:
            warn_once(
                "model_cls is not read: the checkpoint's configuration names the architecture"
            )
        model_id = local_id(model_id)
        self.model_id, self.remat = model_id, remat
        self.mesh = mesh_of(device_mesh) if mesh is None else mesh
        self.dtype = read_dtype(_compute_dtype(dtype, mixed_precision))
        self.key = key_of_seed(seed)
        decoder = self._first_policy(model_id, _read_config(config), seed)
        self.config, self.source = decoder.config, decoder.source
        self.router_replay = enable_router_replay and self.config.experts is not None
        self.tokenizer_id = local_id(tokenizer_id, "tokenizer_id") or self.source
        self.model = Module(self.config)
        self.base: Params | None = None  # the frozen parameters under adapters
        self.first_loss: Loss = CrossEntropyLoss()  # of each adapter, before `set_loss`
        state = begin_training(decoder.params, None, self.mesh)
        self.optimizer_group = {"": OptimizerGroup("", state)}
        self.active_group = ""

    @property
    def params(self) -> dict[str, Any]:
        """All parameters, the active adapter included: what the decoder's functions take.

        [`merge_adapter`][twinkle_jax.model.merge_adapter] merges the adapter. Nothing is copied:
        the next `forward_backward` or `step` donates trained arrays, so read it again after that.
        """
        return self.merged(self.group())

    @property
    def state(self) -> TrainState:
        """Trained parameters and optimizer state of the active adapter, or of all parameters."""
        return self.group().state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.group().state = state

    @property
    def template(self) -> Any:
        """The template; None before `set_template`."""
        return self.group().template

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.group().learning_rate

    @property
    def cur_step(self) -> int:
        """Number of calls of `forward_backward`."""
        return self.group().cur_step

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and the parameters frozen."""
        return "" not in self.optimizer_group

    def group(self, adapter_name: str | None = None) -> OptimizerGroup:
        """Return the group of an adapter, by default of the last one that was added."""
        name = adapter_name or self.active_group
        if name not in self.optimizer_group:
            names = sorted(filter(None, self.optimizer_group))
            known = " or ".join(map(repr, names)) if names else None
            raise ValueError(f"adapter_name must be {known} or left out, got {adapter_name!r}")
        return self.optimizer_group[name]

    def merged(self, group: OptimizerGroup) -> dict[str, Any]:
        """Merge the trees of a group's trained parameters and of the frozen ones."""
        return merge_params(group.frozen, group.state.params)

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, np.ndarray]:
        """Copy trained parameters to the host, with the names and layout of a checkpoint."""
        group = self.group(adapter_name)
        if group.lora is not None:
            return adapter_tensors(self.config, group.state.params)
        tensors = list_tensors(Decoder(self.config, group.state.params), PREFIX, None)
        return {tensor.name: tensor.fetch() for tensor in tensors}

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Describe adapter, loss, learning rate and accumulation."""
        group = self.group(adapter_name)
        trained = sum(leaf.size for leaf in jax.tree.leaves(group.state.params))
        total = sum(leaf.size for leaf in jax.tree.leaves(self.merged(group)))
        lines = [
            f"Adapter config: {group.lora}",
            f"Trainable params: {trained:,d} || all params: {total:,d} || "
            f"trainable%: {100 * trained / total:.4f}",
            f"Loss: {type(group.loss).__name__}",
            f"Learning rate: {group.learning_rate}",
            f"Gradient accumulation steps: {group.gradient_accumulation_steps}",
        ]
        return "\n".join(lines)

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any,
        *,
        gradient_accumulation_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        """Freeze the parameters, and train low-rank adapters instead.

        An adapter begins with the loss that was set before the first one, as in Twinkle, and with
        the template that was set last.

        Args:
            adapter_name: its name; several adapters share the frozen parameters, and are trained
                separately.
            config_or_dir: a [`LoraConfig`][twinkle_jax.model.LoraConfig], or PEFT's; or a directory
                with an adapter. `lora_dropout` is applied in training only.
            gradient_accumulation_steps: how many calls of `forward_backward` make an update; None:
                1, or for the first adapter as before.
            seed: of A, which is random; B starts at 0.

        Raises:
            ValueError: if the name is taken, or an option or target is not supported.
        """
        if isinstance(config_or_dir, str | Path):
            lora, adapter = load_adapter(local_id(config_or_dir), self.config)
        else:
            lora = read_lora_config(config_or_dir)
            adapter = init_adapter(key_of_seed(seed), self.config, lora)
        self.add_group(adapter_name, lora, adapter)
        self.group(adapter_name).set_accumulation(gradient_accumulation_steps)

    def add_group(self, name: str, lora: LoraConfig, adapter: Params) -> None:
        """Add an adapter; the first one freezes the parameters."""
        if not name or name in self.optimizer_group:
            raise ValueError(f"adapter_name must be new and not empty, got {name!r}")
        before, steps = self.group(), 1
        if not self.has_adapters:
            self.first_loss, steps = before.loss, before.gradient_accumulation_steps
            before.drop_training_state()
            self.base = cast_params(before.state.params, self.dtype)
            del self.optimizer_group[""]
        state = begin_training(adapter, None, self.mesh)
        group = OptimizerGroup(name, state, lora, with_adapter(self.base, self.config, lora))
        group.template, group.loss = before.template, self.first_loss
        group.set_accumulation(steps)
        self.optimizer_group[name], self.active_group = group, name

    def restart(self, group: OptimizerGroup, params: Params) -> None:
        """Reset optimizer state and gradients, but not the count of rows, which seeds dropout."""
        rows = group.state.rows
        group.drop_training_state()
        group.state = begin_training(params, group.optimizer, self.mesh)._replace(rows=rows)

    def read(self, directory: str | Path, config: DecoderConfig | None = None) -> Decoder:
        """Read a checkpoint onto the devices."""
        rules = None if self.mesh is None else partition_rules(self.mesh)
        return load_pretrained(
            directory,
            dtype="float32",
            mesh=self.mesh,
            partition=rules,
            config=config,
            argument="model_id",
        )

    def _first_policy(
        self, model_id: str | Path | Decoder | None, config: DecoderConfig | None, seed: int
    ) -> Decoder:
        if isinstance(model_id, Decoder):
            if config not in (None, model_id.config):
                raise ValueError(f"config must be that of the Decoder, or left out, got {config}")
            return self._copy(model_id)
        if model_id is not None:
            return self.read(model_id, config)
        if config is None:
            raise ValueError("model_id or config must be given, got neither")
        key = jax.random.split(key_of_seed(seed))[1]  # not that of dropout
        shapes = jax.eval_shape(partial(init_params, config=config), key)
        shardings = None if self.mesh is None else shard_like_params(shapes, self.mesh)
        draw = jax.jit(init_params, static_argnames="config", out_shardings=shardings)
        return Decoder(config, draw(key, config=config))

    def _copy(self, decoder: Decoder) -> Decoder:
        """Copy the parameters of a caller's decoder, since training donates them."""
        shardings = None if self.mesh is None else shard_like_params(decoder.params, self.mesh)

        def copied(params: Params) -> Params:
            return jax.tree.map(lambda x: jnp.copy(x.astype(jnp.float32)), params)

        params = jax.jit(copied, out_shardings=shardings)(decoder.params)
        return Decoder(decoder.config, params, source=decoder.source)


def _read_config(config: Any) -> DecoderConfig | None:
    """Read a configuration of transformers, or the dictionary in a `config.json`."""
    if config is None or isinstance(config, DecoderConfig):
        return config
    return parse_config(config.to_dict() if hasattr(config, "to_dict") else config)


def _compute_dtype(dtype: DTypeLike | None, mixed_precision: str | None) -> DTypeLike:
    if mixed_precision is None:
        return "float32" if dtype is None else dtype
    if mixed_precision not in _DTYPES:
        raise ValueError(f"mixed_precision must be 'no' or 'bf16', got {mixed_precision!r}")
    named = _DTYPES[mixed_precision]
    if dtype is not None and read_dtype(dtype) != jnp.dtype(named):
        raise ValueError(
            f"dtype must be {named} with mixed_precision={mixed_precision!r}, got {dtype}"
        )
    return named
