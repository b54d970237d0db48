"""Two processes do what one does: the same tokens, the same metrics, one outcome."""

import json
from itertools import chain

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.training import small_run
from tests.training.joined_runs import SHORT_ANSWERS, JoinedRun
from twinkle_jax.training import (
    DistributedConfig,
    MeshConfig,
    OptimizerConfig,
    train,
)
from twinkle_jax.training.hosts import started_as_one_of_several

TIMES = ("time/sample", "step_time", "tokens_per_second")


def config(folder, directory, **changes):
    settings = {"reward": SHORT_ANSWERS, "mesh": MeshConfig(fsdp=8), "steps": 2}
    settings |= {"evaluation": small_run.evaluation(folder, every=2)}
    return small_run.config(folder, directory, **(settings | changes))


def metrics(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in TIMES} for x in lines]


def assert_same_metrics(got, expected, atol=1e-5):
    assert len(metrics(got)) == len(metrics(expected)) > 0
    for one, other in zip(metrics(got), metrics(expected), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, abs=atol, rel=atol), (one["step"], name)
    a, b = (load_file(run / "policy" / "model.safetensors") for run in (got, expected))
    for name, value in b.items():
        np.testing.assert_allclose(a[name], value, atol=atol, err_msg=name)


def test_two_processes_are_one(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    train(config(folder, tmp_path / "one"))
    with JoinedRun(folder, config(folder, tmp_path / "two")) as run:
        assert run.wait() == [0, 0], run.errors(0) + run.errors(1)
    assert_same_metrics(tmp_path / "two", tmp_path / "one")
    # Each completion is scored once, by one of the processes, and both have some.
    calls = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    first, second, alone = ([*chain(*calls)] for calls in (*run.scored(), calls))
    assert sorted(first + second) == sorted(alone)
    assert len(first) > len(second) > 0  # the evaluation's few problems are all in the first
    assert "step 2/2" in run.printed(0)
    assert run.printed(1).replace("[Gloo]", "").count("step") == 0


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, False),  # the batch script, before srun
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
    ],
)
def test_schedulers_that_start_several_processes_are_found(environment, several):
    assert started_as_one_of_several(environment) is several


def test_a_process_number_without_a_coordinator_is_refused(folder, tmp_path):
    alone = DistributedConfig(process_id=1)
    with pytest.raises(ValueError, match="coordinator_address"):
        train(config(folder, tmp_path / "run", distributed=alone))


def test_hosts_that_are_started_differently_are_refused_by_name(folder, tmp_path):
    other = {1: ["--optimizer.learning_rate=0.02"]}
    with JoinedRun(folder, config(folder, tmp_path / "run"), extra=other) as run:
        assert run.wait() == [1, 1], run.errors(0) + run.errors(1)
    [first], second = run.complaints()
    assert "optimizer.learning_rate must be the same" in first
    assert "0.02 in process 1" in first
    assert second == []
    assert not (tmp_path / "run").exists()


LONG = [  # an update, and how many processes have how many devices
    (small_run.update(), 2, 4),
    (small_run.update(advantage="grpo", scale="batch", kl_beta=0.0, mini_batches=2), 2, 4),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("update", "processes", "devices"), LONG)
def test_twenty_steps_are_the_same(folder, tmp_path, monkeypatch, update, processes, devices):
    """With a reference on a mesh of three axes; with statistics over the batch and mini-batches."""
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    mesh = (
        MeshConfig(data=2, fsdp=2, tensor=2) if update.advantage == "rloo" else MeshConfig(fsdp=8)
    )
    # Sums over devices round in another order, which a high learning rate amplifies.
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=1)
    changes = {"steps": 20, "update": update, "mesh": mesh, "optimizer": optimizer}
    train(config(folder, tmp_path / "one", **changes))
    several = config(folder, tmp_path / "several", **changes)
    with JoinedRun(folder, several, processes=processes, devices=devices) as run:
        assert run.wait(500) == [0] * processes, run.errors(0) + run.errors(1)
    assert_same_metrics(tmp_path / "several", tmp_path / "one")
    calls = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    alone = [*chain(*calls)]
    together = [*chain(*(chain(*calls) for calls in run.scored()))]
    assert sorted(together) == sorted(alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["one", "two"])
def test_a_run_goes_on_with_another_number_of_processes(folder, tmp_path, monkeypatch, first):
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    every = {"logging": small_run.EVERY_STEP, "steps": 4}
    whole, cut = config(folder, tmp_path / "whole", **every), tmp_path / "cut"
    train(whole)
    begin = config(folder, cut, **(every | {"steps": 2}))
    go_on = config(folder, cut, resume="auto", mesh=MeshConfig(data=2, fsdp=4), **every)
    for part, together in ((begin, first == "two"), (go_on, first == "one")):
        if together:
            with JoinedRun(folder, part, files=tmp_path / "files") as run:
                assert run.wait() == [0, 0], run.errors(0) + run.errors(1)
        else:
            train(part)
    assert_same_metrics(cut, tmp_path / "whole")
