"""Evaluations: what is sampled and scored, and what the results are computed from."""

import time
from itertools import combinations

import jax
import numpy as np
import pytest

from twinkle_jax.data import ArithmeticTask, message_text
from twinkle_jax.model import init_params
from twinkle_jax.rollout import EnvironmentFailureError, engine
from twinkle_jax.training import (
    EvaluationConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    evaluate,
    small_policy,
)
from twinkle_jax.training.evaluation import held_out
from twinkle_jax.training.task import EnvironmentRows, Task

POLICY = small_policy(0)
PROBLEMS = ArithmeticTask(1, size=5)[:]
K = 2


class Judge:
    """Returns the rewards that it was made with, and records the arguments of its calls."""

    def __init__(self, rewards=()):
        self.rewards, self.calls = list(rewards), []

    def __call__(self, trajectories, truths):
        self.calls.append((trajectories, truths))
        rewards, self.rewards = self.rewards[: len(truths)], self.rewards[len(truths) :]
        return rewards or [0.0] * len(truths)

    def completions(self):
        return [
            [message_text(t["messages"][-1]) for t in trajectories]
            for trajectories, _ in self.calls
        ]


SETTINGS = RolloutConfig(max_new_tokens=4)


def judged(judge, prompts=PROBLEMS, temperature=1.0, **options):
    """Compiled once for greedy completions and once for four samples of each prompt."""
    settings = RolloutConfig(max_new_tokens=4, temperature=temperature)
    return evaluate(POLICY, prompts, judge, settings, batch=len(prompts), **options)


def test_accuracy_is_the_share_of_rewards_of_one_or_more():
    assert judged(Judge([1.0, 0.99, 2.0, -1.0, 0.0])) == {
        "accuracy": 2 / 5,
        "reward": pytest.approx(2.99 / 5),
    }
    with pytest.raises(ValueError, match="prompts"):
        judged(Judge(), [])


@pytest.mark.slow
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_right_one():
    right = np.arange(2 * K) < np.arange(5)[:, None]  # none, one, …, all of a prompt's
    results = judged(Judge([0.0] * 5 + right.reshape(-1).astype(float).tolist()), pass_k=K)
    chosen = [[row[list(drawn)].any() for drawn in combinations(range(2 * K), K)] for row in right]
    assert results == {"accuracy": 0.0, "reward": 0.0, f"pass@{K}": pytest.approx(np.mean(chosen))}


def test_completions_stand_beside_their_prompts_and_truths():
    judge = Judge()
    judged(judge, pass_k=K)
    for (trajectories, truths), samples in zip(judge.calls, (1, 2 * K), strict=True):
        for i, prompt in enumerate(PROBLEMS):
            of_prompt = slice(i * samples, (i + 1) * samples)
            assert [t["messages"][:-1] for t in trajectories[of_prompt]] == [
                prompt["messages"]
            ] * samples
            assert truths[of_prompt] == [dict(prompt["user_data"])["ground_truth"]] * samples


def test_accuracy_is_of_the_most_probable_completions_and_pass_at_k_of_drawn_ones():
    cold, warm = Judge(), Judge()
    judged(cold, pass_k=K, temperature=1e-6)
    judged(warm, pass_k=K)
    greedy, drawn = cold.completions()
    assert drawn == [text for text in greedy for _ in range(2 * K)]
    again, drawn = warm.completions()
    assert again == greedy
    assert len(set(drawn)) > len(PROBLEMS)


def test_no_two_batches_share_noise_and_a_seed_repeats():
    alike = [PROBLEMS[0]] * 10
    first, again, other, large = Judge(), Judge(), Judge(), Judge()
    for judge, seed in ((first, 0), (again, 0), (other, 1), (large, 2**32)):
        evaluate(POLICY, alike, judge, SETTINGS, batch=5, pass_k=K, seed=seed)
    drawn = first.completions()[2:]
    assert drawn[0] != drawn[1]
    assert again.completions()[2:] == drawn
    assert other.completions()[2:] != drawn
    assert large.completions()[2:] != drawn


def test_other_parameters_are_judged_in_place_of_the_policys_own():
    params = init_params(jax.random.key(9), POLICY.config)
    initial, passed, replaced = Judge(), Judge(), Judge()
    judged(initial)
    judged(passed, params=params)
    evaluate(POLICY._replace(params=params), PROBLEMS, replaced, SETTINGS, batch=5)
    assert passed.completions() == replaced.completions() != initial.completions()


@pytest.mark.slow
def test_completions_are_drawn_in_as_many_slots_as_the_settings_say(monkeypatch):
    slots = []
    drawn = engine.generate
    monkeypatch.setattr(
        engine, "generate", lambda *args, **kw: slots.append(kw["slots"]) or drawn(*args, **kw)
    )
    evaluate(POLICY, PROBLEMS, Judge(), RolloutConfig(max_new_tokens=4, slots=2), batch=4)
    assert slots == [2, 1]  # of four prompts, and of the last one


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"batch": 0}, ValueError), ({"batch": 2.0}, TypeError), ({"pass_k": -1}, ValueError)],
)
def test_counts_are_refused_by_name(changes, error):
    with pytest.raises(error, match=rf"^{next(iter(changes))} must"):
        evaluate(POLICY, PROBLEMS, Judge(), SETTINGS, **changes)


def test_a_run_evaluates_with_its_own_settings_and_its_judge():
    config = TrainConfig(
        rollout=RolloutConfig(max_new_tokens=4, temperature=1e-6),
        evaluation=EvaluationConfig(pass_k=K),
    )
    reward, judge = Judge(), Judge()
    results = held_out(config, Task([], PROBLEMS, reward, judge), POLICY)
    assert results.keys() == {"accuracy", "reward", f"pass@{K}"}
    greedy, drawn = judge.completions()
    assert drawn == [text for text in greedy for _ in range(2 * K)]  # so cold, samples are greedy
    assert not reward.calls


@pytest.mark.parametrize(("evaluation", "slots"), [(None, 3), (2, 2)])
def test_a_run_evaluates_with_as_many_slots_as_it_samples_with_or_its_own(evaluation, slots):
    class Settings(Exception):
        pass

    class Asked:
        row_shards = 1

        def draw(self, params, prompts, key, settings):
            raise Settings(settings.slots)

    config = TrainConfig(
        rollout=RolloutConfig(slots=3), evaluation=EvaluationConfig(slots=evaluation)
    )
    with pytest.raises(Settings, match=f"^{slots}$"):
        held_out(config, Task([], PROBLEMS, Judge()), POLICY, engine=Asked())


@pytest.mark.slow
def test_a_run_evaluates_with_its_penalty_and_its_filters():
    rollout = RolloutConfig(max_new_tokens=4, top_k=1, repetition_penalty=1e4)
    config = TrainConfig(rollout=rollout, evaluation=EvaluationConfig(pass_k=K))
    judge = Judge()
    held_out(config, Task([], PROBLEMS, judge), POLICY)
    greedy, drawn = judge.completions()
    assert drawn == [text for text in greedy for _ in range(2 * K)]  # of one token, one is drawn
    assert all(len(set(text)) == len(text) for text in greedy)
    held_out(
        TrainConfig(rollout=RolloutConfig(max_new_tokens=4)), Task([], PROBLEMS, judge), POLICY
    )
    assert any(len(set(text)) < len(text) for text in judge.completions()[-1])


def test_a_run_evaluates_with_its_seed_its_longest_prompt_and_its_timeout():
    def drawn(seed):
        settings = RolloutConfig(max_new_tokens=4)
        config = TrainConfig(rollout=settings, evaluation=EvaluationConfig(pass_k=K), seed=seed)
        judge = Judge()
        held_out(config, Task([], PROBLEMS, judge), POLICY)
        return judge.completions()[1]

    assert drawn(0) == drawn(0) != drawn(1)
    short = TrainConfig(rollout=RolloutConfig(max_new_tokens=4, max_prompt_tokens=2))
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        held_out(short, Task([], PROBLEMS, Judge()), POLICY)

    def slow(trajectories, truths):
        time.sleep(60)

    hasty = TrainConfig(rollout=RolloutConfig(max_new_tokens=4), reward_timeout=0.2)
    with pytest.raises(TimeoutError, match="slow"):
        held_out(hasty, Task([], PROBLEMS, slow), POLICY)


# Episodes of two turns with environments, by a policy that always ends its turn at once.


def silent_policy():
    params = jax.tree.map(np.zeros_like, POLICY.params)
    params["embed_tokens"]["embedding"][:] = 1
    params["norm"]["scale"][:] = 1
    params["lm_head"]["kernel"][:, POLICY.tokenizer.stop_token_ids[0]] = 1
    return POLICY._replace(params=jax.tree.map(jax.numpy.asarray, params))


class TwoTurns:
    """Gives half a point a turn; that of row 1 fails."""

    tools = None
    seeds: list[int] = []  # noqa: RUF012

    def reset(self, row, seed):
        self.turns, self.index = 0, dict(row["user_data"])["index"]
        TwoTurns.seeds.append(seed)
        return "1="

    def step(self, action):
        self.turns += 1
        if self.index == 1 and self.turns == 2:
            raise OSError("lost")
        return "1", 0.5, self.turns == 2, {}

    def close(self):
        pass


def evaluate_two_turns(rows, *, discount=1.0, seed=0, pass_k=0, **rollout):
    settings = {"max_new_tokens": 4, "max_prompt_tokens": 16, "max_turns": 3} | rollout
    config = TrainConfig(
        environment="games.py:TwoTurns",
        rollout=RolloutConfig(**settings),
        update=UpdateConfig(discount=discount),
        evaluation=EvaluationConfig(pass_k=pass_k),
        seed=seed,
    )
    TwoTurns.seeds.clear()
    task = Task([], rows, None, environment=TwoTurns)
    results = held_out(config, task, silent_policy())
    return results, sorted(TwoTurns.seeds)  # threads reset them in any order


@pytest.mark.slow
def test_an_episode_is_judged_by_its_discounted_return():
    rows = EnvironmentRows(2, first=2)
    results, seeds = evaluate_two_turns(rows)
    assert results == {"accuracy": 1.0, "reward": 1.0, "turns": 2.0, "failed": 0.0}
    assert evaluate_two_turns(rows)[1] == seeds
    less, others = evaluate_two_turns(rows, discount=0.5, seed=1)
    assert (less["accuracy"], less["reward"]) == (0.0, 0.75)
    assert others != seeds


@pytest.mark.slow
def test_failed_episodes_are_left_out_of_an_evaluation_unless_they_are_too_many():
    rows = EnvironmentRows(2)
    results, _ = evaluate_two_turns(rows, max_failed=0.5, pass_k=1)
    kept = {"accuracy": 1.0, "reward": 1.0, "turns": 2.0, "pass@1": 1.0}
    assert results == {**kept, "failed": 0.5}
    with pytest.raises(EnvironmentFailureError, match="max_failed"):
        evaluate_two_turns(rows, max_failed=0.4)
    # Means of nothing were NaN, which no checkpoint takes.
    failing = EnvironmentRows(1, first=1)
    assert evaluate_two_turns(failing, max_failed=1.0, pass_k=1)[0] == {"failed": 1.0}
