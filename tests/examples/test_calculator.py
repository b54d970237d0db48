"""The calculator: its rules, its demonstrations, and that it is learnt."""

import pytest

from tests.examples import load

calculator = load("calculator")


def test_the_calculator_multiplies_and_takes_an_answer():
    game = calculator.Calculator()
    assert game.reset({}, 5) == f"{game.x}*{game.y}="
    assert game.step("(12*34)") == ("=408", 0.0, False, {"asked": 1.0})
    assert game.step("(12*34")[1:3] == (0.0, True)
    assert game.step(str(game.x * game.y))[1:3] == (1.0, True)
    assert game.step("__import__('os')")[1:3] == (0.0, True)


def test_demonstrations_ask_as_often_as_they_say():
    shown = calculator.Calculator.demonstrations(400, 3)
    assert shown == calculator.Calculator.demonstrations(400, 3)
    for conversation in shown:
        roles = [m["role"] for m in conversation["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    lengths = [len(conversation["messages"]) for conversation in shown]
    assert abs(lengths.count(4) / 400 - calculator.ASKING) < 0.07


@pytest.mark.exhaustive
def test_it_is_learnt(tmp_path, capsys):
    scores = calculator.main(["--steps", "20", "--output", str(tmp_path / "run")])
    assert scores[0] < 0.5
    assert sum(scores[-5:]) / 5 > 0.6
    assert "episode" in capsys.readouterr().out
