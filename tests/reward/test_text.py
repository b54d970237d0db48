"""Rewards that look at text alone."""

import math

import pytest

from tests.reward.completions import completions
from twinkle_jax.reward import ExactMatchReward, FormatReward, OverlongPenalty, last_boxed


def test_exact_matches():
    texts = completions("7", " 7\n", "07", "7.", "")
    assert ExactMatchReward()(texts, [7]) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        (" <think>a\n</think>\n<answer></answer>\n", 1, 1),
        ("<answer>b</answer><think>a</think>", 1, 0),
        ("so <think>a</think><answer>b</answer>", 1, 0),
        ("<think>a</think><answer>b</answer>.", 1, 0),
        ("<think>a</think> hm <answer>b</answer>", 1, 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 1, 0),
        ("<think>a<answer>b</think></answer>", 1, 0),
        ("<think>a</think><answer>b", 0, 0),
        ("</think><think><answer>b</answer>", 0, 0),
        ("<think>a</think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_parts_between_tags(text, loose, strict):
    assert FormatReward()(completions(text)) == [loose]
    assert FormatReward(strict=True)(completions(text)) == [strict]


@pytest.mark.parametrize("tags", [[], "think", ["think", ""]])
def test_tags_that_are_refused(tags):
    with pytest.raises(ValueError, match="tags"):
        FormatReward(tags)


def test_many_open_tags_take_no_longer():
    assert FormatReward()(completions("<think>" * 200_000)) == [0.0]
    assert FormatReward(strict=True)(completions("<think>" * 200_000)) == [0.0]


def test_the_penalty_of_long_completions():
    # L = 100, C = 20: 0 up to 80, −1 at 100, −(n − 80)/20 between
    lengths = [{"messages": [], "completion_length": n} for n in (0, 80, 85, 100, 101, 10**6)]
    assert OverlongPenalty(100, 20)(lengths) == [0.0, 0.0, -0.25, -1.0, -1.0, -1.0]
    assert math.copysign(1, OverlongPenalty(100, 20)(lengths)[0]) == 1

    class Words:
        def encode(self, text):
            return text.split()

    assert OverlongPenalty(4, 4, tokenizer=Words())(completions("a b")) == [-0.5]


def test_penalties_that_are_refused():
    with pytest.raises(ValueError, match=r"trajectories\[0\]"):
        OverlongPenalty(4, 4)(completions("a b"))
    with pytest.raises(ValueError, match="buffer"):
        OverlongPenalty(4, 5)
    with pytest.raises(ValueError, match="buffer"):
        OverlongPenalty(4, 0)
    with pytest.raises(TypeError, match="max_length"):
        OverlongPenalty(4.0, 1)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{ \\frac{1}{2} }", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2", None),
        ("\\boxed{}", ""),
        ("boxed{1}", None),
        ("\\boxed{1}}", "1"),
    ],
)
def test_the_last_box(text, box):
    assert last_boxed(text) == box
