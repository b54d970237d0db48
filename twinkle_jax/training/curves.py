"""The curves of a run, plotted from `metrics.jsonl`."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from twinkle_jax.data.missing_extra import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Float[np.ndarray, " steps"]

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1661d", "#5b6470"


class _Panel(NamedTuple):
    """A picture of one kind of number, with a band around it or without."""

    title: str
    name: str
    spread: str = ""  # half the band's width
    edges: tuple[str, str] = ("", "")  # or its lower and upper edge
    colour: str = _BLUE


_PANELS = (
    _Panel("reward  (band: ± standard deviation in a group)", "reward", spread="reward_std"),
    _Panel("held-out accuracy", "eval/accuracy", colour=_ORANGE),
    _Panel(
        "tokens of a completion  (band: shortest to longest)",
        "completions/mean_length",
        edges=("completions/min_length", "completions/max_length"),
    ),
    _Panel("KL divergence from the reference policy", "kl"),
    _Panel("entropy, nats a token", "entropy"),
    _Panel("norm of the gradient", "grad_norm", colour=_GREY),
)


def draw_curves(
    metrics: str | os.PathLike[str],
    picture: str | os.PathLike[str],
    *,
    accuracy_before: float | None = None,
) -> None:
    """Plot reward, held-out accuracy, length, KL, entropy and gradient norm against the step.

    Panels without values are left out. With more than 60 steps, a moving average is drawn over the
    pale line of single steps.

    Args:
        metrics: path of `metrics.jsonl`.
        picture: path of the PNG to write.
        accuracy_before: held-out accuracy before the first step, where its curve begins.

    Raises:
        ImportError: if matplotlib is not installed; it names the extra.
        ValueError: if the file holds no line with any of these numbers.
    """
    require("matplotlib", "training")
    from matplotlib.figure import Figure

    rows = _read(Path(metrics))
    if rows and accuracy_before is not None:
        rows = [{"step": 0, "eval/accuracy": accuracy_before}, *rows]
    steps = np.asarray([row["step"] for row in rows], float)
    panels = [panel for panel in _PANELS if np.isfinite(_column(rows, panel.name)).any()]
    if not panels:
        raise ValueError(f"metrics must have a step with a reward, got {metrics} without one")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 2.9 * lines), dpi=120, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        _draw(ax, panel, rows, steps)
        _dress(ax, panel.title, steps)
    for ax in axes[len(panels) :]:
        ax.remove()
    figure.savefig(picture, format="png")


def _draw(ax: "Axes", panel: _Panel, rows: Sequence[Mapping[str, Any]], steps: Values) -> None:
    values = _column(rows, panel.name)
    finite = np.isfinite(values)
    x, y = steps[finite], values[finite]
    low, high = (_column(rows, edge)[finite] for edge in panel.edges)
    if panel.spread:
        spread = _column(rows, panel.spread)[finite]
        low, high = y - spread, y + spread
    many = len(y) > 60
    width = max(1, len(y) // 25)
    if many:
        ax.plot(x, y, color=panel.colour, alpha=0.25, linewidth=0.8)
        low, high = moving_average(low, width), moving_average(high, width)
    ax.fill_between(x, low, high, color=panel.colour, alpha=0.13, linewidth=0)
    marker = "o" if len(y) <= 40 else None
    ax.plot(x, moving_average(y, width) if many else y, color=panel.colour, linewidth=1.8,
            marker=marker, markersize=3.5)  # fmt: skip
    if panel.name == "eval/accuracy":
        ax.set_ylim(-0.03, 1.03)
    if panel.name == "grad_norm" and y.min() > 0 and y.max() > 20 * np.median(y):
        ax.set_yscale("log")  # or a few large ones would hide the others


def _dress(ax: "Axes", title: str, steps: Values) -> None:
    from matplotlib.ticker import MaxNLocator

    room = 0.03 * max(float(np.ptp(steps)), 1.0)
    ax.set_xlim(steps.min() - room, steps.max() + room)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(title, loc="left", fontsize=9.5)
    ax.set_xlabel("step", fontsize=8.5)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines; a last one without its line break is still being written."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> Values:
    """One metric at every step, NaN where missing."""
    values = [row.get(name) for row in rows]
    return np.asarray([np.nan if value is None else value for value in values], float)


def moving_average(values: Values, width: int) -> Values:
    """Moving average, over fewer neighbours at the ends and where values are missing."""
    finite = np.isfinite(values)
    kernel = np.ones(2 * (width // 2) + 1)
    total = np.convolve(np.where(finite, values, 0), kernel, "same")
    count = np.convolve(finite, kernel, "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
