"""Settings of rollouts."""

from dataclasses import dataclass
from typing import Any, Literal

AUTO: Any = None  # chosen by the run, which knows the policy


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

    prompts: int = 128
    num_samples: int = 8
    max_new_tokens: int = AUTO
    max_prompt_tokens: int = 1024
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    slots: int | None = None
    max_turns: int = 6
    max_episode_tokens: int = AUTO
    history: Literal["append", "template"] = "append"
    cohorts: int = AUTO
    environment_timeout: float = 60.0
    environment_threads: int = 64
    max_failed: float = 0.1
    max_observation: int = 16384
    tool_format: Literal["any", "hermes_qwen", "cline", "react"] = "any"
    tools_in: Literal["process", "thread"] = "process"
    environment_in: Literal["process", "thread"] = "thread"
    process_megabytes: int = 1024
