"""Settings of rollouts; the ranges of settings, and which of them a resumed run may change."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from twinkle_jax.sampler import Sampling

AUTO: Any = None  # chosen by the run, which knows the policy
MAY_CHANGE: Mapping[str, Any] = MappingProxyType({"may_change": True})
"""Metadata of a field, or of a section of fields, that a resumed run may change."""


class Range(NamedTuple):
    """Which values of a setting are valid; the metadata `range` of its field."""

    contains: Callable[[float], bool]
    description: str


def _ranged(
    default: Any, may_change: bool, contains: Callable[[float], bool], description: str
) -> Any:
    metadata = {"range": Range(contains, description), "may_change": may_change}
    return field(default=default, metadata=metadata)


def at_least(least: float, *, default: Any, may_change: bool = False) -> Any:
    """Make a field for finite numbers from a smallest one on."""
    return _ranged(default, may_change, lambda x: least <= x < math.inf, f"at least {least}")


def positive(*, default: Any, may_change: bool = False) -> Any:
    """Make a field for finite numbers above 0."""
    return _ranged(default, may_change, lambda x: 0 < x < math.inf, "above 0 and finite")


def share(*, default: Any, may_change: bool = False) -> Any:
    """Make a field for numbers from 0 to 1."""
    return _ranged(default, may_change, lambda x: 0 <= x <= 1, "in [0, 1]")


def share_below_one(*, default: Any, may_change: bool = False) -> Any:
    """Make a field for numbers from 0 to below 1."""
    return _ranged(default, may_change, lambda x: 0 <= x < 1, "in [0, 1)")


@dataclass(frozen=True)
class RolloutConfig:
    """What is sampled in each step.

    Attributes:
        prompts: prompts a step.
        num_samples: completions of each prompt, at least 2: their rewards are compared.
        max_new_tokens: the most tokens of a completion; auto: 8 for the built-in policy, 512 for a
            checkpoint.
        max_prompt_tokens: the most tokens of a prompt; longer ones are refused.
        temperature: what logits are divided by, in sampling and in training.
        top_k: how many of the most probable tokens may be drawn; 0 for all.
        top_p: the fewest of the most probable tokens with this total probability may be drawn.
        min_p: tokens with at least this share of the most probable one's probability may be drawn.
        slots: completions that are drawn at a time; those that end give their slots to the next
            ones. Fewer take less memory; none: all of a step.
        repetition_penalty: what logits of tokens that occurred before are divided by (multiplied,
            if negative); 1 for none.
        max_turns: the most turns of an episode, with an environment or tools.
        max_episode_tokens: the most tokens of an episode, all turns and observations together;
            auto: max_prompt_tokens and max_turns times max_new_tokens.
        history: how earlier turns are read, see `MultiTurn`: append keeps them as they were
            sampled; template renders them anew, and an episode may take several rows.
        cohorts: parts in which episodes are played: while the environments of one are at work, a
            turn of the next is drawn; auto: 2 on CPUs with 64 episodes or more, else 1.
        environment_timeout: seconds that an environment may take to answer.
        environment_threads: environments that are called at a time.
        max_failed: share of episodes whose environment may fail; more end the run.
        max_observation: characters of an observation; of longer ones the middle is left out.
        tool_format: of tool calls; any tries all.
        tools_in: process runs each call of a function of `--tools` in a process of its own, which
            is killed if it does not answer in time; thread runs them in the trainer's process.
        environment_in: process runs each episode's environment in a process of its own; thread in
            the trainer's process.
        process_megabytes: memory that such a process may take, above what importing its file takes.
    """

    prompts: int = at_least(1, default=128)
    num_samples: int = at_least(2, default=8)
    max_new_tokens: int = at_least(1, default=AUTO)
    max_prompt_tokens: int = at_least(1, default=1024)
    temperature: float = positive(default=1.0)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = positive(default=1.0)
    slots: int | None = field(default=None, metadata=MAY_CHANGE)
    max_turns: int = at_least(1, default=6)
    max_episode_tokens: int = at_least(1, default=AUTO)
    history: Literal["append", "template"] = "append"
    cohorts: int = at_least(1, default=AUTO, may_change=True)
    environment_timeout: float = positive(default=60.0, may_change=True)
    environment_threads: int = at_least(1, default=64, may_change=True)
    max_failed: float = share(default=0.1, may_change=True)
    max_observation: int = at_least(1, default=16384)
    tool_format: Literal["any", "hermes_qwen", "cline", "react"] = "any"
    tools_in: Literal["process", "thread"] = "process"
    environment_in: Literal["process", "thread"] = "thread"
    process_megabytes: int = at_least(1, default=1024, may_change=True)

    def resolved(self, max_new_tokens: int = 512) -> "RolloutConfig":
        """Replace `auto` values, except `cohorts`, which depends on the devices.

        Args:
            max_new_tokens: the value to use if that setting is `auto`.
        """
        new = max_new_tokens if self.max_new_tokens is AUTO else self.max_new_tokens
        longest = self.max_episode_tokens
        if longest is AUTO:
            longest = self.max_prompt_tokens + self.max_turns * new
        return replace(self, max_new_tokens=new, max_episode_tokens=longest)

    def sampling(self, stop_tokens: Sequence[int]) -> Sampling:
        """Return temperature, penalty and filters, which are the fields of `Sampling`."""
        names = [name for name in Sampling._fields if name != "stop_tokens"]
        return Sampling(**{name: getattr(self, name) for name in names}, stop_tokens=stop_tokens)

    @property
    def rows_each(self) -> int:
        """Rows of a batch for each episode."""
        return 1 if self.history == "append" else self.max_turns
