"""One turn: completions as a batch in which nothing is shifted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout.small_rollout import ENGINE, POLICY, PROMPTS, SAMPLES, SETTINGS, draw
from twinkle_jax.reward import OverlongPenalty
from twinkle_jax.rollout import SingleTurn, training_batch, with_advantages
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


def test_a_fixed_width_fits_all_rows():
    """Many steps of one width compile once; a row that is longer would lose its last tokens."""
    drawn = draw()
    batch = training_batch(*drawn)
    longest = int((np.asarray(batch.labels) != -100).nonzero()[1].max()) + 1
    wide = training_batch(*drawn, width=64)
    np.testing.assert_array_equal(wide.labels[:, : batch.labels.shape[1]], batch.labels)
    assert training_batch(*drawn, width=longest).tokens.shape[1] == longest
    with pytest.raises(ValueError, match=f"width must be at least .* {longest}, got {longest - 1}"):
        training_batch(*drawn, width=longest - 1)
    traced = jax.jit(lambda *drawn: training_batch(*drawn, width=longest))(*drawn)
    np.testing.assert_array_equal(traced.labels, wide.labels[:, :longest])


def test_what_cannot_be_laid_out():
    prompts, mask, completions = draw()
    full = np.where(mask, prompts, 1)
    np.testing.assert_array_equal(
        training_batch(full, None, completions).tokens,
        training_batch(full, np.ones_like(mask), completions).tokens,
    )
    five = [np.repeat(x, [2, 1, 1, 1], axis=0) for x in (prompts, mask)]
    with pytest.raises(ValueError, match="completions must be of equal number for each of 5"):
        training_batch(*five, completions)
    with pytest.raises(ValueError, match="prompt_mask"):
        training_batch(prompts, mask[:, 1:], completions)
    with pytest.raises(TypeError, match="prompt_mask"):
        training_batch(prompts, mask.astype(int), completions)


def test_advantages_fit_rows_or_positions():
    """One for all rows, or for those of a prompt, is no weight of a sample."""
    batch = training_batch(*draw())
    rows, time = batch.tokens.shape
    assert with_advantages(batch, [0.5] * rows).advantages.shape == (rows, time)
    assert with_advantages(batch, np.zeros((rows, time))).advantages.shape == (rows, time)
    for shape in ((1,), (rows // SAMPLES,), (1, time), (rows, 1), (rows, time - 1)):
        with pytest.raises(ValueError, match="advantages must have shape"):
            with_advantages(batch, jnp.zeros(shape))


def test_prompts_may_be_a_list():
    source = SingleTurn(ENGINE, OverlongPenalty(6, 3), SETTINGS)
    one, two = (
        source.score(source.sample(POLICY.params, prompts, jax.random.key(3)))
        for prompts in (PROMPTS, list(PROMPTS))
    )
    assert one.ground_truths == two.ground_truths
    np.testing.assert_array_equal(one.rewards, two.rewards)


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
