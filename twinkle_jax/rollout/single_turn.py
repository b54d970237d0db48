"""One turn: each prompt is completed several times, and a reward scores the completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import numpy as np

from twinkle_jax.data import PromptBatch, Trajectory
from twinkle_jax.model import Params
from twinkle_jax.reward import RewardFunction, TrajectoryScores, score_trajectories
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.engine import Engine, Texts, read_texts
from twinkle_jax.rollout.rollout import Rollout, batch_width, training_batch
from twinkle_jax.rollout.settings import RolloutConfig


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

    def greedy_rewards(self, params: Params, prompts: PromptBatch) -> np.ndarray[Any, Any]:
        """Score the most probable trajectory of each prompt."""


@dataclass(frozen=True)
class SingleTurn:
    """Completes each prompt, and scores the completions.

    Attributes:
        engine: draws completions.
        reward: of trajectories and ground truths.
        settings: what is sampled; `prompts` and the settings of episodes are not read, and
            `max_new_tokens` is 512 if it is `auto`.
        reward_timeout: seconds that the reward may take for the completions of a call.
        mask_truncated: exclude truncated completions from the loss.
        width_multiple: the width of a batch is a multiple of this.
    """

    engine: Engine
    reward: RewardFunction
    settings: RolloutConfig = field(default_factory=RolloutConfig)
    reward_timeout: float = 600.0
    mask_truncated: bool = False
    width_multiple: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self.settings.resolved())

    def with_settings(self, **changes: Any) -> "SingleTurn":
        """Return a copy with other settings."""
        return replace(self, settings=replace(self.settings, **changes))

    def sample(self, params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        """Draw completions, and lay them out; their tokens come to the host in one transfer."""
        samples = self.settings.num_samples
        drawn = self.engine.draw(params, prompts, key, self.settings)
        texts = read_texts(drawn, prompts, self.engine.template)
        prompt_lengths = np.repeat(np.asarray(drawn.prompt_mask).sum(axis=1), samples)
        row_lengths = prompt_lengths + texts.lengths - 1
        batch = training_batch(
            *drawn,
            width=batch_width(int(row_lengths.max()), multiple=self.width_multiple),
            mask_truncated=self.mask_truncated,
        )
        return Rollout(
            batch,
            texts.trajectories,
            [truth for truth in prompts.ground_truths for _ in range(samples)],
            texts.lengths,
            row_lengths.astype(np.int32),
            texts.truncated,
            held=texts.held,
        )

    def score(self, rollout: Rollout) -> Rollout:
        """Call the reward once, for the completions that this process holds; NaN for the others."""
        held = np.flatnonzero(rollout.held_rows)
        scores = self._score(
            [rollout.trajectories[i] for i in held], [rollout.ground_truths[i] for i in held]
        )

        def of_all_rows(values: Sequence[float | None]) -> np.ndarray[Any, Any]:
            array = np.full(len(rollout.lengths), np.nan, np.float32)
            array[held] = np.asarray(values, np.float32)
            return array

        parts = {}
        if len(scores.components) > 1:  # NaN where a reward returned None
            parts = {name: of_all_rows(values) for name, values in scores.components.items()}
        return rollout._replace(rewards=of_all_rows(scores.rewards), reward_parts=parts)

    def greedy_rewards(self, params: Params, prompts: PromptBatch) -> np.ndarray[Any, Any]:
        """Score the most probable completion of each prompt."""
        greedy = self.with_settings(num_samples=1, temperature=0.0)
        texts = greedy.complete(params, prompts, jax.random.key(0))
        return score_texts(
            texts,
            prompts.ground_truths,
            lambda trajectories, truths: self._score(trajectories, truths).rewards,
        ).astype(np.float32)

    def complete(self, params: Params, prompts: Sequence[Trajectory], key: jax.Array) -> Texts:
        """Draw completions of any number of prompts, as text."""
        # Devices must divide the rows: the last prompt is repeated, and its copies are dropped.
        filled = [*prompts, *[prompts[-1]] * (-len(prompts) % self.engine.row_shards)]
        drawn = self.engine.draw(params, filled, key, self.settings)
        texts = read_texts(drawn, filled, self.engine.template)
        rows = len(prompts) * self.settings.num_samples
        return Texts(texts.trajectories[:rows], *(values[:rows] for values in texts[1:]))

    def _score(self, trajectories: Sequence[Trajectory], truths: Sequence[Any]) -> TrajectoryScores:
        return score_trajectories(self.reward, trajectories, truths, timeout=self.reward_timeout)


def score_texts(
    texts: Texts,
    ground_truths: Sequence[Any],
    score: Callable[[list[Trajectory], list[Any]], Sequence[float]],
) -> np.ndarray[Any, Any]:
    """Score completions, each in the process that holds it; one number a row, in float64.

    Args:
        texts: the completions.
        ground_truths: one a row.
        score: called with the trajectories and ground truths of this process.
    """
    held = np.flatnonzero(texts.held).tolist()
    trajectories = [texts.trajectories[i] for i in held]
    truths = [ground_truths[i] for i in held]

    def numbers() -> dict[str, np.ndarray[Any, Any]]:
        rewards = np.full(len(texts.held), np.nan)
        rewards[held] = score(trajectories, truths)
        return {"rewards": rewards}

    return hosts.merge_rows("computing rewards", texts.held, numbers)["rewards"]
