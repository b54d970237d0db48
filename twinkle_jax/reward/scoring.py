"""Call untrusted reward functions: on copies, with a time limit and checks; weighted sums."""

import copy
import math
import sysconfig
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twinkle_jax.data import Trajectory, message_text
from twinkle_jax.reward.reward import (
    GroundTruths,
    Reward,
    RewardFunction,
    align_ground_truths,
    as_reward,
    on_event_loop,
    result_of,
    reward_name,
)

# Halfway between the largest float32 and what would follow it: rounds to infinity.
_INFINITE_IN_FLOAT32 = (2 - 2**-24) * 2.0**127
_OURS = Path(__file__).parents[1]
_LIBRARIES = {Path(sysconfig.get_path(x)) for x in ("stdlib", "platstdlib", "purelib", "platlib")}


class TrajectoryScores(NamedTuple):
    """Rewards of a batch, and the components of their weighted sums.

    Attributes:
        rewards: one finite number for each trajectory.
        components: each reward by its name, before its weight. None where a reward does not apply
            to a trajectory.
    """

    rewards: list[float]
    components: dict[str, list[float | None]]

    def means(self) -> dict[str, float]:
        """Average each component over the trajectories that it applies to.

        Returns:
            The means by name, of components that apply to at least one trajectory.
        """
        present = {n: [x for x in xs if x is not None] for n, xs in self.components.items()}
        return {name: math.fsum(xs) / len(xs) for name, xs in present.items() if xs}


class WeightedReward(Reward):
    r"""The weighted sum of several rewards, $\sum_c w_c R_c$.

    Args:
        rewards: by the names that metrics use; or a list, then the names are those of the classes
            and functions.
        weights: one for each, in the same form; ones by default.
        timeout: seconds for each; None for no limit but that of `score_trajectories` or of a run.

    Raises:
        ValueError: if there are no rewards, two of one name, other weights than rewards, or a
            weight that is not finite.
        TypeError: if something is not a reward, see `as_reward`.

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
        timeout: float | None = None,
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
        self.weights = {name: float(weights[name]) for name in rewards}
        if not all(map(math.isfinite, self.weights.values())):
            raise ValueError(f"weights must be finite numbers, got {self.weights}")
        self.rewards = {n: as_reward(x, argument=f"rewards[{n!r}]") for n, x in rewards.items()}
        self.timeout = timeout

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compute each reward, and sum them up."""
        return score_trajectories(self, trajectories, ground_truths, timeout=None).rewards


def score_trajectories(
    reward: RewardFunction,
    trajectories: Sequence[Trajectory],
    ground_truths: GroundTruths = None,
    *,
    timeout: float | None = 600.0,
) -> TrajectoryScores:
    r"""Call a reward on copies of trajectories, check what it returns, and keep its components.

    $$r_i = \sum_{c:\, R_{ci} \text{ is not None}} w_c R_{ci}$$

    Args:
        reward: a `WeightedReward`, whose rewards $R_c$ are called one after the other; any other
            `Reward` or function that `as_reward` takes is the only component, with weight 1.
        trajectories: conversations that end with a completion.
        ground_truths: as for [`Reward`][twinkle_jax.reward.Reward]. A function gets one for each
            trajectory, None where there is none.
        timeout: seconds for each component; None for no limit. The shorter one counts if a
            `WeightedReward` has a limit, too. A reward that hangs keeps its thread until the
            process ends.

    Returns:
        The rewards, and each component by name.

    Raises:
        RuntimeError: if a reward raises an error, which is its cause, or calls `sys.exit`. It names
            the reward, the file and line, and the first trajectory for which the reward raises the
            same when called on it alone.
        TimeoutError: if a reward does not return in time.
        ValueError: if ground truths fit neither trajectories nor prompts (a `Reward` raises it: a
            RuntimeError); if a reward returns another number of rewards, one that is NaN, infinite
            or too large for float32.
        TypeError: if it returns anything but numbers and None, or is no reward; or if no reward
            applies to a trajectory.

    Example:
        >>> one, none = lambda trajectories: [1.0], lambda trajectories: [None]
        >>> both = WeightedReward({"short": one, "none": none})
        >>> score_trajectories(both, [{"messages": [{"role": "assistant", "content": "4"}]}])
        TrajectoryScores(rewards=[1.0], components={'short': [1.0], 'none': [None]})
    """
    if isinstance(reward, WeightedReward):
        weighted = reward
        limits = [x for x in (timeout, weighted.timeout) if x is not None]
        timeout = min(limits, default=None)
    else:
        weighted = WeightedReward({reward_name(reward): as_reward(reward)})
    components = {
        name: _call(part, trajectories, ground_truths, timeout)
        for name, part in weighted.rewards.items()
    }
    sums, weights = [], weighted.weights.values()
    for i, row in enumerate(zip(*components.values(), strict=True)):
        terms = [w * x for w, x in zip(weights, row, strict=True) if x is not None]
        if not terms:
            raise TypeError(
                f"{' or '.join(components)} must return numbers, got None for trajectory {i}"
            )
        try:  # exactly: 0.7 + 0.2 + 0.1 would be less than 1, which counts as wrong
            total = math.fsum(terms)
        except OverflowError:
            total = math.inf
        sums.append(_finite(total, "the weighted sum", i))
    return TrajectoryScores(sums, components)


def compute_rewards(
    reward: RewardFunction,
    trajectories: Sequence[Trajectory],
    ground_truths: GroundTruths = None,
    *,
    timeout: float | None = 600.0,
) -> list[float]:
    """Call a reward on copies of trajectories, and check what it returns.

    Args:
        reward: as for `score_trajectories`, which returns the components too.
        trajectories: conversations that end with a completion.
        ground_truths: as for [`Reward`][twinkle_jax.reward.Reward].
        timeout: seconds for each component.

    Returns:
        One finite float for each trajectory.

    Raises:
        RuntimeError: as `score_trajectories`; so are the other errors.
        TimeoutError: if it does not return in time.
        ValueError: if their number is wrong, or one is not finite in float32.
        TypeError: if it returns anything but numbers.

    Example:
        >>> answers = [{"messages": [{"role": "assistant", "content": "4"}]}]
        >>> compute_rewards(lambda trajectories, ground_truths: [0.5], answers)
        [0.5]
    """
    return score_trajectories(reward, trajectories, ground_truths, timeout=timeout).rewards


def _call(
    reward: RewardFunction,
    trajectories: Sequence[Trajectory],
    ground_truths: GroundTruths,
    timeout: float | None,
) -> list[float | None]:
    """Call one reward, and check that it returns a number or None for each trajectory."""
    name = reward_name(reward)
    if not isinstance(reward, Reward):  # which matches them itself; a function pairs them up
        ground_truths = align_ground_truths(trajectories, ground_truths)
    values = _within(timeout, name, reward, trajectories, ground_truths)
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"{name} must return a list of {len(trajectories)} numbers, got {shown(values)}"
        )
    if len(values) != len(trajectories):
        raise ValueError(f"{name} must return {len(trajectories)} numbers, got {len(values)}")
    return [None if value is None else _finite(value, name, i) for i, value in enumerate(values)]


def _finite(value: Any, name: str, row: int) -> float:
    """Check that a reward is a number that stays finite in float32, as training holds it."""
    try:
        number = float(value) if hasattr(value, "__float__") else None  # text has none
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):  # an array of several numbers
        number = None
    if number is None:
        raise TypeError(f"{name} must return numbers, got {shown(value)} for trajectory {row}")
    if not abs(number) < _INFINITE_IN_FLOAT32:  # NaN neither
        raise ValueError(
            f"{name} must return finite numbers (in float32), got {shown(value)} for "
            f"trajectory {row}"
        )
    return number


def shown(value: Any) -> str:
    """Shorten the repr of a returned value; an int of thousands of digits has none."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a value of type {type(value).__name__}"


def _copies(
    trajectories: Sequence[Trajectory], ground_truths: GroundTruths
) -> tuple[list[Trajectory], GroundTruths]:
    """Copy each trajectory separately, so that rows share no mutable objects."""
    return [copy.deepcopy(trajectory) for trajectory in trajectories], copy.deepcopy(ground_truths)


def _within(
    timeout: float | None,
    name: str,
    reward: RewardFunction,
    trajectories: Sequence[Trajectory],
    ground_truths: GroundTruths,
) -> Any:
    """Call on another thread, which is abandoned after the timeout."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = result_of(reward(*_copies(trajectories, ground_truths)))
        except KeyboardInterrupt as interrupt:  # not an error of the reward's
            outcome["interrupt"] = interrupt
        except BaseException as error:  # SystemExit must not end the run
            outcome["error"] = error
            outcome["row"] = _failing_row(reward, error, trajectories, ground_truths)

    if timeout is None or on_event_loop():  # that another thread would wait for
        work()
    else:
        thread = threading.Thread(target=work, name=f"reward {name}", daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive() and "error" not in outcome:
            raise TimeoutError(f"{name} must return within {timeout} s, it did not")
    if "interrupt" in outcome:
        raise outcome["interrupt"]
    if "error" not in outcome:
        return outcome["value"]
    error, where = outcome["error"], error_place(outcome["error"])
    raise RuntimeError(
        f"{name} must return rewards, got {type(error).__name__}: {error}"
        f"{f' ({where})' if where else ''}, {_named_row(outcome.get('row'), trajectories)}"
    ) from error


def _failing_row(
    reward: RewardFunction,
    error: BaseException,
    trajectories: Sequence[Trajectory],
    ground_truths: GroundTruths,
) -> int | None:
    """Find the first trajectory for which the reward raises the same error when called alone."""
    try:
        truths = align_ground_truths(trajectories, ground_truths)
    except (TypeError, ValueError):
        return None
    for i, trajectory in enumerate(trajectories):
        try:
            alone = _copies([trajectory], None if ground_truths is None else [truths[i]])
            result_of(reward(*alone))
        except KeyboardInterrupt:
            raise
        except BaseException as again:
            if type(again) is type(error) and error_place(again) == error_place(error):
                return i
    return None


def _named_row(row: int | None, trajectories: Sequence[Trajectory]) -> str:
    if row is not None:
        return f"for trajectory {row}"
    messages = trajectories[0].get("messages") if len(trajectories) else None
    first = f", the first of which begins {message_text(messages[0])!r:.60}" if messages else ""
    return f"for a batch of {len(trajectories)} trajectories{first}"


def error_place(error: BaseException) -> str | None:
    """Find the file and line that an error comes from, in code that the user can change.

    That is the innermost line outside the standard library, installed packages and this one; or
    else the innermost one outside this package; None if there is no such line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    places: dict[bool, str] = {}  # by whether it is a library's; later ones are further inside
    for frame in traceback.extract_tb(error.__traceback__):
        folders = set(Path(frame.filename).parents)
        if _OURS not in folders and not frame.filename.startswith("<frozen"):
            places[bool(_LIBRARIES & folders)] = f"{frame.filename}, line {frame.lineno}"
    return places.get(False) or places.get(True)
