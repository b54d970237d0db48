"""One turn: each prompt is completed several times, and a reward scores the completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from twinkle_jax.data import PromptBatch, Trajectory
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.reward import RewardFunction, TrajectoryScores, score_trajectories
from twinkle_jax.rollout.engine import Engine, read_texts
from twinkle_jax.rollout.rollout import Rollout, batch_width, training_batch
from twinkle_jax.sampler import Sampling


class RolloutSource(Protocol):
    """Turns prompts into scored trajectories: what a run draws through.

    Sampling and scoring are two calls, so that the device can go on with the batch while the host
    computes rewards.
    """

    def sample(self, params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        """Draw trajectories for each prompt, `num_samples` next to each other."""

    def score(self, rollout: Rollout) -> Rollout:
        """Give each trajectory its reward."""

    def greedy_rewards(self, params: Params, prompts: PromptBatch) -> np.ndarray[Any, Any]:
        """Score the most probable trajectory of each prompt."""


@dataclass(frozen=True)
class SingleTurn:
    """Completes each prompt, and scores the completions.

    Attributes:
        engine: draws completions.
        reward: of trajectories and ground truths.
        sampling: temperature, filters and stop tokens.
        num_samples: completions of each prompt.
        reward_timeout: seconds that the reward may take for the completions of a call.
        mask_truncated: True takes completions that ran out of room out of the loss.
        width_multiple: what the width of a batch must be a multiple of.
    """

    engine: Engine
    reward: RewardFunction
    sampling: Sampling
    num_samples: int
    reward_timeout: float = 600.0
    mask_truncated: bool = False
    width_multiple: int = 1

    def sample(self, params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        """Draw completions, and lay them out; one transfer brings their tokens to the host."""
        samples = self.num_samples
        drawn = self.engine.draw(params, prompts, key, self.sampling, num_samples=samples)
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
        )

    def score(self, rollout: Rollout) -> Rollout:
        """Call the reward once, for all completions."""
        scores = self._score(rollout.trajectories, rollout.ground_truths)
        parts = {}
        if len(scores.components) > 1:  # NaN where a reward says nothing about a trajectory
            parts = {n: np.asarray(x, np.float32) for n, x in scores.components.items()}
        return rollout._replace(rewards=np.asarray(scores.rewards, np.float32), reward_parts=parts)

    def greedy_rewards(self, params: Params, prompts: PromptBatch) -> np.ndarray[Any, Any]:
        """Score the most probable completion of each prompt."""
        trajectories = self.complete(
            params, prompts, jax.random.key(0), self.sampling._replace(temperature=0.0), 1
        )  # nothing is random
        return np.asarray(self._score(trajectories, prompts.ground_truths).rewards, np.float32)

    def complete(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        sampling: Sampling,
        num_samples: int,
    ) -> list[Trajectory]:
        """Draw completions of any number of prompts, as text alone."""
        # Devices must divide the rows: the last prompt is repeated, and dropped afterwards.
        filled = [*prompts, *[prompts[-1]] * (-len(prompts) % self.engine.row_shards)]
        drawn = self.engine.draw(params, filled, key, sampling, num_samples=num_samples)
        texts = read_texts(drawn, filled, self.engine.template)
        return texts.trajectories[: len(prompts) * num_samples]

    def _score(self, trajectories: Sequence[Trajectory], truths: Sequence[Any]) -> TrajectoryScores:
        return score_trajectories(self.reward, trajectories, truths, timeout=self.reward_timeout)
