"""Functions as tools: their description, how they are called, and environments by name."""

import asyncio
import inspect
import json
from typing import Literal

import pytest

from twinkle_jax.rollout import (
    Action,
    ToolEnvironment,
    find_environment,
    find_tools,
    tool_schema,
)


def search(query: str, limit: int | None = None, kind: Literal["web", "news"] = "web") -> list:
    """Look something up.

    It takes a while.

    Args:
        query: what to look for,
            in a few words.
        limit (int): how many results.

    Returns:
        Results.
    """
    return [query] * (limit or 1)


def divide(x: float, y: float) -> float:
    """Divide."""
    return x / y


async def later(items: list[int]) -> str:
    """Add up."""
    await asyncio.sleep(0)
    return str(sum(items))


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_nothing():
    return None


def step(environment, text):
    reply = environment.step(Action(text))
    return asyncio.run(reply) if inspect.isawaitable(reply) else reply


def test_a_schema_is_the_signature_and_the_docstring():
    function = tool_schema(search)["function"]
    assert function["name"] == "search"
    assert function["description"] == "Look something up.\n\nIt takes a while."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for, in a few words."},
            "limit": {"type": "integer", "description": "how many results."},
            "kind": {"enum": ["web", "news"]},
        },
        "required": ["query"],
    }
    items = tool_schema(later)["function"]["parameters"]["properties"]["items"]
    assert items == {"type": "array", "items": {"type": "integer"}}
    with pytest.raises(TypeError, match="args"):
        tool_schema(lambda *args: args)


@pytest.mark.parametrize(
    ("text", "answers", "errors"),
    [
        (call("search", query="a", limit=2), ['["a", "a"]'], 0),
        (call("divide", x=1, y=2), ["0.5"], 0),
        (call("later", items=[1, 2]) + call("divide", x=4, y=2), ["3", "2.0"], 0),
        (call("divide", x=1, y=0), ["Error: ZeroDivisionError: division by zero"], 1),
        (call("divide", x=1), ["Error: divide: missing a required argument: 'y'"], 1),
        (
            call("nothing"),
            ["Error: there is no tool 'nothing'; there are search, divide, later"],
            1,
        ),
        (call("later", items=["x"]), ["Error: TypeError: "], 1),
        ('<tool_call>{"name": 1}</tool_call>', ["Error: a call must have a name"], 1),
    ],
)
def test_calls_are_answered_in_order_and_errors_are_told(text, answers, errors):
    messages, reward, done, info = step(ToolEnvironment([search, divide, later]), text)
    assert [m["role"] for m in messages] == ["tool"] * len(answers)
    for message, answer in zip(messages, answers, strict=True):
        assert message["content"].startswith(answer)
    assert (reward, done, info["tool_errors"]) == (0.0, False, errors)


def test_text_without_calls_goes_to_the_environment_or_ends():
    class Inner:
        tools = ("a schema",)
        closed = False

        def reset(self, row, seed):
            return f"{seed}"

        def step(self, action):
            return action.content, 1.0, True, {}

        def final_reward(self):
            return 0.5

        def close(self):
            self.closed = True

    inner = Inner()
    environment = ToolEnvironment([divide], inner)
    assert environment.reset({}, 3) == "3"
    assert step(environment, "4") == ("4", 1.0, True, {})
    assert environment.final_reward() == 0.5
    assert len(environment.tools) == 2
    environment.close()
    assert inner.closed
    assert step(ToolEnvironment([divide]), "so") == (None, 0.0, True, {})
    with pytest.raises(ValueError, match="divide"):
        ToolEnvironment([divide, divide])


def test_a_lost_connection_is_not_the_policys_fault():
    def fetch() -> str:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        step(ToolEnvironment([fetch]), call("fetch"))


def test_environments_and_tools_by_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from math import floor\n"
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
