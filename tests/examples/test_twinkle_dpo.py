"""Twinkle's recipe of supervised learning and DPO learns."""

import numpy as np
import pytest

from tests.examples import load

example = load("twinkle_dpo")


@pytest.mark.exhaustive
def test_losses_fall_and_margins_rise():
    losses, margins = example.run(["--max_steps", "10", "--sft_steps", "5"])
    assert losses[-1] < losses[0] - 0.1
    assert np.mean(margins[-3:]) > np.mean(margins[:3])
