"""A signal during an evaluation ends it; it is done anew, and nothing tells that it was."""

import dataclasses
import os
import signal
import subprocess

import pytest

from tests.training import small_run
from tests.training.runs import (
    ROOT,
    arrays,
    assert_same_run,
    command,
    environment,
    flags,
    metrics,
    run,
    steps,
)
from twinkle_jax.training import EvaluationConfig, train

EXIT_WITHIN = 30
EVERY = 2  # steps from one evaluation to the next


def config(folder, directory, **changes):
    """Each evaluation calls the reward twice, once for the most probable completions."""
    task = str(folder / "task.jsonl")
    often = EvaluationConfig(every=EVERY, problems=2, path=task, pass_k=2)
    return small_run.config(folder, directory, **({"evaluation": often} | changes))


class Scorer:
    """Likes short answers; in one call this process gets a signal."""

    def __init__(self, signal_at=0):
        self.signal_at, self.calls = signal_at, 0

    def __call__(self, trajectories, truths):
        self.calls += 1
        if self.calls == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return [float(len(t["messages"][-1]["content"]) < 3) for t in trajectories]


@pytest.fixture(scope="module")
def whole(folder):
    reward = Scorer()
    train(config(folder, folder / "whole"), reward=reward)
    # 2 before the first step; 1 a step; 2 after steps 2 and 4; 2 at the end
    assert reward.calls == 2 + 4 + 2 * 2 + 2
    assert "eval/accuracy" in metrics(folder / "whole")[1]
    return folder / "whole"


# In the first part of the evaluation after step 2, of that after the last step, of the one at the
# end of the run; in a second part, which is the last thing to be done, so that it is finished.
MOMENTS = [(5, 2, 1), (9, 4, 3), (11, 4, 4), (6, 2, 2)]


@pytest.mark.parametrize(
    ("call", "step", "lines"),
    [pytest.param(*m, marks=[pytest.mark.exhaustive] if m[0] != 9 else []) for m in MOMENTS],
)
def test_it_is_ended_between_batches_and_done_anew(
    folder, whole, tmp_path, capsys, call, step, lines
):
    own, reward = config(folder, tmp_path / "run"), Scorer(signal_at=call)
    summary = train(own, reward=reward)
    assert (summary["interrupted"], summary["steps"]) == (True, step)
    assert reward.calls == call  # and no batch later
    assert steps(tmp_path / "run") == [0, step]
    assert len(metrics(tmp_path / "run")) == lines
    assert f"interrupted after step {step}, which is saved" in capsys.readouterr().out
    resumed = train(dataclasses.replace(own, resume="auto"), reward=Scorer())
    assert resumed["steps"] == 4
    assert_same_run(tmp_path / "run", whole)
    again = train(dataclasses.replace(own, resume="auto", steps=5), reward=Scorer())
    assert again["steps"] == 5
    assert metrics(tmp_path / "run")[:4] == metrics(whole)


@pytest.mark.exhaustive
def test_one_that_was_not_finished_may_be_left_out_when_going_on(folder, whole, tmp_path):
    own = config(folder, tmp_path / "run")
    train(own, reward=Scorer(signal_at=5))
    without = dataclasses.replace(own, resume="auto", evaluation=EvaluationConfig(every=0))
    train(without, reward=Scorer())
    assert "eval/accuracy" not in "".join(metrics(tmp_path / "run"))
    assert arrays(tmp_path / "run", 4) == arrays(whole, 4)


@pytest.mark.exhaustive
def test_a_batch_that_takes_long_is_ended_by_the_signal_handler(folder, tmp_path):
    evaluated = {"evaluation.every": EVERY, "evaluation.path": folder / "task.jsonl"}
    rarely = evaluated | {"logging.checkpoint_every": 4, "steps": 4}
    done = run(folder, tmp_path / "whole", **rarely)
    assert done.returncode == 0, done.stderr
    process = subprocess.Popen(
        command(flags(folder, output_dir=tmp_path / "run", **rarely)),
        cwd=ROOT,
        env=environment(
            folder, RECORD=str(tmp_path / "run.record"), SIGNAL_AT="reward:4:SIGTERM:600"
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("signal at"))
        assert process.wait(timeout=EXIT_WITHIN) == 143
    assert steps(tmp_path / "run") == [0, EVERY]
    assert len(metrics(tmp_path / "run")) == EVERY - 1
    resumed = run(folder, tmp_path / "run", resume="auto", **rarely)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(tmp_path / "run", tmp_path / "whole")
