"""Imports of a script for Twinkle, with `twinkle` renamed to `twinkle_jax.twinkle`."""

import importlib

import pytest

NAMES = {
    "advantage": "Advantage GRPOAdvantage RLOOAdvantage",
    "loss": "CrossEntropyLoss DPOLoss GKDLoss GRPOLoss GSPOLoss Loss MSELoss SAPOLoss",
    "reward": "FormatReward GSM8KAccuracyReward GSM8KFormatReward MathReward Reward",
    "model": "TransformersModel",
    "sampler": "vLLMSampler",
    "data_format": "InputFeature Message SampledSequence SampleResponse SamplingParams Trajectory",
    "template": "Template",
    "metric": "Metric",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_name_stands_where_twinkle_has_it(module):
    found = importlib.import_module(f"twinkle_jax.twinkle.{module}")
    for name in NAMES[module].split():
        assert isinstance(getattr(found, name), type)
