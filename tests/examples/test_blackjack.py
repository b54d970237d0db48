"""Blackjack: its rules, its exact scores, its demonstrations, and that it is learnt."""

import random
import re

import numpy as np
import pytest

from tests.examples import load
from twinkle_jax.rollout import Action

blackjack = load("blackjack")
RANDOM = random.Random(5)


def play(choose, seed):
    """Play a hand with a player who sees it; the reward, and how many turns it took."""
    game, total, done, turns = blackjack.Blackjack(), 0.0, False, 0
    game.reset({}, seed)
    while not done:
        _, reward, done, _ = game.step(call(choose(game)))
        total, turns = total + reward, turns + 1
    return total + game.final_reward(), turns


def call(name):
    return Action(blackjack.CALL.format(name))


def sensible(game):
    return "hit" if game.hand[0] < 14 else "stand"


def test_cards_are_added_as_the_rules_say():
    add = blackjack.add_card
    assert add((0, False), 1) == (11, True)
    assert add((11, True), 1) == (12, True)  # the second ace is 1
    assert add((16, True), 10) == (16, False)  # the ace is 1 now
    assert add((16, False), 10) == (26, False)
    assert add((10, False), 1) == (21, True)
    assert blackjack.outcome(22, 18) == blackjack.outcome(17, 18) == -1
    assert blackjack.outcome(18, 18) == 0
    assert blackjack.outcome(12, 22) == blackjack.outcome(19, 18) == 1
    assert abs(sum(blackjack.dealer_totals((10, False)).values()) - 1) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choose", "worth"),
    [
        (lambda game: RANDOM.choice(["hit", "stand"]), None),
        (lambda game: "stand", lambda hands, shown, stand, draw: stand),
        (lambda game: "hit", lambda hands, shown, stand, draw: draw),
        (sensible, lambda hands, shown, stand, draw: draw if hands[-1][0] < 14 else stand),
    ],
)
def test_what_hands_are_worth_is_what_they_bring(choose, worth):
    """5,000 hands: the mean is within four standard errors."""
    exact = blackjack.RANDOM_SCORE if worth is None else blackjack.expected_score(worth)
    played = [play(choose, 7919 * i) for i in range(5_000)]
    assert abs(np.mean([reward for reward, _ in played]) - exact) < 0.054
    assert max(turns for _, turns in played) <= blackjack.MOST_CARDS - 2
    assert exact <= blackjack.BEST_SCORE
    assert round(blackjack.RANDOM_SCORE, 2) == -0.38
    assert round(blackjack.BEST_SCORE, 2) == -0.09


def test_who_does_not_finish_has_lost():
    game = blackjack.Blackjack()
    game.reset({}, 3)
    assert game.final_reward() == -1
    assert game.step(Action("stand"))[1:] == (-1.0, True, {})
    assert game.final_reward() == 0
    game.reset({}, 3)
    game.step(call("stand"))
    assert game.final_reward() == 0


def test_tools_are_described_and_answer():
    game = blackjack.Blackjack()
    names = [tool["function"]["name"] for tool in game.tools]
    assert names == ["hit", "stand"]
    first = game.reset({}, 5)
    assert first == f"hard {game.hand[0]} against {game.shown}"
    game.hand = (5, False)
    [told], reward, done, info = game.step(call("hit"))
    assert told["role"] == "tool"
    assert told["content"].split()[1] == str(game.hand[0])
    assert (reward, done, info) == (0.0, False, {"tool_errors": 0.0})
    [told], reward, done, _ = game.step(call("fold"))
    assert told["content"].startswith("Error: there is no tool")
    assert not done
    _, reward, done, _ = game.step(Action(blackjack.CALL.format("stand") * 2))
    assert done
    assert reward in (-1, 0, 1)
    over = game.hand
    game.step(call("hit"))  # after the end, nothing changes
    assert (game.hand, game.reward) == (over, reward)


def test_demonstrations_are_games():
    shown = blackjack.Blackjack.demonstrations(400, 3)
    assert shown == blackjack.Blackjack.demonstrations(400, 3)
    for conversation in shown:
        roles = [m["role"] for m in conversation["messages"]]
        assert roles == ["user", *["assistant", "tool"] * (len(roles) // 2 - 1), "assistant"]


@pytest.mark.exhaustive
def test_the_exact_score_of_a_policy_is_what_its_calls_bring():
    """A policy that has only imitated: 5,000 hands, within four standard errors."""
    policy = blackjack.make_policy(0)
    chances = blackjack.call_chances(policy)
    assert min(map(sum, chances.values())) > 0.95
    assert max(map(sum, chances.values())) < 1 + 1e-5
    rewards = []
    for i in range(5_000):
        game, hands, reward = blackjack.Blackjack(), (), None
        game.reset({}, 7919 * i)
        while reward is None:
            hands = (*hands, game.hand)
            hit, stand = chances[hands, game.shown]
            drawn = RANDOM.random()
            if drawn > hit + stand:
                reward = -1.0
                break
            game.step(call("hit" if drawn < hit else "stand"))
            reward = game.reward
        rewards.append(reward)
    assert abs(np.mean(rewards) - blackjack.policy_score(policy)) < 0.054
    assert blackjack.policy_score(policy) < blackjack.policy_score(policy, greedy=True)


@pytest.mark.exhaustive
def test_it_is_learnt(tmp_path, capsys):
    """The standard error of the mean of 50 steps of 128 different hands is 0.012."""
    scores = blackjack.main(["--output", str(tmp_path / "run")])
    assert np.mean(scores[:5]) < -0.18
    assert np.mean(scores[-50:]) > -0.17
    shown = capsys.readouterr().out
    assert "step 160/160" in shown
    share = float(re.search(r"exact score \S+, (\S+) of the way", shown)[1])
    assert share > 0.87  # what drawing below 14 is worth: more needs the dealer's card
