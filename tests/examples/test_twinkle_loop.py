"""Twinkle's loops run with the imports renamed, and learn."""

import numpy as np
import pytest

from tests.examples import load

example = load("twinkle_loop")


WHOLE = pytest.param("whole", "rloo", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("form", "advantage"), [("responses", "grpo"), WHOLE])
def test_the_reward_rises(form, advantage):
    rewards = example.run(form, advantage, steps=10)
    assert len(rewards) == 10
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
