"""What befalls runs: signals, kills, full disks, damaged files, wrong gradients and rewards."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from tests.training.runs import (
    ROOT,
    arrays,
    assert_same_run,
    command,
    copy_until,
    damage_checkpoint,
    end_by_signal,
    environment,
    flags,
    learnt,
    metrics,
    run,
    steps,
    wait_for,
)
from tests.training.small_run import EVERY_STEP, STEPS, Scorer, config, evaluation, update
from twinkle_jax.rollout.hosts import InterruptedRunError
from twinkle_jax.training import OptimizerConfig, SamplerMismatchError, train
from twinkle_jax.training import evaluation as training_evaluation
from twinkle_jax.training.checkpoint import RunCheckpoints
from twinkle_jax.training.config import with_setting
from twinkle_jax.training.display import Display
from twinkle_jax.training.progress import LastStep, save
from twinkle_jax.training.run import one_step
from twinkle_jax.training.start import begin
from twinkle_jax.training.task import make_task
from twinkle_jax.training.tracking import MetricsLog


@pytest.fixture(scope="module")
def uninterrupted(folder):
    done = run(folder, folder / "whole", steps=STEPS)
    assert done.returncode == 0, done.stderr
    return folder / "whole"


def assert_goes_on(folder, directory, uninterrupted, **changes):
    resumed = run(folder, directory, resume="auto", steps=STEPS, **changes)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(directory, uninterrupted)
    return resumed


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", range(10))
def test_killed_at_any_moment(folder, uninterrupted, tmp_path, moment):
    """Before the first checkpoint too, and while one is written."""
    process = subprocess.Popen(
        command(flags(folder, output_dir=tmp_path / "run", steps=STEPS)),
        cwd=ROOT,
        env=environment(folder, RECORD=str(tmp_path / "run.record")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with process:
        wait_for(tmp_path / "run" / "config.json")
        whole_run = json.loads((uninterrupted / "summary.json").read_text())["seconds"]
        time.sleep(np.random.default_rng(moment).random() * 2 * whole_run)
        process.kill()
    assert_goes_on(folder, tmp_path / "run", uninterrupted)


# A stage that takes minutes has to be ended by the signal handler.
SIGNALS = [
    ("reward:3:SIGTERM:600", 2, {}),
    ("reward:3:SIGINT:600", 2, {}),
    ("reward:2:SIGINT:0", 1, {}),
    ("compile:19:SIGTERM:600", 0, {}),
    ("compile:29:SIGINT:0", None, {}),  # in whichever step compiles its 29th program
    ("write:2:SIGTERM:0", 1, {"logging.checkpoint_every": 1}),
    ("write:3:SIGINT:10", 2, {"logging.checkpoint_every": 1}),
    ("update:2:SIGTERM:0.05", None, {}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("moment", "saved", "changes"), SIGNALS)
def test_a_signal_saves_the_last_finished_step(
    folder, uninterrupted, tmp_path, moment, saved, changes
):
    changes = {"logging.checkpoint_every": STEPS, **changes}
    end_by_signal(folder, tmp_path / "run", moment, steps=STEPS, **changes)
    newest = steps(tmp_path / "run")[-1]
    assert saved in (None, newest)
    assert len(metrics(tmp_path / "run")) == newest
    assert_goes_on(folder, tmp_path / "run", uninterrupted)


@pytest.mark.exhaustive
def test_a_full_disk_names_the_step_and_spoils_nothing(folder, uninterrupted, tmp_path):
    copy_until(uninterrupted, tmp_path / "run", 2)
    # 12 KiB: facts and metrics fit, but no list of the arrays, which is one file. How the arrays
    # are dealt out to files depends on how their writes happen to coincide.
    less_than_a_checkpoint_needs = ["bash", "-c", 'ulimit -f 12; exec "$@"', "bash"]
    settings = {"resume": "auto", "steps": STEPS}
    ended = run(folder, tmp_path / "run", before=less_than_a_checkpoint_needs, **settings)
    assert ended.returncode == 1
    messages = [line for line in ended.stderr.splitlines() if line.startswith("twinkle-jax: ")]
    assert len(messages) == 1  # orbax's threads may have a word of their own
    assert "step 3 was not saved: File too large" in messages[0]
    # Writes that are still under way after the first error may leave a partial directory.
    assert RunCheckpoints(tmp_path / "run" / "checkpoints").steps() == [0, 1, 2]
    assert_goes_on(folder, tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_killed_run_loses_at_most_the_step_whose_line_is_the_last(folder, tmp_path, monkeypatch):
    """With a checkpoint every step, on a disk that is slower than the steps."""
    flush = os.fsync

    def slow_flush(descriptor):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.03)  # for each file of a checkpoint
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", slow_flush)
    settings = config(folder, tmp_path / "run", logging=EVERY_STEP)
    task = make_task(settings)._replace(reward=Scorer())
    (tmp_path / "run").mkdir()
    saved_at_line = {}
    with MetricsLog(tmp_path / "run") as log, Display(STEPS) as display:
        run, progress = begin(settings, tmp_path / "run", task, log, display, None)

        class Log:
            def __getattr__(self, name):
                return getattr(log, name)

            def write(self, step, metrics):
                saved_at_line[step] = run.checkpoints.steps()
                log.write(step, metrics)

        def settle(*, wait):
            (run.checkpoints.finish if wait else run.checkpoints.poll)()

        recorded = run._replace(log=Log())
        last = LastStep(
            lambda p, wait: save(run.checkpoints, p, run.recipe.reference, settings, wait=wait),
            settle,
        )
        last.finished(progress)
        last.save()
        for _ in range(STEPS):
            progress = one_step(recorded, progress, last, lambda: None)
    assert saved_at_line == {step: list(range(step)) for step in range(1, STEPS + 1)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", ["bit", "missing"])
def test_a_damaged_checkpoint_is_not_used(folder, uninterrupted, tmp_path, damage):
    copy_until(uninterrupted, tmp_path / "run", 3)
    path = damage_checkpoint(tmp_path / "run", 3, damage)
    resumed = assert_goes_on(folder, tmp_path / "run", uninterrupted)
    assert f"step 3 is skipped: {path}" in resumed.stderr
    assert "resuming after step 2" in resumed.stdout


def huge(lengths):
    return [3e38 * (-1) ** i for i in range(len(lengths))]


@pytest.mark.slow
def test_gradients_that_are_not_finite_are_skipped_and_counted(folder, tmp_path):
    settings = config(folder, tmp_path / "run", logging=EVERY_STEP)
    assert train(settings, reward=Scorer(call2=huge, call4=huge))["steps"] == STEPS  # not in a row
    skipped = [json.loads(line)["skipped_updates"] for line in metrics(tmp_path / "run")]
    assert skipped == [0, 1, 0, 1]
    assert learnt(tmp_path / "run", 2) == learnt(tmp_path / "run", 1)
    assert learnt(tmp_path / "run", 3) != learnt(tmp_path / "run", 2)

    settings = config(folder, tmp_path / "other")
    with pytest.raises(RuntimeError, match="gradients"):
        train(settings, reward=Scorer(call2=huge, call3=huge))
    assert steps(tmp_path / "other") == [0, 3]
    assert learnt(tmp_path / "other", 3) == learnt(tmp_path / "run", 1)


@pytest.mark.slow
@pytest.mark.parametrize("found_in", ["step", "evaluation", "last evaluation"])
def test_a_policy_that_breaks_ends_the_run_and_is_not_saved(folder, tmp_path, found_in):
    every = {"step": 0, "evaluation": 2, "last evaluation": 0}[found_in]
    settings = config(
        folder,
        tmp_path / "run",
        steps=2 if found_in == "last evaluation" else STEPS,
        optimizer=OptimizerConfig(learning_rate=1e30, warmup_steps=1),
        update=update(kl_beta=0.0),
        evaluation=evaluation(folder, every=every),
    )

    def equal(lengths):  # no signal, and no update
        return [0.0] * len(lengths)

    # The evaluation before the first step is the first call.
    scorer = Scorer(call2=equal)
    with pytest.raises(RuntimeError, match=r"after step 2, .*logits.* Checkpoints from before: 0$"):
        train(settings, reward=scorer)
    assert steps(tmp_path / "run") == ([0, 2] if found_in == "last evaluation" else [0])
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.slow
def test_a_signal_ends_the_evaluation_before_the_first_step(folder, tmp_path, monkeypatch):
    """It may take minutes; the run that goes on repeats it. Four problems, in batches of two."""
    two_at_a_time = functools.partial(training_evaluation.evaluate, batch=2)
    monkeypatch.setattr(training_evaluation, "evaluate", two_at_a_time)

    def interrupt(lengths):
        os.kill(os.getpid(), signal.SIGTERM)
        return Scorer.usual(lengths)

    settings = config(folder, tmp_path / "run", steps=1, evaluation=evaluation(folder, every=0))
    scorer = Scorer(call1=interrupt)
    summary = train(settings, reward=scorer)
    assert summary["interrupted"] and summary["accuracy_before"] is None and scorer.calls == 1
    resumed = train(dataclasses.replace(settings, resume="auto"), reward=Scorer())
    expected = train(config(folder, tmp_path / "whole", steps=1, evaluation=settings.evaluation),
                     reward=Scorer())  # fmt: skip
    assert resumed["accuracy_before"] == expected["accuracy_before"] is not None
    assert learnt(tmp_path / "run", 1) == learnt(tmp_path / "whole", 1)


def hang(lengths):
    time.sleep(600)


def fail(lengths):
    raise ZeroDivisionError("of the reward")


def interrupt(lengths):
    raise KeyboardInterrupt("of the user")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (fail, RuntimeError, "Scorer"),
        (hang, TimeoutError, "Scorer"),
        (interrupt, KeyboardInterrupt, "of the user"),
        (lambda x: None, TypeError, "None"),
        (lambda x: [0.0, np.nan] * 4, ValueError, "nan for trajectory 1"),
    ],
)
def test_a_reward_that_goes_wrong_costs_no_finished_step(folder, tmp_path, wrong, error, message):
    settings = config(folder, tmp_path / "run", reward_timeout=1.0)
    with pytest.raises(error, match=message):
        train(settings, reward=Scorer(call3=wrong))
    assert steps(tmp_path / "run") == [0, 2]
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.slow
def test_a_reward_that_goes_wrong_in_an_evaluation_costs_no_finished_step(folder, tmp_path):
    settings = config(folder, tmp_path / "run", evaluation=evaluation(folder, every=1))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        train(settings, reward=Scorer(call3=fail))
    assert steps(tmp_path / "run") == [0, 1]
    assert len(metrics(tmp_path / "run")) == 1


def stop():
    raise InterruptedRunError


@pytest.mark.slow
def test_a_stale_sampler_costs_no_finished_step(folder, tmp_path):
    settings = config(folder, tmp_path / "run")
    train(config(folder, tmp_path / "whole", steps=1), reward=Scorer())
    task = make_task(settings)._replace(reward=Scorer())
    (tmp_path / "run").mkdir()
    with MetricsLog(tmp_path / "run") as log, Display(4) as display:
        run, progress = begin(settings, tmp_path / "run", task, log, display, None)
        last = LastStep(lambda p, wait: save(run.checkpoints, p, run.recipe.reference, settings))
        progress = one_step(run, progress, last, lambda: None)
        begun = run.loader.get_state()
        with pytest.raises(InterruptedRunError):
            one_step(run, progress, last, stop)
        assert run.loader.get_state() == begun  # nothing was drawn for a step that is not to be
        impossible = with_setting(settings, "update.max_logp_diff", 0.0)
        strict = run._replace(recipe=run.recipe._replace(config=impossible))
        with pytest.raises(RuntimeError, match="log-probabilities"):
            one_step(strict, progress, last, lambda: None)
        assert last.save_from_signal()
    assert steps(tmp_path / "run") == [1]
    assert arrays(tmp_path / "run", 1) == arrays(tmp_path / "whole", 1)


@pytest.mark.slow
def test_all_rows_are_compared_in_the_first_and_every_25th_step(folder, tmp_path):
    """In the others those of the first update, for which each step deals prompts out anew."""
    settings = config(folder, tmp_path / "run", update=update(mini_batches=2))
    task = make_task(settings)._replace(reward=Scorer())
    (tmp_path / "run").mkdir()

    def order(step):
        return np.random.default_rng([settings.seed, step, 0]).permutation(2).tolist()

    other = next(step for step in range(1, 25) if order(step) != order(0))
    with MetricsLog(tmp_path / "run") as log, Display(4) as display:
        run, progress = begin(settings, tmp_path / "run", task, log, display, None)

        class Source:
            def __getattr__(self, name):
                return getattr(run.recipe.source, name)

            def sample(self, *arguments):
                drawn = run.recipe.source.sample(*arguments)
                logps = drawn.batch.old_logps.at[wrong_prompt * 4 + 1].add(-1.0)
                return drawn._replace(batch=drawn.batch._replace(old_logps=logps))

        stale = run._replace(recipe=run.recipe._replace(source=Source()))
        last = LastStep(lambda p, wait: None)
        for step, update_of_it in ((0, 1), (25, 1), (other, 0)):
            wrong_prompt = order(step)[update_of_it]
            with pytest.raises(SamplerMismatchError):
                one_step(stale, progress._replace(step=step), last, lambda: None)
            progress = last.progress
        wrong_prompt = order(other)[1]
        one_step(stale, progress._replace(step=other), last, lambda: None)


@pytest.fixture(scope="module")
def begun(folder):
    train(config(folder, folder / "begun", steps=1), reward=Scorer())
    return folder / "begun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update": update(kl_beta=0.1)}, r"update.kl_beta"),
        ({"model": None, "task": "arithmetic"}, "model"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"reward": "math"}, "reward"),
    ],
)
def test_what_differs_is_named_before_anything_else(folder, begun, changes, message):
    settings = config(folder, begun, resume="auto", **changes)
    with pytest.raises(ValueError, match=message):
        train(settings, reward=Scorer())
    assert steps(begun) == [0, 1]


@pytest.mark.slow
def test_a_run_that_is_done_says_so_at_once(folder, begun, capsys):
    asked = Scorer()
    settings = config(folder, begun, resume="auto", steps=1)
    before = (begun / "summary.json").read_text()
    assert train(settings, reward=asked) == json.loads(before)
    assert asked.calls == 0
    assert "nothing left to do: 1 of 1 steps are done" in capsys.readouterr().out
    fewer = config(folder, begun, resume="auto", steps=0)
    assert train(fewer, reward=asked)["steps"] == 1
