"""Environments and tools by name, and environments with other interfaces."""

import pytest

from tests.rollout.test_tools import call, step
from twinkle_jax.rollout import Action, GymEnvironment, find_environment, find_tools
from twinkle_jax.rollout.by_name import openenv_text


def make_nothing():
    return None


def test_environments_and_tools_by_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from os.path import join\n"
        "class Game:\n"
        "    demonstrations = 7\n"
        "    def reset(self, row, seed): return 'x'\n"
        "    def step(self, action): return None, 0.0, True, {}\n"
        "    def close(self): pass\n"
        "class Half:\n"
        "    def reset(self, row, seed): return 'x'\n"
        "def double(x: int) -> int: return 2 * x\n"
        "def _hidden(): pass\n"
        "TOOLS = [double]\n"
    )
    assert type(find_environment(f"{path}:Game")()).__name__ == "Game"
    both = find_environment(f"{path}:Game", str(path))
    assert both.demonstrations == 7
    assert [t["function"]["name"] for t in both().tools] == ["double"]
    assert [f.__name__ for f in find_tools(f"{path}:TOOLS")] == ["double"]
    assert find_environment(None, f"{path}:double")().step(Action(call("double", x=2)))[0]
    for name, tools, argument in (
        (f"{path}:Gone", None, "environment"),
        ("Gone", None, "environment"),
        (f"{tmp_path}/other.py:Game", None, "environment"),
        (None, None, "environment"),
        (f"{path}:Game", f"{path}:gone", "tools"),
    ):
        with pytest.raises(ValueError, match=argument):
            find_environment(name, tools)
    for name, tools, argument in (
        (f"{path}:Half", None, "method step"),
        (f"{path}:TOOLS", None, "environment"),
        (None, f"{path}:__name__", "tools"),
    ):
        with pytest.raises(TypeError, match=argument):
            find_environment(name, tools)


class Ledger:
    """Counts, as an environment of TRL does: its public methods are tools."""

    def reset(self, start=0, **columns):
        self.total = start
        return f"start at {start}, {sorted(columns)}"

    def add(self, amount: int) -> int:
        """Add an amount."""
        self.total += amount
        return self.total

    def get_reward(self):
        return self.total / 2

    def _hidden(self):
        return None


class Countdown:
    """Counts down, in gymnasium's form."""

    def reset(self, seed=None):
        self.left = 2
        return str(seed), {}

    def step(self, action):
        self.left -= 1
        return f"{action}{self.left}", 0.5, self.left == 0, False, {"left": self.left}


def test_an_environment_of_trl_is_its_methods():
    environment = find_environment(f"trl:{__name__}:Ledger")()
    row = {"messages": [], "user_data": [("start", 3), ("answer", "7")]}
    assert environment.reset(row, 0) == "start at 3, ['answer', 'prompt']"
    assert [t["function"]["name"] for t in environment.tools] == ["add"]
    assert step(environment, call("add", amount=4))[0][0]["content"] == "7"
    assert step(environment, "done")[1:3] == (0.0, True)
    assert environment.final_reward() == 3.5
    environment.close()
    with pytest.raises(TypeError, match="reset"):
        find_environment(f"trl:{__name__}:make_nothing")()


def test_an_environment_of_gymnasium_ends_or_is_truncated():
    environment = find_environment(f"gym:{__name__}:Countdown")()
    assert environment.reset({"messages": []}, 7) == "7"
    assert environment.step(Action("x")) == ("x1", 0.5, False, {"left": 1})
    assert environment.step(Action("x")) == ("x0", 0.5, True, {"left": 0})
    environment.close()

    class Truncated(Countdown):
        def step(self, action):
            return "x", 0.5, False, True, {}

    environment = GymEnvironment(Truncated())
    environment.reset({}, 0)
    assert environment.step(Action("x"))[2]


class Board:
    """As a pydantic model of OpenEnv."""

    def model_dump(self):
        return {"cells": [0, 1], "seen": {2}}


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (None, ""),
        ("é", "é"),
        ({"text": "b", "result": "a"}, "a"),
        ({"text": "b", "result": None}, "b"),
        ({"message": 5, "response": "c"}, "5"),
        ({"response": "c"}, "c"),
        ({"cells": "é"}, '{"cells": "é"}'),
        (Board(), '{"cells": [0, 1], "seen": "{2}"}'),
        (7, "7"),
    ],
)
def test_text_of_openenvs_observations(observation, text):
    assert openenv_text(observation) == text
    assert openenv_text({"cells": text}, ["cells"]) == text
