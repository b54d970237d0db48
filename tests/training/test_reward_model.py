"""Runs whose reward is a model, named by its directory."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from tests.training import small_run
from twinkle_jax.model import RewardModel
from twinkle_jax.training import EvaluationConfig, MeshConfig, TrainConfig, start, train
from twinkle_jax.training.task import make_task

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")


@pytest.fixture
def files(tmp_path):
    """The files of a run, and a reward model of the policy's size."""
    small_run.make_files(tmp_path)
    small_run.make_reward_model(tmp_path, tmp_path / "preference")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_run_learns_from_the_scores_of_a_model(devices, files, monkeypatch, capfd):
    calls, score = [], RewardModel.__call__
    limits, fit = [], start.fit

    def record(self, trajectories, truths=None):
        calls.append((self, score(self, trajectories, truths)))
        return calls[-1][1]

    def record_limit(recipe, state, limit, *args, **options):
        limits.append(limit)
        return fit(recipe, state, limit, *args, **options)

    monkeypatch.setattr(RewardModel, "__call__", record)
    monkeypatch.setattr(start, "fit", record_limit)
    config = small_run.config(
        files,
        files / "run",
        steps=2,
        reward=[str(files / "preference"), "exact"],
        reward_weights=[0.5, 2.0],
        mesh=MeshConfig(data=devices // 2 or 1, fsdp=min(devices, 2), memory=4.0),
    )
    train(config)
    lines = [json.loads(x) for x in (files / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(calls) == 2
    for line, (model, scores) in zip(lines, calls, strict=True):
        assert len(scores) == 8 and np.ptp(scores) > 0
        assert line["rewards/preference/mean"] == pytest.approx(np.mean(scores), rel=1e-5)
        total = 0.5 * line["rewards/preference/mean"] + 2 * line["rewards/exact/mean"]
        assert line["reward"] == pytest.approx(total, rel=1e-5)
        kernel = model.params["layers"]["0"]["mlp"]["up_proj"]["kernel"]
        assert kernel.addressable_shards[0].data.size == kernel.size // devices
    held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(calls[0][0].params)]
    assert limits == [4 * 2**30 - sum(held)]  # of each device
    assert "reward models take" in capfd.readouterr().out


def test_a_model_may_judge_alone(files):
    names = {"reward": "exact", "evaluation": EvaluationConfig(reward=str(files / "preference"))}
    task = make_task(TrainConfig(**names))
    assert task.reward_models() == [task.judge]
    names["reward"] = [str(files / "preference"), "exact"]
    assert len(make_task(TrainConfig(**names)).reward_models()) == 1  # read once for both
    (files / "math").mkdir()  # the name of a reward comes first
    assert not make_task(TrainConfig(reward="math")).reward_models()


def test_what_is_not_there_is_named_by_its_option(files):
    for name in ("no/such/model", f"{files}/preferences"):
        with pytest.raises(ValueError, match=f"^reward must be a directory.*{name}"):
            make_task(TrainConfig(reward=name))
    for name in ("preferences", "rewards/short.py", "rewards/short.py:score", "a.b:score"):
        with pytest.raises(ValueError, match=r"^reward .*(NAME|not found)"):
            make_task(TrainConfig(reward=name))
    with pytest.raises(ValueError, match=r"^evaluation\.reward must be a reward model"):
        make_task(TrainConfig(evaluation=EvaluationConfig(reward=str(files / "model"))))


def test_a_run_does_not_delete_its_reward_model(files):
    config = TrainConfig(reward=str(files / "preference"), output_dir=str(files), overwrite=True)
    (files / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    with pytest.raises(FileExistsError, match="must not hold reward"):
        train(config)
    assert (files / "preference" / "model.safetensors").exists()
