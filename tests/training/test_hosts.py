"""Two processes do what one does: the same tokens, the same metrics, one outcome."""

import hashlib
import json
import os
import shutil
import signal
import time
from itertools import chain
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.training import small_run
from tests.training.joined_runs import SHORT_ANSWERS, run_joined
from tests.training.runs import ROOT, lines, scored, steps
from twinkle_jax.model import LoraConfig
from twinkle_jax.rollout import hosts
from twinkle_jax.training import (
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    LoraSettings,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
    TeacherConfig,
    TrainConfig,
    add_adapter,
    load_policy,
    save_policy,
    train,
)
from twinkle_jax.training import hosts as training_hosts
from twinkle_jax.training.hosts import (
    check_same,
    code_hashes,
    fingerprint,
    started_as_one_of_several,
)


def config(folder, directory, **changes):
    settings = {"reward": SHORT_ANSWERS, "mesh": MeshConfig(fsdp=8), "steps": 2}
    settings |= {"evaluation": small_run.evaluation(folder, every=0)}
    return small_run.config(folder, directory, **(settings | changes))


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch):
    """What the reward is asked in this process is written beside the run `one`."""
    monkeypatch.setenv("RECORD", str(tmp_path / "one.record"))


def assert_scored_once(run, alone):
    """Each completion is scored by one of the processes; returns what each has scored."""
    parts = [[*chain(*calls)] for calls in run.scored()]
    assert sorted(chain(*parts)) == sorted(chain(*scored(alone)))
    return parts


def assert_same_metrics(got, expected, atol=1e-5):
    assert len(lines(got)) == len(lines(expected)) > 0
    for one, other in zip(lines(got), lines(expected), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, abs=atol, rel=atol), (one["step"], name)
    [trained] = (path.name for path in (expected / "policy").glob("*.safetensors"))
    a, b = (load_file(run / "policy" / trained) for run in (got, expected))
    for name, value in b.items():
        np.testing.assert_allclose(a[name], value, atol=atol, err_msg=name)


@pytest.mark.slow
def test_two_processes_are_one(folder, tmp_path):
    short = {"steps": 1, "update": small_run.update(kl_beta=0.0)}
    alone = train(config(folder, tmp_path / "one", **short))
    run = run_joined(folder, config(folder, tmp_path / "two", **short))
    assert_same_metrics(tmp_path / "two", tmp_path / "one")
    together = json.loads((tmp_path / "two" / "summary.json").read_text())
    for name in ("accuracy_before", "accuracy_after"):
        assert together[name] == alone[name]
    first, second = assert_scored_once(run, tmp_path / "one")
    assert len(first) > len(second) > 0  # the evaluation's few problems are all in the first
    assert "step 1/1" in run.printed(0)
    assert run.printed(1).replace("[Gloo]", "").count("step") == 0


@pytest.mark.slow
def test_two_processes_of_one_device_split_the_layers(folder, tmp_path):
    """The second holds no row, and so scores none; adapters are whole on both."""
    changes = {
        "steps": 1,
        "reward": [SHORT_ANSWERS, "exact"],
        "mesh": MeshConfig(tensor=2),
        "lora": LoraSettings(rank=2),
        "update": small_run.update(advantage="gdpo", scale=None, kl_beta=0.0),
    }
    train(config(folder, tmp_path / "one", **changes))
    run = run_joined(folder, config(folder, tmp_path / "two", **changes), devices=1)
    assert_same_metrics(tmp_path / "two", tmp_path / "one")
    assert run.scored()[1] == []


@pytest.mark.exhaustive
def test_two_processes_score_with_a_reward_model(folder, tmp_path):
    """Each has the whole model, on its own devices, and scores the completions that it holds."""
    reward = small_run.make_reward_model(folder, tmp_path / "preference")
    short = {"steps": 2, "reward": reward, "update": small_run.update(kl_beta=0.0)}
    train(config(folder, tmp_path / "one", **short))
    run_joined(folder, config(folder, tmp_path / "two", **short))
    assert_same_metrics(tmp_path / "two", tmp_path / "one")


@pytest.mark.exhaustive
def test_two_processes_have_the_penalty_in_rewards(folder, tmp_path):
    """Log-ratios are on the devices of both, rewards on all hosts."""
    penalty = {"steps": 2, "update": small_run.update(kl_beta=0.5, kl_in="reward")}
    train(config(folder, tmp_path / "one", **penalty))
    run_joined(folder, config(folder, tmp_path / "two", **penalty))
    assert_same_metrics(tmp_path / "two", tmp_path / "one")


def test_files_that_differ_have_different_fingerprints(tmp_path):
    for size in (100, 3_000_000):  # of the larger, samples are read
        content = np.random.default_rng(0).bytes(size)
        contents = {"a": content, "same": content, "longer": content + b"\0"}
        for name, place in (("first", 0), ("middle", size // 2 - size // 30), ("last", size - 1)):
            changed = bytearray(content)
            changed[place] ^= 1
            contents[name] = bytes(changed)
        for name, written in contents.items():
            (tmp_path / name).write_bytes(written)
        prints = {name: fingerprint(tmp_path / name) for name in contents}
        assert prints.pop("a") == prints.pop("same")
        assert len({fingerprint(tmp_path / "a"), *prints.values()}) == 5


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        (SLURM, False),  # the batch script, outside srun
        (SLURM | {"SLURM_STEP_NODELIST": "node[1-8]"}, True),
        (SLURM | {"SLURM_STEP_NODELIST": "node1", "SLURM_NTASKS": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
    ],
)
def test_schedulers_that_start_several_processes_are_found(environment, several):
    assert started_as_one_of_several(environment) is several


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_number_of_tasks_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} .*'8x2'"):
        started_as_one_of_several({name: "8x2"})


def test_a_process_number_without_a_coordinator_is_refused(folder, tmp_path):
    alone = DistributedConfig(process_id=1)
    with pytest.raises(ValueError, match="coordinator_address"):
        train(config(folder, tmp_path / "run", distributed=alone))


@pytest.mark.parametrize("address", ["localhost", "localhost:", "localhost:http"])
def test_an_address_without_a_port_is_refused(folder, tmp_path, address):
    alone = DistributedConfig(address, num_processes=1, process_id=0)
    with pytest.raises(ValueError, match=r"coordinator_address must be HOST:PORT"):
        train(config(folder, tmp_path / "run", distributed=alone))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("clock", "clocks of all hosts must agree to within 60 s, got that of process 1"),
        ("version", "the version of optax must be the same in all processes"),
        ("setting", "jax_default_matmul_precision must be the same in all processes"),
    ],
)
def test_what_differs_between_two_processes_is_refused_by_name(folder, tmp_path, change, name):
    """The second has another clock, another version or another setting of JAX."""
    file, text = {
        "clock": (
            "sitecustomize.py",
            "import time\nt = time.time\ntime.time = lambda: t() + 120\n",
        ),
        "version": ("optax-0.0.1.dist-info/METADATA", "Name: optax\nVersion: 0.0.1\n"),
        "setting": ("empty", ""),
    }[change]
    path = tmp_path / "first on the path" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    variables = {"PYTHONPATH": f"{tmp_path / 'first on the path'}{os.pathsep}{ROOT}"}
    if change == "setting":
        variables["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    run = run_joined(
        folder, config(folder, tmp_path / "run"), variables={1: variables}, status=1, seconds=60
    )
    [first], second = run.complaints()
    assert name in first
    assert second == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("versions", "the version of jax"),
        ("settings", "jax_default_matmul_precision"),
        ("file", "more.txt of model"),
        ("reward", "more.txt of reward .*/preference"),
        ("tools", "the file of tools"),
        ("clock", "clocks"),
    ],
)
def test_what_differs_on_one_host_is_named(folder, tmp_path, monkeypatch, change, name):
    """Seen from one process, which computes what the other one would share."""
    versions = training_hosts.package_versions()
    clock, reward = time.time, tmp_path / "preference"
    reward.mkdir()
    tools = tmp_path / "tools.py"
    tools.write_text("def now() -> str: ...\n")
    more = (reward if change == "reward" else folder / "model") / "more.txt"

    def share(call, compute):
        first = compute()
        with monkeypatch.context() as other, jax.default_matmul_precision(precision):
            if change == "versions":
                other.setattr(training_hosts, "package_versions", lambda: versions | {"jax": "0.0"})
            if change == "clock":
                other.setattr(time, "time", lambda: clock() + 120)
                return [first, time.time() if call == "comparing clocks" else compute()]
            if change in ("file", "reward"):
                more.write_text("of one host")
            if change == "tools":
                tools.write_text("def then() -> str: ...\n")
            second = compute()
            more.unlink(missing_ok=True)
            return [first, second]

    precision = "highest" if change == "settings" else None
    monkeypatch.setattr(hosts, "several", lambda: True)
    monkeypatch.setattr(hosts, "share", share)
    with pytest.raises(hosts.SharedError, match=name):
        check_same(config(folder, tmp_path / "run", reward=str(reward), tools=str(tools)), [], [])


def test_the_files_that_a_run_imports_are_hashed_by_option(tmp_path):
    file = tmp_path / "code.py"
    file.write_text("x = 1\n")
    digest = hashlib.sha256(b"x = 1\n").hexdigest()
    named = {"environment": f"trl:{file}:Game", "tools": str(file), "reward": [f"{file}:f", "math"]}
    hashes = {"environment": digest, "tools": digest, f"reward {file}:f": digest}
    assert code_hashes(TrainConfig(**named)) == hashes
    module = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    named = {"environment": f"gym:{__name__}:Game", "tools": __name__}
    assert code_hashes(TrainConfig(**named)) == {"environment": module, "tools": module}
    assert code_hashes(TrainConfig(environment="openenv:http://localhost:8000")) == {}


@pytest.mark.parametrize("adapter", [False, True])
def test_the_files_of_a_teacher_are_hashed_with_an_adapters_base(folder, tmp_path, adapter):
    shutil.copytree(folder / "model", tmp_path / "base")
    teacher, base = str(tmp_path / "base"), load_policy(str(tmp_path / "base"))
    if adapter:
        teacher = str(tmp_path / "adapter")
        save_policy(add_adapter(base, LoraConfig(r=2), base=str(tmp_path / "base")), teacher)
    config = TrainConfig(teacher=TeacherConfig(model=teacher))
    before = code_hashes(config)
    assert before.keys() == {"teacher.model"}
    assert code_hashes(config) == before
    save_policy(base._replace(params=jax.tree.map(lambda x: x + 1, base.params)), tmp_path / "base")
    assert code_hashes(config) != before
    served = TeacherConfig(model=teacher, url="http://localhost:1")
    assert code_hashes(TrainConfig(teacher=served)) == {}


@pytest.mark.slow
def test_hosts_that_are_started_differently_are_refused_by_name(folder, tmp_path):
    other = {1: ["--optimizer.learning_rate=0.02"]}
    run = run_joined(folder, config(folder, tmp_path / "run"), extra=other, status=1)
    [first], second = run.complaints()
    assert "optimizer.learning_rate must be the same" in first
    assert "0.02 in process 1" in first
    assert second == []
    assert not (tmp_path / "run").exists()


def messages(monkeypatch, then=lambda calls: None):
    """The names of messages as they are sent; `then` is called with them after each."""
    calls, exchange = [], hosts._exchange

    def counted(call, *message):
        received = exchange(call, *message)
        calls.append(call)
        then(calls)
        return received

    monkeypatch.setattr(hosts, "several", lambda: True)
    monkeypatch.setattr(hosts, "_exchange", counted)
    return calls


@pytest.mark.slow
def test_the_messages_of_a_step(folder, tmp_path, monkeypatch):
    """Each takes milliseconds on CPUs, whatever its size; seen from one process that sends all."""
    calls = messages(monkeypatch)
    train(config(folder, tmp_path / "run"))
    last = "writing metrics"
    begin = calls.index(last) + 1
    expected = ["encoding prompts", "decoding completions", "computing rewards", last]
    assert calls[begin : begin + 4] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "count"), [("computing rewards", 2), ("saving step 2", 1)])
def test_a_signal_after_the_rewards_ends_a_run_before_it_draws(
    folder, tmp_path, monkeypatch, moment, count
):
    """During the update, or while a checkpoint is begun; the evaluation before has a reward too."""

    def send(calls):
        if calls[-1] == moment and calls.count(moment) == count:
            signal.raise_signal(signal.SIGTERM)

    calls = messages(monkeypatch, send)
    rarely = LoggingConfig(checkpoint_every=2, samples_every=0)
    summary = train(config(folder, tmp_path / "run", logging=rarely, steps=3))
    assert summary["interrupted"]
    assert summary["steps"] == calls.count("writing metrics")
    assert summary["steps"] == calls.count("encoding prompts") - 1  # and an evaluation before
    assert summary["steps"] == (1 if moment == "computing rewards" else 2)


LONG = {  # settings of the update and others, and how many processes have how many devices
    "rloo, tensor": ({}, {"mesh": MeshConfig(data=2, fsdp=2, tensor=2)}, 2, 4),
    "batch, once": (
        {"advantage": "grpo", "scale": "batch", "mini_batches": 2},
        {"mesh": MeshConfig(data=2, fsdp=4, transfers="once")},
        2,
        4,
    ),
    "reinforce++": (
        {
            "advantage": "reinforce_plus_plus",
            "scale": None,  # which it does not have
            "kl_beta": 0.0,
            "dynamic_sampling": 3,
        },
        {},
        2,
        4,
    ),
    "lora": ({}, {"lora": LoraSettings(rank=2, dropout=0.1)}, 2, 4),
    "lora, once": (
        {},
        {
            "lora": LoraSettings(rank=2, dropout=0.1),
            "mesh": MeshConfig(fsdp=8, transfers="once"),
        },
        2,
        4,
    ),
    # 128 rows: each of the two updates adds up several micro-batches.
    "grpo": (
        {"advantage": "grpo", "scale": "group", "mini_batches": 2, "micro_batch_tokens": 36},
        {
            "rollout": RolloutConfig(
                prompts=2, num_samples=64, max_new_tokens=4, max_prompt_tokens=32
            )
        },
        4,
        2,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", LONG)
def test_twenty_steps_are_the_same(folder, tmp_path, case):
    """With and without a reference, one update a step and several, accumulated or not."""
    update, changes, processes, devices = LONG[case]
    # Sums over devices round in another order, which a high learning rate amplifies.
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=1)
    judged = small_run.evaluation(folder, every=10)
    changes = changes | {"steps": 20, "optimizer": optimizer, "evaluation": judged}
    changes["update"] = small_run.update(**update)
    train(config(folder, tmp_path / "one", **changes))
    several = config(folder, tmp_path / "several", **changes)
    run = run_joined(folder, several, processes=processes, devices=devices, seconds=500)
    assert_same_metrics(tmp_path / "several", tmp_path / "one")
    assert_scored_once(run, tmp_path / "one")


def games(folder, directory, environment="Guess", **changes):
    """Eight episodes a step, four in each of two processes."""
    sizes = {"prompts": 2, "num_samples": 4, "max_new_tokens": 4, "max_prompt_tokens": 16}
    settings = {
        "environment": f"tests.rollout.games:{environment}",
        "task": "environment",
        "rollout": RolloutConfig(
            max_turns=3, max_episode_tokens=32, **(sizes | changes.pop("rollout", {}))
        ),
        "update": small_run.update(kl_beta=0.0, credit="turn", discount=0.5),
        "optimizer": OptimizerConfig(learning_rate=1e-3, warmup_steps=1),
        "evaluation": EvaluationConfig(every=3, problems=4),
        "logging": LoggingConfig(checkpoint_every=1, samples_every=1, traces_every=1),
        "steps": 3,
    }
    return config(folder, directory, **(settings | changes))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "rollout",
    [
        {"cohorts": 2},
        {"history": "template"},
        {"slots": 8, "num_samples": 8},
    ],
    ids=["append", "template", "read again"],
)
def test_two_processes_play_the_episodes_of_one(folder, tmp_path, rollout):
    """Each plays half of them, with a reward on top; texts, rewards and metrics are the same."""
    train(games(folder, tmp_path / "one", rollout=rollout))
    run = run_joined(folder, games(folder, tmp_path / "two", rollout=rollout))
    assert_same_metrics(tmp_path / "two", tmp_path / "one")
    traces = sorted((tmp_path / "one" / "traces").iterdir())
    assert len(traces) == 3
    for path in traces:
        assert path.read_text() == (tmp_path / "two" / "traces" / path.name).read_text()
    first, second = assert_scored_once(run, tmp_path / "one")
    assert len(first) == len(second) > 0


@pytest.mark.exhaustive
def test_environments_that_fail_on_one_host_are_counted_on_all(folder, tmp_path):
    """The second process plays 2 episodes of the first evaluation and 4 of a step, and no more."""
    fault = {1: {"FAULT": "6"}}
    some = games(folder, tmp_path / "some", "BrokenHere", rollout={"max_failed": 0.5})
    run_joined(folder, some, variables=fault)
    steps_of_run = lines(tmp_path / "some")
    assert [line["environment/failed"] for line in steps_of_run] == [0, 0.5, 0.5]
    assert [line["environment/retried"] for line in steps_of_run] == [0, 0.5, 0.5]
    assert steps_of_run[2]["environment/failed/raised"] == 0.5
    last_alone = LoggingConfig(checkpoint_every=99, samples_every=0)
    many = games(folder, tmp_path / "many", "BrokenHere", logging=last_alone)
    run = run_joined(folder, many, variables=fault, status=1)
    [message], others = run.complaints()
    assert "max_failed=0.1" in message
    assert "4 of 8; the first (raised): OSError: no such game here" in message
    assert others == []
    assert steps(tmp_path / "many")[-1] == 1


@pytest.mark.exhaustive
def test_strange_answers_on_one_host_are_failures_of_their_episodes(folder, tmp_path):
    """What JSON cannot hold, NaN, 100 MB. The second process plays one of 3 evaluation episodes."""
    strange = games(
        folder,
        tmp_path / "run",
        "StrangeHere",
        rollout={"max_failed": 0.5, "max_observation": 64},
        evaluation=EvaluationConfig(every=2, problems=3),
        steps=2,
    )
    run_joined(folder, strange, variables={1: {"FAULT": "1"}})
    first, second = lines(tmp_path / "run")
    # Kinds 0 and 1 come before the first step: then 2, 3, 4, 0 and again 1, 2, 3; 4, 0, 1, 2 and
    # again 3, 4, 0.
    assert (first["environment/failed"], second["environment/failed"]) == (3 / 8, 2 / 8)
    assert (first["environment/retried"], second["environment/retried"]) == (3 / 8, 3 / 8)
    assert first["environment/failed/reply"] == 2 / 8
    assert first["environment/failed/raised"] == 1 / 8
    records = [
        json.loads(line)
        for path in (tmp_path / "run" / "traces").iterdir()
        for line in path.read_text().splitlines()
    ]
    shown = [m["content"] for record in records for m in record["messages"]]
    assert max(map(len, shown)) < 128


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["one", "two"])
def test_a_run_goes_on_with_another_number_of_processes(folder, tmp_path, first):
    every = {"logging": small_run.EVERY_STEP, "steps": 4}
    uninterrupted, cut = config(folder, tmp_path / "whole", **every), tmp_path / "cut"
    train(uninterrupted)
    begin = config(folder, cut, **(every | {"steps": 2}))
    go_on = config(folder, cut, resume="auto", mesh=MeshConfig(data=2, fsdp=4), **every)
    for part, together in ((begin, first == "two"), (go_on, first == "one")):
        if together:
            run_joined(folder, part, files=tmp_path / "files")
        else:
            train(part)
    assert_same_metrics(cut, tmp_path / "whole")
