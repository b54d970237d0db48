"""Twinkle's rewards: where `MathReward` finds its ground truths."""

import pytest

from twinkle_jax.twinkle.preprocessor import CompetitionMathGRPOProcessor
from twinkle_jax.twinkle.reward import MathReward

pytest.importorskip("math_verify", reason="pip install 'twinkle-jax[reward]'")


def _completed(answer, **user_data):
    messages = [{"role": "assistant", "content": f"\\boxed{{{answer}}}"}]
    return {"messages": messages, "user_data": list(user_data.items())}


def test_ground_truths_are_the_solutions_of_their_trajectories():
    """A trajectory without one would be compared with its own last message, and be right."""
    row = {"problem": "1+1=", "solution": "Two: \\boxed{2}."}
    prompt = CompetitionMathGRPOProcessor().preprocess(row)
    solution = dict(prompt["user_data"])["solution"]
    completed = [_completed(answer, solution=solution) for answer in "23"]
    reward = MathReward(workers=1)
    assert reward(completed, completed) == [1.0, 0.0]
    assert reward(completed, [prompt]) == [1.0, 0.0]
    assert reward(completed, ("3",)) == [0.0, 1.0]
    named = MathReward(ground_truth_key="key", workers=1)
    assert named([_completed("2")], [_completed("5", key="2", solution="5")]) == [1.0]
    assert reward([_completed("2")], [_completed("5", ground_truth="2")]) == [1.0]
