"""One step of a run, and what is due after it: an evaluation, a checkpoint, a look."""

import time

import jax

from twinkle_jax.training.checkpoints.last_step import LastStep
from twinkle_jax.training.checkpoints.progress import Progress
from twinkle_jax.training.configuration.learning_rate import learning_rate
from twinkle_jax.training.run.begin import Run
from twinkle_jax.training.run.held_out import held_out_accuracy
from twinkle_jax.training.run.interruption import Interruption
from twinkle_jax.training.step.dynamic_sampling import fill_up
from twinkle_jax.training.step.sample_and_score import (
    InterruptedRunError,
    Sampled,
    sample_and_score,
)
from twinkle_jax.training.step.sample_metrics import sample_metrics
from twinkle_jax.training.step.train_step import StaleSamplerError, train_step

_COMPARE_ALL_EVERY = 25  # steps, the first among them


def one_step(run: Run, progress: Progress, last: LastStep, interruption: Interruption) -> Progress:
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
    try:
        state, learnt = train_step(
            progress.state,
            run.recipe,
            sampled,
            learning_rate=learning_rate(config, step),
            seed=(config.seed, step),
            compare_all=step % _COMPARE_ALL_EVERY == 0,
        )
    except StaleSamplerError as error:
        last.finished(progress._replace(state=error.state))
        raise
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
