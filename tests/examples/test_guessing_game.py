"""The guessing game: its rules, its best and its random score, and that it is learnt."""

import random

import pytest

from tests.examples import load

guessing_game = load("guessing_game")


def play(number, choose):
    """Play the guessing game with a player who is told the answers."""
    game = guessing_game.GuessingGame()
    assert game.reset({}, 1) == "(1-7)="
    game.number, answers = number, []
    for _ in range(guessing_game.GUESSES):
        guess = choose(answers)
        answer, reward, done, info = game.step(str(guess))
        assert info == {"readable": 1.0}
        answers.append((guess, answer))
        if done:
            return reward
    return 0.0


def halving(answers):
    low = max([g + 1 for g, a in answers if a == "+"], default=1)
    high = min([g - 1 for g, a in answers if a == "-"], default=guessing_game.LARGEST)
    return (low + high) // 2


def test_the_guessing_game_has_the_best_and_the_random_score_that_it_names():
    numbers = range(1, guessing_game.LARGEST + 1)
    assert {play(n, halving) for n in numbers} == {guessing_game.BEST_SCORE}
    generator = random.Random(0)
    rewards = [play(n % 7 + 1, lambda answers: generator.randint(1, 7)) for n in range(7000)]
    assert abs(sum(rewards) / 7000 - guessing_game.RANDOM_SCORE) < 0.02
    game = guessing_game.GuessingGame()
    game.reset({}, 1)
    assert game.step("*") == ("*", 0.0, False, {"readable": 0.0})


def test_demonstrations_are_conversations():
    shown = guessing_game.GuessingGame.demonstrations(400, 3)
    assert shown == guessing_game.GuessingGame.demonstrations(400, 3)
    for conversation in shown:
        roles = [m["role"] for m in conversation["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.exhaustive
def test_it_is_learnt(tmp_path, capsys):
    scores = guessing_game.main(["--steps", "30", "--output", str(tmp_path / "run")])
    assert scores[0] < 0.5
    assert sum(scores[-5:]) / 5 > 0.6
    assert "step 30/30" in capsys.readouterr().out
