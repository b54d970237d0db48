"""Twinkle's sampler: its engine's options, adapters by path, scored prompts; and distillation."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.model.families import config_of, hidden, params_of
from tests.sampler.vllm.fake_server import write_checkpoint
from tests.twinkle.rows import INPUTS, OLD, ROWS, assert_same, gradient, teacher_of
from twinkle_jax.data import SamplingParams, small_tokenizer
from twinkle_jax.loss import GKDLoss
from twinkle_jax.model import Decoder, LoraConfig, output_logits, save_pretrained
from twinkle_jax.sampler import JaxSampler
from twinkle_jax.twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.sampler import vLLMSampler
from twinkle_jax.twinkle.template import Template

pytestmark = pytest.mark.filterwarnings("ignore:vLLMSampler without base_url")
PROMPTS = [{"input_ids": row} for row in ROWS]
GREEDY = SamplingParams(max_tokens=4, temperature=0)
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=("q_proj", "down_proj"))
PARTS = ("teacher_topk_logprobs", "teacher_topk_indices")


@pytest.fixture
def sampler(checkpoint):
    return vLLMSampler(model_id=checkpoint, engine_args={"gpu_memory_utilization": 0.5})


@pytest.fixture
def trained(checkpoint):
    """A model with an adapter that changes what is sampled."""
    model = TransformersModel(model_id=checkpoint)
    model.add_adapter_to_model("default", LORA)
    model.state = model.state._replace(params=jax.tree.map(lambda x: x + 0.3, model.state.params))
    return model


def tokens(responses):
    return [sequence.tokens for response in responses for sequence in response.sequences]


@pytest.mark.slow
def test_without_a_server_it_samples_here(checkpoint, sampler):
    expected = JaxSampler(model_id=checkpoint).sample(PROMPTS, GREEDY)
    assert tokens(sampler.sample(PROMPTS, GREEDY)) == tokens(expected)
    short = vLLMSampler(model_id=checkpoint, engine_args={"max_model_len": 6})
    assert len(tokens(short.sample(PROMPTS, SamplingParams()))[0]) == 1
    sampler.reset_prefix_cache()
    for engine, error in (
        ({"logprobs_mode": "raw_logits"}, ValueError),
        ({"seed": 1}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(engine))):
            vLLMSampler(model_id=checkpoint, engine_args=engine)
    raw = vLLMSampler(model_id=checkpoint, engine_args={"logprobs_mode": "raw_logprobs"})
    assert tokens(raw.sample(PROMPTS, GREEDY)) == tokens(expected)
    with pytest.raises(ValueError, match="temperature"):
        raw.sample(PROMPTS, SamplingParams(temperature=0.5))


@pytest.mark.slow
def test_experts_are_returned_as_vllm_does(checkpoint, tmp_path):
    engine = {"enable_return_routed_experts": True}
    with pytest.raises(ValueError, match="return_routed_experts"):
        vLLMSampler(model_id=checkpoint, engine_args=engine)
    with pytest.raises(ValueError, match="return_routed_experts"):
        vLLMSampler(model_id=checkpoint, return_routed_experts=True)
    place = write_checkpoint(tmp_path / "mixture", name="qwen3_moe")
    drawn = vLLMSampler(model_id=place, engine_args=engine).sample(PROMPTS, GREEDY).inputs
    for feature in drawn:
        assert np.shape(feature["routed_experts"]) == (len(feature["input_ids"]), 2, 2)


def test_a_template_reads_the_tokenizer_of_the_checkpoint(checkpoint, tmp_path):
    """As in Twinkle; without `model_id` it was a TypeError."""
    place = shutil.copytree(checkpoint, tmp_path / "policy")
    small_tokenizer("0123456789").save_pretrained(place)
    sampler, model = vLLMSampler(place), TransformersModel(model_id=place)
    for holder in (sampler, model):
        for template in ("Qwen3_5Template", Template):
            holder.set_template(template, max_length=32)
            assert holder.template.max_length == 32
            assert holder.template.tokenizer.decode(holder.template.tokenizer.encode("12")) == "12"
        holder.set_template("Template", model_id=small_tokenizer("ab"))
        assert holder.template.tokenizer.decode(holder.template.tokenizer.encode("ab")) == "ab"
    small_tokenizer("xyz").save_pretrained(tmp_path / "tokenizer")
    model = TransformersModel(model_id=place, tokenizer_id=tmp_path / "tokenizer")
    model.set_template("Template")
    assert model.template.tokenizer.decode(model.template.tokenizer.encode("zx")) == "zx"
    response, *_ = sampler.sample(["12"] * len(PROMPTS), GREEDY, return_encoded=True)
    assert response.sequences[0].decoded is not None


@pytest.mark.parametrize("place", ["nowhere/at/all", "no-owner/no-tokenizer", Path(), 5])
def test_a_wrong_tokenizer_id_is_named(checkpoint, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = TransformersModel(model_id=checkpoint, tokenizer_id=place)
    with pytest.raises(TypeError if place == 5 else ValueError, match=r"^tokenizer_id must"):
        model.set_template("Template")
    with pytest.raises(TypeError if place == 5 else ValueError, match=r"^model_id must"):
        model.set_template("Template", model_id=place)


@pytest.mark.slow
def test_adapters_by_path(checkpoint, sampler, trained, tmp_path):
    place = trained.save("adapter", tmp_path)
    plain = tokens(sampler.sample(PROMPTS, GREEDY))
    adapted = tokens(sampler.sample(PROMPTS, GREEDY, adapter_path=place))
    assert adapted == tokens(JaxSampler(model=trained).sample(PROMPTS, GREEDY)) != plain
    assert tokens(sampler.sample(PROMPTS, GREEDY)) == plain
    params = SamplingParams(max_tokens=4)
    draws = [tokens(sampler.sample(PROMPTS, params, adapter_path=place)) for _ in range(2)]
    assert draws[0] != draws[1]
    CheckpointEngineManager(model=trained, sampler=sampler).sync_weights(merge_and_sync=False)
    assert tokens(sampler.sample(PROMPTS, GREEDY)) == adapted
    assert tokens(sampler.sample(PROMPTS, GREEDY, use_base_model=True)) == plain
    assert tokens(sampler.sample(PROMPTS, GREEDY)) == adapted
    with pytest.raises(ValueError, match="adapter_path"):
        sampler.sample(PROMPTS, GREEDY, adapter_path=place)
    served = vLLMSampler(model_id=checkpoint, base_url="http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"^model_id .*'no/such/place'"):
        vLLMSampler(model_id="no/such/place", base_url="http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"adapter_path .*server"):
        served.sample(PROMPTS, GREEDY, adapter_path=place)
    with pytest.raises(ValueError, match=r"use_base_model .*server"):
        served.sample(PROMPTS, GREEDY, use_base_model=True)
    with pytest.raises(ValueError, match=r"sleep .*server"):
        served.sleep()
    with pytest.raises(ValueError, match=r"sample_stream .*server"):
        next(served.sample_stream(PROMPTS[0]))


@pytest.mark.slow
def test_a_stream_of_text(sampler, trained, tmp_path):
    place = trained.save("adapter", tmp_path)
    sampler.set_template(Template(small_tokenizer("0123456789+="), max_length=64))
    for path in (None, place):
        calls = sampler._sampler.calls
        parts = list(sampler.sample_stream({"input_ids": ROWS[0]}, GREEDY, adapter_path=path))
        assert sampler._sampler.calls == calls + 1
        (expected,) = sampler.sample(PROMPTS[:1], GREEDY, adapter_path=path)[0].sequences
        assert "".join(text for text, _ in parts) == expected.decoded
        assert parts[-1][1] == expected.stop_reason


def test_a_sampler_sleeps_while_the_model_trains(checkpoint, sampler):
    assert sampler.max_length == sampler._sampler.max_length  # which rollouts read
    before = tokens(sampler.sample(PROMPTS, GREEDY))
    parameters = sampler._sampler.params["lm_head"]["kernel"]
    sampler.sleep()
    with pytest.raises(ValueError, match="wake_up"):
        sampler.sample(PROMPTS, GREEDY)
    assert isinstance(sampler._sampler._params["lm_head"]["kernel"], np.ndarray)
    sampler.wake_up(tags=["kv_cache"])
    with pytest.raises(ValueError, match="wake_up"):
        sampler.sample(PROMPTS, GREEDY)
    sampler.wake_up(tags=["weights"])
    sampler.wake_up()
    assert tokens(sampler.sample(PROMPTS, GREEDY)) == before
    assert sampler._sampler.params["lm_head"]["kernel"].sharding == parameters.sharding
    sampler.sleep(level=2)
    with pytest.raises(ValueError, match="sync_weights"):
        sampler.wake_up()
    model = TransformersModel(checkpoint)
    CheckpointEngineManager(model=model, sampler=sampler).sync_weights()
    assert tokens(sampler.sample(PROMPTS, GREEDY)) == before
    with pytest.raises(ValueError, match="level"):
        sampler.sleep(level=3)
    own = JaxSampler(model=model)  # nothing of its own
    own.sleep()
    assert tokens(own.sample(PROMPTS, GREEDY)) == before


def test_prompts_are_scored(sampler):
    scored = sampler.sample(PROMPTS, SamplingParams(max_tokens=0, prompt_logprobs=3))
    both = sampler.sample(PROMPTS, SamplingParams(max_tokens=2, prompt_logprobs=3))
    alone = sampler.sample(PROMPTS, SamplingParams(max_tokens=0, prompt_logprobs=0))
    for row, response, drawn, unscored in zip(ROWS, scored, both, alone, strict=True):
        padded = np.asarray([row + [0] * (16 - len(row))], np.int32)
        params = params_of("qwen3")
        config = config_of("qwen3")
        states = hidden(params, config, padded, remat=False)
        logprobs = np.asarray(jax.nn.log_softmax(output_logits(params, config, states)))[0]
        (empty,) = response.sequences
        assert empty.tokens == [] and len(drawn.sequences[0].tokens) == 2
        assert list(empty.new_input_feature["input_ids"]) == row
        assert response.prompt_logprobs[0] is None is response.topk_prompt_logprobs[0]
        expected = [logprobs[t, token] for t, token in enumerate(row[1:])]
        np.testing.assert_allclose(response.prompt_logprobs[1:], expected, atol=1e-4)
        assert unscored.prompt_logprobs == response.prompt_logprobs == drawn.prompt_logprobs
        assert unscored.topk_prompt_logprobs is None
        for t, pairs in enumerate(response.topk_prompt_logprobs[1:]):
            best = np.argsort(-logprobs[t])[:3]
            assert [token for token, _ in pairs] == best.tolist()
            np.testing.assert_allclose([x for _, x in pairs], logprobs[t, best], atol=1e-4)
    with pytest.raises(ValueError, match="max_tokens"):
        sampler.sample(PROMPTS, SamplingParams(max_tokens=0))


@pytest.mark.slow
def test_a_scored_conversation_is_what_a_student_trains_on(checkpoint, sampler, model):
    """Off-policy distillation, as Twinkle's recipe: a teacher scores answers that are there."""
    template = Template(small_tokenizer("0123456789+="), max_length=64)
    sampler.set_template(template)
    talk = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, num_samples=2)
    ((response),) = sampler.sample([{"messages": talk}], params)
    encoded = template.encode({"messages": talk})
    assert len(response.sequences) == 2
    for sequence in response.sequences:
        assert (sequence.tokens, sequence.logprobs) == ([], None)
        feature = sequence.new_input_feature
        for name in ("input_ids", "labels"):
            assert list(feature[name]) == list(encoded[name])
    assert len(response.topk_prompt_logprobs) == len(encoded["input_ids"])
    model.set_loss(GKDLoss())
    named = teacher_of([response])
    inputs = [response.sequences[0].new_input_feature]
    # The teacher is the student.
    assert abs(float(model.forward_backward(inputs=inputs, **named)["loss"])) < 1e-6


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    place = tmp_path_factory.mktemp("teacher") / "qwen3"
    params = jax.tree.map(lambda x: x * 1.25, params_of("qwen3"))
    save_pretrained(Decoder(config_of("qwen3"), params), place)
    return TransformersModel(model_id=place).forward_only(inputs=INPUTS, return_logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [None, 4])
@pytest.mark.parametrize("micro", [None, 2])
def test_distillation(model, teacher, topk, micro):
    loss = GKDLoss(beta=0.25, temperature=2.0)
    model.set_loss(loss)
    student = model.forward_only(inputs=INPUTS, return_logits=True)["logits"]
    labels = np.full((3, 5), -100)
    for i, feature in enumerate(INPUTS):
        labels[i, : len(feature["labels"])] = feature["labels"]
    expected = loss(
        {"labels": labels}, {"logits": student}, teacher_logits=teacher["logits"], topk=topk
    ).loss
    options = {"teacher_output": teacher, "topk": topk, "micro_batch_size": micro}
    np.testing.assert_allclose(
        model.forward_backward(inputs=INPUTS, **options)["loss"], expected, rtol=1e-4
    )
    by_logits = gradient(model)
    model.zero_grad()
    logprobs = np.asarray(jax.nn.log_softmax(teacher["logits"]))
    order = np.argsort(-logprobs)[..., :topk]
    parts = np.take_along_axis(logprobs, order, -1), order
    named = {name: part.tolist() for name, part in zip(PARTS, parts, strict=True)}
    model.forward_backward(inputs=INPUTS, **named)
    assert_same(gradient(model), by_logits, 1e-5)
    losses = [float(expected)]
    for _ in range(3):
        model.clip_grad_and_step()
        losses.append(float(model.forward_backward(inputs=INPUTS, **options)["loss"]))
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_loss_or_the_call_says_how_many_tokens_of_the_teacher_count(model, teacher):
    def loss_of(of_loss, **options):
        model.set_loss(GKDLoss(topk=of_loss))
        model.zero_grad()
        return float(
            model.forward_backward(inputs=INPUTS, teacher_output=teacher, **options)["loss"]
        )

    assert loss_of(4) == loss_of(None, topk=4) == loss_of(2, topk=4) != loss_of(None)
    with pytest.raises(ValueError, match=r"topk .*-1"):
        loss_of(None, topk=-1)


def test_a_policy_that_is_its_own_teacher_loses_nothing(checkpoint, sampler):
    """Scores of prompts say what comes at a token, labels what comes after it: shifted by one."""
    vocab = config_of("qwen3").vocab_size
    named = teacher_of(sampler.sample(PROMPTS, SamplingParams(max_tokens=0, prompt_logprobs=vocab)))
    inputs = [
        {"input_ids": row, "labels": [*row[1:], -100], "attention_mask": [1] * len(row)}
        for row in ROWS
    ]
    losses = []
    for shift in (0, 1):
        model = TransformersModel(model_id=checkpoint)
        model.set_loss(GKDLoss(beta=0.5))
        moved = {name: np.roll(x, shift, axis=1) for name, x in named.items()}
        losses.append(float(model.forward_backward(inputs=inputs, **moved)["loss"]))
    assert abs(losses[0]) < 1e-6 < 1e-3 < losses[1]


def test_teachers_that_are_refused(model, teacher):
    with pytest.raises(ValueError, match="teacher_logits"):
        model.forward_backward(inputs=INPUTS, teacher_output=teacher, old_logps=OLD)
    model.set_loss("GKDLoss")
    with pytest.raises(ValueError, match="teacher_logits"):
        model.forward_backward(inputs=INPUTS)
    with pytest.raises(ValueError, match="teacher_output"):
        model.forward_backward(inputs=INPUTS, teacher_output=teacher, teacher_logits=[1])
    cut = {name: np.zeros((3, 4, 2), int) for name in PARTS}
    with pytest.raises(ValueError, match="teacher_logprobs"):
        model.forward_backward(inputs=INPUTS, **cut)
    cut["teacher_topk_logprobs"] = np.zeros((3, 5, 3))
    cut["teacher_topk_indices"] = np.zeros((3, 5, 2), int)
    with pytest.raises(ValueError, match="teacher_tokens"):
        model.forward_backward(inputs=INPUTS, **cut)
