"""The directory of a run: whether it may be begun, resumed or emptied, and its settings.

A resumed run may change some settings, and keeps what was chosen for its devices.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from twinkle_jax.data.settings import AUTO
from twinkle_jax.model.huggingface.saving import names_path
from twinkle_jax.reward.reward import REWARDS
from twinkle_jax.training.checkpoint import RunCheckpoints, read_facts
from twinkle_jax.training.config import TrainConfig, automatic_budget, flat
from twinkle_jax.training.tracking import FILE, TRACKER_FILES, file_is_locked, open_locked


def check_settings(config: TrainConfig, directory: Path) -> None:
    """Raise if a setting differs from that of the run to resume in `directory`, if there is one.

    Raises:
        ValueError: with the name of the first setting that differs, or if `resume` names a
            directory without a run.
    """
    source = run_to_resume(config.resume, directory)
    if source is not None:
        saved = saved_settings(source)
        check_resumable(saved, with_choices(config, saved))


def prepare_directory(config: TrainConfig, directory: Path) -> Path | None:
    """Find the run to resume, or empty the directory for a new one if the settings allow it.

    Returns:
        The directory of the run to resume; None for a new run.

    Raises:
        ValueError: if `resume` names a directory without a run.
        FileExistsError: if it is a file, a run is active in it, it is not empty and neither
            `resume` nor `overwrite` is set, or overwriting it would delete anything but a run, or
            what this one reads.
    """
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"output_dir must be a directory, got a file, {directory}")
    if file_is_locked(directory / FILE):
        raise FileExistsError(f"output_dir must not be in use by a run, got {directory}")
    source = run_to_resume(config.resume, directory)
    if source != directory:
        _make_empty(config, directory, source)
    return source


def run_to_resume(resume: str, directory: Path) -> Path | None:
    """Find the run that `--resume` names; None for a new run.

    Raises:
        ValueError: if it names a directory without a run.
    """
    if resume == "never":
        return None
    source = directory if resume == "auto" else Path(resume).expanduser()
    if RunCheckpoints(source / "checkpoints").steps():
        # The run in `directory` may be named by another path, such as a relative one.
        return directory if source.resolve() == directory.resolve() else source
    if resume == "auto":
        return None
    raise ValueError(f"resume must be auto, never or the directory of a run, got {source}")


_WITH_FILES = ("model", "environment", "tools", "examples", "task", "reward", "path")
_WITHOUT_FILES = ("arithmetic", "environment", "examples", *REWARDS)


def saved_settings(source: Path) -> dict[str, Any]:
    """Read the settings of a run.

    Files that are not here are looked for in the directory that the run was started in.
    """
    settings, directory = _read_settings(source), started_in(source)
    return settings if directory is None else _with_files(settings, directory)


def started_in(run: Path) -> str | None:
    """Return the directory that a run was started in; None if no checkpoint says it."""
    return _newest_facts(run).get("started_in")


def changed_code(run: Path, code: Mapping[str, str]) -> list[str]:
    """List the options whose files have changed since the newest checkpoint of a run."""
    before = _newest_facts(run).get("code") or {}
    return [option for option, digest in code.items() if before.get(option, digest) != digest]


def _newest_facts(run: Path) -> dict[str, Any]:
    for path in sorted((run / "checkpoints").glob("step_*/facts.json"), reverse=True):
        with suppress(OSError, ValueError):
            return read_facts(path.parent)
    return {}


def _read_settings(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, or no JSON
        raise ValueError(f"{path} must hold a run's settings, got no JSON: {error}") from error
    if not isinstance(settings, dict) or _SETTINGS_OF_RUNS - settings.keys():
        raise ValueError(f"{path} must hold a run's settings, got {str(settings)[:80]}")
    return settings


# Checkpoints of models have a config.json as well.
_SETTINGS_OF_RUNS = {"rollout", "update", "optimizer", "dtype"}


def _with_files(settings: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """Make paths absolute that are relative to another directory than the current one."""

    def find(value: Any) -> Any:
        if isinstance(value, list):
            return [find(part) for part in value]
        if not isinstance(value, str) or value in _WITHOUT_FILES:
            return value
        there = path_from(directory, value)
        is_here = Path(file_in(value)).expanduser().exists()
        return there if not is_here and Path(file_in(there)).exists() else value

    located = {name: find(x) if name in _WITH_FILES else x for name, x in settings.items()}
    for section in ("evaluation", "teacher"):
        if isinstance(settings.get(section), dict):
            located[section] = _with_files(settings[section], directory)
    return located


def read_summary(directory: Path) -> dict[str, Any]:
    """Read `summary.json`, which a run writes at its end; empty before."""
    path = directory / "summary.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with names_path(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def _has_not_begun(directory: Path) -> bool:
    """Whether a directory holds only what a run writes before its first checkpoint."""
    names = {path.name for path in directory.iterdir()}
    metrics = directory / FILE
    if FILE not in names:  # a run writes it first; only runs on many hosts write `.shared` before
        return names == {".shared"}
    if not metrics.is_file() or metrics.stat().st_size:
        return False
    known = {"config.json", ".config.json.partial", FILE, "checkpoints", "base", ".shared"}
    known |= {"weights", *TRACKER_FILES}  # that a server has loaded for the first evaluation
    saves = [path.name for path in directory.glob("checkpoints/*")]
    return names <= known and all(name[0] == "." for name in saves)


def holds_run(directory: Path) -> bool:
    """Whether `config.json` has a run's settings."""
    try:
        _read_settings(directory)
    except (OSError, ValueError):
        return False
    return True


def _make_empty(config: TrainConfig, directory: Path, source: Path | None) -> None:
    """Make the directory of a run, and delete what it holds if the settings allow it.

    `source` is the run to resume, if it is another one.
    """
    if directory.is_dir() and any(directory.iterdir()):
        _check_may_be_emptied(config, directory, source)
        with open_locked(directory / FILE):
            _check_may_be_emptied(config, directory, source)  # a run may have begun meanwhile
            # The settings after all else: without them, the rest would be taken for no run. The
            # lock last.
            last = ("config.json", FILE)
            paths = sorted(directory.iterdir(), key=lambda path: (path.name in last, path.name))
            for path in paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    directory.mkdir(parents=True, exist_ok=True)


def _check_may_be_emptied(config: TrainConfig, directory: Path, source: Path | None) -> None:
    """Raise unless all that a directory holds may be deleted."""
    if not _has_not_begun(directory):
        if not holds_run(directory):
            raise FileExistsError(
                f"output_dir must be empty or new, got {directory}, which holds no run to "
                "continue or to overwrite"
            )
        if not config.overwrite:
            raise FileExistsError(
                f"output_dir must be empty or new, got {directory}: --resume auto "
                "continues the run in it, --overwrite deletes it"
            )
    needed = [
        ("model", config.model),
        ("teacher.model", config.teacher.model),
        ("examples", config.examples),
        ("task", config.task),
        ("resume", source),
        ("evaluation.path", config.evaluation.path),
        *(("reward", name) for name in config.rewards),
        ("evaluation.reward", config.evaluation.reward),
        ("environment", config.environment),
        ("tools", config.tools),
    ]
    for name, value in needed:
        path = None if value is None else Path(file_in(str(value))).expanduser()
        if path and path.exists() and path.resolve().is_relative_to(directory.resolve()):
            raise FileExistsError(
                f"output_dir must not hold {name}, which would be deleted, got {directory}"
            )


# What a resumed run may change.


def check_resumable(
    saved: Mapping[str, Any], config: TrainConfig, started_in: str | None = None
) -> None:
    """Raise a ValueError for the first setting that must not change, and has in a resumed run.

    `saved` is `dataclasses.asdict` of the configuration in the checkpoint, read back from JSON.
    Relative paths in it are of the directory `started_in`, or of the current one.
    """
    # JSON has lists for tuples, and strings for the numbers that are keys.
    current = flat(json.loads(json.dumps(dataclasses.asdict(config))))
    for name, before in flat(saved).items():
        # The learning rate of a step depends on their number, unless it is constant.
        fixed = name == "steps" and config.optimizer.schedule != "constant"
        now = current.get(name)
        if (fixed or not _may_change(name)) and not is_same(before, now, started_in):
            reason = f": optimizer.schedule={config.optimizer.schedule} depends on it"
            raise ValueError(
                f"{name} must be {before!r} as in the run to resume, got {now!r}"
                + (reason if fixed else "")
            )


def is_same(before: Any, now: Any, started_in: str | None) -> bool:
    """Whether two values of a setting are equal, or name the same file; see `check_resumable`."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(is_same(*pair, started_in) for pair in zip(before, now, strict=True))
    if not isinstance(before, str) or not isinstance(now, str):
        return before == now
    here = os.getcwd()
    return before == now or path_from(started_in or here, before) == path_from(here, now)


def file_in(value: str) -> str:
    """The file in `FILE`, `gsm8k:FILE`, `FILE.py:NAME` or `trl:FILE.py:NAME`."""
    return value[_file_span(value)]


def path_from(directory: str, value: str) -> str:
    """Make the path in a setting absolute, which may be relative to a directory."""
    span = _file_span(value)
    path = Path(directory, os.path.expanduser(value[span]))
    return f"{value[: span.start]}{path}{value[span.stop :]}"


def _file_span(value: str) -> slice:
    code = re.search(r"(?:^(?:trl|gym):|^)(.*\.py)(?::|$)", value)
    if code:
        return slice(*code.span(1))
    return slice(len("gsm8k:") if value.startswith("gsm8k:") else 0, len(value))


def _may_change(name: str) -> bool:
    """Whether a resumed run may change a setting, which its field or its section says."""
    section: Any = TrainConfig
    for part in name.split("."):
        settings = {x.name: x for x in fields(section)} if is_dataclass(section) else {}
        if part not in settings:  # a setting of another version
            return False
        if settings[part].metadata.get("may_change"):
            return True
        section = settings[part].default_factory
    return False


def with_choices(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """Take over what the run to resume chose for its devices, unless the user has set it.

    `saved` holds its settings, as for `check_resumable`.
    """
    update, saved_update = config.update, saved["update"]
    rollout, choices = config.rollout, {}
    automatic = dataclasses.replace(rollout, max_episode_tokens=AUTO)
    if rollout == automatic.resolved():  # which depends on the longest prompt, and may stay
        longest = saved["rollout"]["max_episode_tokens"]
        rollout = dataclasses.replace(rollout, max_episode_tokens=longest)
    if update.recompute == "auto":
        choices["recompute"] = saved_update["recompute"]
    if update.micro_batch_tokens == automatic_budget(config):
        choices["micro_batch_tokens"] = saved_update["micro_batch_tokens"]
    update = dataclasses.replace(update, **choices)
    dtype = saved["dtype"] if config.dtype is AUTO else config.dtype
    return dataclasses.replace(config, dtype=dtype, rollout=rollout, update=update)
