"""The example on the real path: it learns, what it saves is what it trained, nothing is shifted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.examples import load
from twinkle_jax.model import Decoder, init_params, load_pretrained, parse_config, save_pretrained
from twinkle_jax.training import score_batch

example = load("checkpoint_to_update")
CONFIG = parse_config(example.TINY_QWEN3)


@functools.cache
def first_params():
    return jax.jit(init_params, static_argnums=1)(jax.random.key(1), CONFIG)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_pretrained(Decoder(CONFIG, first_params()), folder / "first")
    rewards = example.train(folder / "first", folder / "trained", steps=60, seed=0)
    return folder, rewards


def prompts():
    digits = jnp.arange(example.PROMPTS, dtype=jnp.int32)
    return jnp.stack([jnp.full_like(digits, example.START), digits], axis=1)


@pytest.mark.exhaustive
def test_the_reward_rises(learnt):
    _, rewards = learnt
    assert rewards[0] < 0.2
    assert np.mean(rewards[-5:]) > 0.5


@pytest.mark.exhaustive
def test_what_is_saved_is_what_was_trained(learnt):
    folder, rewards = learnt
    means = {}
    for name in ("first", "trained"):
        params = load_pretrained(folder / name).params
        completions, _ = example.sample(params, prompts(), jax.random.key(7), config=CONFIG)
        rows = jnp.repeat(prompts(), example.SAMPLES, axis=0)
        means[name] = float(example.reward(rows, completions).mean())
    assert means["first"] < 0.2
    assert means["trained"] == pytest.approx(np.mean(rewards[-5:]), abs=0.1)


def test_a_checkpoint_of_16_bits_is_trained_in_32(tmp_path):
    """Updates of a real learning rate are smaller than what bfloat16 can add to a parameter."""
    save_pretrained(Decoder(CONFIG, first_params()), tmp_path / "first", dtype="bfloat16")
    example.train(tmp_path / "first", tmp_path / "trained", steps=1, seed=0)
    assert load_pretrained(tmp_path / "trained").params["norm"]["scale"].dtype == jnp.float32


def test_the_trainer_scores_the_tokens_as_the_sampler_did():
    params = first_params()
    completions, logprobs = example.sample(params, prompts(), jax.random.key(0), config=CONFIG)
    rows = jnp.repeat(prompts(), example.SAMPLES, axis=0)
    batch = example.to_batch(rows, completions, logprobs, jnp.zeros(len(rows)))
    scores = score_batch(params, batch, CONFIG)
    assert float(jnp.abs(batch.old_logps).max()) > 1
    np.testing.assert_allclose(scores.logps, batch.old_logps, atol=1e-5)


def test_a_completion_is_worth_the_share_of_its_tokens_that_count_on():
    rows = jnp.array([[10, 8], [10, 8], [10, 3]])
    completions = jnp.array([[9, 0, 1], [9, 1, 1], [3, 4, 5]])
    np.testing.assert_allclose(example.reward(rows, completions), [1, 2 / 3, 0], rtol=1e-6)
