"""What a person sees of a run: a line or a bar that moves, completions, sentences."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from twinkle_jax.data.missing_extra import require
from twinkle_jax.data.trajectory import Trajectory, message_text
from twinkle_jax.training.shown.explanations import explain
from twinkle_jax.training.shown.harmless_text import harmless, one_line

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = {  # name in metrics.jsonl: what is shown of it
    "reward": "reward {:.3f}",
    "completions/mean_length": "length {:.1f}",
    "kl": "KL {:.2g}",
    "tokens_per_second": "{:,.0f} tok/s",
}


class Display:
    """Shows a run while it goes on: on a terminal as a bar that moves, elsewhere as plain lines.

    A sentence says what a number means that would puzzle, each time that it begins to.

    Args:
        total: steps of the run, those before a resumption too; None if nobody knows.
        console: where to show; None for the standard output.

    Raises:
        ImportError: if rich is not installed; it names the extra.

    Example:
        >>> import sys
        >>> from rich.console import Console
        >>> with Display(10, console=Console(file=sys.stdout)) as display:
        ...     display.step(1, {"reward": 0.25, "completions/mean_length": 12.0, "loss": 0.5})
        step 1/10  reward 0.250  length 12.0
    """

    def __init__(self, total: int | None = None, *, console: "Console | None" = None) -> None:
        require("rich", "training")
        from rich.console import Console

        self._total = total
        self._console = console or Console()
        self._progress = _make_bar(self._console, total)
        self._task = self._progress and self._progress.add_task("", total=total, shown="")
        self._explained: set[str] = set()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's reward, length, KL and speed, as far as they are among the metrics.

        Args:
            step: how many updates are done.
            metrics: by their names in `metrics.jsonl`.
        """
        shown = "  ".join(text.format(metrics[x]) for x, text in _SHOWN.items() if x in metrics)
        if self._progress is None:
            of_all = "" if self._total is None else f"/{self._total}"
            self.note(f"step {step}{of_all}  {shown}".rstrip())
        else:
            self._progress.update(self._task, completed=step, shown=shown)
        if "eval/accuracy" in metrics:
            self.note(f"held-out accuracy after step {step}: {metrics['eval/accuracy']:.3f}")
        sentences = explain(metrics)
        for name, sentence in sentences.items():
            if name not in self._explained:
                self.note(sentence)
        self._explained = set(sentences)

    def samples(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[float],
        advantages: Sequence[float],
        *,
        rows: int = 4,
    ) -> None:
        """Show some completions of one prompt with their rewards and advantages.

        The prompt is the first whose rewards differ. Control characters, escape sequences and what
        turns the reading direction are shown as code points, and square brackets as they are.

        Args:
            step: to which they belong.
            trajectories: whose last message is the completion; those of a prompt side by side.
            rewards: of each.
            advantages: of each.
            rows: the most completions to show.
        """
        from rich.table import Table
        from rich.text import Text

        prompts = [" ".join(map(message_text, x["messages"][:-1])) for x in trajectories]
        chosen = _one_prompt(prompts, rewards)[:rows]
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
            cells = (completion, f"{rewards[i]:.3f}", f"{advantages[i]:+.3f}")
            table.add_row(*map(Text, cells))
        self._console.print(table)

    def summary(self, summary: Mapping[str, Any], directory: str | os.PathLike[str]) -> None:
        """Say how a run went, and where all is.

        Args:
            summary: what `summary.json` holds.
            directory: of the run.
        """
        time = f"{summary['steps']} steps in {summary['seconds']:.0f} s"
        before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
        if before is not None and after is not None:
            self.note(f"held-out accuracy {before:.3f} before, {after:.3f} after {time}")
        else:
            self.note(time)
        self.note(f"the policy, metrics.jsonl and curves.png are in {Path(directory)}")

    def note(self, sentence: str) -> None:
        """Show a sentence as it is, without taking brackets in it for markup."""
        from rich.text import Text

        text = harmless(sentence, encoding=self._console.encoding)
        self._console.print(Text(text), soft_wrap=not self._console.is_terminal)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _make_bar(console: "Console", total: int | None) -> Any:
    """Make a bar, unless there is no terminal that could move one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.table import Column

    if not console.is_terminal or console.is_dumb_terminal:
        return None
    count = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total)) + 1))
    left = TimeLeft(table_column=Column(no_wrap=True, min_width=7))
    shown = TextColumn("{task.fields[shown]}", markup=False)
    columns = (TextColumn("step"), count, BarColumn(10), left, shown)
    return Progress(*columns, console=console, refresh_per_second=4)


def _one_prompt(prompts: Sequence[str], rewards: Sequence[float]) -> list[int]:
    """Find the rows of the first prompt whose rewards differ; of the first one, if none do."""
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(i)
    for rows in groups.values():
        if len({float(rewards[i]) for i in rows}) > 1:
            return rows
    return next(iter(groups.values()), [])
