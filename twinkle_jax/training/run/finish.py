"""The end of a run: the policy, its curves and a summary are written."""

import json
from pathlib import Path
from typing import Any

from twinkle_jax.training.checkpoints.progress import Progress
from twinkle_jax.training.checkpoints.run_directory import write_whole
from twinkle_jax.training.policies.text_policy import save_policy
from twinkle_jax.training.run.begin import Run
from twinkle_jax.training.run.held_out import held_out_accuracy
from twinkle_jax.training.run.interruption import Interruption
from twinkle_jax.training.shown.curves import draw_curves


def finish(
    run: Run, progress: Progress, directory: Path, interruption: Interruption
) -> dict[str, Any]:
    """Write what is left to write, and say how it went."""
    facts, config = progress.facts, run.config
    summary = {
        "accuracy_before": facts["accuracy_before"],
        "accuracy_after": None,
        "steps": progress.step,
        "seconds": round(facts["seconds"], 3),
        "step_time": round(facts["seconds"] / max(progress.step, 1), 4),
        "interrupted": interruption.requested,
    }
    if interruption.requested:
        run.display.note(
            f"interrupted after step {progress.step}, which is saved: --resume auto goes on"
        )
        return summary
    summary["accuracy_after"] = held_out_accuracy(
        config, run.task, run.policy, progress.state.params
    ).get("accuracy")
    save_policy(run.policy._replace(params=progress.state.params), str(directory / "policy"))
    if progress.step:
        draw_curves(directory / "metrics.jsonl", directory / "curves.png")
    write_whole(directory / "summary.json", json.dumps(summary, indent=1))
    run.display.summary(summary, directory)
    return summary
