"""The loop: from a configuration to a trained policy, in steps that can be gone on from."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from twinkle_jax.reward.checked import RewardFunction
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.curves import draw_curves
from twinkle_jax.training.devices import run_mesh
from twinkle_jax.training.display import Display
from twinkle_jax.training.dynamic_sampling import fill_up
from twinkle_jax.training.interruption import Interruption
from twinkle_jax.training.last_step import LastStep
from twinkle_jax.training.learning_rate import learning_rate
from twinkle_jax.training.metrics_log import MetricsLog
from twinkle_jax.training.policy import save_policy
from twinkle_jax.training.progress import Progress, save
from twinkle_jax.training.resolve import resolve
from twinkle_jax.training.run import Run, begin, held_out_accuracy
from twinkle_jax.training.run_directory import prepare_directory, write_whole
from twinkle_jax.training.sample_and_score import InterruptedRunError, Sampled, sample_and_score
from twinkle_jax.training.step import train_step
from twinkle_jax.training.step_metrics import sample_metrics
from twinkle_jax.training.tasks import make_task


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
    sinks = config.logging

    def write(progress: Progress) -> None:
        save(run.checkpoints, progress, run.recipe.reference, config, run.log)

    last = LastStep(write)
    with (
        Interruption(last_resort=last.save_from_aside) as interruption,
        MetricsLog(directory, tensorboard=sinks.tensorboard, wandb=sinks.wandb) as log,
        Display(total=config.steps) as display,
    ):
        run, progress = begin(config, directory, task, log, display, source)
        last.finished(progress, saved=source == directory)
        last.save()
        if progress.step >= (config.steps or 0) and (directory / "summary.json").exists():
            display.note(f"nothing is left to do: {progress.step} of {config.steps} steps are done")
            return json.loads((directory / "summary.json").read_text())
        try:
            while progress.step < (config.steps or 0):
                progress = _one_step(run, progress, last, interruption)
        except InterruptedRunError:
            last.save()
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                if last.save_from_aside():
                    display.note(f"step {progress.step} is saved: --resume auto goes on after it")
            raise
        return _finish(run, progress, directory, interruption)


def _one_step(run: Run, progress: Progress, last: LastStep, interruption: Interruption) -> Progress:
    """Do a step and what is due after it, or end the run with `InterruptedRunError`."""
    config, step = run.config, progress.step

    def check() -> None:
        if interruption.requested:
            raise InterruptedRunError  # the step will be done anew, with the same prompts

    check()
    began = time.perf_counter()
    key = jax.random.fold_in(progress.key, step)

    def draw(number: int) -> Sampled:
        prompts, own = next(run.loader), jax.random.fold_in(key, number)
        return sample_and_score(progress.state.params, run.recipe, prompts, own, check)

    sampled, drawn = fill_up(draw, run.recipe, config.rollout.prompts)
    metrics = sample_metrics(drawn, run.recipe, began)
    state, learnt = train_step(
        progress.state,
        run.recipe,
        sampled,
        learning_rate=learning_rate(config, step),
        seed=(config.seed, step),
    )
    step_time = time.perf_counter() - began
    facts = dict(progress.facts)
    tokens = int(sum(s.lengths.sum() for s in drawn))
    facts["num_tokens"] += tokens
    facts["seconds"] += step_time
    facts["skipped"] = facts["skipped"] + 1 if learnt["skipped_updates"] else 0
    progress = Progress(state, progress.key, step + 1, facts, run.loader.get_state())
    metrics |= learnt | {
        "num_tokens": facts["num_tokens"],
        "step_time": step_time,
        "tokens_per_second": tokens / step_time,
    }
    _after_step(run, progress, last, sampled, metrics)
    return progress


def _after_step(
    run: Run, progress: Progress, last: LastStep, sampled: Sampled, metrics: dict[str, float]
) -> None:
    config, step = run.config, progress.step
    every = config.evaluation.every
    try:
        if every and step % every == 0 and run.task.held_out:
            found = held_out_accuracy(config, run.task, run.policy, progress.state.params)
            metrics |= {f"eval/{name}": value for name, value in found.items()}
    finally:  # a reward that raises loses the evaluation, not the step
        run.log.write(step, metrics)
        last.finished(progress)
    run.display.step(step, metrics)
    if config.logging.samples_every and step % config.logging.samples_every == 0:
        rewards, advantages = sampled.rewards.tolist(), sampled.advantages.tolist()
        run.display.samples(step, sampled.trajectories, rewards, advantages)
    if progress.facts["skipped"] >= config.optimizer.max_skipped:
        last.save()
        raise RuntimeError(
            f"gradients must be finite, got {progress.facts['skipped']} steps in a row in which "
            f"some were not; the parameters of step {step} are in {run.checkpoints.directory}"
        )
    if step % config.logging.checkpoint_every == 0 or step == config.steps:
        last.save()


def _finish(
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
