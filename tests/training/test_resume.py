"""2N steps are N steps, a new process, and N steps: byte for byte, wherever the run was cut.

Each way in which others lost or repeated something when they resumed is a case here.
"""

import json

import pytest

from tests.training.runs import (
    arrays,
    assert_same_run,
    copy_until,
    facts,
    metrics,
    run,
    scored,
    steps,
)

pytestmark = pytest.mark.exhaustive  # in this process, test_run.py tests the same

EPOCH = 3  # steps in which all prompts come up once
UPDATES = 4  # a step


@pytest.fixture(scope="module")
def uninterrupted(folder):
    done = run(folder, folder / "whole")
    assert done.returncode == 0, done.stderr
    assert len(set(metrics(folder / "whole"))) == 2 * EPOCH
    return folder / "whole"


@pytest.mark.parametrize("after", range(6))
def test_a_new_process_goes_on_as_if_nothing_had_been(folder, uninterrupted, tmp_path, after):
    """After 1: the order of prompts; after 3: the end of an epoch; later: the second epoch."""
    copy_until(uninterrupted, tmp_path / "run", after)
    resumed = run(folder, tmp_path / "run", resume="auto")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming after step {after} of" in resumed.stdout
    # No prompt twice, none left out.
    assert scored(tmp_path / "run") == scored(uninterrupted)[after:]
    assert len(scored(tmp_path / "run")) == 2 * EPOCH - after  # and it did run
    assert_same_run(tmp_path / "run", uninterrupted)


def test_every_step_is_named_for_the_updates_it_has_had(uninterrupted):
    assert steps(uninterrupted) == list(range(2 * EPOCH + 1))
    without_signal = [json.loads(line)["updates_without_signal"] for line in metrics(uninterrupted)]
    for step in steps(uninterrupted):
        count = arrays(uninterrupted, step)["['state'].step"][2]
        applied = step * UPDATES - sum(without_signal[:step])
        assert int.from_bytes(count, "little") == applied
        moments = arrays(uninterrupted, step)["['state'].optimizer_state[0].count"][2]
        assert moments == count
    assert [json.loads(line)["step"] for line in metrics(uninterrupted)] == list(
        range(1, 2 * EPOCH + 1)
    )
    assert facts(uninterrupted, 2)["data"]["position"] == 4


def test_n_steps_and_n_more_in_another_process(folder, uninterrupted, tmp_path):
    assert run(folder, tmp_path / "run", steps=EPOCH).returncode == 0
    assert steps(tmp_path / "run")[-1] == EPOCH
    assert run(folder, tmp_path / "run", resume="auto").returncode == 0
    assert scored(tmp_path / "run") == scored(uninterrupted)
    assert_same_run(tmp_path / "run", uninterrupted)


JUDGED = {"evaluation.path": "held_out.jsonl"}  # in the folder of the runs
ENDS = {
    "in the middle of mini-batches": ("update:4:SIGKILL:0.05", {}),
    "in the middle of accumulation": ("update:3:SIGKILL:0.05", {"rollout.num_samples": 8}),
    "in the middle of dynamic sampling": (
        "reward:6:SIGTERM:0",
        {"update.dynamic_sampling": 3, "update.mask_truncated": True},
    ),
    "while the learning rate falls, with a reference": (
        "update:2:SIGTERM:0.05",
        {"update.kl_beta": 0.1, "optimizer.schedule": "linear"},
    ),
    "in bfloat16, with batch statistics": (
        "reward:5:SIGKILL:0",
        {"dtype": "bfloat16", "update.scale": "batch"},
    ),
    "with dropout, in the middle of accumulation": (
        "update:3:SIGKILL:0.05",
        {"lora.rank": 2, "lora.dropout": 0.3, "rollout.num_samples": 8},
    ),
    "in the evaluation before the first step": ("draw:1:SIGTERM:0", JUDGED),
    "with checkpoints of every second step": (
        "reward:6:SIGKILL:0",
        {"logging.checkpoint_every": 2, "evaluation.every": 3, **JUDGED},
    ),
    "with the policy and the task that are built in": (
        "reward:4:SIGKILL:0",
        {"model": None, "task": "arithmetic", "warm_start": 0.01, "evaluation.problems": 8},
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_ended_anywhere_goes_on(folder, tmp_path, name):
    moment, changes = ENDS[name]
    changes = {x: folder / y if x == "evaluation.path" else y for x, y in changes.items()}
    uninterrupted = run(folder, tmp_path / "whole", **changes)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    ended = run(folder, tmp_path / "run", env={"SIGNAL_AT": moment}, **changes)
    assert ended.returncode == (143 if "SIGTERM" in moment else -9), ended.stderr
    resumed = run(folder, tmp_path / "run", resume="auto", **changes)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(tmp_path / "run", tmp_path / "whole")
