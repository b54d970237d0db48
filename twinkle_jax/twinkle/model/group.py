"""What is trained together: an adapter or all parameters, with optimizer, loss and metrics."""

from dataclasses import dataclass, field
from typing import Any

import optax
from jaxtyping import Array, Float

from twinkle_jax.loss import CrossEntropyLoss, Loss
from twinkle_jax.model import LoraConfig
from twinkle_jax.training import StepSummary, TrainState, UpdateInfo, add_summaries
from twinkle_jax.twinkle.metric import TrainMetric
from twinkle_jax.twinkle.model.optimizer import Schedule, choose_schedule


class MetricLog:
    """Sums of training passes, and metrics of training passes and of the others."""

    def __init__(self) -> None:
        self._summary: StepSummary | None = None
        self._speed = TrainMetric()
        self._metrics: dict[bool, list[Any]] = {True: [], False: []}
        self._losses: list[float] = []  # of `calculate_loss`

    def add_metric(self, metric: Any, is_training: bool | None, options: dict[str, Any]) -> None:
        """Add a metric, or a class of metrics with its arguments."""
        if not (hasattr(metric, "accumulate") and hasattr(metric, "calculate")):
            raise TypeError(f"metric must have accumulate and calculate, got {metric!r}")
        for kind in (True, False) if is_training is None else (is_training,):
            made = metric(**options) if isinstance(metric, type) else metric
            self._metrics[kind].append(made)

    def add_summary(self, summary: StepSummary) -> None:
        """Add the sums of a training pass."""
        self._summary = summary if self._summary is None else add_summaries(self._summary, summary)

    def add_loss(self, loss: float) -> None:
        """Add a loss that was only calculated."""
        self._losses.append(loss)

    def show(self, is_training: bool, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Show a pass to the metrics of its kind."""
        if is_training:
            self._speed.accumulate(inputs, outputs, **facts)
        for metric in self._metrics[is_training]:
            metric.accumulate(inputs, outputs, **facts)

    def sees_logps(self, is_training: bool) -> bool:
        """Whether a metric may want log-probabilities."""
        return bool(self._metrics[is_training])

    def report(self, is_training: bool) -> dict[str, Any]:
        """Give the numbers since the last report, and begin anew."""
        numbers: dict[str, Any] = {}
        if is_training:
            numbers |= self._speed.calculate()
        elif self._losses:
            numbers = {"loss": sum(self._losses) / len(self._losses)}
            self._losses = []
        if is_training and self._summary is not None:
            numbers |= {"loss": float(self._summary.loss), "tokens": float(self._summary.tokens)}
            means = {} if self._summary.metrics is None else self._summary.metrics._asdict()
            numbers |= {name: float(x) for name, x in means.items() if x is not None}
            self._summary = None
        for metric in self._metrics[is_training]:
            numbers |= metric.calculate()
        return numbers


@dataclass
class OptimizerGroup:
    """Twinkle's optimizer group: an adapter, or the parameters themselves, and how it learns.

    Attributes:
        adapter_name: empty for the parameters themselves.
        state: what is trained; replaced by every verb that changes it.
        lora: configuration of the adapter.
        frozen: parameters over which those of the state are laid; shared by all adapters.
        optimizer: None before `set_optimizer`.
        lr: base learning rate.
        lr_steps: how often the schedule has gone on.
        cur_step: calls of `forward_backward`.
        last_pass: what `calculate_loss` is of.
    """

    adapter_name: str
    state: TrainState
    lora: LoraConfig | None = None
    frozen: dict[str, Any] | None = None
    optimizer: optax.GradientTransformation | None = None
    lr: float = 1.0
    lr_steps: int = 0
    schedule: Schedule = field(default_factory=lambda: choose_schedule("ConstantLR", {}))
    loss: Loss = field(default_factory=CrossEntropyLoss)
    template: Any = None
    log: MetricLog = field(default_factory=MetricLog)
    gradient_norm: Float[Array, ""] | None = None
    updates: list[UpdateInfo] = field(default_factory=list)
    cur_step: int = 0
    gradient_accumulation_steps: int = 1
    last_pass: Any = None

    @property
    def learning_rate(self) -> float:
        """What the next step multiplies updates by."""
        return float(self.schedule(self.lr_steps, self.lr))

    def set_accumulation(self, steps: int | None) -> None:
        """Set how many calls of `forward_backward` make an update; None leaves it."""
        if steps is None:
            return
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be a positive int, got {steps!r}")
        self.gradient_accumulation_steps = steps

    def due(self, steps: int | None) -> bool:
        """Whether the verbs that change the policy do something now."""
        self.set_accumulation(steps)
        n = self.gradient_accumulation_steps
        return n == 1 or (self.cur_step > 0 and self.cur_step % n == 0)

    def needed_optimizer(self) -> optax.GradientTransformation:
        """Give the optimizer, which must have been chosen."""
        if self.optimizer is None:
            raise ValueError("an optimizer must be chosen first: call set_optimizer")
        return self.optimizer

    def drop_training_state(self) -> None:
        """Give up moments and gradients, so that their memory is free."""
        self.state = self.state._replace(optimizer_state=None, gradient_sum=None)

    def metrics(self) -> dict[str, Any]:
        """Summarise training since the last call."""
        numbers = self.log.report(True)
        metrics = {"learning_rate": self.learning_rate, "step": float(self.state.step), **numbers}
        if self.gradient_norm is not None:
            metrics["grad_norm"] = float(self.gradient_norm)
        metrics["skipped_updates"] = float(sum(not info.applied for info in self.updates))
        self.gradient_norm, self.updates = None, []
        return metrics
