"""A training run: its steps and what follows each, its end, and its export."""

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from twinkle_jax.model.huggingface.checkpoint_files import ADAPTER_CONFIG
from twinkle_jax.reward import RewardFunction
from twinkle_jax.rollout import LocalEngine, Rollout, hosts
from twinkle_jax.rollout.engine import LogitsError
from twinkle_jax.rollout.hosts import InterruptedRunError
from twinkle_jax.training.checkpoint import RunCheckpoints
from twinkle_jax.training.config import (
    MEASURED,
    TeacherConfig,
    TrainConfig,
    check_learning_rates,
    from_dict,
    with_steps,
)
from twinkle_jax.training.display import Display, draw_curves
from twinkle_jax.training.effects import check_effects
from twinkle_jax.training.evaluation import held_out
from twinkle_jax.training.hosts import (
    check_same,
    check_shared,
    code_hashes,
    connect,
    describe_loss,
)
from twinkle_jax.training.metrics import rollout_metrics
from twinkle_jax.training.policy import load_policy, save_policy
from twinkle_jax.training.progress import (
    Interruption,
    LastStep,
    Progress,
    Totals,
    arrays_of,
    check_base,
    save,
)
from twinkle_jax.training.run_directory import (
    check_settings,
    holds_run,
    prepare_directory,
    read_summary,
    saved_settings,
    with_choices,
    write_atomically,
)
from twinkle_jax.training.start import (
    Run,
    begin,
    fingerprint_of_base,
    make_recipe,
    read_policy,
    with_adapter,
)
from twinkle_jax.training.state import begin_training, find_devices
from twinkle_jax.training.step import (
    SamplerMismatchError,
    collect,
    describe_mismatch,
    rollout_key,
    train_step,
)
from twinkle_jax.training.task import make_task
from twinkle_jax.training.tracking import MetricsLog, NoLog, Tracker, check_trackers

_COMPARE_ALL_EVERY = 25  # steps, the first among them


def train(
    config: TrainConfig,
    *,
    reward: RewardFunction | None = None,
    trackers: Sequence[Tracker] = (),
) -> dict[str, Any]:
    """Train a policy, and write everything about the run to `output_dir`.

    The directory holds `config.json` (as resolved), `metrics.jsonl`, `curves.png`, `checkpoints/`,
    `policy/` (the trained policy as a Hugging Face checkpoint, or as adapters in PEFT's format) and
    `summary.json`.

    With several processes (`config.distributed`, or a scheduler that JAX knows), all of them call
    this with the same configuration, and share the directory. Process 0 shows and logs.

    Args:
        config: of the run.
        reward: in place of the one that the configuration names: a `Reward`, or any function of
            trajectories and ground truths.
        trackers: where process 0 writes the metrics of each step, besides `config.logging`.

    Returns:
        What `summary.json` holds: `accuracy_before`, `accuracy_after`, `reward_before`,
        `reward_after`, `cross_entropy_before`, `cross_entropy_after`, `preference_loss_before`,
        `preference_loss_after`, `pass@K_after` with `evaluation.pass_k`, `steps`, `seconds`,
        `step_time`, and `interrupted`: whether a signal ended the run early, which then writes no
        `summary.json`.

    Raises:
        ValueError: if the configuration does not fit the run to resume, or the task; or if
            `output_dir` is not in UTF-8.
        TypeError: if one of `trackers` has no `write` or no `close`.
        FileExistsError: if `output_dir` holds a run, with neither `resume` nor `overwrite`, or
            anything else; or if a run uses it, or it is a file.
        RuntimeError: if the sampler does not sample from the trained policy, or too many gradients
            in a row were not finite; the last finished step is saved. If the policy's logits are no
            longer finite; the message names the checkpoints from before. With several processes,
            for any error in one of them, which it names: all end at the same step, and save the
            last finished one.
        ConnectionError: if the processes do not find each other.
    """
    # Absolute, since environments may change the working directory.
    directory, started_in = Path(config.output_dir).expanduser().absolute(), os.getcwd()
    check_trackers(trackers)
    # First: a run without its tools, say, has other settings that would have no effect.
    check_settings(config, directory)
    check_effects(config)
    connect(config.distributed)
    mesh = config.mesh
    find_devices(mesh.data, mesh.fsdp, mesh.tensor)  # raises before anything is written
    try:
        str(directory).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "output_dir must be in UTF-8, which checkpoints are written with, got "
            f"{str(directory)!r}; PYTHONUTF8=1 reads names as UTF-8 whatever the locale"
        ) from error
    task = hosts.agreed("reading the task", lambda: make_task(config, reward))
    config = with_steps(config, len(task.train))
    check_learning_rates(config)
    check_same(config, task.train, task.held_out)
    code = code_hashes(config)
    source = _prepare(config, directory)
    if source is not None:
        config = with_choices(config, saved_settings(source))

    def write(progress: Progress, *, wait: bool) -> None:
        save(
            run.checkpoints, progress, run.recipe.reference, run.config,
            base=run.base, started_in=started_in, code=code, wait=wait,
        )  # fmt: skip

    def settle(*, wait: bool) -> None:
        (run.checkpoints.finish if wait else run.checkpoints.poll)()

    def open_log() -> MetricsLog | NoLog:
        return MetricsLog(directory, config.logging, trackers) if hosts.is_first() else NoLog()

    last = LastStep(write, settle)
    # A save of several processes is collective: a signal handler of one cannot start it.
    last_resort = None if hosts.several() else last.save_from_signal
    with (
        Interruption(last_resort=last_resort) as interruption,
        hosts.agreed("opening the log", open_log) as log,
        Display(
            total=config.steps,
            quiet=not hosts.is_first(),
            kl_in_reward=config.update.kl_in == "reward",
        ) as display,
    ):
        run, progress = begin(config, directory, task, log, display, source, interruption.check)
        last.finished(progress, saved=source == directory)
        last.save()
        summary = read_summary(directory)
        # A run that was continued, and then killed at its end, has the summary of its first end.
        if progress.step >= config.steps and summary.get("steps") == progress.step:
            display.note(f"nothing left to do: {progress.step} of {config.steps} steps are done")
            return summary
        try:
            hosts.together("beginning", interruption.check)
            progress = write_waiting_metrics(run, progress, last, interruption.check)
            if progress.step < config.steps:
                display.note("compiling: the first step takes longer than the others")
            while progress.step < config.steps:
                progress = one_step(run, progress, last, interruption.check)
            return finish(run, progress, directory, interruption.check)
        except InterruptedRunError as error:
            last.save()
            step, cause = last.progress.step, f"{error}: " if hosts.several() else ""
            display.note(
                f"{cause}interrupted after step {step}, which is saved: continue with --resume auto"
            )
            return summarize(last.progress, interrupted=True)
        except LogitsError as error:
            # The parameters of the last step are of no use: they are not saved.
            with suppress(Exception):
                settle(wait=True)
            raise LogitsError(_describe_broken(error, last.progress.step, run)) from error
        except BaseException as error:
            if hosts.several() and not isinstance(error, hosts.SharedError):
                # This process alone failed, or the others are gone: nothing collective can end.
                raise RuntimeError(describe_loss(error, last.progress.step)) from error
            with suppress(Exception):  # the first error is the one to report
                if last.save_from_signal():
                    step = last.progress.step
                    display.note(f"step {step} is saved: continue with --resume auto")
            raise
        finally:
            if run.next_rollout is not None:
                run.next_rollout.close()


def _describe_broken(error: LogitsError, step: int, run: Run) -> str:
    earlier = [str(saved) for saved in run.checkpoints.steps() if saved < step]
    return (
        f"after step {step}, {error}; optimizer.learning_rate, "
        f"{run.config.optimizer.learning_rate:g}, may be too high. Checkpoints from before: "
        + (", ".join(earlier) if earlier else "none")
    )


def _prepare(config: TrainConfig, directory: Path) -> Path | None:
    """Find the run to resume or empty the directory, once for all processes."""

    def prepare() -> str | None:
        source = prepare_directory(config, directory)
        return None if source is None else str(source)

    source = hosts.first_decides("preparing output_dir", prepare)
    check_shared(directory)
    return None if source is None else Path(source)


# Steps.


def one_step(run: Run, progress: Progress, last: LastStep, check: Callable[[], None]) -> Progress:
    """Run one step, then evaluate, log, show and save what is due; return the progress after it.

    `check` raises `InterruptedRunError` after a signal.
    """
    config, step = run.config, progress.step
    if not hosts.several():  # several processes tell each other with the last step's metrics
        check()
    last.poll()
    started = time.perf_counter()
    sampled = None if run.next_rollout is None else run.next_rollout.take(check)
    rollout, drawn = collect(
        run.recipe,
        progress.state.params,
        lambda: next(run.loader),
        jax.random.fold_in(progress.key, step),
        sampled=sampled,
        check=check,
    )
    metrics = rollout_metrics(drawn, config, started)
    run.display.failures(step + 1, [episode for x in drawn for episode in x.episodes or ()])
    data = run.loader.get_state()
    if run.next_rollout is not None and not _is_due(run, step + 1):
        key = rollout_key(jax.random.fold_in(progress.key, step + 1), 0)
        run.next_rollout.start(progress.state.params, next(run.loader), key)
    try:
        state, learnt = train_step(
            progress.state,
            run.recipe,
            rollout,
            learning_rate=config.learning_rate(step),
            seed=(config.seed, step),
            compare_all=step % _COMPARE_ALL_EVERY == 0,
        )
    except SamplerMismatchError as error:
        last.finished(progress._replace(state=error.state))
        raise
    problem = describe_mismatch(learnt, config)
    if problem is not None:
        run.display.note(f"warning: {problem}")
    step_time = time.perf_counter() - started
    tokens = int(sum(r.lengths.sum() for r in drawn))
    totals = dataclasses.replace(
        progress.totals,
        num_tokens=progress.totals.num_tokens + tokens,
        seconds=progress.totals.seconds + step_time,
        skipped=progress.totals.skipped + 1 if learnt["skipped_updates"] else 0,
    )
    progress = Progress(state, progress.key, step + 1, totals, data)
    metrics |= learnt | {
        "num_tokens": totals.num_tokens,
        "step_time": step_time,
        "tokens_per_second": tokens / step_time,
    }
    progress, interruption = _write_metrics(run, progress, last, metrics, check)
    _show_and_save(run, progress, last, rollout, metrics, check)
    if interruption is not None:
        raise interruption
    return progress


def _is_due(run: Run, step: int) -> bool:
    """Whether an evaluation, a checkpoint or the end follows a step.

    A run that resumes from the checkpoint then samples as this one does, and an evaluation has the
    server for itself.
    """
    return _evaluates_after(run, step) or _saves_after(run, step)


def _evaluates_after(run: Run, step: int) -> bool:
    every = run.config.evaluation.every
    return bool(every and run.task.held_out) and step % every == 0


def _saves_after(run: Run, step: int) -> bool:
    return step % run.config.logging.checkpoint_every == 0 or step == run.config.steps


def write_waiting_metrics(
    run: Run, progress: Progress, last: LastStep, check: Callable[[], None]
) -> Progress:
    """Repeat an evaluation that was interrupted, and write its step's metrics."""
    if progress.totals.unwritten is None:
        return progress
    metrics = json.loads(progress.totals.unwritten)
    totals = dataclasses.replace(progress.totals, unwritten=None)
    progress, interruption = _write_metrics(
        run, progress._replace(totals=totals), last, metrics, check
    )
    last.save()
    if interruption is not None:
        raise interruption
    return progress


def _write_metrics(
    run: Run,
    progress: Progress,
    last: LastStep,
    metrics: dict[str, float],
    check: Callable[[], None],
) -> tuple[Progress, InterruptedRunError | None]:
    """Evaluate if it is due, and write a step's metrics, also if the evaluation raises.

    The line of a step that will be saved is written when the save before it is complete: a process
    that is killed then loses no more than these steps.

    Returns:
        The progress, and a signal that has arrived: processes tell each other in the same message.
    """
    totals = progress.totals

    def write_line() -> None:
        run.log.write(progress.step, metrics)
        check()

    def write() -> tuple[Progress, InterruptedRunError | None]:
        interruption = None
        try:
            hosts.together("writing metrics", write_line)
        except InterruptedRunError as error:  # all have written their line
            interruption = error
        written = dataclasses.replace(totals, metrics_offset=run.log.offset)
        finished = progress._replace(totals=written)
        last.finished(finished)
        return finished, interruption

    # A signal during the evaluation, or an error of a tracker, saves this step; a resumed run then
    # repeats the evaluation and writes the line.
    waiting = dataclasses.replace(
        totals, unwritten=json.dumps(metrics), metrics_offset=run.log.offset
    )
    last.finished(progress._replace(totals=waiting))
    try:
        if _evaluates_after(run, progress.step):
            results = held_out(
                run.config, run.task, run.policy,
                engine=run.engine, params=progress.state.params, recipe=run.recipe, check=check,
            )  # fmt: skip
            metrics |= {f"eval/{name}": value for name, value in results.items()}
            progress = progress._replace(held_out=results)
        if _saves_after(run, progress.step):
            last.poll(wait=True)
    except InterruptedRunError:
        raise
    except BaseException:
        write()
        raise
    progress, interruption = write()
    run.display.step(progress.step, metrics)
    return progress, interruption


def _show_and_save(
    run: Run,
    progress: Progress,
    last: LastStep,
    rollout: Rollout,
    metrics: Mapping[str, float],
    check: Callable[[], None],
) -> None:
    config, step = run.config, progress.step
    due = config.logging.samples_every and step % config.logging.samples_every == 0
    if due and config.examples is None:
        assert rollout.advantages is not None
        rewards, advantages = rollout.scores.tolist(), rollout.advantages.tolist()
        if rollout.episodes is not None:
            run.display.episodes(step, rollout.episodes, rewards, advantages)
        else:
            shown = np.flatnonzero(rollout.held_rows)
            run.display.samples(
                step,
                [rollout.trajectories[i] for i in shown],
                [rewards[i] for i in shown],
                [advantages[i] for i in shown],
            )
    if config.logging.traces_every and step % config.logging.traces_every == 0:
        path = run.checkpoints.directory.parent / "traces" / f"{step:06d}.jsonl"
        hosts.first_decides("writing traces", lambda: _write_traces(path, rollout))
    if progress.totals.skipped >= config.optimizer.max_skipped:
        last.save()
        finite = math.isfinite(metrics.get("teacher/kl", 0))
        scored = "" if finite else f" (nor were scores of teacher.model={config.teacher.model!r})"
        raise hosts.SharedError(
            f"gradients must be finite, got {progress.totals.skipped} steps in a row in which "
            f"some were not{scored}; the parameters of step {step} are in "
            f"{run.checkpoints.directory}"
        )
    if _saves_after(run, step):
        last.save(wait=step == config.steps)
        # A signal that arrived while arrays were copied ends the run before it draws.
        hosts.together("saving", check)


def _write_traces(path: Path, rollout: Rollout) -> None:
    """Write the episodes of a step, one a line; a resumed run writes the same file."""
    lines = []
    for i, episode in enumerate(rollout.episodes or ()):
        record = episode.as_record() | {"reward": float(rollout.scores[i])}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, "".join(lines))


# After the last step.


def summarize(progress: Progress, *, interrupted: bool) -> dict[str, Any]:
    """Summarize a run, without its final evaluation."""
    totals = progress.totals
    return {
        **{f"{name}_before": getattr(totals, f"{name}_before") for name in MEASURED},
        **dict.fromkeys(f"{name}_after" for name in MEASURED),
        "steps": progress.step,
        "seconds": round(totals.seconds, 3),
        "step_time": round(totals.seconds / max(progress.step, 1), 4),
        "interrupted": interrupted,
    }


def finish(
    run: Run, progress: Progress, directory: Path, check: Callable[[], None]
) -> dict[str, Any]:
    """Evaluate unless the last step did, save the policy, and write curves and summary."""
    hosts.together("ending", check)
    params, results = progress.state.params, progress.held_out
    if results is None:
        results = held_out(
            run.config, run.task, run.policy,
            engine=run.engine, params=params, recipe=run.recipe, check=check,
        )  # fmt: skip
    after = {f"{name}_after": results.get(name) for name in MEASURED}
    after |= {f"{name}_after": x for name, x in results.items() if name.startswith("pass@")}
    summary = summarize(progress, interrupted=False) | after
    save_policy(run.policy._replace(params=params), directory / "policy")

    def write() -> None:
        if progress.step:
            draw_curves(
                directory / "metrics.jsonl",
                directory / "curves.png",
                before={name: summary[f"{name}_before"] for name in MEASURED},
                after={name: summary[f"{name}_after"] for name in MEASURED},
            )
        write_atomically(directory / "summary.json", json.dumps(summary, indent=1))

    hosts.first_decides("writing the summary", write)
    run.display.summary(summary, directory)
    return summary


def export(
    directory: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    merge: bool = False,
    overwrite: bool = False,
) -> None:
    """Write the policy of a run's checkpoint in Hugging Face's format.

    Adapters of the built-in policy are written with it, in `base`.

    Args:
        directory: of the run.
        target: where to write it.
        step: of the checkpoint; None for the newest valid one.
        merge: True adds adapters to the kernels and writes a whole checkpoint.
        overwrite: whether `target` may hold something, which is replaced.

    Raises:
        FileNotFoundError: if there is no run, or no valid checkpoint.
        FileExistsError: if `target` holds something, without `overwrite`; or is the base of the
            run's adapters.
        ValueError: if `step` has no valid checkpoint, or the base of the run's adapters is another
            one now.
    """
    path, run = Path(target).expanduser(), Path(directory).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not overwrite:
        names = sorted(p.name for p in path.iterdir())[:3] if path.is_dir() else ["a file"]
        raise FileExistsError(
            f"directory must be empty or new, got {path} with {', '.join(names)}: --overwrite "
            "replaces the policy in it"
        )
    if not holds_run(run):
        raise FileNotFoundError(f"run must be the directory of a run, got {run}")
    config = from_dict(saved_settings(run))
    policy = with_adapter(config, read_policy(config), run, run, None)
    if policy.base is not None and Path(policy.base).resolve() == path.resolve():
        raise FileExistsError(
            f"directory must not be the base that the run's adapters are added to, got {path}"
        )
    # Neither a server is needed nor the teacher.
    engine = LocalEngine(policy.config, policy.template)
    config = dataclasses.replace(config, teacher=TeacherConfig())
    recipe = make_recipe(config, policy, lambda trajectories, truths: [], engine=engine)
    state = begin_training(policy.params, recipe.optimizer, None)
    like = arrays_of(
        Progress(state, jax.random.key(config.seed), 0, Totals(), {}), recipe.reference
    )
    base_files = fingerprint_of_base(policy)
    restored = RunCheckpoints(run / "checkpoints").restore(
        like, step=step, check=lambda facts: check_base(facts, base_files)
    )
    trained = policy._replace(params=restored.arrays["state"].params)
    if policy.lora is None or config.model is not None or merge:
        save_policy(trained, path, merge=merge)
        return
    base = path / "base"
    if base.is_dir() and (path / ADAPTER_CONFIG).is_file():  # of an earlier export
        shutil.rmtree(base)
    save_policy(trained._replace(base=str(base.resolve())), path)
    save_policy(load_policy(str(policy.base)), base)
