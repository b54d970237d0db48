"""Metrics of Twinkle's kind, and the log of a model that collects them."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from twinkle_jax.training.gradient import StepSummary, add_summaries


class Metric(Protocol):
    """A metric: it sees every pass, and gives numbers when asked."""

    def accumulate(
        self, inputs: list[dict[str, np.ndarray]], outputs: Mapping[str, Any], **facts: Any
    ) -> None:
        """Look at a pass: its input features, and its outputs."""

    def calculate(self) -> Mapping[str, Any]:
        """Give the numbers since the last call."""


class MetricLog:
    """Summaries of micro-batches, and metrics for training passes and for the others."""

    def __init__(self) -> None:
        self._summary: StepSummary | None = None
        self._metrics: dict[bool, list[Metric]] = {True: [], False: []}

    def add_metric(self, metric: Any, is_training: bool | None, options: dict[str, Any]) -> None:
        """Add a metric, or a class of metrics with its arguments."""
        made = metric(**options) if isinstance(metric, type) else metric
        if not (hasattr(made, "accumulate") and hasattr(made, "calculate")):
            raise TypeError(f"metric must have accumulate and calculate, got {metric!r}")
        for kind in (True, False) if is_training is None else (is_training,):
            self._metrics[kind].append(made)

    def add_summary(self, summary: StepSummary) -> None:
        """Add the sums of a training pass."""
        self._summary = summary if self._summary is None else add_summaries(self._summary, summary)

    def show(self, is_training: bool, inputs: Any, outputs: Any, **facts: Any) -> None:
        """Show a pass to the metrics of its kind."""
        for metric in self._metrics[is_training]:
            metric.accumulate(inputs, outputs, **facts)

    def report(self, is_training: bool) -> dict[str, Any]:
        """Give the numbers since the last report, and begin anew."""
        numbers: dict[str, Any] = {}
        if is_training and self._summary is not None:
            numbers = {"loss": float(self._summary.loss), "tokens": float(self._summary.tokens)}
            means = {} if self._summary.metrics is None else self._summary.metrics._asdict()
            numbers |= {name: float(x) for name, x in means.items() if x is not None}
            self._summary = None
        for metric in self._metrics[is_training]:
            numbers |= metric.calculate()
        return numbers
