"""Twinkle's recipes learn: rewards and margins rise, losses fall."""

import numpy as np
import pytest

from tests.examples import load

grpo, dpo = load("twinkle_grpo"), load("twinkle_dpo")
pytestmark = pytest.mark.exhaustive


@pytest.mark.filterwarnings("ignore:vLLMSampler without base_url")
def test_answers_get_shorter():
    rewards = grpo.run(["--max_steps", "12"])
    assert len(rewards) == 12
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15


def test_losses_fall_and_margins_rise():
    losses, margins = dpo.run(["--max_steps", "10", "--sft_steps", "5"])
    assert losses[-1] < losses[0] - 0.1
    assert np.mean(margins[-3:]) > np.mean(margins[:3])
