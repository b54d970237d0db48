"""The directory of a run: found again or made anew, and nothing in it lost by accident."""

import shutil
from pathlib import Path

from twinkle_jax.training.checkpoints.run_checkpoints import RunCheckpoints
from twinkle_jax.training.configuration.train_config import TrainConfig


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
    if not (config.resume == "auto" and _has_not_begun(directory)):
        _make_empty(config, directory)
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever looks finds the old one or the new one."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _has_not_begun(directory: Path) -> bool:
    """Whether a process that ended before its first checkpoint has left this, and nothing else."""
    if not (directory / "metrics.jsonl").is_file() or (directory / "metrics.jsonl").stat().st_size:
        return False
    known = {"config.json", ".config.json.partial", "metrics.jsonl", "checkpoints", "tensorboard"}
    known |= {"wandb", "wandb_run.txt"}
    saves = [path.name for path in directory.glob("checkpoints/*")]
    return {p.name for p in directory.iterdir()} <= known and all(n[0] == "." for n in saves)


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
