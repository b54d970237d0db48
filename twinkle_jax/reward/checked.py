"""Calling rewards that may be anybody's: whatever goes wrong in them is named."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from twinkle_jax.data.trajectory import Trajectory
from twinkle_jax.reward.reward import GroundTruths

RewardFunction = Callable[..., Sequence[float]]


def compute_rewards(
    reward: RewardFunction,
    trajectories: Sequence[Trajectory],
    ground_truths: GroundTruths = None,
    *,
    timeout: float | None = 600.0,
) -> list[float]:
    """Call a reward, and check what it returns.

    Args:
        reward: a `Reward`, or any function of trajectories and ground truths.
        trajectories: conversations that end with a completion.
        ground_truths: as for [`Reward`][twinkle_jax.reward.Reward].
        timeout: seconds after which it is given up; None waits for ever. A reward that hangs keeps
            its thread until the process ends.

    Returns:
        One finite float for each trajectory.

    Raises:
        RuntimeError: if the reward raises an error, which is its cause.
        TimeoutError: if it does not return in time.
        ValueError: if it returns another number of rewards, or one that is NaN or infinite.
        TypeError: if it returns something else than numbers.

    Example:
        >>> said = [{"messages": [{"role": "assistant", "content": "4"}]}]
        >>> compute_rewards(lambda trajectories, truths: [0.5], said)
        [0.5]
    """
    name = reward_name(reward)
    values = _within(timeout, name, reward, trajectories, ground_truths)
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"{name} must return a list of {len(trajectories)} numbers, got {values!r:.80}"
        )
    if len(values) != len(trajectories):
        raise ValueError(f"{name} must return {len(trajectories)} numbers, got {len(values)}")
    for i, value in enumerate(values):
        if not isinstance(value, int | float) and not hasattr(value, "__float__"):
            raise TypeError(f"{name} must return numbers, got {value!r:.80} for trajectory {i}")
        if not math.isfinite(float(value)):
            raise ValueError(f"{name} must return finite numbers, got {value} for trajectory {i}")
    return [float(value) for value in values]


def reward_name(reward: Any) -> str:
    """Find what to call a reward in messages."""
    return str(getattr(reward, "__name__", None) or type(reward).__name__)


def _within(timeout: float | None, name: str, function: Any, *arguments: Any) -> Any:
    """Call on another thread, which is left behind when time is up."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = function(*arguments)
        except BaseException as error:
            outcome["error"] = error

    if timeout is None:
        work()
    else:
        thread = threading.Thread(target=work, name=f"reward {name}", daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            raise TimeoutError(f"{name} must return within {timeout} s, it did not")
    if "error" in outcome:
        error = outcome["error"]
        if not isinstance(error, Exception):
            raise error  # KeyboardInterrupt and the like are not the reward's
        raise RuntimeError(
            f"{name} must return rewards, got {type(error).__name__}: {error}"
        ) from error
    return outcome["value"]
