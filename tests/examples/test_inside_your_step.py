"""The short example: it learns, and its other two ways give what one device gives."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax import grpo_advantage, rloo_advantage

PATH = pathlib.Path(__file__).parents[2] / "examples/inside_your_step.py"
SPEC = importlib.util.spec_from_file_location("inside_your_step", PATH)
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)


def test_the_reward_rises(capsys):
    history = example.main()
    assert history[0] < 0.45
    assert np.mean(history[-5:]) > 0.9
    assert "8 device(s)" in capsys.readouterr().out


def test_over_batches_is_a_loop():
    rewards = jax.random.normal(jax.random.key(0), (3, 2 * example.K))
    expected = jnp.stack([rloo_advantage(row, example.K) for row in rewards])
    np.testing.assert_allclose(example.over_batches(rewards), expected, rtol=1e-6, atol=1e-6)


def test_over_devices_is_one_device():
    rewards = jax.random.normal(jax.random.key(0), (16 * example.K,))
    expected = grpo_advantage(rewards, example.K, scale="batch")
    np.testing.assert_allclose(example.over_devices(rewards), expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(expected, grpo_advantage(rewards, example.K), rtol=1e-3)
