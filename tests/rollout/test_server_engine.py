"""What a server's engine draws is what the policy draws there: rows, ends, seeds, settings."""

import threading

import jax
import numpy as np
import pytest

from tests.sampler.vllm import moved
from tests.sampler.vllm.fake_server import (
    FakeServer,
    log_softmax,
    lose,
    odd_experts,
    send,
    write_checkpoint,
)
from twinkle_jax.data import PromptBatch
from twinkle_jax.rollout import RolloutConfig, ServerConfig, server_engine
from twinkle_jax.sampler import LENGTH, STOP, ServerError, vllm_server
from twinkle_jax.training import TrainConfig, UpdateConfig, load_policy
from twinkle_jax.training.engine import make_engine

PROMPTS = PromptBatch([{"messages": [{"role": "user", "content": x}]} for x in ("1+2=", "40", "7")])
NEW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture
def server(model):
    with FakeServer(model) as running:
        yield running


@pytest.fixture
def drawn(server, tmp_path):
    """Draw with some settings, and give the completions and the prompts."""
    return drawing(server, tmp_path)


def drawing(server, tmp_path, replay_routing="none", **serving):
    policy = load_policy(server.name)

    def draw(key=0, *, prompts=PROMPTS, seeded=True, **changes):
        settings = {"num_samples": 4, "max_new_tokens": NEW, "max_prompt_tokens": 32} | changes
        config = TrainConfig(
            model=server.name,
            task="task.jsonl",
            rollout=RolloutConfig(**settings),
            output_dir=str(tmp_path),
            dtype="float32",
            update=UpdateConfig(replay_routing=replay_routing),
            server=ServerConfig(url=server.url, seeded=seeded, **serving),
        )
        engine = make_engine(config, policy)
        return engine.draw(policy.params, prompts, jax.random.key(key), config.rollout)

    return draw


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "mixture", name="qwen3_moe")


@pytest.mark.slow
def test_experts_lie_where_their_tokens_are(mixture, tmp_path):
    """Those of the prompt and of all drawn tokens but the last; behind them there is no expert."""
    with FakeServer(mixture) as server:
        server.experts = True
        drawn = drawing(server, tmp_path, "sampler", tolerance=50.0)
        prompts, mask, completions = drawn()
    longest = np.max(np.repeat(mask.sum(axis=1), 4) + completions.lengths) - 1
    assert completions.routing.shape == (12, longest, 2, 2)
    config = load_policy(str(mixture)).config
    for i, row in enumerate(completions.routing):
        tokens = prompts[i // 4][mask[i // 4]].tolist()
        tokens += completions.tokens[i, : completions.lengths[i] - 1].tolist()
        np.testing.assert_array_equal(row[: len(tokens)], odd_experts(config, [tokens])[0])
        assert np.all(row[len(tokens) :] >= config.experts.number)
    assert len(set(completions.lengths)) > 1


def bodies(server):
    """What was asked for the rows of a call, not for probes."""
    asked = [body for path, body in server.asked if path == "/v1/completions"]
    return [body for body in asked if body["n"] == 4]


def test_rows_belong_to_their_prompts_and_end_as_the_server_says(server, drawn):
    prompts, mask, completions = drawn()
    reasons = []
    for i, row in enumerate(completions.tokens):
        prompt = prompts[i // 4][mask[i // 4]].tolist()
        length = completions.lengths[i]
        tokens = row[:length].tolist()
        scores = server.logits(server.first, prompt + tokens)[len(prompt) - 1 : -1]
        expected = [log_softmax(x)[t] for x, t in zip(scores, tokens, strict=True)]
        np.testing.assert_allclose(completions.logprobs[i, :length], expected, atol=1e-5)
        assert not row[length:].any() and not completions.logprobs[i, length:].any()
        assert completions.mask[i].tolist() == [column < length for column in range(NEW)]
        ends = bodies(server)[i // 4]["stop_token_ids"]
        stopped = tokens[-1] in ends
        assert stopped or length == NEW
        assert completions.finish_reasons[i] == (STOP if stopped else LENGTH)
        reasons.append(stopped)
    assert {True, False} == set(reasons)


def test_each_prompt_has_a_seed_that_depends_on_the_key(server, drawn):
    twice = PromptBatch([*PROMPTS, PROMPTS[0]])
    first, again, other = (drawn(key, prompts=twice).completions.tokens for key in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[:4] != first[12:]).any()  # the same prompt with another seed
    assert len({body["seed"] for body in bodies(server)}) == 8


def test_a_server_may_choose_its_seeds(server, drawn):
    drawn(seeded=False)
    assert {body["seed"] for body in bodies(server)} == {None}


def test_settings_reach_the_server(server, drawn):
    server.logprobs_mode = "raw_logprobs"
    filters = {"top_k": 3, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
    drawn(**filters)
    server.logprobs_mode = "processed_logprobs"
    drawn(temperature=0.7)
    filtered, scaled = bodies(server)[0], bodies(server)[-1]
    assert filters == {name: filtered[name] for name in filters}
    assert (filtered["temperature"], filtered["max_tokens"]) == (1.0, NEW)
    assert (scaled["temperature"], scaled["top_k"], scaled["top_p"]) == (0.7, 0, 1.0)


def test_turns_of_some_rows(server, model, tmp_path):
    policy = load_policy(str(model))
    settings = RolloutConfig(max_new_tokens=NEW, max_prompt_tokens=16, max_episode_tokens=60)
    config = TrainConfig(
        model=str(model),
        environment="tests.rollout.games:Guess",
        rollout=settings,
        output_dir=str(tmp_path),
        dtype="float32",
        server=ServerConfig(url=server.url),
    )
    turns = make_engine(config, policy).converse(policy.params, 4, config.rollout)
    keys = jax.random.split(jax.random.key(3), 4)
    rows = {3: [5, 6, 7], 1: [8, 9]}
    limits = {3: 2, 1: 5}
    both = turns.go_on(rows, keys, limits)
    assert both.lengths[[0, 2]].tolist() == [0, 0]
    assert 0 < both.lengths[3] <= 2 and 0 < both.lengths[1] <= 5
    # A row draws the same whatever other rows are in the call.
    alone = turns.go_on({1: rows[1]}, keys, {1: 5})
    np.testing.assert_array_equal(alone.tokens[1], both.tokens[1])
    np.testing.assert_array_equal(alone.logprobs[1], both.logprobs[1])
    asked = [body for _, body in server.asked if body and body.get("prompt") in ([5, 6, 7], [8, 9])]
    assert len({body["seed"] for body in asked}) == 2


# Servers that are restarted, gone or busy.


@pytest.fixture
def trained(server, tmp_path, monkeypatch):
    """An engine whose policy is not the checkpoint, and what it draws: (engine, draw)."""
    monkeypatch.setattr(vllm_server, "_PAUSES", (0.01,))
    monkeypatch.setattr(server_engine, "_PAUSE", 0.01)
    return trained_engine(server, tmp_path)


def trained_engine(server, tmp_path, patience=60.0, notes=None, **settings):
    policy = load_policy(server.name)
    settings = {"num_samples": 4, "max_new_tokens": NEW, "max_prompt_tokens": 32} | settings
    config = TrainConfig(
        model=server.name,
        task="task.jsonl",
        rollout=RolloutConfig(**settings),
        output_dir=str(tmp_path),
        dtype="float32",
        server=ServerConfig(url=server.url, patience=patience),
    )
    engine = make_engine(config, policy, note=[].append if notes is None else notes.append)
    params = moved(policy.params)

    def draw():
        return engine.draw(params, PROMPTS, jax.random.key(0), config.rollout).completions

    return engine, draw


PATHS = ("/v1/completions", "/v1/models", "/pause", "/collective_rpc", "/resume")


def restarting(server, *, answer=lose, lost=1):
    """Restart the server at the request for the second row, which it loses, and others behind it.

    Returns:
        What is set then.
    """
    rows, restarted = [], threading.Event()

    def handle(handler):
        if (handler.body or {}).get("n") == 4:
            rows.append(handler)
        if len(rows) < 2 or handle.left == 0:
            return False
        handle.left -= 1
        restarted.set()
        server.restart()
        return answer(handler)

    handle.left = lost
    server.take_over = dict.fromkeys(PATHS, handle)
    return restarted


def assert_same(got, expected):
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.logprobs, expected.logprobs)


@pytest.mark.parametrize("lost", [1, 30])
def test_a_server_that_is_restarted_meanwhile_draws_all_rows_again(server, trained, lost):
    """Also if the request that was lost is sent again before anyone else notices."""
    _, draw = trained
    calm = draw()
    restarted = restarting(server, lost=lost)
    assert_same(draw(), calm)
    assert restarted.is_set()
    assert server.models[server.name] is not server.first


def test_completions_that_a_server_aborts_are_drawn_again(server, trained):
    _, draw = trained
    calm, aborted = draw(), threading.Event()

    def abort(answer):
        if len(answer["choices"]) == 4 and not aborted.is_set():
            aborted.set()
            answer["choices"][3]["finish_reason"] = "abort"
        return answer

    server.alter["/v1/completions"] = abort
    assert_same(draw(), calm)
    assert aborted.is_set()


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/v1/completions"])
def test_weights_are_loaded_again_if_the_server_is_lost_meanwhile(server, trained, path):
    _, draw = trained

    def lose_in_first_load(handler):
        if server.paths().count("/resume") > 1:  # it is sent after an error, too
            return False
        server.restart()
        return lose(handler)

    server.take_over[path] = lose_in_first_load
    assert draw().lengths.all()
    assert server.models[server.name] is not server.first


def test_a_restarted_server_with_another_kind_of_log_probabilities_is_refused(
    server, tmp_path, trained
):
    def with_other_options(handler):
        server.logprobs_mode = "raw_logprobs"
        return lose(handler)

    _, draw = trained_engine(server, tmp_path, temperature=0.7)
    draw()
    restarting(server, answer=with_other_options)
    with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
        draw()


def test_a_restarted_server_that_keeps_its_own_weights_is_refused(server, trained):
    _, draw = trained
    draw()
    restarting(server)
    server.loads = False
    with pytest.raises(ServerError, match="weights that this run had it load"):
        draw()


@pytest.mark.parametrize("fault", ["gone", 503, 500])
def test_patience_ends_with_the_last_error(server, tmp_path, trained, fault):
    notes = []
    _, draw = trained_engine(server, tmp_path, patience=0.2, notes=notes)
    draw()
    answer = lose if fault == "gone" else lambda handler: send(handler, fault, b"no") or True
    server.take_over = dict.fromkeys(PATHS, answer)
    with pytest.raises(ServerError, match=r"RemoteProtocolError|status 50[03]: no") as caught:
        draw()
    # An error of the server itself is not waited for.
    assert ("server.patience=0.2 seconds" in str(caught.value)) == (fault != 500)
    assert len(notes) == (fault != 500)
    assert all("waiting" in note and "server.patience=0.2" in note for note in notes)


def test_a_cancelled_call_does_not_wait(server, trained, monkeypatch):
    engine, draw = trained
    draw()
    waits, errors = threading.Event(), []
    monkeypatch.setattr(server_engine, "_PAUSE", 60.0)
    monkeypatch.setattr(engine, "_note", lambda sentence: waits.set())
    server.take_over = dict.fromkeys(PATHS, lose)

    def sample():
        try:
            draw()
        except ServerError as error:
            errors.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    assert waits.wait(30)
    engine.cancel()
    thread.join(30)
    assert "cancelled" in str(errors[0])
