"""The policy-gradient example as a command: it learns, shows how, and answers bad options."""

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest

from tests.examples import FOLDER, load

example = load("policy_gradient")

pytestmark = pytest.mark.exhaustive


def call(*options):
    """Run the example in this process; return its result, what it printed and what it compiled."""
    printed, compiled = io.StringIO(), []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed), jax.log_compiles():
            result = example.main([*options])
    finally:
        logger.removeHandler(handler)
    return result, printed.getvalue(), "\n".join(compiled)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "made" / "on the way"
    return output, *call("--advantage", "rloo", "--steps", "30", "--output", str(output))


def test_it_learns_from_rewards(learnt):
    _, result, _, _ = learnt
    rewards = result["rewards"]
    assert len(rewards) == 30
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.06
    assert 0.15 < result["accuracy_before"] <= 0.5
    assert result["accuracy_after"] > result["accuracy_before"] + 0.05


def test_the_last_line_is_one_json_object(learnt):
    _, result, printed, _ = learnt
    last = json.loads(printed.splitlines()[-1])
    assert list(last) == [
        "advantage",
        "scale",
        "steps",
        "accuracy_before",
        "accuracy_after",
        "seconds",
    ]
    assert (last["advantage"], last["scale"], last["steps"]) == ("rloo", "group", 30)
    assert last == {name: result[name] for name in last}


def test_it_shows_samples_first_and_last_and_says_what_taught_what(learnt):
    _, result, printed, _ = learnt
    for heading in ("prompt", "completion", "reward", "advantage"):
        assert printed.count(f" {heading} ") >= 2
    assert "The first step from rewards alone" in printed
    assert "Step 30, the last" in printed
    assert f"45 steps of demonstrations: {result['accuracy_before']:.1%} of held-out" in printed
    assert f"rewards, without answers: {result['accuracy_after']:.1%} of held-out" in printed


def test_it_draws_the_curve(learnt):
    from matplotlib.image import imread

    output, _, _, _ = learnt
    pixels = imread(output / "reward_curve.png")
    assert pixels.shape[0] > 400 and pixels.shape[1] > 800
    assert np.std(pixels[..., :3]) > 0.05


def test_each_step_compiles_once(learnt):
    _, _, _, compiled = learnt
    names = Counter(re.findall(r"Finished XLA compilation of jit\((\w+)\)", compiled))
    assert names["train_step"] == 1
    assert names["demonstration_step"] == 1
    assert names["held_out_accuracy"] == 1


def test_the_seed_fixes_the_run(tmp_path):
    options = (
        "--advantage",
        "rloo",
        "--steps",
        "2",
        "--warm-start",
        "2",
        "--output",
        str(tmp_path),
    )
    first, again, other = (call("--seed", seed, *options) for seed in ("4", "4", "5"))
    for _, printed, _ in (first, again, other):
        assert "First" not in printed

    def numbers(outcome):
        result, printed, _ = outcome
        return {**result, "seconds": 0}, printed[: printed.index('"seconds"')]

    assert numbers(first) == numbers(again)
    assert numbers(first) != numbers(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--advantage", "ppo"], "argument --advantage: invalid choice: 'ppo'"),
        (["--scale", "token"], "argument --scale: invalid choice: 'token'"),
        (["--steps", "0"], "argument --steps: expected 1 to 1000000, got 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--warm-start", "-1"], "argument --warm-start: expected 0 to 1000000, got -1"),
        (["--seed", "-1"], "argument --seed: expected 0 to 2147483647, got -1"),
        (["--num-generations", "1"], "argument --num-generations: expected 2 to 64, got 1"),
        (["--prompts", "1000000"], "argument --prompts: expected 1 to 512, got 1000000"),
        (["--prompts", "12"], "argument --prompts: expected a multiple of the 8 devices"),
    ],
)
def test_a_bad_option_is_answered_with_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(options)
    assert stopped.value.code == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.count("\n") == 1 and message in errors


@pytest.mark.parametrize("below", [".", "deeper"])
def test_an_output_that_is_a_file_is_answered_with_one_line(tmp_path, below, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        example.main(["--output", str(tmp_path / "file" / below)])
    assert stopped.value.code == 2
    assert re.fullmatch(r".*argument --output: .*file.*\n", capsys.readouterr().err)


def test_a_curve_that_cannot_be_written_is_answered_with_one_line(tmp_path, capsys):
    (tmp_path / "reward_curve.png").mkdir()
    with pytest.raises(SystemExit) as stopped:
        example.main(["--output", str(tmp_path)])
    assert stopped.value.code == 2
    assert "argument --output: Is a directory" in capsys.readouterr().err


def test_as_a_script_it_answers_a_bad_option_without_a_traceback():
    command = [sys.executable, str(FOLDER / "policy_gradient.py"), "--steps", "0"]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 2
    assert (
        finished.stderr
        == "policy_gradient.py: error: argument --steps: expected 1 to 1000000, got 0\n"
    )


@pytest.mark.parametrize("missing", ["rich.console", "matplotlib.figure"])
def test_a_missing_extra_is_named(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # how Python itself marks a module as absent
    with pytest.raises(SystemExit) as stopped:
        load("policy_gradient")
    assert stopped.value.code == f"{missing} is missing: pip install 'twinkle-jax[examples]'"
