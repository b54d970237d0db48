"""Runs with rewards that tell nothing: the policy stays as it is, and the run says so."""

import dataclasses
import json

import pytest

from tests.training import small_run
from tests.training.runs import arrays, metrics
from tests.training.small_run import EVERY_STEP, update
from twinkle_jax.training import OptimizerConfig, train

DECAYING = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, options={"weight_decay": 0.1})


def config(folder, directory, **changes):
    settings = {"update": update(advantage="grpo", scale="group", kl_beta=0.0)}
    settings |= {"optimizer": DECAYING, "logging": EVERY_STEP}
    return small_run.config(folder, directory, **(settings | changes))


def learnt(directory, step):
    """Parameters, moments and the number of updates."""
    found = arrays(directory, step)
    names = ("params", "optimizer", ".step")
    return {name: x for name, x in found.items() if any(part in name for part in names)}


def told(directory, name):
    return [json.loads(line)[name] for line in metrics(directory)]


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_a_constant_reward_changes_nothing(folder, tmp_path, capsys, advantage):
    asked = update(advantage=advantage, scale="group", kl_beta=0.0)
    own = config(folder, tmp_path / "run", update=asked, steps=3)
    train(own, reward=lambda trajectories, truths: [0.7] * len(trajectories))
    before = learnt(tmp_path / "run", 0)
    assert len(before) > 20
    assert learnt(tmp_path / "run", 3) == before
    trained = tmp_path / "run" / "policy" / "model.safetensors"
    assert trained.read_bytes() == (folder / "model" / "model.safetensors").read_bytes()
    assert told(tmp_path / "run", "frac_reward_zero_std") == [1, 1, 1]
    assert told(tmp_path / "run", "updates_without_signal") == [1, 1, 1]
    said = " ".join(capsys.readouterr().out.split())
    assert "No update was made: parameters and the optimizer's moments are as before" in said


def rewards_of_steps(*, first):
    """Short answers are liked, but in steps 2 and 3 all answers are."""
    calls = iter(range(first, 9))

    def reward(trajectories, truths):
        flat = next(calls) in (2, 3)
        return [float(flat or len(t["messages"][-1]["content"]) < 3) for t in trajectories]

    return reward


def test_a_run_goes_on_exactly_among_steps_without_a_signal(folder, tmp_path):
    own = config(folder, tmp_path / "whole")
    train(own, reward=rewards_of_steps(first=1))
    assert told(tmp_path / "whole", "updates_without_signal")[1:3] == [1, 1]
    assert learnt(tmp_path / "whole", 3) == learnt(tmp_path / "whole", 1)
    assert learnt(tmp_path / "whole", 1) != learnt(tmp_path / "whole", 0)

    own = dataclasses.replace(own, output_dir=str(tmp_path / "cut"), steps=2)
    train(own, reward=rewards_of_steps(first=1))
    own = dataclasses.replace(own, steps=4, resume="auto")
    train(own, reward=rewards_of_steps(first=3))
    assert arrays(tmp_path / "cut", 4) == arrays(tmp_path / "whole", 4)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
