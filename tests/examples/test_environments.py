"""The examples' environments: rules, best and random scores, and that they are learnt."""

import random

import pytest

from tests.examples import load

calculator, guessing_game = load("calculator"), load("guessing_game")


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
    generator = random.Random(0)  # noqa: S311
    rewards = [play(n % 7 + 1, lambda answers: generator.randint(1, 7)) for n in range(7000)]
    assert abs(sum(rewards) / 7000 - guessing_game.RANDOM_SCORE) < 0.02
    game = guessing_game.GuessingGame()
    game.reset({}, 1)
    assert game.step("*") == ("*", 0.0, False, {"readable": 0.0})


@pytest.mark.parametrize(
    "environment", [guessing_game.GuessingGame, calculator.Calculator], ids=lambda e: e.__name__
)
def test_demonstrations_are_conversations_that_score_like_chance(environment):
    shown = environment.demonstrations(400, 3)
    assert shown == environment.demonstrations(400, 3)
    for conversation in shown:
        roles = [m["role"] for m in conversation["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    lengths = [len(c["messages"]) for c in shown]
    if environment is calculator.Calculator:
        assert abs(lengths.count(4) / 400 - calculator.ASKING) < 0.07


def test_the_calculator_multiplies_and_takes_an_answer():
    game = calculator.Calculator()
    assert game.reset({}, 5) == f"{game.x}*{game.y}="
    assert game.step("(12*34)") == ("=408", 0.0, False, {"asked": 1.0})
    assert game.step("(12*34")[1:3] == (0.0, True)
    assert game.step(str(game.x * game.y))[1:3] == (1.0, True)
    assert game.step("__import__('os')")[1:3] == (0.0, True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("example", "steps", "reached"), [(guessing_game, 30, 0.6), (calculator, 20, 0.6)]
)
def test_it_is_learnt(example, steps, reached, tmp_path, capsys):
    scores = example.main(["--steps", str(steps), "--output", str(tmp_path / "run")])
    assert scores[0] < 0.5
    assert sum(scores[-5:]) / 5 > reached
    shown = capsys.readouterr().out
    assert "episode" in shown
