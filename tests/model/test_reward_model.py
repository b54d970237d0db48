"""Reward models: the scores of transformers' models, whatever else is in the batch."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import each, family, params_of
from tests.model.huggingface.tensors import rewrite
from twinkle_jax.data import Template, small_tokenizer
from twinkle_jax.model import (
    Decoder,
    RewardModel,
    hidden_states,
    make_mesh,
    parse_config,
    save_pretrained,
)
from twinkle_jax.reward import WeightedReward, score_trajectories

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
_GET = "pip install 'twinkle-jax[oracle]'"
torch = pytest.importorskip("torch", reason=_GET)
transformers = pytest.importorskip("transformers", reason=_GET)

TEMPLATE = Template(small_tokenizer("0123456789+-*()="))
END = TEMPLATE.tokenizer.eos_token_id
CASES = (
    *("qwen3", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "olmo2", "olmo3", "smollm3"),
    *("qwen3_5_text", "qwen3_moe"),
)  # those that transformers has as models for sequence classification


def conversations(answers):
    question = {"role": "user", "content": "1+2="}
    return [{"messages": [question, {"role": "assistant", "content": x}]} for x in answers]


ANSWERS = conversations(["3", "", "4" * 30, "1+1+1", "12", "(1+2)*1", "3"])


def checkpoint(directory, name="qwen3", labels=1, **changes):
    """Write a random model of transformers' with a tokenizer, and return it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**family(name, num_labels=labels, **changes))
    model = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 0.7, 0.5)
    model.save_pretrained(directory)
    TEMPLATE.tokenizer.save_pretrained(directory)
    return model


def theirs(model, trajectories, pad=0):
    rows = [x["input_ids"] for x in TEMPLATE.batch_encode(trajectories)]
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        return model(tokens, attention_mask=mask).logits[:, 0].numpy()


@pytest.mark.parametrize("name", each(CASES, default=2))
def test_scores_are_those_of_transformers(name, tmp_path):
    model = checkpoint(tmp_path, name, pad_token_id=0)
    scores = RewardModel.from_pretrained(tmp_path)(ANSWERS)
    np.testing.assert_allclose(scores, theirs(model, ANSWERS), rtol=2e-5, atol=2e-5)
    assert np.ptp(scores) > 0.5
    assert scores[0] == scores[-1]


def test_a_pad_token_at_the_end_is_not_counted(tmp_path):
    """Some checkpoints pad with the token that ends a turn."""
    model = checkpoint(tmp_path, pad_token_id=END)
    assert TEMPLATE.batch_encode(ANSWERS)[0]["input_ids"][-1] == END
    scores = RewardModel.from_pretrained(tmp_path)(ANSWERS)
    np.testing.assert_allclose(scores, theirs(model, ANSWERS, END), rtol=2e-5, atol=2e-5)
    counted = RewardModel.from_pretrained(tmp_path)
    counted.pad_token_id = None
    assert np.abs(np.subtract(counted(ANSWERS), scores)).max() > 0.1


def reward_of(name="qwen3", **options):
    config = parse_config(family(name))
    head = np.random.default_rng(0).standard_normal(config.hidden_size)
    return RewardModel(config, params_of(name), head, TEMPLATE, **options)


def test_scores_depend_on_no_other_conversation(monkeypatch):
    reward = reward_of()
    alone = [reward([x])[0] for x in ANSWERS]
    np.testing.assert_allclose(reward(ANSWERS), alone, rtol=1e-5, atol=1e-5)
    for tokens, order in itertools.product((1, 100), ([3, 1, 2, 0], [6, 5, 4, 3, 2, 1, 0])):
        monkeypatch.setattr("twinkle_jax.model.reward_model._TOKENS", tokens)
        some = reward([ANSWERS[i] for i in order])
        np.testing.assert_allclose(some, [alone[i] for i in order], rtol=1e-5, atol=1e-5)


def test_scores_on_a_mesh_are_those_of_one_device(tmp_path):
    checkpoint(tmp_path)
    scores = RewardModel.from_pretrained(tmp_path)(ANSWERS)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    spread = RewardModel.from_pretrained(tmp_path, mesh=mesh)
    kernel = spread.params["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    np.testing.assert_allclose(spread(ANSWERS), scores, rtol=1e-5, atol=1e-5)


def test_the_type_of_parameters_can_be_chosen(tmp_path):
    checkpoint(tmp_path)
    scores = RewardModel.from_pretrained(tmp_path)(ANSWERS)
    rounded = RewardModel.from_pretrained(tmp_path, dtype="bfloat16")
    assert rounded.params["embed_tokens"]["embedding"].dtype == jnp.bfloat16
    differences = np.abs(np.subtract(rounded(ANSWERS), scores))
    assert 0 < differences.max() < 0.1 * np.abs(scores).max()


def test_scores_are_not_divided_as_logits_are():
    config, params = parse_config(family("granite")), params_of("granite")
    assert config.logits_scaling != 1
    unscaled = dataclasses.replace(config, logits_scaling=1.0)
    tokens = TEMPLATE.batch_encode(ANSWERS[:1])[0]["input_ids"]
    expected = float(hidden_states(params, unscaled, tokens[None])[0, -1].sum())
    reward = RewardModel(config, params, np.ones(config.hidden_size), TEMPLATE)
    assert reward(ANSWERS[:1]) == [pytest.approx(expected, rel=1e-4)]


def test_it_is_a_reward_among_others():
    both = WeightedReward({"model": reward_of(), "length": lambda trajectories: [1.0] * 7}, [2, 1])
    scores = score_trajectories(both, ANSWERS, ["3"] * 7)
    expected = [2 * x + 1 for x in scores.components["model"]]
    np.testing.assert_allclose(scores.rewards, expected, rtol=1e-6)
    assert reward_of()([]) == []


def test_what_is_no_reward_model_is_refused(tmp_path):
    checkpoint(tmp_path / "two", labels=2)
    with pytest.raises(ValueError, match=r"--reward .*\(1, 24\), got one of the shape \(2, 24\)"):
        RewardModel.from_pretrained(tmp_path / "two", argument="--reward")
    config = parse_config(family("qwen3"))
    save_pretrained(Decoder(config, params_of("qwen3")), tmp_path / "policy")
    with pytest.raises(ValueError, match=r"score\.weight .* got none in"):
        RewardModel.from_pretrained(tmp_path / "policy")
    checkpoint(tmp_path / "one")
    settings = tmp_path / "one" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": None}))
    with pytest.raises(ValueError, match="chat_template"):
        RewardModel.from_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match=r"head .*\(24,\).* got \(25,\)"):
        RewardModel(config, params_of("qwen3"), np.ones(25), TEMPLATE)
    for strategy in ("delete", "split"):  # scores would belong to other conversations
        template = Template(TEMPLATE.tokenizer, truncation_strategy=strategy)
        with pytest.raises(ValueError, match=f"template .* got .*{strategy}"):
            RewardModel(config, params_of("qwen3"), np.ones(24), template)


def test_scores_and_heads_that_are_not_finite_are_refused(tmp_path):
    reward = reward_of()
    reward.head = np.where(np.arange(24) == 3, np.nan, reward.head)
    with pytest.raises(ValueError, match="scores must be finite"):
        reward(ANSWERS)
    checkpoint(tmp_path)
    rewrite(tmp_path, {"score.weight": np.full((1, 24), np.inf, np.float32)})
    with pytest.raises(ValueError, match=r"score\.weight must be finite"):
        RewardModel.from_pretrained(tmp_path)
