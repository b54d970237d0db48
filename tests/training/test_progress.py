"""The state of a run: saved, restored, and saved on signals."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from twinkle_jax.rollout.hosts import InterruptedRunError
from twinkle_jax.training import EvaluationConfig, TrainConfig, progress
from twinkle_jax.training.checkpoint import RunCheckpoints
from twinkle_jax.training.progress import Interruption, LastStep, Progress, Totals, restore, save

ROOT = Path(__file__).parents[2]


class Loader:
    def set_state(self, state):
        self.state = state


def test_a_checkpoint_gives_progress_back(tmp_path):
    checkpoints, config = RunCheckpoints(tmp_path), TrainConfig()
    totals = Totals(7, 1, 2.5, 0.5, 0.25, 123, '{"kl": NaN}', cross_entropy_before=1.5)
    progress = Progress({"x": jnp.arange(3.0)}, jax.random.key(4), 2, totals, {"position": 9})
    save(checkpoints, progress, None, config)
    facts = json.loads((checkpoints.path(2) / "facts.json").read_text())
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["config"] == dataclasses.asdict(config)
    fresh = Progress({"x": jnp.zeros(3)}, jax.random.key(0), 0, Totals(), {})
    loader = Loader()
    restored, reference = restore(checkpoints, fresh, None, config, loader)
    assert (restored.step, restored.totals, restored.data, reference) == (
        2,
        totals,
        {"position": 9},
        None,
    )
    assert loader.state == {"position": 9}
    for changes in ({"problems": 9}, {"path": "b.jsonl"}, {"reward": "math"}):
        judged = TrainConfig(evaluation=EvaluationConfig(**changes))
        restored, _ = restore(checkpoints, fresh, None, judged, loader)
        unknown = {"accuracy_before": None, "reward_before": None, "cross_entropy_before": None}
        assert restored.totals == dataclasses.replace(totals, **unknown), changes
    assert restored.state["x"].tolist() == [0, 1, 2]


def test_an_accuracy_is_of_the_problems_that_it_was_measured_on(tmp_path):
    """The file of a path may have changed since the first step."""
    checkpoints, config = RunCheckpoints(tmp_path), TrainConfig()
    totals = Totals(accuracy_before=0.5, held_out="these")
    progress = Progress({"x": jnp.zeros(3)}, jax.random.key(4), 2, totals, {})
    save(checkpoints, progress, None, config)
    for problems, accuracy in (("these", 0.5), ("others", None)):
        restored, _ = restore(checkpoints, progress, None, config, Loader(), held_out=problems)
        assert restored.totals.accuracy_before == accuracy


def test_a_step_whose_writing_has_failed_is_saved_again():
    """Written in the background, it counts as saved only until that is known to have failed."""
    written, errors = [], [OSError("no space")]

    def settle(*, wait):
        if errors:
            raise errors.pop()

    last = LastStep(lambda progress, *, wait: written.append(wait), settle)
    last.finished(Progress({"x": jnp.zeros(3)}, jax.random.key(0), 1, Totals(), {}))
    last.save(wait=False)
    with pytest.raises(OSError, match="no space"):
        last.poll()
    last.save()
    last.save()  # nothing is left to write
    assert written == [False, True]


BOTH = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_asks(number):
    before = [signal.getsignal(x) for x in BOTH]
    with Interruption() as interruption:
        assert not interruption.requested
        interruption.check()
        os.kill(os.getpid(), number)
        assert interruption.requested
        with pytest.raises(InterruptedRunError):
            interruption.check()
    assert interruption.requested
    assert [signal.getsignal(x) for x in BOTH] == before


def test_a_closed_terminal_asks_too_unless_that_is_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interruption.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_gone_is_not_written_to(monkeypatch):
    """The run was saved, and then ended with status 1: its last line could not be written."""
    terminal, descriptor = os.openpty()
    progress._leave_terminal((descriptor,))
    assert os.isatty(descriptor)  # it is still there
    os.close(terminal)
    with pytest.raises(OSError, match="Input/output"):
        os.write(descriptor, b"saved")
    progress._leave_terminal((descriptor,))
    assert os.write(descriptor, b"saved") == 5
    os.close(descriptor)

    left = threading.Event()
    monkeypatch.setattr(progress, "_leave_terminal", left.set)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Interruption():
            os.kill(os.getpid(), signal.SIGHUP)
            assert left.wait(10)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_it_can_be_entered_again_and_an_error_passes():
    interruption = Interruption()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), interruption:
        raise KeyError
    with interruption:
        os.kill(os.getpid(), signal.SIGINT)
    assert interruption.requested
    with interruption:  # has counted from the beginning, so this is no second signal
        assert not interruption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.requested
    assert signal.getsignal(signal.SIGINT) is handler


def test_its_thread_ends():
    def count():
        return sum(thread.name == "interruption" for thread in threading.enumerate())

    with Interruption():
        assert count() == 1
    assert count() == 0


def test_what_else_woke_up_does_so_again():
    read, write = socket.socketpair()
    write.setblocking(False)
    with read, write:
        before = signal.set_wakeup_fd(write.fileno())
        with Interruption():
            pass
        assert signal.set_wakeup_fd(before) == write.fileno()


def test_other_signals_are_not_counted():
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with Interruption() as interruption:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert not interruption.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_nothing_is_changed():
    seen = []
    interruption = Interruption()
    with interruption:
        pass
    handlers = [signal.getsignal(x) for x in BOTH]

    def run():
        with interruption:
            seen.append((interruption.requested, [signal.getsignal(x) for x in BOTH]))
        seen.append("left")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(False, handlers), "left"]


@contextlib.contextmanager
def started(code, *lines, **pipes):
    """A process that runs Python code, once it has printed these lines; it is killed in the end."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **pipes) as process:
        late = threading.Timer(300, process.kill)  # a test that waits for a line would wait forever
        late.start()
        try:
            assert [process.stdout.readline() for _ in lines] == [f"{line}\n" for line in lines]
            yield process
        finally:
            late.cancel()
            process.kill()


BUSY = """
import signal, sys, time
from twinkle_jax.training.progress import Interruption
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
with Interruption() as interruption:
    print("ready", flush=True)
    {wait}
    print("asked", flush=True)
    {wait_more}
    print("never", flush=True)
"""
ASKED = "while not interruption.requested: time.sleep(0.01)"
# Minutes in compiled code, during which Python runs no handler.
COMPILED = 'import hashlib; hashlib.pbkdf2_hmac("sha256", b"x", b"x", 10**9)'


SAME = [pytest.param(x, x, marks=pytest.mark.exhaustive) for x in BOTH]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [BOTH, BOTH[::-1], *SAME])
def test_the_second_signal_ends_the_process(first, second):
    code = BUSY.format(wait=ASKED, wait_more="time.sleep(600)")
    with started(code, "ready") as process:
        process.send_signal(first)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(second)
        assert process.wait(timeout=60) == 128 + second
        assert process.stdout.read() == ""


@pytest.mark.slow
def test_a_closed_terminal_may_send_its_signal_twice():
    """The shell sends one to its jobs; the system another, when the shell has ended."""
    code = BUSY.format(wait=ASKED, wait_more="time.sleep(1); print('saved'); sys.exit()")
    with started(code, "ready") as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) == 0
        assert process.stdout.read() == "saved\n"


@pytest.mark.slow
def test_the_second_signal_ends_compiled_code_too():
    code = BUSY.format(wait="", wait_more=COMPILED)
    with started(code, "ready", "asked") as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # two of the same at once would be one
        assert process.wait(timeout=60) in (130, 143)
        assert process.stdout.read() == ""


FORKED = """
import os, signal, threading, time
from twinkle_jax.training.progress import Interruption
with Interruption() as interruption:
    def reward():
        pids = []
        for _ in range(3):
            pids.append(os.fork())
            if not pids[-1]:
                time.sleep(5)
                os._exit(7)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as the end of a pool of multiprocessing does
        print([os.WTERMSIG(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
    thread = threading.Thread(target=reward)
    thread.start()
    thread.join()
    print(interruption.requested, flush=True)
"""


@pytest.mark.slow
def test_signals_to_forked_processes_are_not_the_runs():
    with started(FORKED, [15, 15, 15], False) as process:
        assert process.wait(timeout=60) == 0


LAST_RESORT = """
import sys, time
from twinkle_jax.training.progress import Interruption
tries = 0
def save():
    global tries
    tries += 1
    {save}
with Interruption(patience=0.1, last_resort=save):
    print("ready", flush=True)
    time.sleep(20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "status", "message"),
    [("return tries == 2", 143, "is saved"), ('raise OSError("no space")', 1, "no space")],
)
def test_a_loop_that_does_not_stop_is_saved_by_another_thread(save, status, message):
    """It is tried again until it is saved; an error ends the process with another status."""
    code = LAST_RESORT.format(save=save)
    with started(code, "ready", stderr=subprocess.PIPE) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == status
        assert message in process.stderr.read()


@pytest.mark.slow
def test_it_ends_where_nobody_reads_what_it_says():
    code = LAST_RESORT.format(save="return True")
    with started(code, "ready", stderr=subprocess.PIPE) as process:
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
