"""Rewards -> advantages: pure functions, and stateless objects with Twinkle's signature.

Public is what this file lists; all else in this folder is private and may change. A family of
estimators is a file (`grpo.py`, `gae.py`): functions, `segment_` forms and classes. What runs them:
`inputs.py` checks arrays and settings, `estimate.py` forms groups and runs a formula, `groups.py`
has the statistics that formulas use, `estimators.py` the base of the classes.
"""

from twinkle_jax.advantage.estimators import ESTIMATORS, Advantage, get_advantage
from twinkle_jax.advantage.gae import (
    GAE,
    GAEAdvantage,
    gae_advantage,
    turn_gae_advantage,
    turn_returns,
)
from twinkle_jax.advantage.gdpo import GDPOAdvantage, gdpo_advantage, segment_gdpo_advantage
from twinkle_jax.advantage.group_statistics import (
    GroupStatistics,
    dynamic_sampling_filter,
    group_statistics,
)
from twinkle_jax.advantage.groups import NOISE_ULPS
from twinkle_jax.advantage.grpo import (
    DGPOAdvantage,
    GRPOAdvantage,
    MaxRLAdvantage,
    MCGRPOAdvantage,
    dgpo_advantage,
    grpo_advantage,
    maxrl_advantage,
    mc_grpo_advantage,
    segment_dgpo_advantage,
    segment_grpo_advantage,
    segment_maxrl_advantage,
)
from twinkle_jax.advantage.inputs import ArrayLike, AxisName, HoldsArray, Scalar, Scale, TorchTensor
from twinkle_jax.advantage.pass_at_k import (
    Baseline,
    PassAtKAdvantage,
    PKPOAdvantage,
    pass_at_k_advantage,
    pkpo_advantage,
)
from twinkle_jax.advantage.reinforce import (
    OPOAdvantage,
    ReinforceAdvantage,
    ReMaxAdvantage,
    RLOOAdvantage,
    opo_advantage,
    reinforce_advantage,
    remax_advantage,
    rloo_advantage,
    segment_opo_advantage,
    segment_rloo_advantage,
)
from twinkle_jax.advantage.reinforce_plus_plus import (
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    reinforce_plus_plus_advantage,
    reinforce_plus_plus_baseline_advantage,
    segment_reinforce_plus_plus_baseline_advantage,
)
from twinkle_jax.advantage.rewards_and_returns import (
    broadcast_to_tokens,
    discounted_returns,
    kl_in_reward,
    kl_in_token_reward,
)

__all__ = [
    "ESTIMATORS",
    "GAE",
    "NOISE_ULPS",
    "Advantage",
    "ArrayLike",
    "AxisName",
    "Baseline",
    "DGPOAdvantage",
    "GAEAdvantage",
    "GDPOAdvantage",
    "GRPOAdvantage",
    "GroupStatistics",
    "HoldsArray",
    "MCGRPOAdvantage",
    "MaxRLAdvantage",
    "OPOAdvantage",
    "PKPOAdvantage",
    "PassAtKAdvantage",
    "RLOOAdvantage",
    "ReMaxAdvantage",
    "ReinforceAdvantage",
    "ReinforcePlusPlusAdvantage",
    "ReinforcePlusPlusBaselineAdvantage",
    "Scalar",
    "Scale",
    "TorchTensor",
    "broadcast_to_tokens",
    "dgpo_advantage",
    "discounted_returns",
    "dynamic_sampling_filter",
    "gae_advantage",
    "gdpo_advantage",
    "get_advantage",
    "group_statistics",
    "grpo_advantage",
    "kl_in_reward",
    "kl_in_token_reward",
    "maxrl_advantage",
    "mc_grpo_advantage",
    "opo_advantage",
    "pass_at_k_advantage",
    "pkpo_advantage",
    "reinforce_advantage",
    "reinforce_plus_plus_advantage",
    "reinforce_plus_plus_baseline_advantage",
    "remax_advantage",
    "rloo_advantage",
    "segment_dgpo_advantage",
    "segment_gdpo_advantage",
    "segment_grpo_advantage",
    "segment_maxrl_advantage",
    "segment_opo_advantage",
    "segment_reinforce_plus_plus_baseline_advantage",
    "segment_rloo_advantage",
    "turn_gae_advantage",
    "turn_returns",
]
