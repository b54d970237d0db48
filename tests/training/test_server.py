"""Runs that sample on a server, which has the weights of each step."""

import json
import re
import shutil
import threading

import chex
import pytest

from tests.model.families import each
from tests.rollout import games
from tests.sampler.vllm.fake_server import FakeServer, adapters_in, lose, write_checkpoint
from tests.training.joined_runs import run_joined
from tests.training.options import config_of
from tests.training.runs import TIMES
from tests.training.test_hosts import assert_same_metrics
from twinkle_jax.command import main
from twinkle_jax.rollout import hosts, server_engine
from twinkle_jax.rollout.engine import LogitsError
from twinkle_jax.sampler import ServerError, vllm_server
from twinkle_jax.training import SamplerMismatchError, export, load_policy, train
from twinkle_jax.training import run as run_module
from twinkle_jax.training.engine import make_engine

EXACT = 1e-5  # difference of log-probabilities in float32
LENGTHS = "tests.training.test_server:likes_short"


def likes_short(trajectories, truths):
    return [1.0 / len(t["messages"][-1]["content"] or "-") for t in trajectories]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint and six problems, four tokens each."""
    place = tmp_path_factory.mktemp("served")
    write_checkpoint(place / "model", characters="0123456789+-*()=")
    rows = [{"prompt": f"{a}+2=", "answer": str(a + 2)} for a in range(6)]
    (place / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


@pytest.fixture
def server(folder):
    with FakeServer(folder / "model") as running:
        yield running


def settings(folder, server, tmp_path, **changes):
    return {
        "model": str(folder / "model"),
        "task": str(folder / "task.jsonl"),
        "reward": LENGTHS,
        "steps": 3,
        "output_dir": str(tmp_path / "run"),
        "server.url": None if server is None else server.url,
        "rollout.prompts": 2,
        "rollout.num_samples": 4,
        "rollout.max_new_tokens": 8,
        "rollout.max_prompt_tokens": 32,
        "update.mini_batches": 2,
        "optimizer.learning_rate": 1e-3,
        "evaluation.every": 0,
        "evaluation.problems": 4,
        "logging.samples_every": 0,
    } | {name.replace("__", "."): value for name, value in changes.items()}


def run(folder, server, tmp_path, **changes):
    """Train, and return the metrics of each step."""
    train(config_of(settings(folder, server, tmp_path, **changes)))
    return read_metrics(tmp_path / "run")


def read_metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def loads(server):
    return server.paths().count("/collective_rpc")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", each([{}, {"mesh__fsdp": 2, "mesh__tensor": 2}]), ids=str)
def test_each_step_samples_from_the_policy_that_it_trains(folder, server, tmp_path, mesh):
    rows = run(folder, server, tmp_path, **mesh)
    assert len(rows) == 3
    assert all(row["sampling/logp_diff/max"] < EXACT for row in rows)
    assert loads(server) == 3  # one a step: nothing is evaluated
    assert not any("/v1/load_lora_adapter" in path for path in server.paths())


@pytest.mark.slow
def test_what_the_server_has_at_the_end_is_the_policy_that_is_saved(folder, server, tmp_path):
    held_out = {"evaluation__path": str(folder / "task.jsonl"), "evaluation__every": 2}
    rows = run(folder, server, tmp_path, **held_out)
    assert [("eval/accuracy" in row) for row in rows] == [False, True, False]
    assert loads(server) == 4  # the last one for the evaluation at the end
    saved = load_policy(str(tmp_path / "run" / "policy")).params
    chex.assert_trees_all_equal(saved, dict(server.models[server.name].params))


@pytest.mark.slow
def test_the_policy_of_a_run_is_exported_without_a_server(folder, server, tmp_path, monkeypatch):
    run(folder, server, tmp_path, steps=1)
    monkeypatch.setattr("twinkle_jax.training.engine.ServedSampler", None)
    export(tmp_path / "run", tmp_path / "exported")
    saved, exported = (load_policy(str(tmp_path / x)).params for x in ("run/policy", "exported"))
    chex.assert_trees_all_equal(saved, exported)


@pytest.mark.slow
def test_adapters_are_loaded_one_after_the_other(folder, server, tmp_path):
    rows = run(folder, server, tmp_path, lora__rank=2, optimizer__learning_rate=1e-2)
    assert all(row["sampling/logp_diff/max"] < EXACT for row in rows)
    assert server.paths().count("/v1/load_lora_adapter") == 3
    assert not loads(server)
    assert len(adapters_in(tmp_path / "run" / "weights")) == 1


EPISODES = {
    "environment": "tests.rollout.games:Guess",
    "task": "environment",
    "reward": None,
    "rollout.max_turns": 3,
    "rollout.max_prompt_tokens": 16,
    "rollout.max_episode_tokens": 60,
}


@pytest.mark.slow
@pytest.mark.parametrize("history", each(["append", "template"]))
def test_episodes_of_several_turns(folder, server, tmp_path, history):
    rows = run(folder, server, tmp_path, **EPISODES, rollout__history=history)
    assert all(row["sampling/logp_diff/max"] < EXACT for row in rows)
    assert max(row["environment/turns"] for row in rows) > 1
    assert not games.OPEN


# Overlap: the rollout of the next step during the update of this one.


@pytest.mark.slow
def test_overlapped_steps_learn_from_the_policy_before(folder, server, tmp_path):
    rows = run(folder, server, tmp_path, server__overlap=True, steps=4)
    first, *others = [row["sampling/logp_diff/max"] for row in rows]
    assert first < EXACT
    # The learning rate of 1e-3 moves log-probabilities by more than rounding, and not by much.
    assert all(EXACT < difference < 0.5 for difference in others)
    assert loads(server) == 3  # of the policies before steps 1, 2 and 3


def drawn(server):
    """The prompt and the seed of each request of a step, not of probes."""
    asked = [body for path, body in server.asked if path == "/v1/completions"]
    return [(body["prompt"], body["seed"]) for body in asked if body["n"] == 4]


@pytest.mark.slow
def test_overlapped_steps_draw_the_same_prompts_with_the_same_seeds(folder, server, tmp_path):
    run(folder, server, tmp_path / "alone", steps=4)
    alone, server.asked = drawn(server), []
    run(folder, server, tmp_path / "overlapped", steps=4, server__overlap=True)
    assert sorted(drawn(server)) == sorted(alone)
    assert len({seed for _, seed in alone}) == len(alone) == 8


@pytest.mark.slow
def test_a_run_that_is_cut_off_draws_the_lost_prompts_again(folder, server, tmp_path, monkeypatch):
    changes = {"server__overlap": True, "optimizer__schedule": "constant"}
    run(folder, server, tmp_path / "whole", steps=4, **changes)
    whole, server.asked = drawn(server), []
    train_step = run_module.train_step

    def cut_off(*arguments, **options):
        if options["seed"][1] == 1:  # the prompts of step 3 are being drawn
            raise ValueError("cut off")
        return train_step(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "train_step", cut_off)
        with pytest.raises(ValueError, match="cut off"):
            run(folder, server, tmp_path / "part", steps=4, **changes)
    server.asked = []
    run(folder, server, tmp_path / "part", steps=4, **changes, resume="auto")
    assert sorted(drawn(server)) == sorted(whole[2:])  # two prompts a step


@pytest.mark.slow
def test_the_server_samples_while_the_update_runs(folder, server, tmp_path, monkeypatch):
    """Neither can end before the other has begun."""
    updating, sampling = threading.Event(), threading.Event()
    train_step = run_module.train_step

    def overlapped(*arguments, **options):
        updating.set()
        if options["seed"][1] == 0:
            assert sampling.wait(60)
        return train_step(*arguments, **options)

    def answer(handler):
        if handler.body["n"] == 4 and len(drawn(server)) > 2:  # of the second step
            assert updating.wait(60)
            sampling.set()
        return False

    monkeypatch.setattr(run_module, "train_step", overlapped)
    server.take_over["/v1/completions"] = answer
    run(folder, server, tmp_path, server__overlap=True, steps=2)
    assert sampling.is_set()


@pytest.mark.slow
def test_a_resumed_run_with_overlap_repeats_the_steps(folder, server, tmp_path):
    """A checkpoint is not overlapped: the step after it samples from the policy that it holds."""
    changes = {"server__overlap": True, "steps": 6, "logging__checkpoint_every": 3}
    changes |= {"optimizer__schedule": "constant"}
    whole = run(folder, server, tmp_path / "whole", **changes)
    run(folder, server, tmp_path / "part", **(changes | {"steps": 3}))
    rest = run(folder, server, tmp_path / "part", **changes, resume="auto")
    times = ("time/sample", "step_time", "tokens_per_second")
    for mine, theirs in zip(whole, rest, strict=True):
        assert {k: v for k, v in mine.items() if k not in times} == {
            k: v for k, v in theirs.items() if k not in times
        }
    assert whole[3]["sampling/logp_diff/max"] < EXACT < whole[4]["sampling/logp_diff/max"]


@pytest.mark.slow
def test_a_resumed_run_may_begin_to_overlap(folder, server, tmp_path):
    """The limit of the sampler's mismatch then is that of overlapped steps."""
    options = {"steps": 2, "logging__checkpoint_every": 10, "optimizer__learning_rate": 3e-3}
    run(folder, server, tmp_path, **options)
    resumed = ["train", "--output_dir", str(tmp_path / "run"), "--resume", "auto"]
    assert main([*resumed, "--server.overlap", "true", "--steps", "5"]) == 0
    differences = [row["sampling/logp_diff/mean"] for row in read_metrics(tmp_path / "run")]
    assert max(differences) > 1e-3  # the limit of float32 without overlap
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["update"]["max_logp_diff"] == 0.2


def test_an_error_of_the_next_rollout_ends_the_run_after_the_update(folder, server, tmp_path):
    def fail_in_step_3(handler):
        # Probes ask for few tokens; the prompts of a step for 8, 2 requests a step.
        asked = [body for path, body in server.asked if path == "/v1/completions"]
        if sum(body["n"] == 4 for body in asked) <= 4 or handler.body["n"] != 4:
            return False
        handler.send_error(400, "no more")
        return True

    server.take_over["/v1/completions"] = fail_in_step_3
    with pytest.raises(ServerError, match="400"):
        run(folder, server, tmp_path, server__overlap=True, steps=5)
    assert len(read_metrics(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()


def test_a_run_that_ends_does_not_wait_for_the_server(folder, server, tmp_path, monkeypatch):
    """The update fails while the server is silent about the next rollout."""
    silent, ended = threading.Event(), threading.Event()

    def fail(*arguments, **options):
        assert silent.wait(60)
        raise ValueError("no update today")

    def be_silent(handler):
        asked = [body for path, body in server.asked if path == "/v1/completions"]
        if sum(body["n"] == 4 for body in asked) <= 2 or handler.body["n"] != 4:
            return False
        silent.set()
        ended.wait(60)
        return True

    monkeypatch.setattr(run_module, "train_step", fail)
    server.take_over["/v1/completions"] = be_silent
    try:
        with pytest.raises(ValueError, match="no update today"):
            run(folder, server, tmp_path, server__overlap=True)
        assert not any(t.name == "next rollout" and t.is_alive() for t in threading.enumerate())
    finally:
        ended.set()


# What cannot be sampled is refused.


@pytest.mark.slow
def test_a_run_that_fails_in_its_first_evaluation_leaves_its_directory_free(
    folder, server, tmp_path
):
    held_out = {"evaluation__path": str(folder / "task.jsonl"), "steps": 1}
    server.take_over["/reset_prefix_cache"] = lambda handler: handler.send_error(404) or True
    with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE"):
        run(folder, server, tmp_path, **held_out)
    assert (tmp_path / "run" / "weights").is_dir()
    server.take_over.clear()
    assert len(run(folder, server, tmp_path, **held_out)) == 1


@pytest.mark.slow
def test_a_server_that_keeps_its_weights_ends_the_run(folder, server, tmp_path):
    def stop_loading(handler):
        server.loads = loads(server) < 2
        return False

    server.take_over["/pause"] = stop_loading
    with pytest.raises(ServerError, match="policy's weights"):
        run(folder, server, tmp_path, optimizer__learning_rate=0.1, optimizer__warmup_steps=0)
    assert (tmp_path / "run" / "checkpoints").is_dir()


def without_times(rows):
    return [{name: x for name, x in row.items() if name not in TIMES} for row in rows]


RESTARTED = {
    "checkpoint": {},
    "adapter": {"lora__rank": 2},
    "overlap": {"server__overlap": True},
    "episodes": EPISODES,
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", RESTARTED)
@pytest.mark.parametrize("lost", [1, 30])
def test_a_run_goes_on_with_a_server_that_was_restarted(
    folder, server, tmp_path, monkeypatch, variant, lost
):
    """It has the weights again before it draws, and the run takes the same steps."""
    monkeypatch.setattr(vllm_server, "_PAUSES", (0.01,))
    monkeypatch.setattr(server_engine, "_PAUSE", 0.01)
    changes = {"optimizer__learning_rate": 3e-3} | RESTARTED[variant]
    calm = run(folder, server, tmp_path / "calm", **changes)
    requests = sum(is_of_step(body) for _, body in server.asked)
    server.restart()
    seen, left = [], [lost]

    def restart(handler):
        seen.extend([handler] if is_of_step(handler.body) else [])
        if len(seen) < requests * 0.8 or not left[0]:
            return False
        left[0] -= 1
        server.restart()
        return lose(handler)

    server.take_over = dict.fromkeys(("/v1/completions", "/v1/models", "/pause"), restart)
    troubled = run(folder, server, tmp_path / "troubled", **changes)
    assert not left[0]
    assert without_times(troubled) == without_times(calm)


def is_of_step(body):
    """Whether completions of a step or a turn are asked for: probes have prompts of 24 tokens."""
    return bool(body) and "prompt" in body and len(body["prompt"]) != 24


@pytest.mark.slow
def test_adapters_of_a_killed_process_are_removed(folder, server, tmp_path):
    changes = {"lora__rank": 2, "optimizer__schedule": "constant"}
    run(folder, server, tmp_path, steps=1, **changes)
    weights = tmp_path / "run" / "weights"
    [last] = adapters_in(weights)
    for name in ("adapter-0123abcd", ".adapter-0123abcd.4567cdef.partial", "adapter-mine"):
        shutil.copytree(weights / last, weights / name)
    server.models["adapter-0123abcd"] = server.models[last]
    run(folder, server, tmp_path, steps=2, resume="auto", **changes)
    names = {path.name for path in weights.iterdir()}
    assert "adapter-mine" in names and len(names) == 2
    assert set(server.models) == {server.name, *names} - {"adapter-mine"}
    # Other runs may write to a directory that a user names.
    shared = {"server__shared_dir": str(weights)}
    run(folder, server, tmp_path, steps=3, resume="auto", **changes, **shared)
    assert len(list(weights.iterdir())) == 3


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_a_policy_whose_logits_are_not_finite_is_not_saved(folder, server, tmp_path, overlap):
    """The server of these tests closes the connection, as it cannot draw from NaN."""
    rate = {"optimizer__learning_rate": 1e30, "optimizer__warmup_steps": 0}
    with pytest.raises(LogitsError, match=r"optimizer\.learning_rate"):
        run(folder, server, tmp_path, **rate, server__overlap=overlap, update__on_mismatch="warn")
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step*"))
    assert saved == ["step_00000000"]


@pytest.mark.slow
def test_errors_name_what_a_user_of_the_command_can_change(folder, server, tmp_path):
    def errors_of(name, **changes):
        with pytest.raises((ServerError, OSError)) as caught:
            run(folder, server, tmp_path / name, steps=1, **changes)
        return str(caught.value)

    assert "server.timeout=0.001 seconds" in errors_of("slow", server__timeout=1e-3)
    assert "server.tolerance=1e-12" in errors_of("strict", server__tolerance=1e-12)
    file = str(folder / "task.jsonl")
    assert "server.shared_dir" in errors_of("file", server__shared_dir=file)
    assert "(server.served_name" in errors_of("name", server__served_name="nobody")
    assert "logprobs_kind" not in errors_of("filter", rollout__top_k=3)
    server.take_over["/v1/completions"] = lambda handler: (
        handler.body["n"] == 4 and (handler.send_error(400) or True)
    )
    assert " for prompt " in errors_of("prompt")
    server.take_over["/collective_rpc"] = lambda handler: handler.send_error(500) or True
    assert f"server.shared_dir, {tmp_path / 'hidden'}" in errors_of("hidden")
    for path in ("/collective_rpc", "/resume"):
        server.take_over[path] = lambda handler: handler.send_error(400) or True
    assert "may be paused still" in errors_of("paused")
    server.take_over["/v1/models"] = lambda handler: handler.send_error(401) or True
    assert "VLLM_API_KEY must" in errors_of("key")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "needed", "option"),
    [({}, 40, "rollout.max_prompt_tokens or "), (EPISODES, 60, "rollout.max_episode_tokens")],
    ids=["prompts", "episodes"],
)
def test_a_server_without_room_for_the_longest_row_is_refused(
    folder, server, tmp_path, changes, needed, option
):
    server.max_model_len = needed - 1
    with pytest.raises(ServerError, match=rf"--max-model-len {needed}, .* {option}"):
        run(folder, server, tmp_path, **changes)
    assert set(server.paths()) == {"/v1/models"}  # nothing was loaded or drawn
    server.max_model_len = needed
    assert len(run(folder, server, tmp_path, steps=1, **changes)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same", "elsewhere"])
def test_a_resume_that_does_not_find_its_server_changes_nothing(
    folder, server, tmp_path, elsewhere
):
    run(folder, server, tmp_path, steps=1, optimizer__schedule="constant")
    before = (tmp_path / "run" / "config.json").read_text()
    directory = tmp_path / ("other" if elsewhere else "run")
    resumed = ["train", "--steps=2", f"--resume={tmp_path / 'run'}", f"--output_dir={directory}"]
    assert main([*resumed, "--server.url=http://127.0.0.1:1"]) == 1
    assert (tmp_path / "run" / "config.json").read_text() == before
    assert main(resumed) == 0  # with the server of before, into the same directory
    assert json.loads((directory / "config.json").read_text())["server"]["url"] == server.url
    assert len(read_metrics(directory)) == 2
    server.stop()
    again = ["train", "--steps=2", "--resume=auto", f"--output_dir={directory}"]
    assert main(again) == 0  # nothing is left to do, and no server is needed


REFUSED = [
    ({"server.url": "ftp://here"}, "server.url must"),
    ({"server.url": "http://me:pass@here"}, "VLLM_API_KEY"),
    ({"rollout.temperature": 3.0}, "rollout.temperature must"),
    ({"rollout.temperature": 0.7, "rollout.top_k": 3}, "top_k"),
    ({"rollout.slots": 4}, "rollout.slots"),
    ({"model": None, "task": "arithmetic"}, "model"),
    ({"server.url": None, "server.timeout": 5.0}, "server.timeout"),
    ({"server.url": None, "server.overlap": True}, "server.overlap"),
    ({"server.timeout": 0.0}, "server.timeout"),
]


@pytest.mark.parametrize(("changes", "name"), REFUSED, ids=str)
def test_settings_that_do_not_fit_a_server(folder, server, tmp_path, changes, name):
    with pytest.raises(ValueError, match=re.escape(name)):
        train(config_of(settings(folder, server, tmp_path) | changes))
    assert not loads(server)


# Several processes.


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["checkpoint", "adapter", "episodes", "overlap"])
def test_two_processes_sample_as_one_does(folder, server, tmp_path, kind):
    changes = {
        "checkpoint": {},
        "adapter": {"lora.rank": 2},
        "episodes": EPISODES | {"rollout.history": "append"},
        "overlap": {"server.overlap": True, "steps": 4, "logging.checkpoint_every": 3},
    }[kind]
    changes = settings(folder, server, tmp_path, steps=2) | {"mesh.fsdp": 8} | changes
    places = {name: {"output_dir": str(tmp_path / name)} for name in ("one", "two")}
    train(config_of(changes | places["one"]))
    alone, requests, server.asked = server.paths(), drawn(server), []
    run_joined(folder, config_of(changes | places["two"]))
    assert_same_metrics(tmp_path / "two", tmp_path / "one")
    assert sorted(drawn(server)) == sorted(requests)
    for path in ("/collective_rpc", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert server.paths().count(path) == alone.count(path)  # once, not once a process


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["checkpoint", "adapter", "overlap"])
@pytest.mark.parametrize("lost", [1, 30])
def test_two_processes_go_on_with_a_server_that_was_restarted(folder, server, tmp_path, kind, lost):
    """Both draw their rows again, though one of them may have lost nothing."""
    variant = {"overlap": {"server.overlap": True, "steps": 3}, "adapter": {"lora.rank": 2}}
    changes = settings(folder, server, tmp_path, steps=2) | {"mesh.fsdp": 8}
    changes |= {"optimizer.learning_rate": 1e-2} | variant.get(kind, {})
    places = {name: {"output_dir": str(tmp_path / name)} for name in ("one", "two")}
    train(config_of(changes | places["one"]))
    server.restart()
    seen, left = [], [lost]

    def restart(handler):
        seen.extend([handler] if is_of_step(handler.body) else [])
        if len(seen) < 4 or not left[0]:  # the last one of the second step
            return False
        left[0] -= 1
        server.restart()
        return lose(handler)

    server.take_over = dict.fromkeys(("/v1/completions", "/v1/models", "/pause"), restart)
    run_joined(folder, config_of(changes | places["two"]))
    assert not left[0]
    assert_same_metrics(tmp_path / "two", tmp_path / "one")


@pytest.mark.exhaustive
def test_a_server_that_is_gone_ends_all_processes(folder, server, tmp_path):
    changes = settings(folder, server, tmp_path, server__patience=1.0) | {"mesh.fsdp": 8}
    server.take_over["/collective_rpc"] = lambda handler: loads(server) > 1 and lose(handler)
    ended = run_joined(folder, config_of(changes), status=1)
    [[line], others] = ended.complaints()
    assert "server.patience=1 seconds" in line
    assert not others
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()


@pytest.mark.exhaustive
def test_a_server_that_fails_ends_all_processes(folder, server, tmp_path):
    def fail(handler):
        if loads(server) == 2:
            handler.send_error(400, "no more")
        return loads(server) == 2

    server.take_over["/collective_rpc"] = fail
    joined = config_of(settings(folder, server, tmp_path) | {"mesh.fsdp": 8})
    ended = run_joined(folder, joined, status=1)
    [[line], others] = ended.complaints()
    assert "400" in line and "/collective_rpc" in line
    assert not others
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()


@pytest.mark.exhaustive
def test_the_server_samples_while_two_processes_update(folder, server, tmp_path):
    """Completions are asked for before the step before them is done."""
    changes = {"server.overlap": True, "mesh.fsdp": 8}
    written = []

    def look(handler):
        if handler.body["n"] == 4 and len(drawn(server)) > 2:  # of the second or third step
            metrics = tmp_path / "run" / "metrics.jsonl"
            written.append(len(metrics.read_text().splitlines()) if metrics.exists() else 0)
        return False

    server.take_over["/v1/completions"] = look
    run_joined(folder, config_of(settings(folder, server, tmp_path) | changes))
    assert written == [0, 0, 1, 1]  # steps that were done, for each process's share


def test_overlapped_episodes_in_several_processes_are_refused(
    folder, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(hosts, "several", lambda: True)
    changes = EPISODES | {"server__overlap": True, "dtype": "float32"}
    config = config_of(settings(folder, server, tmp_path, **changes))
    with pytest.raises(ValueError, match=r"server\.overlap"):
        make_engine(config, load_policy(config.model))


@pytest.mark.slow
def test_raw_log_probabilities_take_filters_at_temperature_1(folder, server, tmp_path):
    filters = {"rollout__top_k": 5, "rollout__top_p": 0.9, "update__max_logp_diff": 1e-5}
    with pytest.raises(ServerError, match="--logprobs-mode raw_logprobs"):
        run(folder, server, tmp_path / "processed", **filters)
    server.logprobs_mode = "raw_logprobs"
    assert len(run(folder, server, tmp_path / "raw", **filters)) == 3


@pytest.mark.slow
def test_the_memory_of_the_server_is_not_the_runs(folder, server, tmp_path, capsys):
    run(folder, server, tmp_path, mesh__memory=1.0, steps=1)
    shown = capsys.readouterr().out
    assert "micro_batch_tokens" in shown and "rollout.slots" not in shown


@pytest.mark.slow
def test_the_key_of_the_server_is_sent_and_not_saved(folder, server, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "open-sesame")
    seen = []
    server.take_over["/v1/models"] = lambda handler: seen.append(handler.headers["Authorization"])
    run(folder, server, tmp_path, steps=1)
    assert set(seen) == {"Bearer open-sesame"}
    monkeypatch.setenv("VLLM_API_KEY", "")  # vLLM takes this as none
    run(folder, server, tmp_path / "none", steps=1)
    assert seen[-1] is None
    assert "sesame" not in (tmp_path / "run" / "config.json").read_text()


@pytest.mark.slow
def test_a_copy_of_the_checkpoint_is_served_by_name(folder, server, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "copy")
    changes = {"model": str(tmp_path / "copy"), "steps": 1}
    with pytest.raises(ServerError, match="served_name"):
        run(folder, server, tmp_path / "unnamed", **changes)
    assert run(folder, server, tmp_path / "named", server__served_name=server.name, **changes)


@pytest.mark.slow
def test_a_run_whose_server_has_a_relative_path_is_resumed_elsewhere(
    folder, server, tmp_path, monkeypatch
):
    monkeypatch.chdir(folder)
    server.name, server.models = "model", {"model": server.first}
    run(folder, server, tmp_path, model="model", steps=1)
    monkeypatch.chdir(tmp_path)
    assert len(run(folder, server, tmp_path, resume="auto", steps=2)) == 2


# Experts of a mixture that the server chose.

MIXTURE = {"update__replay_routing": "sampler", "server__tolerance": 50.0}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, folder):
    """As `folder`, with a mixture of experts."""
    place = tmp_path_factory.mktemp("mixture")
    write_checkpoint(place / "model", name="qwen3_moe", characters="0123456789+-*()=")
    shutil.copy(folder / "task.jsonl", place)
    return place


@pytest.fixture
def odd_server(mixture):
    """A server whose tokens go through experts that the policy's router does not choose."""
    with FakeServer(mixture / "model") as running:
        running.experts = True
        yield running


VARIANTS = {
    "a pass before": {"update__correction": "token_truncate", "update__kl_beta": 0.1},
    "episodes": EPISODES | {"rollout__history": "append"},
    "one turn": {},
    "mesh": {"mesh__fsdp": 2, "mesh__tensor": 2},
    "several rollouts": {"update__dynamic_sampling": 3},
    "adapter": {"lora__rank": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", each(list(VARIANTS), default=2))
def test_tokens_are_trained_through_the_experts_of_the_server(
    mixture, odd_server, tmp_path, variant
):
    rows = run(mixture, odd_server, tmp_path, **MIXTURE, **VARIANTS[variant])
    assert len(rows) == 3
    assert all(row["sampling/logp_diff/max"] < EXACT for row in rows)


@pytest.mark.slow
def test_a_server_names_no_experts_of_dense_layers(folder, tmp_path):
    write_checkpoint(tmp_path / "model", name="glm4_moe", characters="0123456789+-*()=")
    shutil.copy(folder / "task.jsonl", tmp_path)
    with FakeServer(tmp_path / "model") as server:
        server.experts = True
        rows = run(tmp_path, server, tmp_path, **MIXTURE)
    assert len(rows) == 3
    assert all(row["sampling/logp_diff/max"] < EXACT for row in rows)


@pytest.mark.slow
def test_a_reference_policy_chooses_experts_by_itself(mixture, odd_server, tmp_path):
    """It is the policy that the run began with, so the divergence is that of the choice alone."""
    [row] = run(mixture, odd_server, tmp_path, **MIXTURE, update__kl_beta=0.1, steps=1)
    assert row["kl"] > 0.1


@pytest.mark.slow
def test_without_a_replay_they_are_trained_through_others(mixture, odd_server, tmp_path):
    with pytest.raises(SamplerMismatchError):
        run(mixture, odd_server, tmp_path, server__tolerance=50.0, steps=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["one turn", "episodes"])
def test_two_processes_replay_as_one_does(mixture, odd_server, tmp_path, variant):
    changes = settings(mixture, odd_server, tmp_path, steps=2, **MIXTURE, **VARIANTS[variant])
    places = {name: {"output_dir": str(tmp_path / name)} for name in ("one", "two")}
    changes |= {"mesh.fsdp": 8}
    train(config_of(changes | places["one"]))
    run_joined(mixture, config_of(changes | places["two"]))
    assert_same_metrics(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_a_server_that_does_not_report_experts_is_told_how(mixture, odd_server, tmp_path):
    odd_server.experts = False
    with pytest.raises(ServerError, match="--enable-return-routed-experts"):
        run(mixture, odd_server, tmp_path, **MIXTURE)


@pytest.mark.slow
def test_the_trainers_own_choice_needs_no_report_of_the_server(mixture, odd_server, tmp_path):
    odd_server.experts = False
    [row] = run(mixture, odd_server, tmp_path, update__replay_routing="trainer", steps=1)
    assert row["sampling/logp_diff/max"] < EXACT


def test_a_policy_without_experts_has_none_to_replay(folder, server, tmp_path):
    with pytest.raises(ValueError, match=r"update\.replay_routing .*'qwen3'"):
        run(folder, server, tmp_path, **MIXTURE)
    assert not loads(server)
