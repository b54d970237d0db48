"""A rollout: its settings, sampled trajectories, what samples them, and dynamic sampling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from twinkle_jax.advantage import NOISE_ULPS
from twinkle_jax.data import IGNORE, Batch, PromptBatch, Trajectory
from twinkle_jax.data.settings import (
    AUTO,
    MAY_CHANGE,
    at_least,
    check_values,
    positive,
    seconds,
    share,
)
from twinkle_jax.model import Params
from twinkle_jax.reward import RewardFunction, WeightedReward
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.environment import ToolFormat
from twinkle_jax.rollout.episode import Episode
from twinkle_jax.sampler import Filters, Sampling
from twinkle_jax.sampler.sizes import check_count


@dataclass(frozen=True)
class _BeforeFilters:
    """Settings of `RolloutConfig` that come before the filters in its order, and in `--help`."""

    prompts: int = at_least(1, default=128)
    num_samples: int = at_least(2, default=8)
    max_new_tokens: int = at_least(1, default=AUTO)
    max_prompt_tokens: int = at_least(1, default=1024, may_change=True)
    temperature: float = positive(default=1.0)


@dataclass(frozen=True)
class RolloutConfig(Filters, _BeforeFilters):
    """What is sampled in each step, with the filters of `twinkle_jax.sampler.Filters`.

    Attributes:
        prompts: prompts a step.
        num_samples: completions of each prompt, at least 2: their rewards are compared.
        max_new_tokens: the most tokens of a completion; auto: 8 for the built-in policy, 512 for a
            checkpoint.
        max_prompt_tokens: the most tokens of a prompt; longer ones are refused.
        temperature: what logits are divided by, in sampling and in training.
        slots: completions that are sampled at a time; one that ends gives its slot to the next.
            Fewer take less memory; none: all of a step.
        repetition_penalty: what logits of tokens that occurred before are divided by (multiplied,
            if negative); 1 for none.
        max_turns: the most turns of an episode, with an environment or tools.
        max_episode_tokens: the most tokens of an episode, all turns and observations together, or
            of an example; auto: max_prompt_tokens and max_turns times max_new_tokens, or 4,096 with
            examples.
        history: how the policy reads earlier turns. append keeps them as they were sampled;
            template renders them anew, so that an episode may take several rows.
        cohorts: parts of the episodes; while the environments of one part run, turns of the next
            are sampled; auto: 2 on CPUs with 64 episodes or more, else 1.
        environment_timeout: seconds that an environment may take to answer.
        environment_threads: environments that are called at the same time.
        max_failed: share of episodes whose environment may fail; more end the run.
        max_observation: the most characters of an observation; longer ones lose their middle.
        tool_format: format of tool calls; any tries the chat template's own, if it is one of llama,
            mistral, deepseek, harmony, gemma and glm, then hermes_qwen, cline and react.
        tools_in: process runs each call of a function of `--tools` in a separate process, which
            is killed if it does not answer in time; thread runs them in the trainer's process.
        environment_in: process runs each episode's environment in a separate process; thread in
            the trainer's process.
        process_megabytes: memory of such a process, above what importing its file takes.
    """

    repetition_penalty: float = positive(default=1.0)
    slots: int | None = field(default=None, metadata=MAY_CHANGE)
    max_turns: int = at_least(1, default=6)
    max_episode_tokens: int = at_least(1, default=AUTO)
    history: Literal["append", "template"] = "append"
    cohorts: int = at_least(1, default=AUTO, may_change=True)
    environment_timeout: float = seconds(default=60.0, may_change=True)
    environment_threads: int = at_least(1, default=64, may_change=True)
    max_failed: float = share(default=0.1, may_change=True)
    max_observation: int = at_least(1, default=16384)
    tool_format: ToolFormat = "any"
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

    def of_source(self) -> "RolloutConfig":
        """Replace `auto` values, and check the others, as a source outside of runs reads them.

        The temperature may be 0 here, and `num_samples` 1.
        """
        allowed = {"temperature": 0, "num_samples": 1}
        as_in_runs = [name for name, x in allowed.items() if getattr(self, name) == x]
        check_values(replace(self, **{name: getattr(RolloutConfig, name) for name in as_in_runs}))
        if self.slots is not None:
            check_count("slots", self.slots)
        return self.resolved()

    def sampling(self, stop_tokens: Sequence[int]) -> Sampling:
        """Return temperature, filters and penalty, with the tokens that end a completion."""
        return Sampling(
            self.temperature,
            repetition_penalty=self.repetition_penalty,
            stop_tokens=stop_tokens,
            **{setting.name: getattr(self, setting.name) for setting in fields(Filters)},
        )

    @property
    def rows_each(self) -> int:
        """Rows of a batch for each episode."""
        return 1 if self.history == "append" else self.max_turns


class Rollout(NamedTuple):
    """Sampled trajectories; those of a prompt are consecutive.

    Attributes:
        batch: [rows, time] on the device: tokens; labels, which are the sampled tokens; and their
            log-probabilities under the policy (`old_logps`). Advantages and log-probabilities of a
            reference policy are added later. Each trajectory has one row, or `rows_each` of them
            with `history="template"`.
        trajectories: the conversations; the last message is the completion.
        ground_truths: of the reward, one a trajectory.
        lengths: sampled tokens of each trajectory.
        row_lengths: columns of each row of `batch` without padding.
        truncated: True for trajectories that ended at a limit of tokens or turns.
        rewards: one a trajectory, in float32; None before they are scored.
        reward_parts: the rewards by name, if several are added up; NaN where one does not apply.
        reward_weights: of `reward_parts` in that sum.
        greedy_rewards: rewards of the most probable completions, one a prompt, for estimators with
            such a baseline.
        advantages: one a trajectory, for display; those of tokens are in `batch`.
        counted: True for trajectories that count in statistics: not those whose environment failed,
            and with `mask_truncated` not the truncated ones. None: all.
        episodes: one a trajectory; None without environments.
        turns: for each position of `batch`, the index of the turn that its label belongs to; -1 for
            no label. None without environments.
        held: True for trajectories that this process holds, if a run has several processes; others
            have no completion. None: all.
        teacher_logps: log-probabilities of the batch's labels under a teacher; None without one.
    """

    batch: Batch
    trajectories: list[Trajectory]
    ground_truths: list[Any]
    lengths: np.ndarray[Any, Any]
    row_lengths: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any] | None = None
    reward_parts: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({})
    reward_weights: Mapping[str, float] = MappingProxyType({})
    greedy_rewards: np.ndarray[Any, Any] | None = None
    advantages: Float[Array, " rows"] | None = None
    counted: hosts.RowMask | None = None
    episodes: list[Episode] | None = None
    turns: np.ndarray[Any, Any] | None = None
    held: hosts.RowMask | None = None
    teacher_logps: Float[Array, "rows time"] | None = None

    @property
    def rows_each(self) -> int:
        """Rows of the batch for each trajectory."""
        return len(self.batch.tokens) // len(self.lengths)

    @property
    def failed(self) -> hosts.RowMask:
        """True for trajectories whose environment failed: they have no labels."""
        if self.episodes is None:
            return np.zeros(len(self.lengths), bool)
        return np.asarray([episode.failed for episode in self.episodes])

    @property
    def held_rows(self) -> hosts.RowMask:
        """True for trajectories that this process holds."""
        return np.ones(len(self.lengths), bool) if self.held is None else self.held

    @property
    def scores(self) -> np.ndarray[Any, Any]:
        """The rewards; raises a ValueError before they are computed."""
        if self.rewards is None:
            raise ValueError("rollout must have rewards, got None: score it first")
        return self.rewards


def weights_of_parts(reward: RewardFunction | None) -> Mapping[str, float]:
    """Return the weights of several rewards that are added up; empty for a single one.

    Sources set them when they sample: a process that holds no completion does not score.
    """
    if not isinstance(reward, WeightedReward) or len(reward.weights) == 1:
        return {}
    return reward.weights


class RolloutSource(Protocol):
    """Turns prompts into scored trajectories; a run samples through this interface.

    Sampling and scoring are two calls, so that the device can work on the batch while the host
    computes rewards. With several processes, each scores the rows that it holds, and the run
    gathers the rewards.
    """

    def sample(self, params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        """Sample trajectories; those of a prompt are consecutive."""

    def score(self, rollout: Rollout) -> Rollout:
        """Compute the reward of each trajectory."""

    def greedy_rewards(
        self, params: Params, prompts: PromptBatch, key: jax.Array
    ) -> np.ndarray[Any, Any]:
        """Score the most probable trajectory of each prompt.

        `key` is that of `sample`: environments begin with the same seeds.
        """


def with_advantages(
    batch: Batch, advantages: Float[Array, " rows"] | Float[Array, "rows time"]
) -> Batch:
    """Add advantages to a batch: one number a row, or one a position, as an array or a list.

    Raises:
        ValueError: if their shape is neither [rows] nor [rows, time].
    """
    advantages = advantages if isinstance(advantages, jax.Array) else np.asarray(advantages)
    rows, time = batch.tokens.shape
    if advantages.shape not in ((rows,), (rows, time)):
        raise ValueError(
            f"advantages must have shape {(rows,)} (one a row) or {(rows, time)} (one a "
            f"position), got {advantages.shape}"
        )
    return _with_advantages(batch, advantages)


@jax.jit
def _with_advantages(batch: Batch, advantages: Float[Array, "rows ..."]) -> Batch:
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], batch.tokens.shape)
    return batch._replace(advantages=advantages.astype(jnp.float32))


# Dynamic sampling: rollouts until enough prompts have something to learn from.


def has_signal(
    rollout: Rollout, num_samples: int, compared: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mark the prompts whose rewards differ, so that their advantages are not all 0.

    The rule is that of [`group_statistics`][twinkle_jax.advantage.group_statistics], computed on
    the host, so that it does not wait for the device.

    Args:
        rollout: with rewards.
        num_samples: completions of each prompt.
        compared: what advantages compare instead of one reward a trajectory, float32, such as the
            returns of turns: [trajectories, numbers], NaN for no number. It is enough that one
            column differs.
    """
    rewards = rollout.scores[:, None] if compared is None else compared
    if len(rewards) % num_samples:
        raise ValueError(
            f"num_samples must divide the {len(rewards)} trajectories, got {num_samples}"
        )
    rewards = rewards.reshape(-1, num_samples, rewards.shape[1])
    kept = ~np.isnan(rewards)
    if rollout.counted is not None:
        kept &= rollout.counted.reshape(-1, num_samples, 1)
    highest = rewards.max(axis=1, where=kept, initial=-np.inf)
    lowest = rewards.min(axis=1, where=kept, initial=np.inf)
    with np.errstate(invalid="ignore", over="ignore"):  # groups without a kept reward; overflow
        rounding = NOISE_ULPS * np.spacing(np.maximum(np.abs(highest), np.abs(lowest)))
        return np.asarray(np.any(highest - lowest > rounding, axis=1))


def draw_until_signal(
    draw: Callable[[int], Rollout],
    *,
    prompts: int,
    num_samples: int,
    rollouts: int,
    compared: Callable[[Rollout], np.ndarray[Any, Any] | None] = lambda _: None,
) -> tuple[Rollout, list[Rollout]]:
    """Draw rollouts until enough prompts have a signal.

    Args:
        draw: returns the scored rollout of an index.
        prompts: prompts of an update.
        num_samples: completions of each prompt.
        rollouts: maximum number of rollouts; 1 takes the first as it is.
        compared: returns what advantages compare, see `has_signal`; None: the rewards.

    Returns:
        The rollout to train on, and all rollouts. If too few prompts have a signal after the last
        rollout, prompts without one fill the batch; their advantages are 0.

    References:
        [DAPO](https://arxiv.org/abs/2503.14476) (Yu et al., 2025)
    """
    drawn = [draw(0)]
    if rollouts == 1:
        return drawn[0], drawn
    signals = [has_signal(drawn[0], num_samples, compared(drawn[0]))]
    while sum(map(np.sum, signals)) < prompts and len(drawn) < rollouts:
        drawn.append(draw(len(drawn)))
        signals.append(has_signal(drawn[-1], num_samples, compared(drawn[-1])))
    chosen = np.argsort(~np.concatenate(signals), kind="stable")[:prompts].astype(np.int32)
    return _choose(drawn, chosen, num_samples), drawn


def _choose(
    drawn: list[Rollout], groups: np.ndarray[Any, np.dtype[np.int32]], num_samples: int
) -> Rollout:
    """Select groups of several rollouts, by their index over all of them."""
    rows = (groups[:, None] * num_samples + np.arange(num_samples)).reshape(-1)
    rows_each = drawn[0].rows_each
    of_batch = (rows[:, None] * rows_each + np.arange(rows_each, dtype=np.int32)).reshape(-1)
    width = max(rollout.batch.tokens.shape[1] for rollout in drawn)
    batches = _all_routed([_pad(rollout.batch, width) for rollout in drawn])

    def pick(name: str, index: np.ndarray[Any, Any]) -> Any:
        values = [getattr(rollout, name) for rollout in drawn]
        return None if values[0] is None else np.concatenate(values)[index]

    trajectories = [t for rollout in drawn for t in rollout.trajectories]
    truths = [truth for rollout in drawn for truth in rollout.ground_truths]
    episodes = [e for rollout in drawn for e in rollout.episodes or ()]
    turns = None
    if drawn[0].turns is not None:
        padded = [np.pad(r.turns, ((0, 0), (0, width - r.turns.shape[1])), constant_values=-1)
                  for r in drawn if r.turns is not None]  # fmt: skip
        turns = np.concatenate(padded)[of_batch]
    return Rollout(
        _take_rows(batches, jnp.asarray(of_batch, jnp.int32)),
        [trajectories[i] for i in rows],
        [truths[i] for i in rows],
        lengths=pick("lengths", rows),
        row_lengths=pick("row_lengths", of_batch),
        truncated=pick("truncated", rows),
        rewards=pick("rewards", rows),
        greedy_rewards=pick("greedy_rewards", groups),
        reward_parts={
            name: np.concatenate([rollout.reward_parts[name] for rollout in drawn])[rows]
            for name in drawn[0].reward_parts
        },
        reward_weights=drawn[0].reward_weights,
        counted=pick("counted", rows),
        episodes=[episodes[i] for i in rows] if episodes else None,
        turns=turns,
        held=pick("held", rows),
    )


def _pad(batch: Batch, width: int) -> Batch:
    room = [(0, 0), (0, width - batch.tokens.shape[1])]
    fill = {"labels": IGNORE}

    def pad(name: str, array: Array) -> Array:
        rooms = room + [(0, 0)] * (array.ndim - 2)
        return jnp.pad(array, rooms, constant_values=fill.get(name, 0))

    padded = {
        name: array if name == "rows" else pad(name, array)
        for name, array in batch._asdict().items()
        if array is not None
    }
    return batch._replace(**padded)


def _all_routed(batches: list[Batch]) -> list[Batch]:
    """Give batches without a routing, as all their episodes failed, one that names no expert."""
    known = [batch.routing for batch in batches if batch.routing is not None]
    if len(known) in (0, len(batches)):
        return batches
    shape, dtype = known[0].shape[2:], known[0].dtype
    return [
        batch._replace(routing=jnp.full((*batch.tokens.shape, *shape), jnp.iinfo(dtype).max, dtype))
        if batch.routing is None
        else batch
        for batch in batches
    ]


@jax.jit
def _take_rows(batches: list[Any], rows: Int[Array, " rows"]) -> Any:
    """Select rows of several trees, by their index over all of them."""
    return jax.tree.map(lambda *xs: jnp.take(jnp.concatenate(xs), rows, axis=0), *batches)
