"""One step of a run, and what is due after it: an evaluation, a checkpoint, a look."""

import json
import time
from collections.abc import Callable

import jax

from twinkle_jax.training.checkpoints.last_step import LastStep
from twinkle_jax.training.checkpoints.progress import Progress
from twinkle_jax.training.configuration.learning_rate import learning_rate
from twinkle_jax.training.run.begin import Run
from twinkle_jax.training.run.held_out import held_out_accuracy
from twinkle_jax.training.run.interruption import InterruptedRunError
from twinkle_jax.training.step.dynamic_sampling import fill_up
from twinkle_jax.training.step.sample_and_score import Sampled, sample_and_score
from twinkle_jax.training.step.sample_metrics import sample_metrics
from twinkle_jax.training.step.train_step import StaleSamplerError, train_step

_COMPARE_ALL_EVERY = 25  # steps, the first among them


def one_step(run: Run, progress: Progress, last: LastStep, check: Callable[[], None]) -> Progress:
    """Do a step and what is due after it.

    Args:
        run: what is trained, and how.
        progress: where it is.
        last: told what is finished.
        check: raises `InterruptedRunError` when the run shall end.

    Returns:
        Where it is then.
    """
    config, step = run.config, progress.step
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
    tokens = int(sum(s.lengths.sum() for s in drawn))
    facts = progress.facts | {
        "num_tokens": progress.facts["num_tokens"] + tokens,
        "seconds": progress.facts["seconds"] + step_time,
        "skipped": progress.facts["skipped"] + 1 if learnt["skipped_updates"] else 0,
    }
    progress = Progress(state, progress.key, step + 1, facts, run.loader.get_state())
    metrics |= learnt | {
        "num_tokens": facts["num_tokens"],
        "step_time": step_time,
        "tokens_per_second": tokens / step_time,
    }
    _write_metrics(run, progress, last, metrics, check)
    _show_and_save(run, progress, last, sampled)
    return progress


def write_waiting_metrics(
    run: Run, progress: Progress, last: LastStep, check: Callable[[], None]
) -> Progress:
    """Do the evaluation in which a process was interrupted, and write its step's metrics."""
    if "unwritten" not in progress.facts:
        return progress
    facts = dict(progress.facts)
    metrics = json.loads(facts.pop("unwritten")["metrics"])
    progress = progress._replace(facts=facts)
    _write_metrics(run, progress, last, metrics, check)
    last.save()
    return progress


def _write_metrics(
    run: Run,
    progress: Progress,
    last: LastStep,
    metrics: dict[str, float],
    check: Callable[[], None],
) -> None:
    """Evaluate if that is due, and write a step's metrics; without it if a reward raises."""
    every, params = run.config.evaluation.every, progress.state.params

    def write() -> None:
        run.log.write(progress.step, metrics)
        last.finished(progress)

    try:
        if every and progress.step % every == 0 and run.task.held_out:
            waiting = {"metrics": json.dumps(metrics), "offset": run.log.offset}
            last.finished(progress._replace(facts=progress.facts | {"unwritten": waiting}))
            found = held_out_accuracy(run.config, run.task, run.policy, params, check)
            metrics |= {f"eval/{name}": value for name, value in found.items()}
    except InterruptedRunError:
        raise  # what was finished last says that the evaluation is to be done anew
    except BaseException:
        write()
        raise
    write()
    run.display.step(progress.step, metrics)


def _show_and_save(run: Run, progress: Progress, last: LastStep, sampled: Sampled) -> None:
    config, step = run.config, progress.step
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
