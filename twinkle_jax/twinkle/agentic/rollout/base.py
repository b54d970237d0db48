"""`twinkle_agentic.rollout.base`."""

from abc import ABC, abstractmethod
from typing import Any

from twinkle_jax.data import Trajectory


class Rollout(ABC):
    """Lets a policy speak, as often as a conversation needs."""

    @abstractmethod
    def __call__(self, trajectories: list[Trajectory], **kwargs: Any) -> list[Trajectory]:
        """Go on with trajectories to their end."""
