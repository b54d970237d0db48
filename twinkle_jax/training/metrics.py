"""Metrics of a run: computed for each step under TRL's names, and written to its logs."""

import errno
import json
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from twinkle_jax._package import require
from twinkle_jax.data import IGNORE, Batch
from twinkle_jax.loss import SamplerMismatch, kl_k3
from twinkle_jax.rollout import Rollout, episode_metrics, has_signal
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.gradient import StepSummary
from twinkle_jax.training.state import UpdateInfo


@jax.jit
def rollout_facts(batch: Batch) -> dict[str, Float[Array, ""]]:
    """Estimate entropy and the divergence from the reference policy from samples."""
    assert batch.old_logps is not None
    kept = batch.labels != IGNORE
    tokens = jnp.maximum(jnp.sum(kept, dtype=jnp.float32), 1)
    facts = {"entropy": -jnp.sum(jnp.where(kept, batch.old_logps, 0)) / tokens}
    if batch.ref_logps is not None:
        divergence = kl_k3(batch.old_logps, batch.ref_logps, kept)
        facts["kl"] = jnp.sum(jnp.where(kept, divergence, 0)) / tokens
    return facts


@jax.jit
def mismatch_metrics(mismatch: SamplerMismatch) -> dict[str, Float[Array, ""]]:
    """Compute the metrics of a mismatch on the device, to be read with the others."""
    return mismatch.metrics()


def rollout_metrics(
    drawn: Sequence[Rollout], config: TrainConfig, started: float
) -> dict[str, float]:
    """Metrics of all rollouts of a step, sampled since `started` (`time.perf_counter`)."""
    samples = config.rollout.num_samples
    rewards = np.concatenate([r.scores for r in drawn]).astype(np.float64)
    lengths = np.concatenate([r.lengths for r in drawn])
    truncated = np.concatenate([r.truncated for r in drawn])
    signal = np.concatenate([has_signal(r, samples) for r in drawn])
    deviations = rewards.reshape(-1, samples).std(axis=1, ddof=1)
    episodes = [episode for r in drawn for episode in r.episodes or ()]
    if episodes:  # an episode that ends at the limit of turns is not truncated
        truncated = np.asarray([episode.ended == "length" for episode in episodes])
    kept = ~np.asarray([episode.failed for episode in episodes], bool)
    if not kept.all():  # failures of the environment are not the policy's
        groups = kept.reshape(-1, samples)
        several = groups.sum(axis=1) > 1
        deviations = rewards.reshape(-1, samples)[several].std(
            axis=1, ddof=1, where=groups[several]
        )
        rewards, lengths, truncated = rewards[kept], lengths[kept], truncated[kept]
        deviations = deviations if len(deviations) else np.zeros(1)
    if not len(rewards):
        return episode_metrics(episodes)
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(deviations.mean()),
        "frac_reward_zero_std": float(1 - signal.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "time/sample": time.perf_counter() - started,
    }
    if not truncated.all():
        metrics["completions/mean_terminated_length"] = float(lengths[~truncated].mean())
    for name in drawn[0].reward_parts:
        scores = np.concatenate([r.reward_parts[name] for r in drawn]).astype(np.float64)
        scores = scores[~np.isnan(scores)]  # rows that this reward does not apply to
        if scores.size:
            metrics[f"rewards/{name}/mean"] = float(scores.mean())
            metrics[f"rewards/{name}/std"] = float(scores.std())
    return metrics | (episode_metrics(episodes) if episodes else {})


class Learnt(NamedTuple):
    """What the updates of a step did; arrays on the device.

    Attributes:
        summaries: of each update's loss.
        infos: of each update: gradient norm, and whether it was applied.
        mismatch: differences between the sampler's log-probabilities and those of the policy before
            the first update; None if the batch has none.
    """

    summaries: list[StepSummary]
    infos: list[UpdateInfo]
    mismatch: SamplerMismatch | None


def update_metrics(learnt: Learnt) -> dict[str, float]:
    """Metrics averaged over the updates of a step, and the number of skipped updates."""

    def mean(values: Sequence[Any]) -> float:
        return float(np.mean(np.asarray(values, np.float64)))

    skipped = [info for info in learnt.infos if not info.applied]
    without_signal = sum(info.gradient_norm == 0 for info in skipped)
    metrics = {
        "loss": mean([s.loss_sum / max(float(s.denominator), 1.0) for s in learnt.summaries]),
        "grad_norm": mean([info.gradient_norm for info in learnt.infos]),
        "skipped_updates": float(len(skipped) - without_signal),
        "updates_without_signal": float(without_signal),
    }
    losses = [s.metrics for s in learnt.summaries if s.metrics is not None]
    if losses:
        low = mean([m.clip_fraction_low for m in losses])
        high = mean([m.clip_fraction_high for m in losses])
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "approx_kl": mean([m.approximate_kl for m in losses]),
        }
    return metrics


class Sink(Protocol):
    """Another destination of metrics."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one step."""

    def close(self) -> None:
        """Flush and close."""


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
        """Write the numbers, and purge those of an earlier process from this step on."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, continued when this run is resumed.

    Weights & Biases keeps the first values that it gets for a step. Its project is `twinkle-jax`,
    unless `WANDB_PROJECT` names another.

    Args:
        directory: of the run; `wandb_run.txt` in it stores the id in Weights & Biases.

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


FILE = "metrics.jsonl"


class MetricsLog:
    """Appends one JSON object a step to `metrics.jsonl`, which can be cut back when a run resumes.

    A line is `{"step": 3, "reward": 0.5}`. JSON has no NaN and no infinity: such a value is `null`,
    and the line's `not_finite` says which: `{"kl": "nan"}`. An unfinished line of
    a killed process is removed when the file is opened.

    Args:
        directory: of `metrics.jsonl`; created if missing.
        tensorboard: whether to write event files for TensorBoard to `directory/tensorboard` too.
        wandb: whether to send to Weights & Biases too; its environment variables apply, such as
            `WANDB_MODE=offline`.

    Raises:
        ImportError: if tensorboardX or wandb is not installed; it names the extra.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory, MetricsLog(directory) as log:
        ...     log.write(1, {"reward": 0.5, "kl": float("nan")})
        ...     print((Path(directory) / "metrics.jsonl").read_text(), end="")
        {"step": 1, "reward": 0.5, "kl": null, "not_finite": {"kl": "nan"}}
    """

    def __init__(
        self, directory: str | os.PathLike[str], tensorboard: bool = False, wandb: bool = False
    ) -> None:
        directory = Path(directory).absolute()
        self._sinks: list[Sink] = []
        if tensorboard:
            self._sinks.append(TensorBoard(directory))
        if wandb:
            self._sinks.append(WeightsAndBiases(directory))
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE
        content = self.path.read_bytes() if self.path.exists() else b""
        kept = content[: content.rfind(b"\n") + 1]
        self._last = self._last_step(kept)
        self._file = self.path.open("ab", buffering=0)
        lock_file(self._file)
        self._file.truncate(len(kept))

    @property
    def offset(self) -> int:
        """The file's length in bytes after an fsync, to be stored in a checkpoint."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def truncate(self, offset: int) -> None:
        """Remove all lines after an offset: those of steps that a resumed run repeats.

        Raises:
            ValueError: if no line ends there.
        """
        content = self.path.read_bytes()
        kept = content[: max(offset, 0)]
        if len(kept) != offset or not (kept.endswith(b"\n") or not kept):
            raise ValueError(
                f"offset must be one at which a line of {self.path} ends, got {offset} of "
                f"{len(content)} bytes: a run resumes with the file that it wrote, put it back"
            )
        self._last = self._last_step(kept)
        self._file.truncate(offset)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write one line.

        Args:
            step: number of the step; greater than that of the last line.
            metrics: a number for each name; a device array costs a transfer each.

        Raises:
            ValueError: if `step` is not after the last one, or a name is `step` or `not_finite`.
            TypeError: if a value is not a single number.
            OSError: if the line cannot be written; a partial line is removed.
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        if self._last is not None and step <= self._last:
            raise ValueError(f"step must be after {self._last}, as {self.path} ends, got {step}")
        line = _line(step, numbers)
        begin = self.path.stat().st_size
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(begin)
            reason = f"the metrics of step {step} were not written: {error.strerror}"
            raise OSError(error.errno, reason, str(self.path)) from error
        self._last = step
        for sink in self._sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        """Close the file, TensorBoard's writer and the run of Weights & Biases."""
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _last_step(self, lines: bytes) -> int | None:
        last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        try:
            return json.loads(last)["step"] if last else None
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.path} must end with a step's JSON, got {last!r}") from error


class NoLog:
    """A `MetricsLog` that writes nothing, for processes other than the first."""

    offset = 0

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write nothing."""

    def truncate(self, offset: int) -> None:
        """Remove nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close nothing."""


def _number(name: str, value: SupportsFloat) -> float:
    if name in ("step", "not_finite"):
        raise ValueError(f"metrics must not be named {name!r}, which is reserved")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) or getattr(value, "ndim", False):
        raise TypeError(f"metrics must be single numbers, got {value!r} for {name!r}")
    try:
        return float(value)
    except TypeError as error:
        raise TypeError(f"metrics must be single numbers, got {value!r} for {name!r}") from error


def _line(step: int, numbers: Mapping[str, float]) -> bytes:
    not_finite = {name: str(x) for name, x in numbers.items() if not math.isfinite(x)}
    finite = {name: None if name in not_finite else x for name, x in numbers.items()}
    note = {"not_finite": not_finite} if not_finite else {}
    return json.dumps({"step": int(step)} | finite | note, allow_nan=False).encode() + b"\n"


def lock_file(file: BinaryIO | FileIO) -> None:
    """Lock a file until it is closed, where the system has `flock`."""
    with suppress(ImportError):
        import fcntl  # not on Windows

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def file_is_locked(path: Path) -> bool:
    """Whether another process, or another run in this one, has locked a file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            return True
    return False
