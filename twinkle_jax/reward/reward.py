"""What a reward is: a call on trajectories and ground truths that returns one float each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle_jax.data.trajectory import Trajectory, completion_text
from twinkle_jax.reward.ground_truths import align_ground_truths, find_ground_truths

GroundTruths = Sequence[Any] | None


class Reward(ABC):
    """The base of rewards; what is called on trajectories and ground truths, and returns floats.

    A plain function of the same arguments serves as well wherever a reward is taken.
    """

    @abstractmethod
    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Score what the assistant said last in each trajectory.

        Args:
            trajectories: conversations that end with a completion.
            ground_truths: what is right: one for each trajectory; or one for each prompt, whose
                completions stand next to each other. None: `'ground_truth'` in each trajectory's
                `user_data`. A trajectory stands for what is said last in it.
            kwargs: not used here; for rewards of your own.

        Returns:
            A float for each trajectory.
        """


class FunctionReward(Reward):
    """A reward of each completion by itself, from a function.

    Args:
        function: takes a completion's text and its ground truth, returns a number.
        needs_ground_truth: False passes None for the ground truth where there is none.

    Raises:
        TypeError: if it cannot be called.

    Example:
        >>> shorter = FunctionReward(lambda text, truth: float(len(text) < 5))
        >>> said = [{"messages": [{"role": "assistant", "content": "2"}]}]
        >>> shorter(said, ["2"])
        [1.0]
    """

    def __init__(
        self, function: Callable[[str, Any], float], *, needs_ground_truth: bool = True
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        self.function, self.needs_ground_truth = function, needs_ground_truth

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Call the function on each completion and its ground truth."""
        if self.needs_ground_truth:
            truths = find_ground_truths(trajectories, ground_truths)
        else:
            truths = align_ground_truths(trajectories, ground_truths)
        pairs = zip(trajectories, truths, strict=True)
        return [self.function(completion_text(trajectory), truth) for trajectory, truth in pairs]

    def __repr__(self) -> str:
        return f"FunctionReward({getattr(self.function, '__name__', self.function)})"


def completions_of(trajectories: Sequence[Mapping[str, Any]]) -> list[str]:
    """Read the text of each completion; refuse what is no list of trajectories."""
    if isinstance(trajectories, Mapping | str) or not isinstance(trajectories, Sequence):
        raise TypeError(f"trajectories must be a list of trajectories, got {trajectories!r:.80}")
    for i, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Mapping):
            raise TypeError(f"trajectories[{i}] must be a dictionary, got {trajectory!r:.80}")
    return [completion_text(trajectory) for trajectory in trajectories]
