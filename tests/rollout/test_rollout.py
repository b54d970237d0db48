"""One rollout: prompts as tokens, completions as text, and a batch in which nothing is shifted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.data import ArithmeticTask, PromptBatch, message_text
from twinkle_jax.rollout import LocalEngine, RolloutConfig, encode_prompts, training_batch
from twinkle_jax.rollout.engine import read_texts
from twinkle_jax.training import score_batch, small_policy

POLICY = small_policy(0)
PROMPTS = PromptBatch(ArithmeticTask(6, size=3)[:] + ArithmeticTask(1, size=1)[:])
SAMPLES, NEW = 4, 6


def rollout(temperature=1.0, slots=None):
    settings = RolloutConfig(
        num_samples=SAMPLES,
        max_new_tokens=NEW,
        max_prompt_tokens=64,
        temperature=temperature,
        slots=slots,
    )
    engine = LocalEngine(POLICY.config, POLICY.template)
    return engine.draw(POLICY.params, PROMPTS, jax.random.key(3), settings)


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
    drawn = rollout()
    batch = training_batch(*drawn)
    lengths, tokens = np.asarray(drawn.completions.lengths), np.asarray(drawn.completions.tokens)
    for i, row in enumerate(np.asarray(batch.tokens)):
        prompt = drawn.prompts[i // SAMPLES][drawn.prompt_mask[i // SAMPLES]]
        whole = [*prompt, *tokens[i, : lengths[i]]]
        used = len(whole) - 1  # the last token is a label alone
        np.testing.assert_array_equal(row[:used], whole[:-1])
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


def test_truncated_completions_can_be_left_out_of_the_loss():
    drawn = rollout()
    truncated = np.asarray(drawn.completions.finish_reasons) == 2
    assert 0 < truncated.sum() < truncated.size
    every = np.asarray(training_batch(*drawn).labels) != -100
    some = np.asarray(training_batch(*drawn, mask_truncated=True).labels) != -100
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


def test_fewer_slots_draw_the_same_tokens():
    one, other = (rollout(slots=slots).completions for slots in (None, 4))
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
