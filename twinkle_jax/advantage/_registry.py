"""Estimators by name: those that take a reward per sample, and so can be swapped."""

from collections.abc import Mapping

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
from twinkle_jax.advantage._wrappers import Advantage, GRPOAdvantage, RLOOAdvantage

_ESTIMATORS: Mapping[str, type[Advantage]] = {
    "grpo": GRPOAdvantage,
    "rloo": RLOOAdvantage,
    "remax": ReMaxAdvantage,
    "opo": OPOAdvantage,
    "gdpo": GDPOAdvantage,
    "maxrl": MaxRLAdvantage,
    "dgpo": DGPOAdvantage,
    "mc_grpo": MCGRPOAdvantage,
    "pass_at_k": PassAtKAdvantage,
    "pkpo": PKPOAdvantage,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaselineAdvantage,
}


def get_advantage(name: str) -> Advantage:
    """Return an estimator by its name: `'grpo'`, `'rloo'`, `'maxrl'`, ...

    Args:
        name: the name, in lower case; an unknown one raises with the list of all.

    Returns:
        An instance, which is called with rewards.

    Raises:
        ValueError: an unknown name; the message lists the known ones.

    Example:
        >>> from twinkle_jax.advantage import get_advantage
        >>> get_advantage("rloo")
        RLOOAdvantage()
        >>> get_advantage("maxrl")([1.0, 0.0], num_generations=2).tolist()
        [1.0, -1.0]
    """
    if not isinstance(name, str) or name not in _ESTIMATORS:
        names = ", ".join(map(repr, _ESTIMATORS))
        raise ValueError(f"name must be one of {names}, got {name!r}")
    return _ESTIMATORS[name]()
