"""Twinkle's loops run with the imports renamed, and learn."""

import numpy as np
import pytest

from tests.examples import load

example = load("twinkle_loop")


@pytest.mark.parametrize(("form", "advantage"), [("responses", "grpo"), ("whole", "rloo")])
def test_the_reward_rises(form, advantage):
    rewards = example.run(form, advantage, steps=10)
    assert len(rewards) == 10
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
