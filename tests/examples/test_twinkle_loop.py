"""Twinkle's loops run with the imports renamed, and learn."""

import sys

import numpy as np
import pytest

from tests.examples import load
from tests.sampler.vllm.fake_server import FakeServer

example = load("twinkle_loop")
FORMS = [("responses", "grpo"), ("whole", "rloo")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "advantage"), FORMS)
def test_the_reward_rises(form, advantage):
    rewards = example.run(form, advantage, steps=10)
    assert len(rewards) == 10
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15


@pytest.mark.exhaustive
def test_the_same_loops_run_on_a_server(tmp_path):
    place = tmp_path / "policy"
    example.write_checkpoint(place)
    with FakeServer(place) as server:
        for form, advantage in FORMS:
            server.asked = []
            options = {"checkpoint": place, "base_url": server.url}
            assert len(example.run(form, advantage, 1, **options)) == 1
            assert server.paths().count("/collective_rpc") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "policy-weights"]


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["--sampler", "vllm"], "--base_url"),
        (["--base_url", "http://x"], "--sampler"),
        (["--sampler", "vllm", "--base_url", "http://x"], "--checkpoint"),
    ],
)
def test_options_that_need_each_other(monkeypatch, capsys, arguments, missing):
    monkeypatch.setattr(sys, "argv", ["twinkle_loop.py", *arguments])
    with pytest.raises(SystemExit):
        example.main()
    assert missing in capsys.readouterr().err.split("error:")[1]
