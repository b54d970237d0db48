"""What a whole GRPO step costs beside TRL and Tunix: rollout, reward and update, without KL.

    pip install -e '.[all,test]' trl==1.16.0 google-tunix==0.1.7 torch==2.13.0
    python -m pytest tests/benchmarks/test_step_against_peers.py -s -p no:xdist

Each library runs as a program of its own, by its own documented entry point, on the same random
Qwen3 and the same prompts; they take turns. The policy ends its completions after a number of
tokens that is geometric, with the same mean for all; tokens a step are printed beside the times.
Printed are medians over rounds, and medians of the ratios of a round, in wall and processor time.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tests.benchmarks.peers.turns import environment

PEERS = {"trl_grpo": "trl", "tunix_grpo": "tunix"}


class Lengths(NamedTuple):
    """How long completions are: geometric with a mean, or all of them the room."""

    mean: int | None
    room: int


class Plan(NamedTuple):
    """How one setting is measured.

    Attributes:
        vocab: size of the vocabulary.
        lengths: of the completions.
        rows: whose gradients the peers compute at once: all 64, or what 5 GB have room for.
        rounds: turns of each that count.
        turn: steps of a turn, of which the first of several is not counted: it finds the caches
            full of what others did.
        warm_up: turns of each before those that count. Ours compiles a step for each shape that
            lengths lead to, in the first ten steps at a mean of 128.
    """

    vocab: int
    lengths: Lengths
    rows: int
    rounds: int
    turn: int
    warm_up: int = 2


ALL_32, MEAN_32, MEAN_128 = Lengths(None, 32), Lengths(32, 256), Lengths(128, 1024)
PLANS = {
    "512, all 32": Plan(512, ALL_32, 64, 7, 3),
    "512, mean 32": Plan(512, MEAN_32, 64, 7, 2),
    "512, mean 128": Plan(512, MEAN_128, 16, 5, 1, warm_up=10),
    "32,768, all 32": Plan(32_768, ALL_32, 64, 4, 1),
    "32,768, mean 32": Plan(32_768, MEAN_32, 16, 3, 1),
    "32,768, mean 128": Plan(32_768, MEAN_128, 8, 2, 1),
}


class Contestant:
    """A program that does a step when it is told to, and says what that took."""

    def __init__(self, name, checkpoint, folder, *arguments):
        replies, theirs = os.pipe()
        self._log = (folder / f"{name}-{len(arguments)}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.benchmarks.peers.{name}", str(checkpoint), *arguments],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            env=environment(theirs),
            text=True,
        )
        os.close(theirs)
        self._replies = os.fdopen(replies)
        self.answer()  # until its first rollout is there

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()
        self._replies.close()
        self._log.close()

    def answer(self):
        """Wait for the end of a step; give its seconds, its processor seconds and its tokens."""
        line = self._replies.readline()
        assert line, f"it ended with status {self._process.wait()}; see {self._log.name}"
        return tuple(map(float, line.split()))

    def step(self):
        """Do a step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()


def interleaved(runs, plan):
    """Let programs take turns; give what the steps of each took."""
    took = {name: [] for name in runs}
    for number in range(plan.warm_up + plan.rounds):
        for name, run in runs.items():
            turn = [run.step() for _ in range(plan.turn)][min(1, plan.turn - 1) :]
            if number >= plan.warm_up:
                took[name].append(tuple(map(statistics.median, zip(*turn, strict=True))))
    return took


def report(took):
    """Print medians, and what ours takes of each, in wall time and in processor time."""
    for name, steps in took.items():
        seconds, processor, tokens = map(statistics.median, zip(*steps, strict=True))
        wall, of_processor = (
            statistics.median(a[of] / b[of] for a, b in zip(took["ours"], steps, strict=True))
            for of in range(2)
        )
        print(
            f"| {name} | {seconds:.3g} s | {processor:.3g} s | {tokens:.0f} | "
            f"ours takes {wall:.2f} of it, {of_processor:.2f} of its processor time |"
        )


@pytest.mark.parametrize("name", PLANS)
def test_a_whole_step(name, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'twinkle-jax[oracle]'")
    from tests.benchmarks.peers.task import write_checkpoint

    plan = PLANS[name]
    write_checkpoint(tmp_path / "policy", plan.vocab, plan.lengths.mean)
    room = str(plan.lengths.room)
    programs = {"ours": ("ours", room)}
    programs |= {
        peer: (peer, room, str(plan.rows))
        for peer, package in PEERS.items()
        if importlib.util.find_spec(package)
    }
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Contestant(program, tmp_path / "policy", tmp_path, *options))
            for name, (program, *options) in programs.items()
        }
        took = interleaved(runs, plan)
    print(f"\nvocabulary {name}")
    report(took)
    if plan.lengths.mean:  # all draw lengths of the same distribution
        means = [statistics.mean(step[2] for step in steps) for steps in took.values()]
        assert max(means) < 1.5 * min(means)
