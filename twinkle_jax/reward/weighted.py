"""Several rewards as one: their weighted sum."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_jax.data.trajectory import Trajectory
from twinkle_jax.reward.checked import RewardFunction, compute_rewards, reward_name
from twinkle_jax.reward.reward import GroundTruths, Reward


class WeightedReward(Reward):
    r"""The sum of rewards, each times its weight: $\sum_c w_c R_c$.

    Args:
        rewards: by name, which is what metrics call them; or a list, whose names are those of the
            classes and functions.
        weights: one for each, in the same form; ones by default.
        timeout: seconds that each may take; None for no limit.

    Raises:
        ValueError: if there are no rewards, two of one name, or other weights than rewards.

    Example:
        >>> from twinkle_jax.reward import FormatReward, GSM8KAccuracyReward
        >>> both = WeightedReward([GSM8KAccuracyReward(), FormatReward(["think"])], [1, 0.25])
        >>> text = "<think>3 + 4</think> #### 7"
        >>> both([{"messages": [{"role": "assistant", "content": text}]}], ["7"])
        [1.25]
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardFunction] | Sequence[RewardFunction],
        weights: Mapping[str, float] | Sequence[float] | None = None,
        *,
        timeout: float | None = 600.0,
    ) -> None:
        if not isinstance(rewards, Mapping):
            names = [reward_name(reward) for reward in rewards]
            if len(set(names)) < len(names):
                raise ValueError(f"rewards must have different names, got {names}: name them")
            rewards = dict(zip(names, rewards, strict=True))
        if not rewards:
            raise ValueError(f"rewards must not be empty, got {rewards!r}")
        if weights is None:
            weights = dict.fromkeys(rewards, 1.0)
        if not isinstance(weights, Mapping):
            if len(weights) != len(rewards):
                raise ValueError(
                    f"weights must be {len(rewards)}, one a reward, got {len(weights)}"
                )
            weights = dict(zip(rewards, weights, strict=True))
        if weights.keys() != rewards.keys():
            raise ValueError(f"weights must be for {sorted(rewards)}, got {sorted(weights)}")
        self.rewards, self.timeout = dict(rewards), timeout
        self.weights = {name: float(weights[name]) for name in rewards}

    def components(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None
    ) -> dict[str, list[float]]:
        """Compute each reward by itself, without its weight."""
        return {
            name: compute_rewards(reward, trajectories, ground_truths, timeout=self.timeout)
            for name, reward in self.rewards.items()
        }

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compute each reward, and sum them up."""
        columns = self.components(trajectories, ground_truths)
        weights = [self.weights[name] for name in columns]
        rows = zip(*columns.values(), strict=True)
        return [sum(w * x for w, x in zip(weights, row, strict=True)) for row in rows]
