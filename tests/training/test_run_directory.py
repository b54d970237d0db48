"""The directory of a run: used, emptied or refused; and what a resumed run may change."""

import dataclasses
import errno
import fcntl
import json
import os
import re

import pytest

from tests.training.options import config_of
from twinkle_jax.rollout import RolloutConfig
from twinkle_jax.training import (
    LoggingConfig,
    LoraSettings,
    OptimizerConfig,
    TrainConfig,
    run_directory,
)
from twinkle_jax.training.config import flat
from twinkle_jax.training.run_directory import check_resumable, prepare_directory, with_choices
from twinkle_jax.training.tracking import MetricsLog


def test_a_directory_is_used_by_one_run_at_a_time(tmp_path):
    config = TrainConfig(output_dir=str(tmp_path), overwrite=True)
    with MetricsLog(tmp_path), pytest.raises(FileExistsError, match="output_dir"):
        prepare_directory(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").exists()
    assert prepare_directory(config, tmp_path) is None


def test_two_runs_that_start_at_the_same_moment(tmp_path, monkeypatch):
    """The second one must not delete what the first one has just opened."""
    directory, logs = tmp_path / "run", []

    def first_one_starts(path):
        logs.append(MetricsLog(directory))
        return False

    monkeypatch.setattr(run_directory, "file_is_locked", first_one_starts)
    with pytest.raises(FileExistsError, match="output_dir must not be in use by a run"):
        prepare_directory(TrainConfig(output_dir=str(directory)), directory)
    with pytest.raises(FileExistsError, match="output_dir must not be in use by a run"):
        MetricsLog(directory)
    with logs[0] as log:
        log.write(1, {"reward": 0.5})
    assert (directory / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.5}\n'


def test_files_are_locked_where_that_takes_write_access(tmp_path, monkeypatch):
    """As on NFS, see `man 2 flock`."""
    flock = fcntl.flock

    def on_nfs(file, operation):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", on_nfs)
    MetricsLog(tmp_path).close()
    assert prepare_directory(TrainConfig(), tmp_path) is None


def test_a_directory_that_is_a_link_is_emptied(tmp_path):
    config = TrainConfig(overwrite=True)
    (tmp_path / "disk" / "policy").mkdir(parents=True)
    (tmp_path / "disk" / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert prepare_directory(config, tmp_path / "run") is None
    assert (tmp_path / "run").is_symlink()
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_run_that_failed_before_its_first_step_is_no_obstacle(tmp_path):
    """A process that stopped in its first evaluation: what it left is no run."""
    with MetricsLog(tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "checkpoints" / ".step_00000000.01234567.partial").mkdir(parents=True)
        for name in ("tensorboard", "wandb", "wandb_run.txt", "wandb_step.txt"):
            (tmp_path / name).mkdir()
    config = TrainConfig(output_dir=str(tmp_path), logging=LoggingConfig())
    assert prepare_directory(config, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.json").write_text("{}")  # of anything else
    with pytest.raises(FileExistsError, match="output_dir"):
        prepare_directory(config, tmp_path)
    assert (tmp_path / "config.json").exists()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"^output_dir must be a directory"):
        prepare_directory(config, tmp_path / "notes.txt")
    with pytest.raises(FileExistsError, match="output_dir"):
        prepare_directory(config, tmp_path)


# What a resumed run may change.


def as_saved(config):
    return json.loads(json.dumps(dataclasses.asdict(config)))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (TrainConfig(seed=1), "seed"),
        (TrainConfig(level=3), "level"),
        (TrainConfig(rollout=RolloutConfig(prompts=64)), "rollout.prompts"),
        (TrainConfig(optimizer=OptimizerConfig(options={"b2": 0.95})), "optimizer.options"),
        (TrainConfig(lora=LoraSettings(rank=4)), "lora.rank"),
    ],
)
def test_a_resumed_run_must_be_the_same_run(changed, name):
    with pytest.raises(ValueError, match=f"^{re.escape(name)}"):
        check_resumable(as_saved(TrainConfig()), changed)


CONSTANT = TrainConfig(optimizer=OptimizerConfig(schedule="constant"))
MAY_CHANGE = {"steps", "output_dir", "resume", "overwrite", "reward_timeout"}
MAY_CHANGE |= {"rollout.slots", "rollout.cohorts", "rollout.max_failed"}
MAY_CHANGE |= {"rollout.max_prompt_tokens"}  # a run that met a longer prompt goes on
MAY_CHANGE |= {"rollout.environment_timeout", "rollout.environment_threads"}
MAY_CHANGE |= {"rollout.process_megabytes", "update.on_mismatch"}
MAY_CHANGE |= {"update.max_logp_diff", "update.max_outside_band"}
MAY_CHANGE |= {f"teacher.{x}" for x in ("url", "served_name", "timeout", "patience")}
SECTIONS = {"logging", "evaluation", "mesh", "distributed", "server"}


def resumes_with_another(name, config):
    """Whether a run resumes that was saved with another value of a setting."""
    saved = as_saved(config)
    section, _, setting = name.rpartition(".")
    (saved[section] if section else saved)[setting] = "another"
    try:
        check_resumable(saved, config)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("config", [TrainConfig(), CONSTANT], ids=["linear", "constant"])
def test_a_resumed_run_may_change_only_what_no_finished_step_depends_on(config):
    """Where it runs, how long it waits, what it logs; steps, unless the schedule counts them."""
    names = flat(as_saved(config))
    changeable = {name for name in names if resumes_with_another(name, config)}
    allowed = MAY_CHANGE | {name for name in names if name.split(".")[0] in SECTIONS}
    assert changeable == (allowed if config is CONSTANT else allowed - {"steps"})
    if config is not CONSTANT:
        with pytest.raises(ValueError, match=r"steps must be 3 .*schedule=linear depends on it"):
            check_resumable(as_saved(config) | {"steps": 3}, config)


def test_a_resumed_run_may_have_longer_prompts():
    """The longest episode, which is derived from them, stays what it was."""
    longer = TrainConfig(rollout=RolloutConfig(max_prompt_tokens=2048))
    saved = as_saved(TrainConfig())
    resumed = with_choices(longer, saved)
    check_resumable(saved, resumed)
    assert resumed.rollout.max_prompt_tokens == 2048
    asked = TrainConfig(rollout=RolloutConfig(max_episode_tokens=3000))
    with pytest.raises(ValueError, match=r"^rollout\.max_episode_tokens"):
        check_resumable(saved, with_choices(asked, saved))


@pytest.mark.parametrize(
    "options",
    [
        {
            "optimizer.schedule": "piecewise_constant_schedule",
            "optimizer.schedule_options": {"boundaries_and_scales": {100: 0.1}},
        },
        {"lora.rank": 4, "lora.target_modules": ("q_proj", "v_proj")},
    ],
)
def test_settings_that_json_has_another_type_for_are_the_same(options):
    config = config_of(options)
    check_resumable(as_saved(config), config)


def test_a_file_may_be_named_in_several_ways(tmp_path, monkeypatch):
    """By a path relative to the directory that the run was started in, or that it resumes in."""
    names = {"model": "m", "task": "gsm8k:gsm8k", "reward": ["exact", "r.py:f"], "tools": "t.py"}
    saved = as_saved(TrainConfig(**names))
    monkeypatch.chdir(tmp_path)
    started_in = str(tmp_path / "there")
    absolute = {
        "model": f"{started_in}/m",
        "task": f"gsm8k:{started_in}/gsm8k",
        "reward": ["exact", f"{started_in}/r.py:f"],
        "tools": "there/t.py",
    }
    check_resumable(saved, TrainConfig(**absolute), started_in)
    for name, value in absolute.items():
        with pytest.raises(ValueError, match=f"^{name} must be"):
            check_resumable(saved, TrainConfig(**names | {name: value}), str(tmp_path / "other"))


def test_a_resumed_run_keeps_the_type_that_was_chosen():
    saved = as_saved(TrainConfig(model="somewhere", task="x.jsonl", dtype="bfloat16"))
    automatic = TrainConfig(model="somewhere", task="x.jsonl")
    resumed = with_choices(automatic, saved)
    check_resumable(saved, resumed)
    assert (resumed.dtype, resumed.update.max_logp_diff) == ("bfloat16", 0.2)
    other = dataclasses.replace(automatic, dtype="float32")
    with pytest.raises(ValueError, match=r"^dtype"):
        check_resumable(saved, with_choices(other, saved))


def test_a_setting_of_another_version_must_not_get_lost():
    saved = as_saved(CONSTANT)
    check_resumable(saved | {"logging": saved["logging"] | {"removed": 1}}, CONSTANT)
    for name, unknown in (
        ("removed", {"removed": 1}),
        ("update.removed", {"update": saved["update"] | {"removed": 1}}),
        ("removed.setting", {"removed": {"setting": 1}}),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            check_resumable(saved | unknown, CONSTANT)
