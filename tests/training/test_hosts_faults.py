"""What befalls one of two processes ends both at the same step, and nothing finished is lost."""

import dataclasses
import json
import shutil
import signal
import socket
import subprocess
import time

import numpy as np
import pytest

from tests.training import small_run
from tests.training.joined_runs import JoinedRun, flags_of, free_port, run_joined
from tests.training.runs import (
    ROOT,
    assert_same_run,
    command,
    copy_until,
    damage_checkpoint,
    environment,
    metrics,
    steps,
    wait_for,
)
from tests.training.small_run import EVERY_STEP, STEPS
from twinkle_jax.training import MeshConfig, OptimizerConfig

pytestmark = pytest.mark.exhaustive

FAULTY = "tests.training.recorded_reward:faulty_short_answers"
ENDS_WITHIN = 60


def config(folder, directory, **changes):
    settings = {"reward": FAULTY, "mesh": MeshConfig(fsdp=8)}
    return small_run.config(folder, directory, **(settings | changes))


@pytest.fixture(scope="module")
def uninterrupted(folder):
    run_joined(folder, config(folder, folder / "whole", logging=EVERY_STEP))
    return folder / "whole"


def assert_goes_on(folder, directory, uninterrupted, **changes):
    again = config(folder, directory, resume="auto", **changes)
    run = run_joined(folder, again)
    assert_same_run(directory, uninterrupted)
    return run


def assert_one_message(run, *parts):
    """Process 0 says what happened where; the other is silent."""
    first, second = run.complaints()
    assert len(first) == 1, run.errors(0)
    assert second == []
    for part in parts:
        assert part in first[0]


@pytest.mark.parametrize("after", [1, 3])
def test_resumed_byte_for_byte(folder, uninterrupted, tmp_path, after):
    copy_until(uninterrupted, tmp_path / "run", after)
    run = assert_goes_on(folder, tmp_path / "run", uninterrupted, logging=EVERY_STEP)
    assert f"resuming after step {after} of" in run.printed(0)


def test_an_optimizer_with_a_key_is_resumed(folder, tmp_path):
    noisy = OptimizerConfig("noisy_sgd", {"key": 3}, learning_rate=1e-2, warmup_steps=1)
    changes = {"optimizer": noisy, "logging": EVERY_STEP, "steps": 2}
    run_joined(folder, config(folder, tmp_path / "whole", **changes))
    copy_until(tmp_path / "whole", tmp_path / "run", 1)
    assert_goes_on(folder, tmp_path / "run", tmp_path / "whole", **changes)


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise:3", "ZeroDivisionError: of the reward"),
        ("hang:3", "must return within 3"),
        ("nan:3", "must return finite numbers"),
    ],
)
def test_a_reward_that_goes_wrong_on_one_host(
    folder, uninterrupted, tmp_path, fault, message, process
):
    faulty = config(folder, tmp_path / "run", reward_timeout=3.0)
    run = run_joined(folder, faulty, variables={process: {"FAULT": fault}}, status=1)
    assert_one_message(run, f"process {process} of 2", message)
    assert steps(tmp_path / "run") == [0, 2]
    assert_goes_on(folder, tmp_path / "run", uninterrupted)


SIGNALS = [  # a moment of a step, and the step that is saved where it is known
    ("reward:3:SIGTERM:0", 2),
    ("reward:2:SIGINT:1", 1),
    ("draw:1:SIGTERM:0", 0),
    ("draw:3:SIGINT:0", 2),
    ("update:2:SIGTERM:0.02", None),
    ("update:3:SIGTERM:0.2", None),
    ("compile:40:SIGTERM:0", None),
]


def test_a_policy_that_breaks_ends_both(folder, tmp_path):
    optimizer = OptimizerConfig(learning_rate=1e30, warmup_steps=1)
    run = run_joined(folder, config(folder, tmp_path / "run", optimizer=optimizer), status=1)
    assert_one_message(run, "after step 1, the policy's logits must be finite", "in 8 of 8")
    assert steps(tmp_path / "run") == [0]


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(("moment", "saved"), SIGNALS)
def test_a_signal_to_one_host_ends_both(folder, uninterrupted, tmp_path, moment, saved, process):
    received = {process: {"SIGNAL_AT": moment}}
    run = run_joined(folder, config(folder, tmp_path / "run"), variables=received, status=143)
    assert_interrupted(run, tmp_path / "run", saved, f"process {process} of 2", moment)
    assert_goes_on(folder, tmp_path / "run", uninterrupted)


def assert_interrupted(run, directory, saved, process, moment):
    """Process 0 says who received what and which step is saved; nothing else is said."""
    last = steps(directory)[-1]
    assert saved in (last, None)
    assert len(metrics(directory)) == last
    notes = [line for line in run.printed(0).splitlines() if "interrupted" in line]
    assert len(notes) == 1
    name = moment.split(":")[2]
    assert f"received {name}: interrupted after step {last}, which is saved" in notes[0]
    assert process in notes[0]
    assert "interrupted" not in run.printed(1)
    assert run.complaints() == [[], []]


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(
    ("moment", "saved"),
    # The first checkpoint is that of step 0.
    [("write:1:SIGTERM:0", 0), ("write:3:SIGTERM:0.5", 2), (f"write:{STEPS + 1}:SIGINT:0", STEPS)],
)
def test_a_signal_while_a_checkpoint_is_written(
    folder, uninterrupted, tmp_path, moment, saved, process
):
    often = config(folder, tmp_path / "run", logging=EVERY_STEP)
    run = run_joined(folder, often, variables={process: {"SIGNAL_AT": moment}}, status=143)
    assert_interrupted(run, tmp_path / "run", saved, f"process {process} of 2", moment)
    assert steps(tmp_path / "run") == [*range(saved + 1)]
    assert_goes_on(folder, tmp_path / "run", uninterrupted, logging=EVERY_STEP)


@pytest.mark.parametrize("first", [0, 1])
def test_a_signal_to_each_host_the_later_one_while_all_save(folder, uninterrupted, tmp_path, first):
    """As schedulers do; the checkpoints are that of step 0 and that of the interruption."""
    moments = {first: {"SIGNAL_AT": "reward:3:SIGTERM:0"}}
    moments[1 - first] = {"SIGNAL_AT": "write:2:SIGTERM:0"}
    run = run_joined(folder, config(folder, tmp_path / "run"), variables=moments, status=143)
    assert all("signal at" in run.printed(number) for number in range(2))
    assert_interrupted(run, tmp_path / "run", 2, f"process {first} of 2", "::SIGTERM")
    assert_goes_on(folder, tmp_path / "run", uninterrupted)


@pytest.mark.parametrize("process", [0, 1])
def test_a_signal_during_an_evaluation(folder, tmp_path, process):
    """The first drawing is the evaluation before the first step, the fifth that of step 2."""
    judged = {"evaluation": small_run.evaluation(folder, every=1)}
    run_joined(folder, config(folder, tmp_path / "whole", **judged))
    moment = {process: {"SIGNAL_AT": "draw:5:SIGTERM:0"}}
    run = run_joined(
        folder, config(folder, tmp_path / "run", **judged), variables=moment, status=143
    )
    # Process 0 scores all four problems, and sees its signal there: the line waits for the scores.
    assert steps(tmp_path / "run") == [0, 2]
    assert len(metrics(tmp_path / "run")) == (2 if process else 1)
    assert f"process {process} of 2" in run.printed(0)
    assert_goes_on(folder, tmp_path / "run", tmp_path / "whole", **judged)


@pytest.mark.parametrize("moment", range(10))
def test_one_process_is_killed_at_any_moment(folder, uninterrupted, tmp_path, moment):
    random = np.random.default_rng(moment)
    number = int(random.integers(2))
    with JoinedRun(folder, config(folder, tmp_path / "run", logging=EVERY_STEP)) as run:
        wait_for(tmp_path / "run" / "config.json")
        seconds = json.loads((uninterrupted / "summary.json").read_text())["seconds"]
        time.sleep(random.random() * 2 * seconds)
        run.processes[number].kill()
        killed = time.monotonic()
        status = run.processes[1 - number].wait(ENDS_WITHIN)
        assert time.monotonic() - killed < ENDS_WITHIN
        finished = (tmp_path / "run" / "summary.json").exists()
        assert status != 0 or finished
    assert_goes_on(folder, tmp_path / "run", uninterrupted, logging=EVERY_STEP)


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_answers_no_more(folder, uninterrupted, tmp_path, process):
    """As one whose machine or network is lost: no connection to it is closed."""
    with JoinedRun(folder, config(folder, tmp_path / "run", logging=EVERY_STEP)) as run:
        wait_for(tmp_path / "run" / "metrics.jsonl")
        run.processes[process].send_signal(signal.SIGSTOP)
        assert run.processes[1 - process].wait(ENDS_WITHIN) != 0
    assert_goes_on(folder, tmp_path / "run", uninterrupted, logging=EVERY_STEP)


@pytest.mark.parametrize("process", [0, 1])
def test_a_full_disk_on_one_host(folder, uninterrupted, tmp_path, process):
    copy_until(uninterrupted, tmp_path / "run", 2)
    limit = ["bash", "-c", 'ulimit -f 30; exec "$@"', "bash"]
    full = config(folder, tmp_path / "run", resume="auto", logging=EVERY_STEP)
    run = run_joined(folder, full, before={process: limit}, status=1)
    assert_one_message(run, f"process {process} of 2", "step 3", "File too large")
    assert steps(tmp_path / "run") == [0, 1, 2]
    assert_goes_on(folder, tmp_path / "run", uninterrupted, logging=EVERY_STEP)


@pytest.mark.parametrize("damage", ["bit", "missing"])
def test_a_damaged_checkpoint_is_not_used(folder, uninterrupted, tmp_path, damage):
    copy_until(uninterrupted, tmp_path / "run", 3)
    path = damage_checkpoint(tmp_path / "run", 3, damage)
    run = assert_goes_on(folder, tmp_path / "run", uninterrupted, logging=EVERY_STEP)
    assert f"step 3 is skipped: {path}" in run.errors(0)
    assert "is skipped" not in run.errors(1)
    assert "resuming after step 2" in run.printed(0)


def test_a_second_run_with_the_same_directory(folder, tmp_path):
    slow = config(folder, tmp_path / "run", steps=1000)
    with JoinedRun(folder, slow) as first:
        wait_for(tmp_path / "run" / "metrics.jsonl")
        again = config(folder, tmp_path / "run", resume="auto")
        second = run_joined(folder, again, files=tmp_path / "second", status=1)
        assert_one_message(second, "output_dir must not be in use")
        for process in first.processes:
            process.send_signal(signal.SIGTERM)
        assert first.wait() == [143, 143]


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_the_others_do_not_come_to(folder, tmp_path, process):
    options = [
        *flags_of(config(folder, tmp_path / "run")),
        f"--distributed.coordinator_address=localhost:{free_port()}",
        "--distributed.num_processes=2",
        f"--distributed.process_id={process}",
        "--distributed.connect_timeout=5",
    ]
    ended = subprocess.run(
        command(options),
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN,
        check=False,
    )
    assert ended.returncode == 1
    assert "distributed.connect_timeout=5" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken(folder, tmp_path):
    """By a server that is no coordinator; both processes end, and say so."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        address = f"localhost:{taken.getsockname()[1]}"
        options = [f"--distributed.coordinator_address={address}"]
        options += ["--distributed.connect_timeout=10"]
        both = dict.fromkeys(range(2), options)
        run = run_joined(
            folder, config(folder, tmp_path / "run"), extra=both, status=1, seconds=ENDS_WITHIN
        )
    first, second = run.complaints()
    assert "must be a free port of process 0" in first[-1]
    assert "distributed.connect_timeout=10" in second[-1]
    assert not (tmp_path / "run").exists()


def test_rows_that_the_processes_cannot_share_equally(folder, tmp_path):
    three = {number: ["--rollout.prompts=3"] for number in range(2)}
    with JoinedRun(folder, config(folder, tmp_path / "run"), extra=three) as run:
        statuses = run.wait(ENDS_WITHIN)
    for status, number in zip(statuses, range(2), strict=True):
        assert status != 0
        assert "must divide rollout.prompts times rollout.num_samples" in run.errors(number)
        assert "12, got 8" in run.errors(number)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("task.jsonl", "the data of task"),
        ("model/config.json", "config.json of model"),
        ("reward.py", "the file of reward reward.py:short_answers"),
    ],
)
def test_files_that_differ_between_hosts_are_refused_by_name(folder, tmp_path, file, name):
    """Each process has its own copy of what it reads, under the same relative path."""
    places = {0: make_folder(tmp_path / "a"), 1: make_folder(tmp_path / "b")}
    for place in places.values():
        small_run.make_files(place)
        shutil.copy(ROOT / "tests/training/recorded_reward.py", place / "reward.py")
    path = tmp_path / "b" / file
    text = path.read_text()
    path.write_text(text.rpartition("\n")[0] if file == "task.jsonl" else text + "\n")
    relative = config(
        folder, tmp_path / "run", model="model", task="task.jsonl", reward="reward.py:short_answers"
    )
    run = run_joined(folder, relative, places=places, status=1)
    assert_one_message(run, f"{name} must be the same in all processes")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("error", ["RuntimeError", "ZeroDivisionError"])
def test_an_error_that_the_others_are_not_told_of(folder, uninterrupted, tmp_path, error, process):
    """While drawing, where the other process waits in a collective: it ends by an error there."""
    fault = {process: {"SIGNAL_AT": f"draw:3:{error}:0"}}
    often = config(folder, tmp_path / "run", logging=EVERY_STEP)
    with JoinedRun(folder, often, variables=fault) as run:
        statuses = run.wait(ENDS_WITHIN)
    messages = run.complaints()
    assert statuses[process] == 1, messages
    assert statuses[1 - process] != 0  # JAX may abort it once process 0 is gone
    [message] = messages[process]
    assert f"process {process} of 2" in message
    assert f"failed alone: {error}, after step 2: of this process alone" in message
    for left in messages[1 - process]:
        assert f"process {1 - process} of 2" in left
        assert "can no longer reach the others" in left
    assert messages[1 - process] or process == 0
    assert_goes_on(folder, tmp_path / "run", uninterrupted, logging=EVERY_STEP)


@pytest.mark.parametrize("process", [0, 1])
def test_an_unforeseen_error_before_the_first_step(folder, tmp_path, process):
    """In the evaluation there."""
    fault = {process: {"SIGNAL_AT": "draw:1:ZeroDivisionError:0"}}
    judged = config(folder, tmp_path / "run", evaluation=small_run.evaluation(folder, every=1))
    with JoinedRun(folder, judged, variables=fault) as run:
        statuses = run.wait(ENDS_WITHIN)
    assert statuses[process] == 1
    assert statuses[1 - process] != 0
    assert "ZeroDivisionError: of this process alone" in run.errors(process).splitlines()[-1]


def make_folder(path):
    path.mkdir()
    return path


def test_a_directory_that_hosts_do_not_share_is_refused(folder, tmp_path):
    places = {0: make_folder(tmp_path / "a"), 1: make_folder(tmp_path / "b")}
    relative = config(folder, "here")
    run = run_joined(folder, relative, places=places, files=tmp_path / "run", status=1)
    assert_one_message(run, "output_dir must be one directory that all hosts share", "process 1")


@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=4), MeshConfig(fsdp=16)])
def test_a_mesh_that_does_not_fit_the_processes(folder, tmp_path, mesh):
    rollout = dataclasses.replace(config(folder, tmp_path / "run").rollout, prompts=4)
    run = run_joined(folder, config(folder, tmp_path / "run", mesh=mesh, rollout=rollout), status=1)
    assert "mesh must take all 8 devices of the 2 processes" in run.errors(0)
    assert not (tmp_path / "run").exists()
