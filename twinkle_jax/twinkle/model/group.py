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
        lr_steps: steps of the schedule so far.
        cur_step: calls of `forward_backward`.
        last_pass: what `calculate_loss` takes the loss of.
        losses: of `calculate_loss` since the last report.
        summary: of `forward_backward` since the last report.
        metrics: those that were added, for training passes (True) and for the others.
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
    gradient_norm: Float[Array, ""] | None = None
    updates: list[UpdateInfo] = field(default_factory=list)
    cur_step: int = 0
    gradient_accumulation_steps: int = 1
    last_pass: Any = None
    losses: list[float] = field(default_factory=list)
    summary: StepSummary | None = None
    speed: TrainMetric = field(default_factory=TrainMetric)
    metrics: dict[bool, list[Any]] = field(default_factory=lambda: {True: [], False: []})

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
        """Return the optimizer, which must have been chosen."""
        if self.optimizer is None:
            raise ValueError("an optimizer must be chosen first: call set_optimizer")
        return self.optimizer

    def drop_training_state(self) -> None:
        """Free the memory of moments and gradients."""
        self.state = self.state._replace(optimizer_state=None, gradient_sum=None)

    def add_metric(self, metric: Any, is_training: bool | None, options: dict[str, Any]) -> None:
        """Add a metric, or a class of metrics with its arguments."""
        if not (hasattr(metric, "accumulate") and hasattr(metric, "calculate")):
            raise TypeError(f"metric must have accumulate and calculate, got {metric!r}")
        for kind in (True, False) if is_training is None else (is_training,):
            made = metric(**options) if isinstance(metric, type) else metric
            self.metrics[kind].append(made)

    def add_summary(self, summary: StepSummary) -> None:
        """Add the sums of a training pass."""
        self.summary = summary if self.summary is None else add_summaries(self.summary, summary)

    def show(self, is_training: bool, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Show a pass to the metrics of its kind."""
        for metric in [self.speed] * is_training + self.metrics[is_training]:
            metric.accumulate(inputs, outputs, **facts)

    def report(self, is_training: bool) -> dict[str, Any]:
        """Summarise training, or evaluation, since the last report."""
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
