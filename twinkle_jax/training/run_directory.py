"""The directory of a run: found again or made anew, and nothing in it lost by accident."""

import shutil
from pathlib import Path

from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.run_checkpoints import RunCheckpoints


def prepare_directory(config: TrainConfig, directory: Path) -> Path | None:
    """Find the run to go on with, or make room for a new one; nothing is lost by accident."""
    if config.resume not in ("never", "auto"):
        source = Path(config.resume)
        if not RunCheckpoints(source / "checkpoints").steps():
            raise ValueError(f"resume must be auto, never or the directory of a run, got {source}")
        if source.resolve() != directory.resolve():
            _make_empty(config, directory)
            (directory / "metrics.jsonl").write_bytes((source / "metrics.jsonl").read_bytes())
        return source
    if config.resume == "auto" and RunCheckpoints(directory / "checkpoints").steps():
        return directory
    _make_empty(config, directory)
    return None


def _make_empty(config: TrainConfig, directory: Path) -> None:
    if directory.is_dir() and any(directory.iterdir()):
        if not config.overwrite:
            raise FileExistsError(
                f"output_dir must be empty or new, got {directory}: --resume auto goes on with "
                "the run in it, --overwrite deletes it"
            )
        known = ("config.json", "checkpoints", "metrics.jsonl", "summary.json")
        if not any((directory / name).exists() for name in known):
            raise FileExistsError(f"output_dir must hold a run to be overwritten, got {directory}")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
