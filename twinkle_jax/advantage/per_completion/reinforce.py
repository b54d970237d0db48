"""REINFORCE: the reward itself, without a baseline; for comparison with other estimators."""

import dataclasses

import jax
from jaxtyping import Float

from twinkle_jax.advantage.estimate import estimate, in_rows
from twinkle_jax.advantage.estimators import FunctionAdvantage
from twinkle_jax.advantage.groups import Samples
from twinkle_jax.advantage.inputs import ArrayLike


def reinforce_advantage(
    rewards: ArrayLike,
    num_generations: int = 1,
    *,
    where: ArrayLike | None = None,
    reward_weights: ArrayLike | None = None,
) -> Float[jax.Array, " samples"]:
    r"""Take the reward as the advantage (REINFORCE without a baseline).

    $$A_i = r_i$$

    Its gradient is unbiased and of high variance: a constant added to all rewards changes it, and
    a prompt whose rewards are all equal still has one. It is meant for comparisons; train with
    `rloo_advantage` or `grpo_advantage`. Groups have no effect, so there is no `segment_` form:
    leave K at 1.

    Args:
        rewards: `[N]` or `[N, C]`, as in `grpo_advantage`.
        num_generations: K, samples per prompt, at least 1; without effect.
        where: as in `grpo_advantage`.
        reward_weights: as in `grpo_advantage`.

    Returns:
        Advantages, `[N]`, sharded as the rewards are.

    Raises:
        ValueError: as `grpo_advantage`.
        TypeError: as `grpo_advantage`.

    References:
        Simple statistical gradient-following algorithms (Williams, 1992),
        https://doi.org/10.1007/BF00992696

    Example:
        >>> from twinkle_jax.advantage import reinforce_advantage
        >>> reinforce_advantage([1.0, 0.0, 0.5, 0.5]).tolist()
        [1.0, 0.0, 0.5, 0.5]
    """
    grouped = in_rows(rewards, num_generations, where, reward_weights, least=1)
    return estimate(grouped, formula=_reinforce)


@dataclasses.dataclass(frozen=True)
class ReinforceAdvantage(FunctionAdvantage, name="reinforce"):
    """`reinforce_advantage` with Twinkle's signature; a missing reward gives 0.

    Example:
        >>> from twinkle_jax.advantage import ReinforceAdvantage
        >>> ReinforceAdvantage()([1.0, 0.0, None, 4.0], num_generations=2).tolist()
        [1.0, 0.0, 0.0, 4.0]
    """

    function = staticmethod(reinforce_advantage)


def _reinforce(samples: Samples) -> jax.Array:
    return samples.values
