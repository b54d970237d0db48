"""The loop: from a configuration to a trained policy, in steps that can be gone on from."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from twinkle_jax.reward import RewardFunction
from twinkle_jax.training.checkpoints.last_step import LastStep
from twinkle_jax.training.checkpoints.progress import Progress, save
from twinkle_jax.training.checkpoints.run_directory import prepare_directory
from twinkle_jax.training.configuration.resolve import resolve
from twinkle_jax.training.configuration.tasks import make_task
from twinkle_jax.training.configuration.train_config import TrainConfig
from twinkle_jax.training.policies.devices import run_mesh
from twinkle_jax.training.run.begin import begin
from twinkle_jax.training.run.finish import finish, summarize
from twinkle_jax.training.run.interruption import InterruptedRunError, Interruption
from twinkle_jax.training.run.one_step import one_step, write_waiting_metrics
from twinkle_jax.training.shown.display import Display
from twinkle_jax.training.shown.metrics_log import MetricsLog


def train(config: TrainConfig, *, reward: RewardFunction | None = None) -> dict[str, Any]:
    """Train a policy, and leave in `output_dir` all that there is to know about it.

    The directory holds `config.json` (as resolved), `metrics.jsonl`, `curves.png`, `checkpoints/`,
    `policy/` (a Hugging Face checkpoint of the trained policy) and `summary.json`.

    Args:
        config: of the run.
        reward: in place of the one that the configuration names: a `Reward`, or any function of
            trajectories and ground truths.

    Returns:
        What `summary.json` holds: `accuracy_before`, `accuracy_after`, `steps`, `seconds`,
        `step_time`, and `interrupted` where a signal ended the run early.

    Raises:
        ValueError: if the configuration cannot be, or does not fit the run to go on with.
        FileExistsError: if `output_dir` holds something, with neither `resume` nor `overwrite`.
        RuntimeError: if the sampler is not the trained policy, or too many gradients in a row
            were not finite; a checkpoint is there.
    """
    config = resolve(config)
    run_mesh(config)  # refuses what there are no devices for
    directory = Path(config.output_dir)
    source = prepare_directory(config, directory)
    task = make_task(config)
    if reward is not None:
        task = task._replace(reward=reward)

    def write(progress: Progress) -> None:
        save(run.checkpoints, progress, run.recipe.reference, config, run.log)

    last = LastStep(write)
    with (
        Interruption(last_resort=last.save_from_aside) as interruption,
        MetricsLog(directory, config.logging.tensorboard, config.logging.wandb) as log,
        Display(total=config.steps) as display,
    ):
        run, progress = begin(config, directory, task, log, display, source)
        last.finished(progress, saved=source == directory)
        last.save()
        if progress.step >= (config.steps or 0) and (directory / "summary.json").exists():
            display.note(f"nothing is left to do: {progress.step} of {config.steps} steps are done")
            return json.loads((directory / "summary.json").read_text())
        try:
            progress = write_waiting_metrics(run, progress, last, interruption.check)
            while progress.step < (config.steps or 0):
                progress = one_step(run, progress, last, interruption.check)
            return finish(run, progress, directory, interruption.check)
        except InterruptedRunError:
            last.save()
            step = last.progress.step
            display.note(f"interrupted after step {step}, which is saved: --resume auto goes on")
            return summarize(last.progress, interrupted=True)
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                if last.save_from_aside():
                    step = last.progress.step
                    display.note(f"step {step} is saved: --resume auto goes on after it")
            raise
