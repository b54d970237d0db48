"""How surely the README's first command learns: several seeds of each estimator.

REINFORCE has no baseline: what it reaches says what baselines are worth, and nothing is promised.

    python -m pytest tests/benchmarks/test_learning.py -s -p no:xdist

One to three minutes a run, fifteen runs.
"""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce"])
@pytest.mark.parametrize("seed", range(5))
def test_held_out_accuracy(estimator, seed, tmp_path):
    program = "from twinkle_jax.training.command import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "train"]
    options = [f"--update.advantage={estimator}", f"--seed={seed}", f"--output_dir={tmp_path}/run"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    print(
        f"\n| {estimator} | {seed} | {told['accuracy_before']:.3f} | {told['accuracy_after']:.3f} "
        f"| {told['seconds']:.0f} s | {told['step_time']:.2f} s |"
    )
    assert told["accuracy_before"] <= 0.5
    if estimator != "reinforce":
        assert told["accuracy_after"] >= 0.9
