"""What a run shows: progress, completions and explanations on the terminal, and its curves."""

import json
import math
import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from jaxtyping import Float

from twinkle_jax._package import require
from twinkle_jax.data import Trajectory, message_text
from twinkle_jax.model.huggingface.saving import names_path
from twinkle_jax.rollout import Episode
from twinkle_jax.training.config import MEASURED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console


# Unicode categories: controls (ESC begins commands to a terminal), format characters (they change
# the reading direction or hide text), lone surrogates (not encodable), two kinds of line break.
_ACTIVE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def harmless(text: str, *, encoding: str = "utf-8") -> str:
    r"""Escape control and format characters, except line breaks and tabs, as their code points.

    Characters outside the terminal's encoding are escaped, too.

    Example:
        >>> harmless("red: \x1b[31m")
        'red: <U+001B>[31m'
    """
    shown = "".join(_show(character) for character in text.replace("\r\n", "\n"))
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: str, *, limit: int = 400, encoding: str = "utf-8") -> str:
    r"""Make text harmless, show its line breaks as arrows, and leave out the middle of long text.

    Example:
        >>> one_line("one\ntwo three four", limit=9)
        'one↵tw … our'
    """
    if len(text) > limit:
        tail = limit // 3
        text = f"{text[: limit - tail]} … {text[len(text) - tail :]}"
    text = text.replace("\r\n", "\n").replace("\n", "↵").replace("\t", " ")
    return harmless(text, encoding=encoding)


def _show(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _ACTIVE:
        return character
    return f"<U+{ord(character):04X}>"


_FLAT = (
    "Nothing to learn from in this step: every completion of a prompt got the same reward, so none "
    "is better than the others of its group, and all advantages are 0. "
)
_MASKED = (
    "Nothing to learn from in this step: update.mask_truncated leaves out what was cut off at a "
    "limit, and no prompt has two other completions with different rewards. A higher limit leaves "
    "out fewer. "
)
_LEFT_OUT = "No update was made: parameters and the optimizer's moments are as before. "
_ALL_WRONG = (
    "All rewards are 0: the task may be too hard for this policy so far, or the reward does not "
    "recognize its answers; look at the table of completions."
)
_ALL_RIGHT = "All rewards are 1: the policy solves these prompts, and harder ones would teach more."
_ALIKE = (
    "More samples for each prompt, a higher temperature, or prompts that are neither too easy nor "
    "too hard make rewards differ."
)
_ZERO_LOSS = (
    "A loss of 0 is expected here: the policy is still the one that sampled, and the advantages of "
    "a group add up to 0. The gradient is not 0; watch the reward."
)
_CUT = (
    "More than half of the completions were cut off at the limit of new tokens, before their end: "
    "a higher limit, or a penalty for length, may help."
)
_UNSCORED = (
    "The teacher's log-probabilities were not finite in this step: its weights may be damaged, or "
    "too large for the dtype."
)
_SKIPPED = "A gradient was not finite: that update was skipped, and the parameters are as before."


def explain(metrics: Mapping[str, float], *, kl_in_reward: bool = False) -> dict[str, str]:
    """Explain metrics of a step that may surprise: a sentence for each, by a short name.

    With `kl_in_reward` a step learns from the penalty where rewards are equal.

    Example:
        >>> list(explain({"frac_reward_zero_std": 1.0, "reward": 0.0}))
        ['flat']
    """
    explanations = {}
    gradient = metrics.get("grad_norm", 0)
    # With a teacher or examples there is a signal in each token.
    taught = not {"teacher/kl", "cross_entropy", "preference_loss"}.isdisjoint(metrics)
    flat = metrics.get("frac_reward_zero_std", 0) >= 1 and not taught
    if flat and (gradient == 0 or ("kl" in metrics and not kl_in_reward)):
        reward = metrics.get("reward")
        left_out = _LEFT_OUT if metrics.get("updates_without_signal", 0) and not gradient else ""
        rounding = 1e-6 * max(1.0, abs(metrics.get("reward", 0)))
        differ = metrics.get("reward_std", 0) > rounding
        if differ and metrics.get("completions/clipped_ratio", 0) > 0:
            explanations["masked"] = _MASKED + left_out
        else:
            explanations["flat"] = (
                _FLAT
                + left_out
                + (_ALL_WRONG if reward == 0 else _ALL_RIGHT if reward == 1 else _ALIKE)
            )
    elif abs(metrics.get("loss", 1)) < 1e-6 and gradient > 0 and not taught:
        explanations["zero loss"] = _ZERO_LOSS
    if metrics.get("completions/clipped_ratio", 0) > 0.5:
        explanations["cut"] = _CUT
    if not math.isfinite(metrics.get("teacher/kl", 0)):
        explanations["unscored"] = _UNSCORED
    if metrics.get("skipped_updates", 0) > 0:
        explanations["skipped"] = _SKIPPED
    return explanations


_SHOWN = {  # name in metrics.jsonl: what is shown of it
    "reward": "reward {:.3f}",
    "completions/mean_length": "length {:.1f}",
    "environment/turns": "turns {:.1f}",
    "kl": "KL {:.2g}",
    "teacher/kl": "teacher KL {:.3f}",
    "cross_entropy": "cross-entropy {:.3f}",
    "preference_loss": "preference loss {:.3f}",
    "rewards/accuracies": "preferred {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
}


_LOSSES_SHOWN = {"cross_entropy": "cross-entropy", "preference_loss": "preference loss"}
_COMPLETIONS, _EPISODES = 4, 2  # of one prompt, the most that are shown at once
_SPEED_OVER = 24 * 3600.0  # seconds, or 1,000 steps, whose speed gives the time left


class Display:
    """Shows the progress of a run: as a bar on a terminal, as plain lines elsewhere.

    Surprising metrics are explained in a sentence, once each time they begin. The total of steps
    includes those before a resumption. Processes other than the first are quiet: nothing is shown.

    Example:
        >>> import sys
        >>> from rich.console import Console
        >>> with Display(10, console=Console(file=sys.stdout)) as display:
        ...     display.step(1, {"reward": 0.25, "completions/mean_length": 12.0, "loss": 0.5})
        step 1/10  reward 0.250  length 12.0
    """

    def __init__(
        self,
        total: int,
        *,
        console: "Console | None" = None,
        quiet: bool = False,
        kl_in_reward: bool = False,
    ) -> None:
        require("rich", "training")
        from rich.console import Console

        self._total, self._kl_in_reward = total, kl_in_reward
        self._console = console or Console(quiet=quiet)
        self._progress = None if quiet else _make_bar(self._console, total)
        self._task = self._progress and self._progress.add_task("", total=total, shown="")
        self._explained: set[str] = set()
        self._failures: set[str] = set()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's reward, length, turns, KL, speed and evaluation, where they are known."""
        shown = "  ".join(text.format(metrics[x]) for x, text in _SHOWN.items() if x in metrics)
        if self._progress is None:
            self.note(f"step {step}/{self._total}  {shown}".rstrip())
        else:
            self._progress.update(self._task, completed=step, shown=shown)
        evaluated = {name: x for name, x in metrics.items() if name.startswith("eval/")}
        results = {name.removeprefix("eval/"): x for name, x in evaluated.items()}
        self.held_out(f"after step {step}", results)
        sentences = explain(metrics, kl_in_reward=self._kl_in_reward)
        for name, sentence in sentences.items():
            if name not in self._explained:
                self.note(sentence)
        self._explained = set(sentences)

    def held_out(self, when: str, results: Mapping[str, float]) -> None:
        """Show held-out accuracy, pass@k, and the mean reward if rewards are not all 0 or 1.

        Of examples, show the cross-entropy, in nats a token; of pairs, their loss.
        """
        if "accuracy" in results:
            accuracy, reward = results["accuracy"], results.get("reward")
            graded = "" if reward in (None, accuracy) else f", mean reward {reward:.3f}"
            samples = {name: x for name, x in results.items() if name.startswith("pass@")}
            chances = "".join(f", {name} {x:.3f}" for name, x in samples.items())
            self.note(f"held-out accuracy {when}: {accuracy:.3f}{graded}{chances}")
        for name, called in _LOSSES_SHOWN.items():
            if name in results:
                share = results.get("preference_accuracy")
                preferred = "" if share is None else f", {share:.3f} preferred"
                self.note(f"held-out {called} {when}: {results[name]:.3f}{preferred}")

    def samples(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[float],
        advantages: Sequence[float],
    ) -> None:
        """Show some completions of one prompt with their rewards and advantages.

        The prompt is the first whose rewards differ. Control characters, escape sequences and
        bidirectional formatting are shown as code points; square brackets are not markup.
        """
        from rich.table import Table
        from rich.text import Text

        prompts = [" ".join(map(message_text, x["messages"][:-1])) for x in trajectories]
        chosen = _one_prompt(prompts, rewards)[:_COMPLETIONS]
        if not chosen:
            return
        encoding = self._console.encoding
        title = f"step {step}, completions of: {one_line(prompts[chosen[0]], encoding=encoding)}"
        table = Table(title=Text(title), title_justify="left", show_lines=True, expand=True)
        table.add_column("completion", ratio=1, overflow="fold")
        for name in ("reward", "advantage"):
            table.add_column(name, justify="right", no_wrap=True)
        for i in chosen:
            completion = one_line(message_text(trajectories[i]["messages"][-1]), encoding=encoding)
            reward = "none" if np.isnan(rewards[i]) else f"{rewards[i]:.3f}"
            cells = (completion, reward, f"{advantages[i]:+.3f}")
            table.add_row(*map(Text, cells))
        self._console.print(table)

    def failures(self, step: int, episodes: Sequence[Episode]) -> None:
        """Say which environments failed in a step, and the first error, each error once."""
        failed = [episode for episode in episodes if episode.failed]
        if not failed or failed[0].error in self._failures:
            return
        self._failures.add(failed[0].error)
        self.note(
            f"step {step}: {len(failed)} of {len(episodes)} environments failed, and their "
            f"episodes are left out; the first ({failed[0].cause}): {failed[0].error}"
        )

    def episodes(
        self,
        step: int,
        episodes: Sequence[Episode],
        rewards: Sequence[float],
        advantages: Sequence[float],
    ) -> None:
        """Show some episodes as conversations, with the reward of each turn.

        They are of one group, the first whose rewards differ. Texts are shown as completions are.
        """
        from rich.table import Table
        from rich.text import Text

        seeds = [f"{episode.seed}" for episode in episodes]
        encoding = self._console.encoding
        for i in _one_prompt(seeds, rewards)[:_EPISODES]:
            episode = episodes[i]
            title = (
                f"step {step}, episode {i}: {episode.ended} {episode.cause}".rstrip()
                + f", reward {rewards[i]:.3f}, advantage {advantages[i]:+.3f}"
            )
            table = Table(title=Text(title), title_justify="left", expand=True)
            table.add_column("who", no_wrap=True)
            table.add_column("says", ratio=1, overflow="fold")
            table.add_column("reward", justify="right", no_wrap=True)
            gained = iter(episode.rewards)
            for message in episode.messages:
                acts = message["role"] == "assistant"
                cells = (
                    message["role"],
                    one_line(message_text(message), encoding=encoding),
                    f"{next(gained, 0.0):+.3f}" if acts else "",
                )
                table.add_row(*map(Text, cells))
            self._console.print(table)

    def summary(self, summary: Mapping[str, Any], directory: str | os.PathLike[str]) -> None:
        """Show the results of a run, which `summary.json` holds, and where its files are."""
        time = f"{summary['steps']} steps in {summary['seconds']:.0f} s"
        both: dict[str, str] = {}
        for name in MEASURED:
            before, after = summary.get(f"{name}_before"), summary.get(f"{name}_after")
            if before is not None and after is not None:
                both[name] = f"{before:.3f} before, {after:.3f} after"
        if "accuracy" in both:
            self.note(f"held-out accuracy {both['accuracy']} {time}")
            if both.get("reward", both["accuracy"]) != both["accuracy"]:
                self.note(f"held-out mean reward {both['reward']}")
            for name, chance in summary.items():
                if name.startswith("pass@"):
                    self.note(f"held-out {name.removesuffix('_after')} {chance:.3f} after")
        losses = [x for x in _LOSSES_SHOWN if x in both]
        for name in losses:
            self.note(f"held-out {_LOSSES_SHOWN[name]} {both[name]} {time}")
        if "accuracy" not in both and not losses:
            self.note(time)
        files = ", metrics.jsonl and curves.png" if summary["steps"] else " and metrics.jsonl"
        self.note(f"the policy{files} are in {Path(directory)}")

    def note(self, sentence: str) -> None:
        """Print a sentence literally: brackets in it are not markup."""
        from rich.text import Text

        text = harmless(sentence, encoding=self._console.encoding)
        self._console.print(Text(text), soft_wrap=not self._console.is_terminal)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _make_bar(console: "Console", total: int) -> Any:
    """Make a progress bar; None unless the output is a terminal that can redraw a line."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.table import Column

    if not console.is_terminal or console.is_dumb_terminal:
        return None
    count = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total)) + 1))
    left = TimeLeft(table_column=Column(no_wrap=True, min_width=7))
    shown = TextColumn("{task.fields[shown]}", markup=False)
    columns = (TextColumn("step"), count, BarColumn(10), left, shown)
    # Of rich's 30 seconds, a step that takes longer is the only one: there would be no time left.
    return Progress(
        *columns, console=console, refresh_per_second=4, speed_estimate_period=_SPEED_OVER
    )


def _one_prompt(prompts: Sequence[str], rewards: Sequence[float]) -> list[int]:
    """Find the rows of the first prompt whose rewards differ; of the first one, if none do."""
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(i)
    for rows in groups.values():
        if len({float(rewards[i]) for i in rows}) > 1:
            return rows
    return next(iter(groups.values()), [])


Values = Float[np.ndarray, " steps"]

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1661d", "#5b6470"


class _Panel(NamedTuple):
    """One plot: a metric, and perhaps a band around it."""

    title: str
    name: str
    spread: str = ""  # half the band's width
    edges: tuple[str, str] = ("", "")  # or its lower and upper edge
    colour: str = _BLUE


_PANELS = (
    _Panel("reward  (band: ± standard deviation in a group)", "reward", spread="reward_std"),
    _Panel("held-out accuracy", "eval/accuracy", colour=_ORANGE),
    _Panel("cross-entropy of examples, nats a token", "cross_entropy"),
    _Panel("held-out cross-entropy, nats a token", "eval/cross_entropy", colour=_ORANGE),
    _Panel("preference loss", "preference_loss"),
    _Panel("held-out preference loss", "eval/preference_loss", colour=_ORANGE),
    _Panel("share of pairs whose chosen answer has the higher reward", "rewards/accuracies"),
    _Panel(
        "implicit reward of chosen answers  (band: down to rejected ones)",
        "rewards/chosen",
        edges=("rewards/rejected", "rewards/chosen"),
    ),
    _Panel(
        "tokens of a completion  (band: shortest to longest)",
        "completions/mean_length",
        edges=("completions/min_length", "completions/max_length"),
    ),
    _Panel("KL divergence from the reference policy", "kl"),
    _Panel("KL divergence from the teacher, nats a token", "teacher/kl"),
    _Panel("entropy, nats a token", "entropy"),
    _Panel("norm of the gradient", "grad_norm", colour=_GREY),
)


def draw_curves(
    metrics: str | os.PathLike[str],
    picture: str | os.PathLike[str],
    *,
    before: Mapping[str, float | None] = MappingProxyType({}),
    after: Mapping[str, float | None] = MappingProxyType({}),
) -> None:
    """Plot rewards, held-out results, lengths, KL, entropy and gradient norms against the step.

    Panels without values are left out. With more than 60 steps, a moving average is drawn over the
    pale line of single steps. Curves of held-out results, `accuracy` and others, begin with those
    `before` the first step, and end with those `after` the last.

    Raises:
        ImportError: if matplotlib is not installed; it names the extra.
        ValueError: if the file holds no line with any of these numbers.
    """
    require("matplotlib", "training")
    from matplotlib.figure import Figure

    rows = _read(Path(metrics))
    first, last = (
        {f"eval/{name}": x for name, x in results.items() if x is not None}
        for results in (before, after)
    )
    if rows and first:
        rows = [{"step": 0, **first}, *rows]
    if rows:
        rows[-1] = rows[-1] | last
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
        _style(ax, panel.title, steps)
    for ax in axes[len(panels) :]:
        ax.remove()
    with names_path(Path(picture)):
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


def _style(ax: "Axes", title: str, steps: Values) -> None:
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
    """Read the complete lines; a last line without a line break is still being written."""
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
