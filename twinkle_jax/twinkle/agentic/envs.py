"""`twinkle_agentic.envs`: environments, alone, as tools and in pools."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Self

from twinkle_jax.data import FunctionSpec, Trajectory
from twinkle_jax.data import Tool as ToolInfo
from twinkle_jax.rollout.by_name import openenv_text
from twinkle_jax.twinkle.infra import note_group
from twinkle_jax.twinkle.names import PAGE, add_submodules

_TEXTS = ("result", "output", "content", "text", "message")  # where an observation has its text


@dataclass
class StepResult:
    """The observation after an action, its reward, and whether the episode is over."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Env(ABC):
    """An environment, in which a policy acts by tool calls; a context manager, which closes it."""

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode."""
        return StepResult()

    @abstractmethod
    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Take an action."""

    def tools(self) -> list[ToolInfo]:
        """Describe the tools that may be called."""
        return []

    def evaluate(self, trajectories: list[Trajectory], **kwargs: Any) -> list[float]:
        """Score whole trajectories."""
        return [0.0 for _ in trajectories]

    def close(self) -> None:  # noqa: B027  (optional)
        """Free resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class EnvTool:
    """An environment's step as a tool; `last_result` is what the last step returned."""

    def __init__(
        self,
        env: Env,
        tool_name: str = "env_action",
        description: str = "Execute an action in the environment.",
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self._env, self._name, self._description = env, tool_name, description
        self._parameters = parameters or {"type": "object", "properties": {}}
        self.last_result: StepResult | None = None

    @classmethod
    def from_env(cls, env: Env) -> list["EnvTool"]:
        """Make a tool of each that the environment describes, or one if it describes none."""
        specs: list[Any] = [info.get("function") or {} for info in env.tools()]
        tools = [
            cls(
                env,
                spec.get("name") or "env_action",
                spec.get("description") or "",
                spec["parameters"] if isinstance(spec.get("parameters"), dict) else None,
            )
            for spec in specs
        ]
        return tools or [cls(env)]

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Take a step, and return the observation."""
        self.last_result = self._env.step(tool_name, arguments)
        return self.last_result.observation

    def tool_info(self) -> ToolInfo:
        """Describe the tool."""
        function = FunctionSpec(
            name=self._name, description=self._description, parameters=self._parameters
        )
        return ToolInfo(type="function", function=function)

    @property
    def done(self) -> bool:
        """Whether the last step ended the episode."""
        return self.last_result is not None and self.last_result.done

    @property
    def episode_reward(self) -> float:
        """The episode's reward so far, if `info` has it, otherwise that of the last step."""
        if self.last_result is None:
            return 0.0
        return float(self.last_result.info.get("episode_reward", self.last_result.reward))


class OpenEnv(Env):
    """An environment of OpenEnv in this process, without its server.

    Args:
        env_name: not supported: name the class.
        env_cls: its class, or `module:Class`.
        env_kwargs: arguments of the class.
        action_cls: the class of actions, or `module:Class`; None passes arguments of calls on.
        action_mapper: makes an action of a tool's name and arguments.
    """

    def __init__(
        self,
        env_name: str | None = None,
        env_cls: Any = None,
        env_kwargs: Mapping[str, Any] | None = None,
        action_cls: Any = None,
        action_mapper: Callable[[str, dict[str, Any]], Any] | None = None,
    ) -> None:
        if env_cls is None:
            raise ValueError(
                f"env_cls must be a class or module:Class, got none (env_name {env_name!r}): "
                f"packages are not searched for one; see {PAGE}"
            )
        self._env = _find_class(env_cls)(**(env_kwargs or {}))
        self._action_cls = None if action_cls is None else _find_class(action_cls)
        self._mapper = action_mapper

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode."""
        return _as_result(self._env.reset())

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Take the action of a tool call."""
        action: Any = arguments or {}
        if self._mapper is not None:
            action = self._mapper(tool_name, action)
        if self._action_cls is not None and isinstance(action, dict):
            action = self._action_cls(**action)
        return _as_result(self._env.step(action))

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        if hasattr(self._env, "close"):
            self._env.close()


class EnvPool:
    """Several environments in this process; `env_kwargs` are the arguments of `OpenEnv`.

    `device_mesh` is unused, and so is `remote_group`, with a warning.
    Errors of an environment are raised, where Twinkle's pool ends the episode with reward 0.
    """

    def __init__(
        self,
        pool_size: int = 32,
        device_mesh: Any = None,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        remote_group: str | None = None,
    ) -> None:
        note_group(remote_group)
        self._envs = [OpenEnv(**(env_kwargs or {})) for _ in range(pool_size)]
        self._rewards = [0.0] * pool_size
        self.pool_size = pool_size

    def reset(self, idx: int) -> dict[str, Any]:
        """Begin an episode of one environment."""
        self._rewards[idx] = 0.0
        return self._describe(idx, self._envs[idx].reset())

    def step(self, idx: int, tool_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take a step of one environment."""
        result = self._envs[idx].step(tool_name, arguments)
        self._rewards[idx] += result.reward
        return self._describe(idx, result)

    def reset_batch(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Begin episodes, in the order of `indices`."""
        return [self.reset(idx) for idx in indices]

    def step_batch(
        self,
        indices: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Take steps, in the order of `indices`."""
        calls = zip(indices, tool_names, arguments_list, strict=True)
        return [self.step(*call) for call in calls]

    def get_adapters(self, n: int) -> list["EnvPoolAdapter"]:
        """Return the first n as separate environments."""
        if n > self.pool_size:
            raise ValueError(f"n must be at most the pool's {self.pool_size}, got {n}")
        return [EnvPoolAdapter(self, idx) for idx in range(n)]

    def close(self) -> None:
        """Close all."""
        for env in self._envs:
            env.close()
        self._envs.clear()

    def _describe(self, idx: int, result: StepResult) -> dict[str, Any]:
        facts = {"observation": result.observation, "reward": result.reward, "done": result.done}
        return facts | {"episode_reward": self._rewards[idx]}


class EnvPoolAdapter(Env):
    """One environment of a pool, by its number."""

    def __init__(self, pool: EnvPool, idx: int) -> None:
        self._pool, self._idx = pool, idx
        self.episode_reward = 0.0

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin an episode."""
        return self._take(self._pool.reset(self._idx))

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Take a step."""
        return self._take(self._pool.step(self._idx, tool_name, arguments))

    def _take(self, facts: Mapping[str, Any]) -> StepResult:
        self.episode_reward = facts["episode_reward"]
        info = {"episode_reward": self.episode_reward}
        return StepResult(facts["observation"], facts["reward"], facts["done"], info)


def _find_class(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    module, _, attribute = name.replace(":", ".").rpartition(".")
    return getattr(import_module(module), attribute)


def _as_result(result: Any) -> StepResult:
    """Read the result of an OpenEnv environment, an object or a dictionary."""
    if isinstance(result, Mapping):
        observation, reward, done = (result.get(x) for x in ("observation", "reward", "done"))
    else:
        observation = getattr(result, "observation", result)
        reward, done = getattr(result, "reward", None), getattr(result, "done", None)
    if observation is not None and hasattr(observation, "model_dump"):  # all fields, as Twinkle
        observation = json.dumps(observation.model_dump(), ensure_ascii=False, default=str)
    return StepResult(openenv_text(observation, _TEXTS), float(reward or 0.0), bool(done))


add_submodules(__name__, "base", "env_tool", "openenv")
