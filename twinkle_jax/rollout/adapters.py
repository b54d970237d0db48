"""Environments written for others: TRL's `environment_factory`, and gymnasium's with text."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from twinkle_jax.data import Message
from twinkle_jax.rollout.environment import Action, Observation
from twinkle_jax.rollout.tools import ToolEnvironment

_NO_TOOLS = ("reset", "get_reward", "close")


class TRLEnvironment(ToolEnvironment):
    """An environment as TRL's `environment_factory` makes them: its public methods are tools.

    `reset(**columns)` gets the columns of the row, `prompt` among them; what it returns is appended
    to the user's last message. An action without a call ends the episode, and `get_reward()`, if
    there is one, is its reward.

    Args:
        environment: with `reset` and methods whose docstrings and type hints describe them.

    Raises:
        TypeError: if it has no `reset`.

    Example:
        >>> class Counter:
        ...     def reset(self, **columns):
        ...         self.count = 0
        ...     def add(self, x: int) -> int:
        ...         '''Add a number.'''
        ...         self.count += x
        ...         return self.count
        ...     def get_reward(self):
        ...         return float(self.count)
        >>> environment = TRLEnvironment(Counter())
        >>> environment.reset({"messages": []}, 0)
        >>> call = '<tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call>'
        >>> environment.step(Action(call))[0][0]["content"], environment.final_reward()
        ('3', 3.0)
    """

    def __init__(self, environment: Any) -> None:
        if not callable(getattr(environment, "reset", None)):
            raise TypeError(f"environment must have a method reset, got {environment!r:.80}")
        methods = [
            method
            for name, method in inspect.getmembers(environment, callable)
            if not name.startswith("_") and name not in _NO_TOOLS and inspect.ismethod(method)
        ]
        super().__init__(methods)
        self._inner = environment

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begin an episode with the columns of the row."""
        columns = dict(row.get("user_data") or [])
        return self._inner.reset(**{"prompt": row["messages"], **columns})

    def final_reward(self) -> Any:
        """Ask for the episode's reward."""
        method = getattr(self._inner, "get_reward", None)
        return 0.0 if method is None else method()

    def close(self) -> Any:
        """Close the environment, if it can be closed."""
        method = getattr(self._inner, "close", None)
        return None if method is None else method()


class GymEnvironment:
    """An environment in gymnasium's form whose observations and actions are text, gem's for one.

    `reset(seed=…)` returns an observation and a dictionary, `step(text)` an observation, a reward,
    whether it has ended, whether a limit has ended it, and a dictionary.

    Args:
        environment: as gymnasium makes them.

    Example:
        >>> class Echo:
        ...     def reset(self, seed=None):
        ...         return f"seed {seed}", {}
        ...     def step(self, action):
        ...         return action, 0.5, False, True, {"length": len(action)}
        >>> environment = GymEnvironment(Echo())
        >>> environment.reset({}, 7)
        'seed 7'
        >>> environment.step(Action("ab"))
        ('ab', 0.5, True, {'length': 2})
    """

    def __init__(self, environment: Any) -> None:
        self._inner = environment

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode."""
        observation, _ = self._inner.reset(seed=seed)
        return _as_text(observation)

    def step(self, action: Action) -> tuple[Observation, Any, bool, Mapping[str, Any]]:
        """Answer an action."""
        observation, reward, ended, truncated, info = self._inner.step(str(action))
        return _as_text(observation), reward, bool(ended or truncated), info

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        if hasattr(self._inner, "close"):
            self._inner.close()


def _as_text(observation: Any) -> Observation:
    if observation is None or isinstance(observation, str | bytes):
        return observation
    return [Message(role="user", content=str(observation))]


ADAPTERS: Mapping[str, Callable[[Any], Any]] = {"trl": TRLEnvironment, "gym": GymEnvironment}
"""What `--environment trl:FILE.py:NAME` and `gym:FILE.py:NAME` lay over what NAME makes."""
