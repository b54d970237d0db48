"""Functions as tools: their description, and how they are called."""

import asyncio
import functools
import inspect
import json
from typing import Literal

import numpy as np
import pytest

from twinkle_jax.rollout import Action, SandboxUnavailableError, ToolEnvironment, tool_schema
from twinkle_jax.rollout.environment import Session


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

    for nameless in (lambda query: query, "search", max):
        with pytest.raises(TypeError, match="tools must"):
            tool_schema(nameless)

    def yields(x: int):
        yield x

    async def yields_later(x: int):
        yield x

    for function in (yields, yields_later):
        with pytest.raises(TypeError, match="yield"):
            tool_schema(function)


def test_partial_functions_and_objects_are_shown_as_what_they_call():
    """A policy was shown a tool called partial, with the docstring of `functools.partial`."""

    class Counter:
        """Count on."""

        def __call__(self, number: int) -> int:
            return number + 1

    whole, part = (
        tool_schema(tool)["function"] for tool in (search, functools.partial(search, kind="web"))
    )
    whole["parameters"]["properties"].pop("kind")
    assert part == whole
    shown = tool_schema(Counter())["function"]
    assert (shown["name"], shown["description"]) == ("Counter", "Count on.")
    assert shown["parameters"]["properties"] == {"number": {"type": "integer"}}
    answer, *_ = step(ToolEnvironment([Counter()]), call("Counter", number=2))
    assert answer[0]["content"] == "3"


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


def measure() -> dict[str, object]:
    """Measure."""
    return {"mean": np.float32(0.5), "counts": np.arange(2000)}


def shape() -> object:
    """Name a shape."""
    return {"size": {1}}


def test_results_of_numpy_are_json_and_other_objects_their_text():
    environment = ToolEnvironment([measure, shape])
    (message,), *_ = step(environment, call("measure"))
    assert json.loads(message["content"]) == {"mean": 0.5, "counts": list(range(2000))}
    (message,), *_ = step(environment, call("shape"))
    assert message["content"] == "{'size': {1}}"


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


def test_calls_of_the_environments_own_tools_reach_it():
    class Inner:
        tools = (tool_schema(search),)

        def step(self, action):
            return [call["function"]["name"] for call in action.calls], 1.0, False, {}

    environment = ToolEnvironment([divide], Inner())
    assert step(environment, call("search", query="a"))[:2] == (["search"], 1.0)
    both = call("divide", x=1, y=2) + call("search", query="a")
    assert step(environment, both)[0] == ["divide", "search"]
    assert step(environment, call("divide", x=1, y=2))[0][0]["content"] == "0.5"
    (message,), *_ = step(environment, call("nothing"))
    assert message["content"].endswith("there are divide, search")


@pytest.mark.parametrize("error", [ConnectionResetError, SandboxUnavailableError])
def test_a_lost_connection_or_sandbox_is_not_the_policys_fault(error):
    def fetch() -> str:
        raise error("gone")

    with pytest.raises(error):
        step(ToolEnvironment([fetch]), call("fetch"))


@pytest.mark.parametrize("text", [call("divide", x=1, y=2), "<tool_call></tool_call>"])
def test_more_calls_than_an_observation_may_answer_are_one_error(text):
    """An environment whose answer is too long has failed, and its episode is left out."""
    session = Session(lambda: ToolEnvironment([divide]), 1000, asyncio.run)
    session.reset({}, 0)
    assert len(session.step(Action(text * 256)).messages) == 256
    reply = session.step(Action(text * 257))
    assert reply.info == {"tool_errors": 257.0}
    (message,) = reply.messages
    assert message["content"] == "Error: a turn may have at most 256 tool calls, got 257"
