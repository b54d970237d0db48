"""`twinkle_agentic.reward`: numbers that Twinkle's classes gave for the same texts."""

import pytest

from tests.reward import completions
from twinkle_jax.twinkle.agentic.reward import CoTReward, F1Reward, ToolExploreReward
from twinkle_jax.twinkle.agentic.reward.f1 import _extract_final_answer, _f1_score
from twinkle_jax.twinkle.agentic.tools.tool_manager import ToolManager


@pytest.fixture(autouse=True, scope="module")
def nltk():
    """It takes a second to import, which a process without these tests does not spend."""
    pytest.importorskip("nltk", reason="pip install 'twinkle-jax[nltk]'")


@pytest.mark.parametrize(
    ("answer", "gold", "f1", "same"),
    [
        ("Delhi", "Delhi", 1.0, 1.0),
        ("the Delhi city", "New Delhi", 0.5, 0.0),
        ("running quickly", "runs quick", 0.5, 0.0),
        ("6 feet tall", "6 feet", 1.0, 0.0),
        ("6 feet", "about 6 feet", 1.0, 0.0),
        ("1969 Paris", "Paris", 1.0, 0.0),
        ("Paris", "1969 Paris", 2 / 3, 0.0),
        ("Rome, Italy", "rome", 2 / 3, 0.0),
        ("tall", "high", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("", "x", 0.0, 0.0),
        ("1,234 people", "1234 People", 1.0, 1.0),
        ("relational databases", "relate database", 1.0, 1.0),
        ("red red blue", "red green", 0.4, 0.0),
        ("red red", "red", 2 / 3, 0.0),
    ],
)
def test_shared_stems(answer, gold, f1, same):
    assert _f1_score(answer, gold) == (pytest.approx(f1), same)


def test_answers_are_in_the_last_closed_box():
    assert _extract_final_answer(r"\boxed{a} then \boxed{ \frac{1}{2} } and \boxed{cut") == (
        r"\frac{1}{2}"
    )
    assert _extract_final_answer("none") == ""
    golds = [("ground_truth", "Rome"), ("level", 3), ("ground_truth", "New Delhi")]
    texts = completions(r"\boxed{Delhi}", r"It is \boxed{rome}.", "Answer: Rome", user_data=golds)
    assert F1Reward()(texts) == pytest.approx([2 / 3, 1.0, 0.0])
    assert F1Reward(r"Answer: (\w+)(.*)")(texts)[2] == 1.0
    assert F1Reward()([{"messages": []}]) == [1.0]  # nothing to find, and nothing found


def test_steps():
    steps = [f"Step {i}: go\n" for i in range(1, 9)]
    texts = completions(
        "".join(steps[:3]) + r"\boxed{1}",
        "".join(steps[:6]) + r"\boxed{",
        "".join(steps) + r"\boxed{1}",
        "".join(steps[:3]),
        steps[0] * 5 + r"\boxed{1}",
        r"In Step 1: Step 2: Step 3: \boxed{1}",
    )
    assert CoTReward()(texts) == [0.3, 0.3, 0.1, 0.0, 0.0, 0.0]


def test_use_of_tools():
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    found, failed = ({"role": "tool", "content": x} for x in ("text", " ERROR: no"))
    answer = {"role": "assistant", "content": r"\boxed{Rome}"}

    def score(*turns, truth="Rome"):
        messages = [*turns, answer]
        (number,) = ToolExploreReward()(
            [{"messages": messages, "user_data": [("ground_truth", truth)]}]
        )
        return number

    assert score(call, found) == score(call, failed, found) == score(*[call, found] * 3) == 1.0
    assert score(*[call, found] * 4) == 0.5
    unknown = {"role": "tool", "content": ToolManager()({"function": {"name": "search"}})}
    assert unknown["content"].startswith("Error:") and score(call, unknown) == 0.0
    assert score() == score(call, failed) == score(call, answer, found) == 0.0
    assert score(call, found, truth="Delhi") == 0.0
