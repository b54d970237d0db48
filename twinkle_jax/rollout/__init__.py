"""Rollouts: prompts to scored trajectories; the interface that every run draws through.

What is listed here is public; all else in this folder is private.
"""

from twinkle_jax.rollout.by_name import (
    GymEnvironment,
    OpenEnvEnvironment,
    TRLEnvironment,
    find_environment,
    find_tools,
)
from twinkle_jax.rollout.engine import (
    Engine,
    LocalEngine,
    PromptCompletions,
    Texts,
    TurnEngine,
    encode_prompts,
)
from twinkle_jax.rollout.environment import (
    Action,
    Environment,
    EnvironmentFactory,
    Observation,
    ToolFormat,
)
from twinkle_jax.rollout.episode import (
    Ended,
    Episode,
    EpisodeBatch,
    TokenRow,
    Turn,
    episode_metrics,
    lay_out_episodes,
)
from twinkle_jax.rollout.hosts import RowMask
from twinkle_jax.rollout.multi_turn import (
    EnvironmentFailureError,
    History,
    MultiTurn,
    check_failures,
    default_cohorts,
)
from twinkle_jax.rollout.processes import ProcessLimits
from twinkle_jax.rollout.rollout import (
    Rollout,
    RolloutConfig,
    RolloutSource,
    draw_until_signal,
    has_signal,
    with_advantages,
)
from twinkle_jax.rollout.server_engine import (
    Sampled,
    ServerConfig,
)
from twinkle_jax.rollout.single_turn import SingleTurn, training_batch
from twinkle_jax.rollout.tools import (
    SandboxUnavailableError,
    ToolEnvironment,
    python_tool,
    tool_schema,
)

__all__ = [
    "Action",
    "Ended",
    "Engine",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentFailureError",
    "Episode",
    "EpisodeBatch",
    "GymEnvironment",
    "History",
    "LocalEngine",
    "MultiTurn",
    "Observation",
    "OpenEnvEnvironment",
    "ProcessLimits",
    "PromptCompletions",
    "Rollout",
    "RolloutConfig",
    "RolloutSource",
    "RowMask",
    "Sampled",
    "SandboxUnavailableError",
    "ServerConfig",
    "SingleTurn",
    "TRLEnvironment",
    "Texts",
    "TokenRow",
    "ToolEnvironment",
    "ToolFormat",
    "Turn",
    "TurnEngine",
    "check_failures",
    "default_cohorts",
    "draw_until_signal",
    "encode_prompts",
    "episode_metrics",
    "find_environment",
    "find_tools",
    "has_signal",
    "lay_out_episodes",
    "python_tool",
    "tool_schema",
    "training_batch",
    "with_advantages",
]
