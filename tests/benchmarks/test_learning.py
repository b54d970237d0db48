"""How surely the README's first command learns: several seeds of each estimator.

REINFORCE has no baseline: what it reaches says what baselines are worth, and nothing is promised.
Once it gets the same rewards plus 1, which no estimator with a baseline would notice.

    python -m pytest tests/benchmarks/test_learning.py -s -p no:xdist

The policy of the default run is then a teacher: distillation beside rewards alone.

MaxRL takes the 200 steps of the default, the others 300: one to two minutes a run, 25 runs.
"""

import json
import subprocess
import sys

import pytest

PLUS_ONE = """
from twinkle_jax.reward import ExactMatchReward

def plus_one(trajectories, truths):
    return [1 + worth for worth in ExactMatchReward()(trajectories, truths)]
"""


def run(directory, *options):
    """Run the command, and return its summary."""
    program = "from twinkle_jax.command import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "train", f"--output_dir={directory}", *options]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.parametrize("estimator", ["maxrl", "grpo", "rloo", "reinforce", "reinforce, plus 1"])
@pytest.mark.parametrize("seed", range(5))
def test_held_out(estimator, seed, tmp_path):
    name, _, shift = estimator.partition(", ")
    options = [f"--update.advantage={name}", f"--seed={seed}"]
    if name != "maxrl":
        options.append("--steps=300")
    if shift:
        (tmp_path / "own_reward.py").write_text(PLUS_ONE)
        options += [f"--reward={tmp_path}/own_reward.py:plus_one", "--evaluation.reward=exact"]
    told = run(tmp_path / "run", *options)
    print(
        f"\n| {estimator} | {seed} | {told['accuracy_before']:.3f} | {told['accuracy_after']:.3f} "
        f"| {told['seconds']:.0f} s | {told['step_time']:.2f} s |"
    )
    assert told["accuracy_before"] <= 0.6
    if name != "reinforce":
        assert told["accuracy_after"] >= 0.9


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher") / "run"
    assert run(directory)["accuracy_after"] > 0.9
    return directory / "policy"


@pytest.mark.parametrize(("seed", "start"), [(0, ""), (1, ""), (2, ""), (0, "--warm_start=0")])
def test_distillation(teacher, seed, start, tmp_path):
    """From the usual start in 100 steps; from random parameters in 200."""
    options = [f"--seed={seed}", start or "--steps=100"]
    taught = run(tmp_path / "taught", f"--teacher.model={teacher}", *options)
    rewarded = run(tmp_path / "rewarded", *options)
    before = taught["accuracy_before"]
    reached = [x["accuracy_after"] for x in (taught, rewarded)]
    print(f"\n| {seed} | {start} | {before:.3f} | {reached[0]:.3f} | {reached[1]:.3f} |")
    assert reached[0] > (0.05 if start else 0.85)
