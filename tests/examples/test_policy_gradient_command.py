"""The policy-gradient example as a command: it learns, and answers bad options."""

import contextlib
import io
import json
import logging
import re
import sys
from collections import Counter

import jax
import numpy as np
import pytest

from tests.examples import load

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
        (["--steps", "0"], "argument --steps: expected 1 to 1000000, got 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--scale", "token"], "argument --scale: invalid choice: 'token'"),
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


@pytest.mark.parametrize("missing", ["rich.console", "matplotlib.figure"])
def test_a_missing_extra_is_named(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # how Python itself marks a module as absent
    with pytest.raises(SystemExit) as stopped:
        load("policy_gradient")
    assert stopped.value.code == f"{missing} is missing: pip install 'twinkle-jax[examples]'"
