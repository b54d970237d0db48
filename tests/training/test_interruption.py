"""The first signal asks, the second ends; what was there before is there again."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from twinkle_jax.rollout.hosts import InterruptedRunError
from twinkle_jax.training.interruption import Interruption

ROOT = Path(__file__).parents[3]
BOTH = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_asks(number):
    before = [signal.getsignal(x) for x in BOTH]
    with Interruption() as interruption:
        assert (interruption.requested, interruption.received) == (False, None)
        interruption.check()
        os.kill(os.getpid(), number)
        assert (interruption.requested, interruption.received) == (True, number)
        with pytest.raises(InterruptedRunError):
            interruption.check()
    assert interruption.requested
    assert [signal.getsignal(x) for x in BOTH] == before


def test_it_can_be_entered_again_and_an_error_passes():
    interruption = Interruption()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), interruption:
        raise KeyError
    with interruption:
        os.kill(os.getpid(), signal.SIGINT)
    assert interruption.received == signal.SIGINT
    with interruption:  # has counted from the beginning, so this is no second signal
        assert not interruption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.received == signal.SIGTERM
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


BUSY = """
import sys, time
from twinkle_jax.training.interruption import Interruption
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


@pytest.mark.parametrize(("first", "second"), [BOTH, BOTH[::-1], *SAME])
def test_the_second_signal_ends_the_process(first, second):
    code = BUSY.format(wait=ASKED, wait_more="time.sleep(600)")
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(second)
        assert process.wait(timeout=60) == 128 + second
        assert process.stdout.read() == ""


def test_the_second_signal_ends_compiled_code_too():
    code = BUSY.format(wait="", wait_more=COMPILED)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "asked\n"]
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # two of the same at once would be one
        assert process.wait(timeout=60) in (130, 143)
        assert process.stdout.read() == ""
