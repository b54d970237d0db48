"""How surely the README's first command learns: several seeds of each estimator.

REINFORCE has no baseline: what it reaches says what baselines are worth, and nothing is promised.
Once it gets the same rewards plus 1, which no estimator with a baseline would notice.

    python -m pytest tests/benchmarks/test_learning.py -s -p no:xdist

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


@pytest.mark.parametrize("estimator", ["maxrl", "grpo", "rloo", "reinforce", "reinforce, plus 1"])
@pytest.mark.parametrize("seed", range(5))
def test_held_out(estimator, seed, tmp_path):
    program = "from twinkle_jax.command import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "train"]
    name, _, shift = estimator.partition(", ")
    options = [f"--update.advantage={name}", f"--seed={seed}", f"--output_dir={tmp_path}/run"]
    if name != "maxrl":
        options.append("--steps=300")
    if shift:
        (tmp_path / "own_reward.py").write_text(PLUS_ONE)
        options += [f"--reward={tmp_path}/own_reward.py:plus_one", "--evaluation.reward=exact"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    print(
        f"\n| {estimator} | {seed} | {told['accuracy_before']:.3f} | {told['accuracy_after']:.3f} "
        f"| {told['seconds']:.0f} s | {told['step_time']:.2f} s |"
    )
    assert told["accuracy_before"] <= 0.6
    if name != "reinforce":
        assert told["accuracy_after"] >= 0.9
