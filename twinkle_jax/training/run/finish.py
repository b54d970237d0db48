"""The end of a run: the policy, its curves and a summary are written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinkle_jax.training.checkpoints.progress import Progress
from twinkle_jax.training.checkpoints.run_directory import write_whole
from twinkle_jax.training.policies.text_policy import save_policy
from twinkle_jax.training.run.begin import Run
from twinkle_jax.training.run.held_out import held_out_accuracy
from twinkle_jax.training.shown.curves import draw_curves


def summarize(progress: Progress, *, interrupted: bool) -> dict[str, Any]:
    """Say how a run went, as far as it is known without an evaluation."""
    facts = progress.facts
    return {
        "accuracy_before": facts["accuracy_before"],
        "accuracy_after": None,
        "steps": progress.step,
        "seconds": round(facts["seconds"], 3),
        "step_time": round(facts["seconds"] / max(progress.step, 1), 4),
        "interrupted": interrupted,
    }


def finish(
    run: Run, progress: Progress, directory: Path, check: Callable[[], None]
) -> dict[str, Any]:
    """Evaluate once more, write what is left to write, and say how it went."""
    check()
    params = progress.state.params
    found = held_out_accuracy(run.config, run.task, run.policy, params, check)
    summary = summarize(progress, interrupted=False) | {"accuracy_after": found.get("accuracy")}
    save_policy(run.policy._replace(params=params), str(directory / "policy"))
    if progress.step:
        draw_curves(directory / "metrics.jsonl", directory / "curves.png")
    write_whole(directory / "summary.json", json.dumps(summary, indent=1))
    run.display.summary(summary, directory)
    return summary
