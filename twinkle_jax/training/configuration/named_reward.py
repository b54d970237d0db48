"""The reward that a run is given by name, one of its user's own among them."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from twinkle_jax.reward import ExactMatchReward, GSM8KAccuracyReward, MathReward
from twinkle_jax.reward.checked import RewardFunction

_BUILT_IN = {"exact": ExactMatchReward, "math": MathReward, "gsm8k": GSM8KAccuracyReward}


def find_reward(name: str, *, argument: str = "reward") -> RewardFunction:
    """Find a reward.

    Args:
        name: `exact`, `math` or `gsm8k`; or `FILE.py:NAME` or `MODULE:NAME`, the name of a
            function of trajectories and ground truths, of a `Reward`, or of a class of rewards.
        argument: what errors call it.

    Returns:
        The reward; of a class, one made without arguments.

    Raises:
        ValueError: if there is none of this name.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(
            f"{argument} must be one of {', '.join(_BUILT_IN)}, FILE.py:NAME or MODULE:NAME, "
            f"got {name!r}"
        )
    found = getattr(_load(place, argument), attribute, None)
    if not callable(found):
        raise ValueError(f"{argument} must name what can be called in {place}, got {attribute!r}")
    return found() if isinstance(found, type) else found


def _load(place: str, argument: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{argument} must be in a module that is there, got {place!r}"
            ) from error
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{argument} must be in a file that is there, got {place!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
