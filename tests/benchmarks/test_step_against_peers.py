"""What a whole GRPO step costs beside TRL and Tunix: rollout, reward and update, without KL.

    pip install -e '.[all,test]' trl google-tunix==0.1.7 torch==2.13.0
    python -m pytest tests/benchmarks/test_step_against_peers.py -s -p no:xdist

Each library runs as a program of its own, by its own documented entry point, on the same random
Qwen3 and the same prompts; they take turns of a few steps, of which the first is not counted: it
finds the caches full of what others did. Printed are medians over rounds, and medians of the ratios
of a round.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.benchmarks.peers.turns import environment

WARM_UP, TURN = 1, 3
# Settings of an update that are faster here than those it comes with; values do not depend on them.
TUNED = {512: '{"recompute": "elementwise"}'}
PEERS = {"trl_grpo": "trl", "tunix_grpo": "tunix"}


class Contestant:
    """A program that does a step when it is told to, and says what that took."""

    def __init__(self, name, checkpoint, folder, *arguments):
        replies, theirs = os.pipe()
        self._log = (folder / f"{name}.log").open("w")
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
        """Wait for the end of a step; give its seconds and its processor seconds."""
        line = self._replies.readline()
        assert line, f"it ended; see {self._log.name}"
        return tuple(map(float, line.split()))

    def step(self):
        """Do a step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()


@pytest.mark.parametrize(("vocab", "rounds"), [(512, 10), (32_768, 3)])
def test_a_whole_step(vocab, rounds, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'twinkle-jax[oracle]'")
    from tests.benchmarks.peers.task import write_checkpoint

    write_checkpoint(tmp_path / "policy", vocab)
    programs = {"ours": ("ours",)}
    if vocab in TUNED:
        programs["ours, tuned"] = ("ours", TUNED[vocab])
    programs |= {n: (n,) for n, package in PEERS.items() if importlib.util.find_spec(package)}
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Contestant(program, tmp_path / "policy", tmp_path, *options))
            for name, (program, *options) in programs.items()
        }
        took = {name: [] for name in runs}
        for number in range(WARM_UP + rounds):
            for name, run in runs.items():
                turn = [run.step() for _ in range(TURN)][1:]
                if number >= WARM_UP:
                    took[name].append(tuple(map(statistics.median, zip(*turn, strict=True))))
    print(f"\nvocabulary {vocab}")
    for name, steps in took.items():
        seconds, processor = zip(*steps, strict=True)
        shares = []
        for own in programs.keys() - PEERS.keys():
            pairs = zip(took[own], seconds, strict=True)
            shares.append(f"{own}: {statistics.median(a[0] / b for a, b in pairs):.2f}")
        print(
            f"| {name} | {statistics.median(seconds):.3f} s | {statistics.median(processor):.3f} s "
            f"| {'; '.join(sorted(shares))} of it |"
        )
