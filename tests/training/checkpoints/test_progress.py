"""Where a run is: what its checkpoint says of it, and of metrics that wait for an evaluation."""

import json

import jax
import jax.numpy as jnp

from twinkle_jax.training import TrainConfig
from twinkle_jax.training.checkpoints.progress import Progress, save
from twinkle_jax.training.checkpoints.run_checkpoints import RunCheckpoints
from twinkle_jax.training.shown.metrics_log import MetricsLog


def test_metrics_that_wait_begin_where_the_log_was_even_if_they_are_written_meanwhile(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "checkpoints")
    with MetricsLog(tmp_path) as log:
        log.write(1, {"reward": 0.5})
        offset = log.offset
        waiting = {"unwritten": {"metrics": "{}", "offset": offset}}
        log.write(2, {"reward": 0.5})
        for step, facts, expected in ((2, waiting, offset), (3, {}, log.offset)):
            progress = Progress({"x": jnp.zeros(2)}, jax.random.key(0), step, facts, {})
            save(checkpoints, progress, None, TrainConfig(), log)
            found = json.loads((checkpoints.path(step) / "facts.json").read_text())
            assert found["metrics_offset"] == expected
            assert found["versions"]["jax"] == jax.__version__
            assert found["config"]["seed"] == TrainConfig().seed
