"""A real vLLM server: what it answers is what the policy says, and it has the weights it should.

`TWINKLE_JAX_VLLM_PYTHON` names the Python of an environment with vLLM. Without it, these fail.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.examples import load
from tests.model.reference import reference_hidden
from tests.sampler.responses import gap, kinds_of, of_drawn, sequences_of, tokens_of
from tests.sampler.vllm import changed
from tests.sampler.vllm.fake_server import adapters_in, behind_filters, write_checkpoint
from tests.sampler.vllm.real_server import vllm_server
from tests.training.options import config_of
from twinkle_jax.data import Batch, SamplingParams
from twinkle_jax.model import LoraConfig
from twinkle_jax.sampler import JaxSampler, ServerError, vLLMSampler
from twinkle_jax.sampler.requests import Stops
from twinkle_jax.sampler.vllm_sampler import ServedSampler
from twinkle_jax.sampler.vllm_server import Client, Deadline, Routing
from twinkle_jax.sampler.vllm_weights import Probe, load_checkpoint, prove
from twinkle_jax.training import load_policy, score_batch, train
from twinkle_jax.twinkle.model import TransformersModel

pytestmark = pytest.mark.exhaustive

SIZES = {"head_dim": 32, "hidden": 64, "characters": "0123456789+-*()="}
PROMPTS = ["12+3=", "4", "(7-1)*2"]
ROUNDING = 3e-5  # of log-probabilities, float32, in two libraries


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A checkpoint with a head of its own, and a server that takes adapters."""
    place = write_checkpoint(tmp_path_factory.mktemp("untied") / "model", **SIZES)
    log = place.parent / "log"
    with vllm_server(place, log, "--enable-lora", "--max-lora-rank", "8") as url:
        yield place, url


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A checkpoint whose head is the embedding, and a server that gives raw log-probabilities."""
    place = write_checkpoint(tmp_path_factory.mktemp("tied") / "model", tied=True, **SIZES)
    with vllm_server(place, place.parent / "log", "--logprobs-mode", "raw_logprobs") as url:
        yield place, url


@pytest.fixture
def make(tmp_path):
    """Make an actor, and a sampler that has its weights."""

    def made(served):
        place, url = served
        actor = TransformersModel(model_id=place)
        sampler = vLLMSampler(model_id=place, base_url=url, shared_dir=tmp_path, timeout=240)
        sampler.sync_weights(actor)
        return actor, sampler

    return made


def assert_the_policys(actor, response, temperature=1.0):
    """The log-probabilities of a response are the trainer's."""
    assert kinds_of(response) == {"policy"}
    assert gap(response, actor, temperature) < ROUNDING


@pytest.mark.parametrize(
    ("kind", "temperature"), [("untied", 0.7), ("untied", 1.0), ("untied", 1.3), ("tied", 1.0)]
)
def test_log_probabilities_are_those_of_the_policy(request, make, kind, temperature):
    actor, sampler = make(request.getfixturevalue(kind))
    params = SamplingParams(max_tokens=40, temperature=temperature)
    response = sampler.sample(PROMPTS, params, num_samples=16)
    assert_the_policys(actor, response, temperature)
    ends = [seq.stop_reason for seq in sequences_of(response)]
    assert {"stop", "length"} == set(ends)
    assert all(
        (seq.tokens[-1] == 1) == (seq.stop_reason == "stop") for seq in sequences_of(response)
    )


FILTERS = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 1.5, "temperature": 0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_raw_log_probabilities_are_the_policys_with_filters_too(make, tied, untied, filters):
    actor, sampler = make(tied)
    params = {"max_tokens": 20, **filters}
    assert_the_policys(actor, sampler.sample(PROMPTS, params, num_samples=8))
    with pytest.raises(ServerError, match="--logprobs-mode raw_logprobs"):
        make(untied)[1].sample(PROMPTS, params)


def test_raw_log_probabilities_are_refused_at_other_temperatures(make, tied):
    actor, sampler = make(tied)
    with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
        sampler.sample(PROMPTS, {"max_tokens": 20, "temperature": 0.7})
    assert_the_policys(actor, sampler.sample(PROMPTS, {"max_tokens": 20, "temperature": 0}))


@pytest.mark.parametrize("filters", [(0.0, 5, 1.0), (0.0, 17, 0.8), (0.1, 17, 1.0), (0.05, 8, 0.9)])
def test_log_probabilities_are_those_behind_the_filters(make, untied, filters):
    actor, sampler = make(untied)
    asked = dict(zip(("min_p", "top_k", "top_p"), filters, strict=True))
    params = SamplingParams(max_tokens=20, temperature=0.9, **asked)
    response = sampler.sample(PROMPTS, params, num_samples=8, logprobs_kind="sampling")
    logits = actor.forward_only(inputs=response.inputs, return_logits=True)["logits"]
    for rows, seq in zip(of_drawn(response, logits), sequences_of(response), strict=True):
        for row, pairs in zip(rows, seq.logprobs, strict=True):
            token, logprob = pairs[0]
            assert logprob == pytest.approx(behind_filters(row, 0.9, *filters)[token], abs=ROUNDING)


def test_both_samplers_agree_on_what_is_certain(make, untied):
    actor, sampler = make(untied)
    ours = JaxSampler(actor)
    for more in (
        {},
        {"stop": "3"},
        {"stop": [10]},
        {"stop": ["=1", "07"]},
        {"repetition_penalty": 1.3},
    ):
        greedy = {"temperature": 0, "max_tokens": 24, **more}
        for one, other in zip(
            ours.sample(PROMPTS, greedy),
            sampler.sample(PROMPTS, greedy, logprobs_kind=None),
            strict=True,
        ):
            mine, theirs = one.sequences[0], other.sequences[0]
            assert (mine.tokens, mine.decoded, mine.stop_reason) == (
                theirs.tokens,
                theirs.decoded,
                theirs.stop_reason,
            )


def test_stop_strings_end_what_is_drawn(make, untied):
    _, sampler = make(untied)
    params = {"max_tokens": 40, "stop": ["1+", "23", "5)"]}
    stopped = sequences_of(sampler.sample(PROMPTS, params, num_samples=32))
    tokenizer = sampler.template.tokenizer
    at_string = [s for s in stopped if s.stop_reason == "stop" and s.tokens[-1] != 1]
    assert at_string
    for seq in stopped:
        text = tokenizer.decode(seq.tokens)
        assert all(string not in text[:-1] for string in params["stop"])
        assert (seq in at_string) == text.endswith(tuple(params["stop"]))


def test_a_seed_repeats_and_prompts_do_not_share_noise(make, untied):
    _, sampler = make(untied)
    seeded = SamplingParams(max_tokens=20, seed=7)
    first, again = (sampler.sample(["12", "12"], seeded, num_samples=4) for _ in range(2))
    assert tokens_of(first) == tokens_of(again)
    assert len(set(map(tuple, tokens_of(first)))) > 4


def test_prompts_are_scored_where_asked_for(make, tied):
    actor, sampler = make(tied)
    asked = {"max_tokens": 8, "logprobs": 3, "prompt_logprobs": 2}
    for one in sampler.sample(PROMPTS, asked, num_samples=2):
        ids = one.prompt_token_ids
        scored = actor.forward_only(inputs=[{"input_ids": ids}])["logps"][0]
        np.testing.assert_allclose(one.prompt_logprobs[1:], scored[: len(ids) - 1], atol=ROUNDING)
        for seq in one.sequences:
            assert all(2 <= len(dict(pairs)) <= 4 for pairs in seq.logprobs)


def test_a_teacher_scores_here_and_there_alike(make, tied, tmp_path):
    place, url = tied  # vLLM 0.32 for CPUs ends when it scores prompts with --enable-lora
    make(tied)  # the server has the checkpoint's weights again
    settings = {
        "rollout.prompts": 4, "rollout.num_samples": 4, "rollout.max_prompt_tokens": 24,
        "update.mini_batches": 1, "teacher.model": str(place), "steps": 3, "warm_start": 0.0,
        "evaluation.every": 0, "evaluation.problems": 4,
    }  # fmt: skip
    seen = {}
    for name, where in (("here", {}), ("there", {"teacher.url": url})):
        train(config_of(settings | where | {"output_dir": str(tmp_path / name)}))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        seen[name] = [json.loads(line)["teacher/kl"] for line in lines]
    np.testing.assert_allclose(seen["there"], seen["here"], atol=1e-4)
    assert min(seen["here"]) > 0.1


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_new_weights_are_loaded(request, make, kind):
    actor, sampler = make(request.getfixturevalue(kind))
    for _ in range(2):
        old = sampler.sample(PROMPTS, {"max_tokens": 20}, num_samples=4)
        assert gap(old, actor) < ROUNDING
        changed(actor)
        assert gap(old, actor) > 0.1
        sampler.sync_weights(actor)
        new = sampler.sample(PROMPTS, {"max_tokens": 20}, num_samples=4)
        assert gap(new, actor) < ROUNDING


def test_adapters_are_loaded_and_merged(make, untied, tmp_path):
    actor, sampler = make(untied)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    actor.add_adapter_to_model("default", lora)
    for step in range(3):
        before = sampler.sample(PROMPTS, {"max_tokens": 20}, num_samples=4)
        actor.state = actor.state._replace(
            params=jax.tree.map(lambda x: x + jnp.float32(0.05), actor.state.params)
        )
        assert gap(before, actor) > 0.01
        sampler.sync_weights(actor, merge=step == 2)
        assert gap(sampler.sample(PROMPTS, {"max_tokens": 20}, num_samples=4), actor) < ROUNDING
        assert len(adapters_in(tmp_path)) == (step < 2)


def test_a_head_that_stays_behind_is_found_out(make, tied, tmp_path):
    actor, sampler = make(tied)
    changed(actor).save(tmp_path / "as-it-stands")  # tied, as no sampler would write it
    client, name, deadline = Client(tied[1]), str(tied[0]), Deadline(200)
    load_checkpoint(client, deadline, tmp_path / "as-it-stands")  # which answers with success
    probe = Probe(actor.config.vocab_size, 64)
    with pytest.raises(ServerError, match=r"actor's weights.* 0\.\d"):
        prove(client, deadline, probe, name, actor, 1e-3)
    with pytest.raises(ServerError, match="last sync_weights"):
        sampler.sample("12")
    sampler.sync_weights(actor)
    assert gap(sampler.sample(PROMPTS, {"max_tokens": 20}), actor) < ROUNDING


@pytest.mark.parametrize(("form", "advantage"), [("responses", "grpo"), ("whole", "rloo")])
def test_the_loops_of_the_documentation_run(untied, form, advantage):
    place, url = untied
    example = load("twinkle_loop")
    rewards = example.run(form, advantage, 2, checkpoint=place, base_url=url)
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)


RUNS = {
    "checkpoint": {},
    "adapter": {"lora.rank": 4},
    "overlap": {"server.overlap": True},
    "episodes": {
        "environment": "tests.rollout.games:Guess",
        "task": "environment",
        "reward": None,
        "rollout.max_turns": 3,
        "rollout.max_episode_tokens": 60,
        "evaluation.problems": 4,
    },
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_samples_from_the_policy_that_it_trains(make, untied, tmp_path, kind):
    make(untied)  # the server has the checkpoint, to which adapters are added
    place, url = untied
    rows = [{"prompt": f"{a}+2=", "answer": str(a + 2)} for a in range(6)]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "model": str(place),
        "task": str(tmp_path / "task.jsonl"),
        "reward": "tests.training.test_server:likes_short",
        "steps": 4,
        "output_dir": str(tmp_path / "run"),
        "server.url": url,
        "rollout.prompts": 2,
        "rollout.num_samples": 8,
        "rollout.max_new_tokens": 16,
        "rollout.max_prompt_tokens": 32,
        "rollout.temperature": 0.9,
        "update.mini_batches": 2,
        "optimizer.learning_rate": 1e-3,
        "evaluation.every": 0,
    }
    train(config_of(options | RUNS[kind]))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    gaps = [json.loads(line)["sampling/logp_diff/max"] for line in lines]
    assert len(gaps) == 4 and gaps[0] < ROUNDING
    if kind == "overlap":  # later steps learn from the policy before
        assert all(ROUNDING < x < 0.5 for x in gaps[1:])
    else:
        assert max(gaps) < ROUNDING


@pytest.mark.parametrize("name", ["exaone4", "ernie4_5"])
def test_families_of_which_vllm_has_code_of_its_own(name, tmp_path):
    place = write_checkpoint(tmp_path / "model", name=name, **SIZES)
    with vllm_server(place, tmp_path / "log") as url:
        actor = TransformersModel(model_id=place)
        sampler = vLLMSampler(model_id=place, base_url=url, shared_dir=tmp_path, timeout=240)
        for _ in ("the checkpoint", "what is loaded"):
            response = sampler.sample(PROMPTS, SamplingParams(max_tokens=40), num_samples=16)
            assert_the_policys(actor, response)
            sampler.sync_weights(actor)


def test_a_server_reports_the_experts_of_each_token(tmp_path):
    """Those that the policy's router chooses, here where both compute in float32.

    No weights are loaded: vLLM 0.32 cannot load those of a mixture on a CPU.
    """
    place = write_checkpoint(
        tmp_path / "model", name="qwen3_moe", moe_intermediate_size=32, **SIZES
    )
    policy = load_policy(str(place))
    layers, experts = policy.config.layers, policy.config.experts
    prompts = [[5, 6, 7], [8], [5, 6, 9, 10, 11, 12]]
    with vllm_server(place, tmp_path / "log", experts=True) as url:
        sampler = ServedSampler(
            Client(url),
            [str(place)],
            policy.config.vocab_size,
            64,
            tolerance=None,
            timeout=240.0,
            routing=Routing(layers, experts.number, experts.chosen),
        )
        params = SamplingParams(max_tokens=16)
        answers = sampler.complete(prompts, params, 4, Stops([1], []), [1, 2, 3])
    lengths = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        for drawn in answer.drawn:
            tokens = [*prompt, *drawn.tokens]
            expected = np.full((len(tokens) - 1, layers, experts.chosen), -1)
            reference_hidden(policy.params, policy.config, tokens[:-1], routing=expected)
            np.testing.assert_array_equal(np.sort(drawn.routing), np.sort(expected))
            row = Batch(
                jnp.asarray([tokens[:-1]]),
                jnp.asarray([tokens[1:]]),
                routing=jnp.asarray(drawn.routing[None]),
            )
            scores = score_batch(policy.params, row, policy.config).logps[0, len(prompt) - 1 :]
            reported = [pairs[0][1] for pairs in drawn.logprobs]
            np.testing.assert_allclose(scores, reported, atol=ROUNDING)
            lengths.add(len(tokens))
    assert len(lengths) > 3
