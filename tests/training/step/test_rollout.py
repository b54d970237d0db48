"""One rollout: prompts as tokens, completions as text, and a batch in which nothing is shifted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.data import ArithmeticTask, PromptBatch, message_text
from twinkle_jax.model import score_batch
from twinkle_jax.sampler import Sampling
from twinkle_jax.training import draw_rollout, encode_prompts, small_policy, training_batch
from twinkle_jax.training.step.rollout import read_texts

POLICY = small_policy(0)
PROMPTS = PromptBatch(ArithmeticTask(6, size=3)[:] + ArithmeticTask(1, size=1)[:])
SAMPLES, NEW = 4, 6


def rollout(temperature=1.0):
    tokens, mask = encode_prompts(POLICY.template, PROMPTS, longest=64)
    sampling = Sampling(temperature, stop_tokens=POLICY.tokenizer.stop_token_ids)
    return draw_rollout(
        POLICY.params,
        POLICY.config,
        tokens,
        mask,
        jax.random.key(3),
        sampling,
        num_samples=SAMPLES,
        max_new_tokens=NEW,
    )


def test_prompts_stand_on_the_right_and_end_where_the_assistant_speaks():
    tokens, mask = encode_prompts(POLICY.template, PROMPTS, longest=64)
    assert tokens.shape == mask.shape
    assert mask[:, -1].all()
    assert not mask[-1, 0]  # the shortest prompt
    said = POLICY.tokenizer.decode(tokens[-1][mask[-1]], skip_special_tokens=False)
    question = message_text(PROMPTS[-1]["messages"][0])
    assert said == f"<|user|>{question}<|end|><|assistant|>"


def test_a_prompt_that_is_too_long_is_named():
    with pytest.raises(ValueError, match=r"at most max_prompt_tokens=9 tokens, got 1\d in prompt"):
        encode_prompts(POLICY.template, PROMPTS, longest=9)


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.7, marks=pytest.mark.exhaustive)])
def test_the_trainer_gives_each_label_the_log_probability_it_was_drawn_with(temperature):
    drawn = rollout(temperature)
    batch = training_batch(drawn, jnp.arange(float(len(PROMPTS) * SAMPLES)))
    scores = score_batch(POLICY.params, batch, POLICY.config, temperature=temperature)
    kept = np.asarray(batch.labels) != -100
    assert kept.sum() == np.asarray(drawn.completions.lengths).sum()
    np.testing.assert_allclose(
        np.asarray(scores.logps)[kept], np.asarray(batch.old_logps)[kept], atol=1e-5
    )
    assert np.asarray(batch.old_logps)[kept].max() < 0
    np.testing.assert_array_equal(np.asarray(batch.advantages)[:, 0], np.arange(16.0))


def test_truncated_completions_can_be_left_out_of_the_loss():
    drawn = rollout()
    truncated = np.asarray(drawn.completions.finish_reasons) == 2
    assert 0 < truncated.sum() < truncated.size
    advantages = jnp.ones(truncated.size)
    every = np.asarray(training_batch(drawn, advantages).labels) != -100
    some = np.asarray(training_batch(drawn, advantages, mask_truncated=True).labels) != -100
    assert every.any(axis=1).all()
    np.testing.assert_array_equal(some.any(axis=1), ~truncated)


def test_texts_are_the_completions_of_their_prompts():
    drawn = rollout()
    texts = read_texts(drawn, PROMPTS, POLICY.template)
    tokens = np.asarray(drawn.completions.tokens)
    for i, said in enumerate(texts.trajectories):
        assert said["messages"][:-1] == PROMPTS[i // SAMPLES]["messages"]
        assert said["user_data"] == PROMPTS[i // SAMPLES]["user_data"]
        own = POLICY.tokenizer.decode(tokens[i, : texts.lengths[i]])
        assert message_text(said["messages"][-1]) == own
    assert "".join(message_text(t["messages"][-1]) for t in texts.trajectories)
