"""Twinkle's sampler in this program: both examples of its documentation, and what it refuses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import family, random_params
from tests.sampler.responses import (
    CHATS,
    assert_whole,
    gap,
    kinds_of,
    of_drawn,
    sequences_of,
    tokens_of,
)
from twinkle_jax.advantage import GRPOAdvantage
from twinkle_jax.data import SamplingParams, small_tokenizer
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    parse_config,
    save_adapter,
    save_pretrained,
    with_adapter,
)
from twinkle_jax.model.decoder.lora import init_adapter
from twinkle_jax.sampler import JaxSampler
from twinkle_jax.sampler.jax_sampler import settled_text
from twinkle_jax.twinkle.model import TransformersModel

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
pytest.importorskip("tokenizers", reason="pip install 'twinkle-jax[data]'")

PARAMS = SamplingParams(max_tokens=6, temperature=0.9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sampler") / "qwen3"
    tokenizer = small_tokenizer("0123456789+=")
    config = parse_config(family("qwen3", vocab_size=len(tokenizer), max_position_embeddings=64))
    save_pretrained(Decoder(config, random_params(config)), directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def actor(checkpoint):
    made = TransformersModel(model_id=checkpoint)
    made.set_loss("GRPOLoss", epsilon=0.2)
    made.set_optimizer("SGD", lr=0.5)
    return made


@pytest.mark.exhaustive
def test_the_training_loop_of_the_documentation(checkpoint):
    actor = TransformersModel(model_id=checkpoint)
    actor.set_loss("GRPOLoss", epsilon=0.2)
    actor.set_optimizer("SGD", lr=0.5)
    sampler = JaxSampler(actor)
    response = sampler.sample(CHATS, PARAMS, num_samples=4)
    assert len(response.inputs) == len(sequences_of(response)) == 8
    rewards = [
        float(len(seq.tokens)) + i for one in response for i, seq in enumerate(one.sequences)
    ]
    advantages = GRPOAdvantage()(rewards, num_generations=4)
    old = [[pair[0][1] for pair in seq.logprobs] for seq in sequences_of(response)]
    assert gap(response, actor, 0.9) < 1e-5
    loss = actor.forward_backward(
        inputs=response.inputs, advantages=advantages, old_logps=old, temperature=0.9
    )["loss"]
    assert np.isfinite(loss)
    before = sampler.sample(CHATS, SamplingParams(max_tokens=6, seed=3))
    actor.clip_grad_and_step()
    after = sampler.sample(CHATS, SamplingParams(max_tokens=6, seed=3))
    assert before[0].sequences[0].logprobs != after[0].sequences[0].logprobs  # live weights


def test_sequences_hold_what_training_needs(actor):
    sampler = JaxSampler(actor)
    response = sampler.sample(CHATS, PARAMS, num_samples=4)
    assert [len(one.sequences) for one in response] == [4, 4]
    assert_whole(response, sampler.template.tokenizer, most=6)


def test_calls_draw_anew_and_a_seed_repeats(actor):
    sampler = JaxSampler(actor, seed=5)
    first, second = (sampler.sample(CHATS, PARAMS, num_samples=4) for _ in range(2))
    assert tokens_of(first) != tokens_of(second)
    resumed = JaxSampler(actor, seed=5)
    resumed.calls = 1
    assert tokens_of(resumed.sample(CHATS, PARAMS, num_samples=4)) == tokens_of(second)
    other = JaxSampler(actor, seed=6).sample(CHATS, PARAMS, num_samples=4)
    assert tokens_of(other) != tokens_of(first)
    seeded = SamplingParams(max_tokens=6, seed=1, num_samples=4)
    assert tokens_of(sampler.sample(CHATS, seeded)) == tokens_of(sampler.sample(CHATS, seeded))
    for large in (2**32 + 1, 2**70 + 1):  # JAX takes seeds modulo 2^32
        seeds = seeded.seed, large
        one, other = (sampler.sample(CHATS, replace(seeded, seed=seed)) for seed in seeds)
        assert tokens_of(one) != tokens_of(other)
        one, other = (JaxSampler(actor, seed=seed).sample(CHATS, PARAMS) for seed in seeds)
        assert tokens_of(one) != tokens_of(other)


@pytest.mark.slow
def test_a_prompt_is_completed_alike_whatever_stands_behind_it(actor):
    sampler = JaxSampler(actor)
    seeded = SamplingParams(max_tokens=6, seed=1, num_samples=4)
    alone, among = sampler.sample(CHATS[0], seeded), sampler.sample([*CHATS, *CHATS, "1"], seeded)
    assert len(among) == 5  # in a batch of six
    assert [s.tokens for s in alone[0].sequences] == [s.tokens for s in among[0].sequences]


@pytest.mark.parametrize("logprobs", [0, 1])
def test_the_log_probabilities_that_twinkles_scripts_ask_for(actor, logprobs):
    sampler = JaxSampler(actor)
    plain, asked = (
        sampler.sample(CHATS, SamplingParams(max_tokens=6, seed=1, logprobs=count))
        for count in (None, logprobs)
    )
    assert asked[0].sequences[0].logprobs == plain[0].sequences[0].logprobs
    assert [len(pairs) for pairs in asked[0].sequences[0].logprobs] == [1] * len(
        asked[0].sequences[0].tokens
    )


FILTERS = [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"repetition_penalty": 2.0}]


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_leave_the_policys_log_probabilities(actor, filters):
    params = {"max_tokens": 6, "seed": 1, "temperature": 0.7, **filters}
    response = JaxSampler(actor).sample(CHATS, params, num_samples=4)
    assert kinds_of(response) == {"policy"}
    assert gap(response, actor, 0.7) < 1e-5


@pytest.mark.parametrize("filters", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_a_filter_may_leave_the_likeliest_token_alone(actor, filters):
    sampler, ask = JaxSampler(actor), {"max_tokens": 6, "seed": 1}
    filtered, greedy = (sampler.sample(CHATS, ask | x) for x in (filters, {"temperature": 0}))
    assert tokens_of(filtered) == tokens_of(greedy)


@pytest.mark.parametrize("temperature", [0.7, 0])
def test_log_probabilities_of_what_was_drawn_from_when_asked_for(actor, temperature):
    params = {"max_tokens": 6, "seed": 1, "temperature": temperature, "top_k": 3}
    response = JaxSampler(actor).sample(CHATS, params, num_samples=4, logprobs_kind="sampling")
    logits = actor.forward_only(inputs=response.inputs, return_logits=True)["logits"]
    assert kinds_of(response) == {"sampling"}
    for rows, seq in zip(of_drawn(response, logits), sequences_of(response), strict=True):
        for row, pairs in zip(rows.astype(np.float64), seq.logprobs, strict=True):
            [(token, logprob)] = pairs
            kept = np.sort(row)[-3:] / (temperature or 1)  # renormalised over the three likeliest
            expected = row[token] / temperature - np.logaddexp.reduce(kept) if temperature else 0
            assert logprob == pytest.approx(expected, abs=1e-5)


def test_no_log_probabilities_when_none_are_asked_for(actor):
    response = JaxSampler(actor).sample(CHATS, PARAMS, logprobs_kind=None)
    sequence = response[0].sequences[0]
    assert sequence.logprobs is None and sequence.logprobs_kind is None and sequence.tokens


@pytest.mark.slow
def test_features_and_strings_are_prompts_too(actor):
    sampler = JaxSampler(actor)
    params = {"max_new_tokens": 6, "seed": 2, "num_samples": 4}
    text = sampler.sample("1+1=", params)
    ids = sampler.template.tokenizer.encode("1+1=")
    padded = {"input_ids": [0, *ids], "attention_mask": [0, *[1] * len(ids)]}
    masked = sampler.sample([padded], params)
    assert text[0].prompt_token_ids == masked[0].prompt_token_ids == ids
    for one, other in zip(text[0].sequences, masked[0].sequences, strict=True):
        assert one.tokens == other.tokens
        assert other.new_input_feature["attention_mask"].tolist()[:2] == [0, 1]
    assert "messages" not in text[0].sequences[0].new_input_feature


def test_room_is_the_limit_where_nothing_else_is(actor):
    sampler = JaxSampler(actor, max_length=12)
    for one in sampler.sample(CHATS, num_samples=4):
        for seq in one.sequences:
            total = len(one.prompt_token_ids) + len(seq.tokens)
            assert total == 12 or (seq.stop_reason == "stop" and total < 12)
    assert JaxSampler(actor).max_length == 64


def test_a_completion_is_cut_behind_a_stop_string(actor):
    sampler = JaxSampler(actor)
    tokenizer = sampler.template.tokenizer
    ask = {"max_tokens": 6, "seed": 0}
    free = sequences_of(sampler.sample(CHATS, ask, num_samples=4))
    long = next(s for s in free if len(s.decoded) > 3)
    stop = long.decoded[2:4]
    with_stop = SamplingParams(**ask, stop=stop)
    cut = sequences_of(sampler.sample(CHATS, with_stop, num_samples=4))
    shown = SamplingParams(**ask, stop=[stop], include_stop_str_in_output=True)
    kept = sequences_of(sampler.sample(CHATS, shown, num_samples=4))
    for before, after, shown_stop in zip(free, cut, kept, strict=True):
        place = before.decoded.find(stop)
        if place < 0:
            assert after.tokens == before.tokens
            continue
        assert after.stop_reason == "stop" and after.decoded == before.decoded[:place]
        assert shown_stop.decoded == before.decoded[: place + len(stop)]
        assert before.tokens[: len(after.tokens)] == after.tokens == shown_stop.tokens
        assert tokenizer.decode(after.tokens).endswith(stop)
        assert len(after.logprobs) == len(after.tokens)
        assert after.new_input_feature["input_ids"].size == before.new_input_feature[
            "input_ids"
        ].size - len(before.tokens) + len(after.tokens)


def test_stop_ids_and_names_of_control_tokens_end_a_row(actor):
    sampler = JaxSampler(actor)
    user = sampler.template.tokenizer.backend.token_to_id("<|user|>")
    ask = {"max_tokens": 6, "seed": 0}
    by_id = sampler.sample(CHATS, SamplingParams(**ask, stop=[user]), num_samples=4)
    by_name = sampler.sample(CHATS, SamplingParams(**ask, stop="<|user|>"), num_samples=4)
    assert user in [s.tokens[-1] for s in sequences_of(by_id) if s.stop_reason == "stop"]
    assert tokens_of(by_id) == tokens_of(by_name)


@pytest.mark.slow
def test_a_stream_is_the_completion_in_parts(actor):
    sampler = JaxSampler(actor)
    likely = {"temperature": 0, "repetition_penalty": 1.5}
    whole = sampler.sample("2", SamplingParams(**likely, max_tokens=20))[0].sequences[0]
    assert len(whole.decoded) > 6
    stop = whole.decoded[3:6]  # across a border of blocks
    stopped = SamplingParams(**likely, max_tokens=20, stop=[stop, "9" * 8])
    shown = SamplingParams(**likely, max_tokens=20, stop=stop, include_stop_str_in_output=True)
    for params in (
        SamplingParams(**likely, max_tokens=20),
        SamplingParams(**likely, max_tokens=3),
        SamplingParams(**likely),
        stopped,
        shown,
    ):
        (expected,) = sampler.sample("2", params)[0].sequences
        parts = list(sampler.stream("2", params, block=4))
        assert "".join(text for text, _ in parts) == expected.decoded
        reasons = [reason for _, reason in parts]
        assert reasons == [None] * (len(parts) - 1) + [expected.stop_reason]
    assert len(list(sampler.stream("2", SamplingParams(**likely, max_tokens=20), block=4))) > 2


@pytest.mark.parametrize(
    ("text", "stops", "settled"),
    [
        ("caf\ufffd", [], "caf"),  # the first byte of two
        ("caf\ufffdé", [], "caf\ufffdé"),
        ("1 <en", ["<end>", "en"], "1 "),
        ("1 <en", ["end"], "1 <"),
        ("1 <en", ["n>", "x"], "1 <e"),
    ],
)
def test_a_stream_waits_for_characters_and_stop_strings_to_be_whole(text, stops, settled):
    assert settled_text(text, stops) == settled


def test_logits_that_are_not_finite_are_an_error(actor):
    """Every token was the first of the vocabulary, without a word."""
    sampler = JaxSampler(actor)
    broken = sampler.with_params(jax.tree.map(lambda x: x * jnp.nan, sampler.params))
    for kind, temperature in (("policy", 1.0), ("sampling", 0.0), (None, 1.0)):
        params = SamplingParams(max_tokens=6, temperature=temperature)
        with pytest.raises(RuntimeError, match=r"logits .* in 2 of 2 completions"):
            broken.sample(CHATS, params, logprobs_kind=kind)
    with pytest.raises(RuntimeError, match="logits"):
        next(broken.stream("1+2=", PARAMS))


@pytest.mark.slow
def test_the_blocks_of_a_stream_share_no_noise(actor):
    sampler = JaxSampler(actor, seed=3)
    even = SamplingParams(temperature=1e4, max_tokens=16)

    def draw(params):
        return "".join(text for text, _ in sampler.stream("1+2=", params, block=1))

    texts = [draw(even) for _ in range(8)]
    assert len(set(texts)) > 4  # calls
    assert max(len(set(text)) for text in texts) > 2  # with equal noise every block is the same
    seeded = SamplingParams(temperature=1e4, max_tokens=16, seed=7)
    assert draw(seeded) == draw(seeded)
    bad = [
        (CHATS, even, "one prompt"),
        ("1", SamplingParams(num_samples=2), "one prompt"),
        ("1", SamplingParams(max_tokens=0, prompt_logprobs=0), "one prompt"),
    ]
    for prompt, params, message in bad:
        with pytest.raises(ValueError, match=message):
            list(sampler.stream(prompt, params))
    with pytest.raises(ValueError, match="block must"):
        list(sampler.stream("1+2=", block=0))


@pytest.mark.exhaustive
def test_a_sampler_of_its_own_is_synchronised(checkpoint):
    actor = TransformersModel(model_id=checkpoint)
    separate, live = JaxSampler(model_id=checkpoint), JaxSampler(actor)
    seeded = SamplingParams(max_tokens=6, seed=1)
    assert tokens_of(separate.sample(CHATS, seeded)) == tokens_of(live.sample(CHATS, seeded))
    actor.add_adapter_to_model("default", LoraConfig(r=2, lora_alpha=4))
    actor.state = actor.state._replace(
        params=jax.tree.map(lambda x: x + jnp.float32(0.3), actor.state.params)
    )
    changed = tokens_of(live.sample(CHATS, seeded))
    assert tokens_of(separate.sample(CHATS, seeded)) != changed
    separate.sync_weights(actor)
    live.sync_weights(actor)
    kept = actor.state.params
    assert tokens_of(separate.sample(CHATS, seeded)) == changed
    assert kept is actor.state.params
    actor.set_loss("GRPOLoss")
    actor.set_optimizer("SGD", lr=5.0)
    rows = [{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}]
    actor.forward_backward(inputs=rows, advantages=[1.0])
    actor.clip_grad_and_step()  # which takes the memory of the actor's parameters
    assert tokens_of(separate.sample(CHATS, seeded)) == changed


def test_an_adapter_over_the_samplers_parameters(checkpoint, tmp_path):
    sampler = JaxSampler(model_id=checkpoint)
    lora = LoraConfig(r=2, lora_alpha=4)
    adapter = init_adapter(jax.random.key(0), sampler.config, lora)
    adapter = jax.tree.map(lambda x: x + jnp.float32(0.3), adapter)
    save_adapter(tmp_path / "adapter", sampler.config, lora, adapter, base=None)
    seeded = SamplingParams(max_tokens=6, seed=1)
    before = tokens_of(sampler.sample(CHATS, seeded))
    adapted = sampler.with_adapter(tmp_path / "adapter")
    params = with_adapter(sampler.params, sampler.config, lora, adapter)
    expected = tokens_of(sampler.with_params(params).sample(CHATS, seeded))
    assert tokens_of(adapted.sample(CHATS, seeded)) == expected != before
    assert tokens_of(sampler.sample(CHATS, seeded)) == before
    shared = sampler.params["embed_tokens"]["embedding"]
    assert adapted.params["embed_tokens"]["embedding"] is shared
    with pytest.raises(ValueError, match="adapter_path"):
        adapted.with_adapter(tmp_path / "adapter")


BAD = [
    ("inputs", {"inputs": []}, ValueError),
    (r"inputs\[1\]", {"inputs": [CHATS[0], {"input_ids": []}]}, ValueError),
    (r"inputs\[0\]", {"inputs": ["1" * 70]}, ValueError),
    (r"inputs\[0\]", {"inputs": [{"input_ids": [99]}]}, ValueError),
    (r"inputs\[0\]\['input_ids'\]", {"inputs": [{"input_ids": [1.5]}]}, TypeError),
    (r"inputs\[0\]\['input_ids'\]", {"inputs": [{"input_ids": [[5, 6], [7, 8]]}]}, ValueError),
    (r"inputs\[0\]\['input_ids'\]", {"inputs": [{"input_ids": [[5], [7, 8]]}]}, ValueError),
    (r"inputs\[0\]", {"inputs": [7]}, TypeError),
    ("num_samples", {"num_samples": "2"}, TypeError),
    ("temperature", {"sampling_params": {"temperature": -1}}, ValueError),
    ("top_p", {"sampling_params": {"top_p": 0}}, ValueError),
    ("stop", {"sampling_params": {"stop": "x"}}, ValueError),
    ("logprobs", {"sampling_params": {"logprobs": 2}}, ValueError),
    ("logprobs_kind", {"logprobs_kind": "raw"}, ValueError),
    ("sampling_params", {"sampling_params": 3}, TypeError),
]


@pytest.mark.parametrize(("name", "change", "error"), BAD)
def test_errors_name_the_argument(actor, name, change, error):
    with pytest.raises(error, match=f"{name} must"):
        JaxSampler(actor).sample(**{"inputs": CHATS, **change})


def test_prompt_logprobs_are_at_most_the_vocabulary(actor):
    vocab = actor.config.vocab_size
    (response,) = JaxSampler(actor).sample("1+2=", {"max_tokens": 0, "prompt_logprobs": vocab})
    assert {len(pairs) for pairs in response.topk_prompt_logprobs[1:]} == {vocab}
    with pytest.raises(ValueError, match="prompt_logprobs must"):
        JaxSampler(actor).sample("1+2=", {"max_tokens": 0, "prompt_logprobs": vocab + 1})


def test_it_needs_one_policy(actor, checkpoint):
    with pytest.raises(ValueError, match="model_id"):
        JaxSampler()
    with pytest.raises(ValueError, match="model_id"):
        JaxSampler(actor, model_id=checkpoint)
    with pytest.raises(ValueError, match=r"^model_id .*'no/such/place'"):
        JaxSampler(model_id="no/such/place")
    with pytest.raises(ValueError, match=r"^dtype .*'bf16'"):
        JaxSampler(model_id=checkpoint, dtype="bf16")
    with pytest.raises(TypeError, match=r"model must.*model_id"):
        JaxSampler(str(checkpoint))
    with pytest.raises(ValueError, match="max_length must"):
        JaxSampler(actor, max_length=1)
    with pytest.raises(TypeError, match="max_length must"):
        JaxSampler(actor, max_length=2.5)
    with pytest.raises(TypeError, match="seed must"):
        JaxSampler(actor, seed=1.5)
    with pytest.raises(TypeError, match="actor must"):
        JaxSampler(model_id=checkpoint).sync_weights(None)


def test_without_a_tokenizer_there_are_ids_only(actor):
    sampler = JaxSampler(actor)
    sampler.template = None
    prompts = [{"input_ids": [8, 9]}] * len(CHATS)
    response = sampler.sample(prompts, SamplingParams(max_tokens=6, num_samples=4))
    one = response[0].sequences[0]
    assert one.decoded is None and one.new_input_feature["input_ids"].tolist()[:2] == [8, 9]
    for wrong in ("12", CHATS[0]):
        with pytest.raises(ValueError, match=r"inputs\[0\] must"):
            sampler.sample(wrong)
    with pytest.raises(ValueError, match="stop must"):
        sampler.sample({"input_ids": [8]}, SamplingParams(stop="1"))
