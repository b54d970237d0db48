"""Where a run is: what its checkpoint says of it, and which directory belongs to whom."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from twinkle_jax.training import LoggingConfig, TrainConfig
from twinkle_jax.training.checkpoint import RunCheckpoints
from twinkle_jax.training.metrics import MetricsLog
from twinkle_jax.training.progress import (
    LastStep,
    Progress,
    Totals,
    prepare_directory,
    restore,
    save,
)


class Loader:
    def set_state(self, state):
        self.state = state


def test_a_checkpoint_gives_progress_back(tmp_path):
    checkpoints, config = RunCheckpoints(tmp_path), TrainConfig()
    totals = Totals(7, 1, 2.5, 0.5, 123, '{"kl": NaN}')
    progress = Progress({"x": jnp.arange(3.0)}, jax.random.key(4), 2, totals, {"position": 9})
    save(checkpoints, progress, None, config)
    facts = json.loads((checkpoints.path(2) / "facts.json").read_text())
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["config"] == dataclasses.asdict(config)
    fresh = Progress({"x": jnp.zeros(3)}, jax.random.key(0), 0, Totals(), {})
    loader = Loader()
    found, reference = restore(checkpoints, fresh, None, config, loader)
    assert (found.step, found.totals, found.data, reference) == (2, totals, {"position": 9}, None)
    assert loader.state == {"position": 9}
    assert found.state["x"].tolist() == [0, 1, 2]


def test_a_directory_is_used_by_one_run_at_a_time(tmp_path):
    config = TrainConfig(output_dir=str(tmp_path), overwrite=True)
    with MetricsLog(tmp_path), pytest.raises(FileExistsError, match="output_dir"):
        prepare_directory(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").exists()
    assert prepare_directory(config, tmp_path) is None


def test_a_run_that_failed_before_its_first_step_is_no_obstacle(tmp_path):
    """A process that stopped in its first evaluation: what it left is no run."""
    with MetricsLog(tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "checkpoints" / ".step_00000000.01234567.partial").mkdir(parents=True)
    config = TrainConfig(output_dir=str(tmp_path), logging=LoggingConfig())
    assert prepare_directory(config, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="output_dir"):
        prepare_directory(config, tmp_path)


def test_a_step_whose_writing_has_failed_is_saved_again():
    """Written in the background, it counts as saved only until that is known to have failed."""
    written, errors = [], [OSError("no space")]

    def settle(*, wait):
        if errors:
            raise errors.pop()

    last = LastStep(lambda progress, *, wait: written.append(wait), settle)
    last.finished(Progress({"x": jnp.zeros(3)}, jax.random.key(0), 1, Totals(), {}))
    last.save(wait=False)
    with pytest.raises(OSError, match="no space"):
        last.poll()
    last.save()
    last.save()  # nothing is left to write
    assert written == [False, True]
