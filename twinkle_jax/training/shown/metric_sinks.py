"""TensorBoard and Weights & Biases as further places for a run's metrics."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from twinkle_jax.data.missing_extra import require


class Sink(Protocol):
    """A further place for metrics."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one step."""

    def close(self) -> None:
        """Write what is not written yet."""


class TensorBoard:
    """Event files in `directory/tensorboard`.

    Args:
        directory: of the run.

    Raises:
        ImportError: if tensorboardX is not installed.
    """

    def __init__(self, directory: Path) -> None:
        require("tensorboardX", "tensorboard")
        self._directory = directory / "tensorboard"
        self._writer: Any = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers; what an earlier process wrote of this step and later ones is void."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Write what is not written yet."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which goes on when this run is resumed.

    Weights & Biases keeps the first values that it is given for a step. Its project is
    `twinkle-jax`, unless `WANDB_PROJECT` names another.

    Args:
        directory: of the run; the identity of the run there is kept in `wandb_run.txt`.

    Raises:
        ImportError: if wandb is not installed.
    """

    def __init__(self, directory: Path) -> None:
        require("wandb", "wandb")
        self._directory = directory
        self._run: Any = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers."""
        if self._run is None:
            self._run = self._start()
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Wait until all is sent."""
        if self._run is not None:
            self._run.finish()

    def _start(self) -> Any:
        import wandb

        identity = self._directory / "wandb_run.txt"
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        project = os.environ.get("WANDB_PROJECT", "twinkle-jax")
        return wandb.init(
            project=project,
            name=self._directory.name,
            dir=str(self._directory),
            id=identity.read_text(),
            resume="allow",
        )
