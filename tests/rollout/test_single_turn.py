"""One turn: completions as a batch in which nothing is shifted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout.small_rollout import ENGINE, POLICY, PROMPTS, SAMPLES, SETTINGS, draw
from twinkle_jax.reward import OverlongPenalty
from twinkle_jax.rollout import SingleTurn, training_batch
from twinkle_jax.training import score_batch


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.7, marks=pytest.mark.exhaustive)])
def test_the_trainer_gives_each_label_the_log_probability_it_was_drawn_with(temperature):
    drawn = draw(dataclasses.replace(SETTINGS, temperature=temperature))
    batch = training_batch(*drawn, advantages=jnp.arange(float(len(PROMPTS) * SAMPLES)))
    scores = score_batch(POLICY.params, batch, POLICY.config, temperature=temperature)
    kept = np.asarray(batch.labels) != -100
    assert kept.sum() == np.asarray(drawn.completions.lengths).sum()
    np.testing.assert_allclose(
        np.asarray(scores.logps)[kept], np.asarray(batch.old_logps)[kept], atol=1e-5
    )
    assert np.asarray(batch.old_logps)[kept].max() < 0
    np.testing.assert_array_equal(np.asarray(batch.advantages)[:, 0], np.arange(16.0))


def test_rows_begin_with_their_prompt_and_end_with_their_completion():
    drawn = draw()
    batch = training_batch(*drawn)
    lengths, tokens = np.asarray(drawn.completions.lengths), np.asarray(drawn.completions.tokens)
    for i, row in enumerate(np.asarray(batch.tokens)):
        prompt = drawn.prompts[i // SAMPLES][drawn.prompt_mask[i // SAMPLES]]
        conversation = [*prompt, *tokens[i, : lengths[i]]]
        used = len(conversation) - 1  # the last token is a label alone
        np.testing.assert_array_equal(row[:used], conversation[:-1])
        assert not row[used:].any()
        labels = np.asarray(batch.labels)[i]
        np.testing.assert_array_equal(labels[len(prompt) - 1 : used], tokens[i, : lengths[i]])
        assert (labels != -100).sum() == lengths[i]
    assert batch.tokens.shape[1] == 24  # a bucket of the longest row, here of 17 to 24 tokens
    padded_right = [np.roll(row, kept.sum(), axis=0) for row, kept in
                    zip(drawn.prompts, drawn.prompt_mask, strict=True)]  # fmt: skip
    mask = np.arange(drawn.prompts.shape[1]) < drawn.prompt_mask.sum(axis=1, keepdims=True)
    other = training_batch(np.stack(padded_right), mask, drawn.completions)
    np.testing.assert_array_equal(other.tokens, batch.tokens)


def test_rewards_know_the_tokens_of_a_completion():
    source = SingleTurn(ENGINE, OverlongPenalty(6, 3), SETTINGS)
    rollout = source.score(source.sample(POLICY.params, PROMPTS, jax.random.key(3)))
    assert len(set(rollout.lengths.tolist())) > 1
    expected = np.clip((3 - rollout.lengths) / 3, -1, 0)
    np.testing.assert_allclose(rollout.rewards, expected, rtol=1e-6)


def test_truncated_completions_can_be_left_out_of_the_loss():
    drawn = draw()
    truncated = np.asarray(drawn.completions.finish_reasons) == 2
    assert 0 < truncated.sum() < truncated.size
    unmasked = np.asarray(training_batch(*drawn).labels) != -100
    masked = np.asarray(training_batch(*drawn, mask_truncated=True).labels) != -100
    assert unmasked.any(axis=1).all()
    np.testing.assert_array_equal(masked.any(axis=1), ~truncated)
