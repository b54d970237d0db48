"""Rewards by name: built-in ones, and the user's from a file or a module."""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from twinkle_jax.reward.reward import REWARDS, RewardFunction, as_reward
from twinkle_jax.reward.scoring import WeightedReward, error_place


def find_reward(name: str, *, argument: str = "reward") -> RewardFunction:
    """Find a reward by its name.

    Args:
        name: `exact`, `math` or `gsm8k`; or `FILE.py:NAME` or `MODULE:NAME`, the name of a
            function, of a `Reward`, or of a class of rewards in a file or a module.
        argument: its name in errors, such as an option of the command.

    Returns:
        The reward, to be called with trajectories and ground truths whatever its own signature, see
        `as_reward`; for a class, an object made without arguments.

    Raises:
        ValueError: if there is no reward of this name, or importing its file raises an error.
        TypeError: if the named object is not a reward, see `as_reward`.

    Example:
        >>> find_reward("exact")([{"messages": [{"role": "assistant", "content": "4"}]}], ["4"])
        [1.0]
    """
    if name in REWARDS:
        return REWARDS[name]()
    place, _, attribute = name.rpartition(":")
    if Path(name).suffix == ".py" and Path(name).is_file():
        place, attribute = name, ""  # whose functions the error lists
    elif not place or not attribute:
        raise ValueError(
            f"{argument} must be one of {', '.join(sorted(REWARDS))}, FILE.py:NAME or MODULE:NAME, "
            f"got {name!r}"
        )
    reward = load_attribute(place, attribute, argument)
    if isinstance(reward, type):
        try:
            reward = reward()
        except Exception as error:
            raise ValueError(
                f"{argument} must name a class that can be made without arguments, "
                f"got {attribute!r}: {_described(error)}"
            ) from error
    return as_reward(reward, argument=argument)


def find_rewards(
    names: str | Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    find: Callable[[str], RewardFunction] = find_reward,
) -> WeightedReward:
    """Find several rewards by name, and combine them in a weighted sum.

    Args:
        names: one name or several, as for `find_reward`.
        weights: one for each name; ones by default.
        find: finds a reward by its name.

    Returns:
        The weighted sum. `score_trajectories` returns each reward by name, too: that of a built-in
        reward, `NAME` of `FILE.py:NAME`, or the last part of a path. Where two would be the same,
        the names are those that were passed.

    Raises:
        ValueError: if there are no names, a name is given twice or not found, or the weights are
            not finite numbers, one for each name, or all 0.
        TypeError: if a named object is not a reward, see `as_reward`.

    Example:
        >>> from twinkle_jax.reward import score_trajectories
        >>> reward = find_rewards(["exact", "gsm8k"], [0.5, 1])
        >>> answers = [{"messages": [{"role": "assistant", "content": "#### 4"}]}]
        >>> score_trajectories(reward, answers, ["4"])
        TrajectoryScores(rewards=[1.0], components={'exact': [0.0], 'gsm8k': [1.0]})
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise ValueError("reward must name at least one reward, got none")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"reward must name each reward once, got {name!r} twice")
    weights = [1.0] * len(names) if weights is None else list(weights)
    if len(weights) != len(names) or not all(map(math.isfinite, weights)):
        raise ValueError(
            f"reward_weights must be {len(names)} finite numbers, one a reward, got {weights}"
        )
    if not any(weights):
        raise ValueError(f"reward_weights must have a number other than 0, got {weights}")
    short = [Path(name.rpartition(":")[2]).name for name in names]
    labels = [s if short.count(s) == 1 else n for s, n in zip(short, names, strict=True)]
    rewards = [find(name) for name in names]
    return WeightedReward(
        dict(zip(labels, rewards, strict=True)), dict(zip(labels, weights, strict=True))
    )


def load_attribute(place: str, attribute: str, argument: str) -> Any:
    """Import a file or a module, and return what it has under a name."""
    module = load_module(place, argument)
    if not hasattr(module, attribute):
        names = [
            name
            for name, x in vars(module).items()
            if callable(x) and not name.startswith("_") and not _is_imported(x, module)
        ]
        raise ValueError(
            f"{argument} must name something in {place}, which has "
            f"{', '.join(names) or 'nothing'}, as {place}:NAME; got {attribute!r}"
        )
    return getattr(module, attribute)


def _is_imported(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type | FunctionType) and value.__module__ != module.__name__


def load_module(place: str, argument: str) -> ModuleType:
    """Import a file, or a module from the current directory or `sys.path`, by the user's name."""
    is_file = place.endswith(".py")
    if is_file:
        place = str(Path(place).expanduser())
    if is_file and not Path(place).is_file():
        raise ValueError(f"{argument} not found: there is no file {place!r}")
    # What a script could import: modules beside it. Last, so that none replaces an installed one.
    folder = str(Path(place).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return _import_file(Path(place)) if is_file else importlib.import_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, of a script that exits when imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not is_file and f"{place}.".startswith(f"{missing}."):
            raise ValueError(f"{argument} not found: there is no module {place!r}") from error
        raise ValueError(
            f"{argument} must be in a file that can be imported, got {place!r}, {_described(error)}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise
    return module


def _described(error: BaseException) -> str:
    place = error_place(error)
    return f"which raised {type(error).__name__}: {error}{f' ({place})' if place else ''}"
