"""One evaluation: who is asked what, and what is made of the answers."""

from itertools import combinations

import jax
import numpy as np
import pytest

from twinkle_jax.data import ArithmeticTask, message_text
from twinkle_jax.model import init_params
from twinkle_jax.training import (
    EvaluationConfig,
    RolloutConfig,
    TrainConfig,
    evaluate,
    small_policy,
)
from twinkle_jax.training.evaluation import held_out
from twinkle_jax.training.task import Task

POLICY = small_policy(0)
PROBLEMS = ArithmeticTask(1, size=5)[:]
K = 2


class Judge:
    """Gives what it is told to give, and remembers what it was asked."""

    def __init__(self, worth=()):
        self.worth, self.asked = list(worth), []

    def __call__(self, trajectories, truths):
        self.asked.append((trajectories, truths))
        given, self.worth = self.worth[: len(truths)], self.worth[len(truths) :]
        return given or [0.0] * len(truths)

    def said(self):
        return [
            [message_text(t["messages"][-1]) for t in trajectories]
            for trajectories, _ in self.asked
        ]


def judged(judge, prompts=PROBLEMS, **options):
    """Compiled once for greedy completions and once for four samples of each prompt."""
    return evaluate(POLICY, prompts, judge, max_new_tokens=4, batch=len(prompts), **options)


def test_accuracy_is_the_share_of_rewards_of_one_or_more():
    assert judged(Judge([1.0, 0.99, 2.0, -1.0, 0.0])) == {
        "accuracy": 2 / 5,
        "reward": pytest.approx(2.99 / 5),
    }
    with pytest.raises(ValueError, match="prompts"):
        judged(Judge(), [])


def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_right_one():
    right = np.arange(2 * K) < np.arange(5)[:, None]  # none, one, …, all of a prompt's
    found = judged(Judge([0.0] * 5 + right.reshape(-1).astype(float).tolist()), pass_k=K)
    chosen = [[row[list(some)].any() for some in combinations(range(2 * K), K)] for row in right]
    assert found == {"accuracy": 0.0, "reward": 0.0, f"pass@{K}": pytest.approx(np.mean(chosen))}


def test_completions_stand_beside_their_prompts_and_truths():
    judge = Judge()
    judged(judge, pass_k=K)
    for (trajectories, truths), samples in zip(judge.asked, (1, 2 * K), strict=True):
        for i, prompt in enumerate(PROBLEMS):
            own = slice(i * samples, (i + 1) * samples)
            assert [t["messages"][:-1] for t in trajectories[own]] == [prompt["messages"]] * samples
            assert truths[own] == [dict(prompt["user_data"])["ground_truth"]] * samples


def test_accuracy_is_of_the_most_probable_completions_and_pass_at_k_of_drawn_ones():
    cold, warm = Judge(), Judge()
    judged(cold, pass_k=K, temperature=1e-6)
    judged(warm, pass_k=K)
    greedy, drawn = cold.said()
    assert drawn == [text for text in greedy for _ in range(2 * K)]
    again, drawn = warm.said()
    assert again == greedy
    assert len(set(drawn)) > len(PROBLEMS)


def test_no_two_batches_share_noise_and_a_seed_repeats():
    alike = [PROBLEMS[0]] * 10
    first, again, other = Judge(), Judge(), Judge()
    for judge, seed in ((first, 0), (again, 0), (other, 1)):
        evaluate(POLICY, alike, judge, max_new_tokens=4, batch=5, pass_k=K, seed=seed)
    drawn = first.said()[2:]
    assert drawn[0] != drawn[1]
    assert again.said()[2:] == drawn
    assert other.said()[2:] != drawn


def test_other_parameters_are_judged_in_place_of_the_policys_own():
    params = init_params(jax.random.key(9), POLICY.config)
    own, given, moved = Judge(), Judge(), Judge()
    judged(own)
    judged(given, params=params)
    evaluate(POLICY._replace(params=params), PROBLEMS, moved, max_new_tokens=4, batch=5)
    assert given.said() == moved.said() != own.said()


def test_a_run_evaluates_with_its_own_settings_and_its_judge():
    config = TrainConfig(
        rollout=RolloutConfig(max_new_tokens=4, temperature=1e-6),
        evaluation=EvaluationConfig(pass_k=K),
    )
    reward, judge = Judge(), Judge()
    results = held_out(config, Task([], PROBLEMS, reward, judge), POLICY)
    assert results.keys() == {"accuracy", "reward", f"pass@{K}"}
    greedy, drawn = judge.said()
    assert drawn == [text for text in greedy for _ in range(2 * K)]  # so cold, samples are greedy
    assert not reward.asked
