"""Rewards -> advantages: pure functions, and stateless objects with Twinkle's signature."""

from twinkle_jax.advantage._dgpo import dgpo_advantage, segment_dgpo_advantage
from twinkle_jax.advantage._dynamic_sampling import dynamic_sampling_filter
from twinkle_jax.advantage._family_wrappers import (
    DGPOAdvantage,
    GDPOAdvantage,
    MaxRLAdvantage,
    MCGRPOAdvantage,
    OPOAdvantage,
    PassAtKAdvantage,
    PKPOAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    ReMaxAdvantage,
)
from twinkle_jax.advantage._gae import GAE, gae_advantage
from twinkle_jax.advantage._gdpo import gdpo_advantage, segment_gdpo_advantage
from twinkle_jax.advantage._grpo import grpo_advantage
from twinkle_jax.advantage._kl_in_reward import kl_in_reward, kl_in_token_reward
from twinkle_jax.advantage._maxrl import maxrl_advantage, segment_maxrl_advantage
from twinkle_jax.advantage._mc_grpo import mc_grpo_advantage
from twinkle_jax.advantage._opo import opo_advantage, segment_opo_advantage
from twinkle_jax.advantage._pass_at_k import pass_at_k_advantage
from twinkle_jax.advantage._pkpo import pkpo_advantage
from twinkle_jax.advantage._registry import get_advantage
from twinkle_jax.advantage._reinforce_plus_plus import reinforce_plus_plus_advantage
from twinkle_jax.advantage._reinforce_plus_plus_baseline import (
    reinforce_plus_plus_baseline_advantage,
    segment_reinforce_plus_plus_baseline_advantage,
)
from twinkle_jax.advantage._remax import remax_advantage
from twinkle_jax.advantage._returns import discounted_returns
from twinkle_jax.advantage._rloo import rloo_advantage
from twinkle_jax.advantage._segments import segment_grpo_advantage, segment_rloo_advantage
from twinkle_jax.advantage._statistics import GroupStatistics, group_statistics
from twinkle_jax.advantage._token_broadcast import broadcast_to_tokens
from twinkle_jax.advantage._token_wrappers import GAEAdvantage, ReinforcePlusPlusAdvantage
from twinkle_jax.advantage._wrappers import Advantage, GRPOAdvantage, RLOOAdvantage

__all__ = [
    "GAE",
    "Advantage",
    "DGPOAdvantage",
    "GAEAdvantage",
    "GDPOAdvantage",
    "GRPOAdvantage",
    "GroupStatistics",
    "MCGRPOAdvantage",
    "MaxRLAdvantage",
    "OPOAdvantage",
    "PKPOAdvantage",
    "PassAtKAdvantage",
    "RLOOAdvantage",
    "ReMaxAdvantage",
    "ReinforcePlusPlusAdvantage",
    "ReinforcePlusPlusBaselineAdvantage",
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
]
