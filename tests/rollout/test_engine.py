"""The engine: prompts as tokens, and completions as text."""

import dataclasses

import numpy as np
import pytest

from tests.rollout.small_rollout import POLICY, PROMPTS, SAMPLES, SETTINGS, draw
from twinkle_jax.data import message_text
from twinkle_jax.rollout import encode_prompts
from twinkle_jax.rollout.engine import LogitsError, read_texts


def test_prompts_are_padded_left_and_end_where_the_assistant_speaks():
    tokens, mask = encode_prompts(POLICY.template, PROMPTS, longest=64)
    assert tokens.shape == mask.shape
    assert mask[:, -1].all()
    assert not mask[-1, 0]  # the shortest prompt
    text = POLICY.tokenizer.decode(tokens[-1][mask[-1]], skip_special_tokens=False)
    question = message_text(PROMPTS[-1]["messages"][0])
    assert text == f"<|user|>{question}<|end|><|assistant|>"


def test_a_prompt_that_is_too_long_is_named():
    with pytest.raises(ValueError, match=r"rollout\.max_prompt_tokens=9 .* got 1\d in prompt"):
        encode_prompts(POLICY.template, PROMPTS, longest=9)
    with pytest.raises(ValueError, match=r"^prompts must"):
        encode_prompts(POLICY.template, [], longest=9)


@pytest.mark.slow
def test_texts_are_the_completions_of_their_prompts():
    drawn = draw()
    texts = read_texts(drawn, PROMPTS, POLICY.template)
    tokens = np.asarray(drawn.completions.tokens)
    for i, trajectory in enumerate(texts.trajectories):
        assert trajectory["messages"][:-1] == PROMPTS[i // SAMPLES]["messages"]
        assert trajectory["user_data"] == PROMPTS[i // SAMPLES]["user_data"]
        completion = POLICY.tokenizer.decode(tokens[i, : texts.lengths[i]])
        assert message_text(trajectory["messages"][-1]) == completion
    assert "".join(message_text(t["messages"][-1]) for t in texts.trajectories)


def test_completions_of_logits_that_are_not_finite_are_no_text():
    drawn = draw()
    logprobs, mask = np.array(drawn.completions.logprobs), np.array(drawn.completions.mask)
    assert not mask.all()
    padded = drawn.completions._replace(logprobs=np.where(mask, logprobs, np.nan))
    read_texts(drawn._replace(completions=padded), PROMPTS, POLICY.template)
    logprobs[[2, 5, 5], [0, 0, 1]] = np.nan
    broken = drawn._replace(completions=drawn.completions._replace(logprobs=logprobs))
    with pytest.raises(LogitsError, match="in 2 of 16 completions"):
        read_texts(broken, PROMPTS, POLICY.template)


def test_fewer_slots_draw_the_same_tokens():
    all_at_once, by_four = (
        draw(dataclasses.replace(SETTINGS, slots=slots)).completions for slots in (None, 4)
    )
    np.testing.assert_array_equal(all_at_once.tokens, by_four.tokens)
    np.testing.assert_allclose(all_at_once.logprobs, by_four.logprobs, atol=1e-5)
