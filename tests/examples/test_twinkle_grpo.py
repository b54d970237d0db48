"""Twinkle's GRPO recipe learns: answers get shorter."""

import numpy as np
import pytest

from tests.examples import load

example = load("twinkle_grpo")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:vLLMSampler without base_url")
def test_the_reward_rises():
    rewards = example.run(["--max_steps", "12"])
    assert len(rewards) == 12
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
