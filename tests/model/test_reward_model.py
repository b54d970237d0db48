"""Reward models: the scores of transformers' models, whatever else is in the batch."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.families import assert_close, each, family, hidden, params_of
from tests.model.huggingface.tensors import assert_same, contents, rewrite
from twinkle_jax.data import Template, pad_rows, small_tokenizer
from twinkle_jax.loss import bradley_terry_loss
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    RewardModel,
    make_mesh,
    merge_params,
    parse_config,
    reward_scores,
    save_pretrained,
    shard_like_params,
    with_adapter,
)
from twinkle_jax.model.decoder.lora import init_adapter
from twinkle_jax.reward import WeightedReward, score_trajectories

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy

_GET = "pip install 'twinkle-jax[oracle]'"
torch = pytest.importorskip("torch", reason=_GET)
transformers = pytest.importorskip("transformers", reason=_GET)

TEMPLATE = Template(small_tokenizer("0123456789+-*()="))
END = TEMPLATE.tokenizer.eos_token_id
CASES = (
    *("qwen3", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "olmo2", "olmo3", "smollm3"),
    *("qwen3_5_text", "qwen3_moe", "gpt_oss", "glm4"),
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


def scores_of(model, trajectories, pad=0):
    rows = [x["input_ids"] for x in TEMPLATE.batch_encode(trajectories)]
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return model(tokens, attention_mask=mask).logits[:, 0]


def theirs(model, trajectories, pad=0):
    with torch.no_grad():
        return scores_of(model, trajectories, pad).numpy()


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


@pytest.mark.parametrize("wrong", ["0", [0, 1], True, 1.0])
def test_pad_tokens_that_are_no_ids_are_refused(wrong, tmp_path):
    """`true` of a `config.json` was taken for token 1."""
    checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": wrong}))
    with pytest.raises(ValueError, match="pad_token_id"):
        RewardModel.from_pretrained(tmp_path)


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
    expected = float(hidden(params, unscaled, tokens[None])[0, -1].sum())
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


# Training, and saving what was trained.


def padded(reward, trajectories, extra=0, fill=0):
    """Tokens and lengths of conversations."""
    rows = reward.encode(trajectories)
    tokens = pad_rows(rows, fill, length=max(map(len, rows)) + extra)
    return jnp.asarray(tokens), jnp.asarray([len(row) for row in rows])


scored = jax.jit(reward_scores, static_argnames=("config", "compute_dtype"))


def pair_loss(params, head, config, tokens, lengths, **options):
    """The even rows are chosen, the odd ones rejected."""
    scores = reward_scores(params, head, config, tokens, lengths, **options).reshape(-1, 2)
    losses = bradley_terry_loss(scores[:, 0], scores[:, 1], center_coefficient=0.01)
    return jnp.mean(losses)


@functools.partial(jax.jit, static_argnames=("config", "compute_dtype", "remat", "mesh"))
def loss_and_gradients(params, head, config, tokens, lengths, **options):
    gradients = jax.value_and_grad(pair_loss, (0, 1))
    return gradients(params, head, config, tokens, lengths, **options)


@pytest.mark.parametrize("name", each(("qwen3", "qwen2", "llama", "gemma3_text", "phi3")))
def test_gradients_are_those_of_pytorch(name, tmp_path):
    model = checkpoint(tmp_path, name, pad_token_id=0)
    for p in model.parameters():
        p.data *= 0.5  # with larger weights scores differ by 20, and gradients of pairs vanish
    model.save_pretrained(tmp_path)
    scores = scores_of(model, ANSWERS[:6])
    chosen, rejected = scores[0::2], scores[1::2]
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    loss = loss + 0.01 * torch.mean((chosen + rejected) ** 2)
    loss.backward()
    reward = RewardModel.from_pretrained(tmp_path)
    batch = padded(reward, ANSWERS[:6])
    value, gradients = loss_and_gradients(reward.params, reward.head, reward.config, *batch)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    reward.params, reward.head = gradients
    reward.save_pretrained(tmp_path / "gradients")  # under the names of parameters
    ours = safetensors.numpy.load_file(tmp_path / "gradients" / "model.safetensors")
    desired = {key: p.grad.numpy() for key, p in model.named_parameters()}
    assert ours.keys() == desired.keys()
    for key, expected in desired.items():
        scale = np.abs(expected).max()
        assert scale > 1e-5, key
        np.testing.assert_allclose(ours[key], expected, rtol=0, atol=2e-5 * scale, err_msg=key)


@pytest.mark.parametrize("name", each(CASES, default=2))
def test_transformers_opens_what_is_saved(name, tmp_path):
    model = checkpoint(tmp_path / "in", name, pad_token_id=0)
    reward = RewardModel.from_pretrained(tmp_path / "in")
    reward.head = 2 * reward.head
    reward.save_pretrained(tmp_path / "out", max_shard_size=9_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    auto = transformers.AutoModelForSequenceClassification
    opened, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert type(opened) is type(model) and opened.config.architectures == [type(model).__name__]
    assert opened.config.num_labels == 1 and opened.config.pad_token_id == 0
    expected = 2 * theirs(model, ANSWERS)
    np.testing.assert_allclose(theirs(opened.eval(), ANSWERS), expected, rtol=2e-5, atol=4e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    row = tokenizer.apply_chat_template(ANSWERS[2]["messages"], return_dict=False)
    assert row == reward.encode(ANSWERS)[2].tolist()
    again = RewardModel.from_pretrained(tmp_path / "out")
    assert again(ANSWERS) == reward(ANSWERS)
    assert_same(again.params, reward.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "qwen3_5_moe_text"])
def test_families_without_a_class_in_transformers_are_saved_too(name, tmp_path):
    reward = reward_of(name, pad_token_id=0)
    assert "lm_head" in reward.params
    reward.save_pretrained(tmp_path / "out")
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert "score.weight" in stored and "lm_head.weight" not in stored
    again = RewardModel.from_pretrained(tmp_path / "out")
    assert again(ANSWERS) == reward(ANSWERS) and again.pad_token_id == 0
    assert again.config.logits_scaling == reward.config.logits_scaling


def save_policy_with_tokenizer(directory, **changes):
    config = parse_config(family("qwen3", **changes))
    params = dict(params_of("qwen3"))
    if config.tie_embeddings:
        del params["lm_head"]
    save_pretrained(Decoder(config, params), directory)
    TEMPLATE.tokenizer.save_pretrained(directory)
    return params


def test_a_text_model_inside_another_one_begins_with_a_head_of_zeros(tmp_path):
    """Its head for tokens, which is left out, stands in `language_model`."""
    nested = {"model_type": "mistral3", "text_config": family("mistral")}
    save_pretrained(Decoder(parse_config(nested), params_of("mistral")), tmp_path)
    TEMPLATE.tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({f"language_model.{k}": x for k, x in tensors.items()}, file)
    reward = RewardModel.from_pretrained(tmp_path, new_head=True)
    assert_same(reward.params, {k: x for k, x in params_of("mistral").items() if k != "lm_head"})


@pytest.mark.parametrize("tied", [False, True])
def test_a_policy_begins_with_a_head_of_zeros(tied, tmp_path):
    params = save_policy_with_tokenizer(tmp_path / "policy", tie_word_embeddings=tied)
    assert ("lm_head" in params) is not tied
    reward = RewardModel.from_pretrained(tmp_path / "policy", new_head=True)
    assert reward(ANSWERS) == [0.0] * 7
    assert_same(reward.params, {k: x for k, x in params.items() if k != "lm_head"})
    assert reward.pad_token_id == TEMPLATE.tokenizer.pad_token_id
    batch = padded(reward, ANSWERS[:6])
    value, gradients = loss_and_gradients(reward.params, reward.head, reward.config, *batch)
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    assert not any(x.any() for x in jax.tree.leaves(gradients[0])) and gradients[1].all()
    reward.save_pretrained(tmp_path / "reward")
    auto = transformers.AutoModelForSequenceClassification
    opened, report = auto.from_pretrained(tmp_path / "reward", output_loading_info=True)
    assert not any(report.values()) and not theirs(opened, ANSWERS).any()
    with pytest.raises(ValueError, match=r"new_head .* score\.weight, got True"):
        RewardModel.from_pretrained(tmp_path / "reward", new_head=True)
    labels = {"num_labels": 2, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    save_policy_with_tokenizer(tmp_path / "named", pad_token_id=5, **labels)
    named = RewardModel.from_pretrained(tmp_path / "named", new_head=True)
    assert named.pad_token_id == 5
    named.save_pretrained(tmp_path / "named")
    assert auto.from_pretrained(tmp_path / "named").config.num_labels == 1
    content = json.loads((tmp_path / "named" / "config.json").read_text())
    assert content["num_labels"] == len(content["id2label"]) == len(content["label2id"]) == 1


def test_head_and_parameters_train_in_float32(tmp_path):
    """A head in bfloat16 would lose small updates, whatever the type of the parameters."""
    checkpoint(tmp_path)
    head = np.asarray(RewardModel.from_pretrained(tmp_path).head)
    rewrite(tmp_path, {"score.weight": head[None].astype(jnp.bfloat16)})
    reward = RewardModel.from_pretrained(tmp_path, dtype="float32")
    assert {x.dtype for x in jax.tree.leaves((reward.params, reward.head))} == {np.dtype("float32")}
    tokens, lengths = padded(reward, ANSWERS)
    half = scored(
        reward.params, reward.head, reward.config, tokens, lengths, compute_dtype="bfloat16"
    )
    single = np.asarray(reward(ANSWERS))
    assert half.dtype == jnp.float32
    assert 1e-4 < np.abs(half - single).max() / np.abs(single).max() < 0.1


@pytest.mark.parametrize("name", each(("qwen3", "qwen3_5_text", "qwen3_moe")))
def test_padding_changes_nothing(name):
    reward = reward_of(name)
    arguments = reward.params, jnp.asarray(reward.head, jnp.float32), reward.config
    tokens, lengths = padded(reward, ANSWERS[:4])
    expected = loss_and_gradients(*arguments, tokens, lengths)
    for fill in (7, -1, 10**6):  # the last two are outside the vocabulary
        dirty, _ = padded(reward, ANSWERS[:4], fill=fill)
        actual = loss_and_gradients(*arguments, dirty, lengths)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
    kept = loss_and_gradients(*arguments, tokens, lengths, remat=False)
    jax.tree.map(functools.partial(assert_close, tolerance=1e-4), kept, expected)


@pytest.mark.slow
def test_padding_beyond_the_longest_row_of_longrope():
    """Positions there have no factors: hidden states are NaN, and so were gradients."""
    reward = reward_of("phi3")
    assert reward.config.attention.longest_row == 128
    tokens, lengths = padded(reward, ANSWERS[:4], extra=130)
    arguments = reward.params, jnp.asarray(reward.head, jnp.float32), reward.config
    scores = reward_scores(*arguments, tokens, lengths)
    np.testing.assert_allclose(scores, reward(ANSWERS[:4]), rtol=1e-5, atol=1e-5)
    _, gradients = loss_and_gradients(*arguments, tokens, lengths)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_lengths_outside_a_row_make_its_score_nan():
    reward = reward_of()
    tokens, _ = padded(reward, ANSWERS[:4])
    lengths = jnp.array([0, 1, tokens.shape[1], tokens.shape[1] + 1])
    scores = scored(reward.params, reward.head, reward.config, tokens, lengths)
    np.testing.assert_array_equal(np.isnan(scores), [True, False, False, True])


def test_tokens_and_lengths_may_be_of_numpy():
    """Of 64 bits, as NumPy makes them: JAX warned that it has 32."""
    reward = reward_of()
    tokens, lengths = (np.asarray(x, np.int64) for x in padded(reward, ANSWERS[:4]))
    scores = reward_scores(reward.params, reward.head, reward.config, tokens, lengths)
    np.testing.assert_allclose(scores, reward(ANSWERS[:4]), rtol=1e-5)


def test_errors_of_scores_name_the_argument():
    reward, tokens = reward_of(), jnp.zeros((2, 5), int)

    def scores(head=reward.head, tokens=tokens, lengths=tokens[:, 0], **options):
        def run(head, tokens, lengths):
            return reward_scores(reward.params, head, reward.config, tokens, lengths, **options)

        return jax.eval_shape(run, jnp.asarray(head, jnp.float32), tokens, lengths)

    assert scores().shape == (2,)
    for error, name, changes in (
        (ValueError, "head", {"head": np.ones(25)}),
        (ValueError, "head", {"head": np.ones((1, 24))}),
        (ValueError, "lengths", {"lengths": jnp.ones(3, int)}),
        (ValueError, "lengths", {"lengths": jnp.ones((2, 1), int)}),
        (TypeError, "lengths", {"lengths": jnp.ones(2)}),
        (ValueError, "tokens", {"tokens": tokens[0][:2]}),
        (TypeError, "tokens", {"tokens": tokens > 0}),
        (ValueError, "batch", {"mesh": make_mesh(fsdp=4)}),
    ):
        with pytest.raises(error, match=f"^{name}"):
            scores(**changes)


def train(reward, mesh):
    """Take three steps of AdamW on two pairs."""
    optimizer = optax.adamw(1e-2)
    trained = reward.params, jnp.asarray(reward.head)
    state = optimizer.init(trained)
    if mesh is not None:
        state = jax.device_put(state, shard_like_params(state, mesh))
    tokens, lengths = padded(reward, ANSWERS[:4])

    @jax.jit
    def step(trained, state):
        def loss(trained):
            return pair_loss(*trained, reward.config, tokens, lengths, mesh=mesh)

        value, gradient = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, value

    values = []
    with jax.numpy_dtype_promotion("standard"):  # Optax's
        for _ in range(3):
            trained, state, value = step(trained, state)
            values.append(float(value))
    reward.params, reward.head = trained
    return values


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2}])
def test_training_on_a_mesh_is_that_on_one_device(shape, tmp_path):
    save_policy_with_tokenizer(tmp_path / "policy")
    read = functools.partial(RewardModel.from_pretrained, tmp_path / "policy", new_head=True)
    alone, mesh = read(), make_mesh(**shape)
    expected = train(alone, None)
    spread = read(mesh=mesh)
    np.testing.assert_allclose(train(spread, mesh), expected, rtol=1e-4)
    assert expected[2] < expected[1] < expected[0]
    kernel = spread.params["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    parts = shape["fsdp"] * shape.get("tensor", 1)
    assert kernel.addressable_shards[0].data.size == kernel.size // parts
    np.testing.assert_allclose(spread(ANSWERS), alone(ANSWERS), rtol=1e-3, atol=1e-3)
    spread.save_pretrained(tmp_path / "reward")
    again = RewardModel.from_pretrained(tmp_path / "reward")
    assert_same(again.params, jax.tree.map(np.asarray, spread.params))
    np.testing.assert_array_equal(again.head, spread.head)


def test_what_no_one_should_read_is_not_saved(tmp_path):
    reward, place = reward_of(), tmp_path / "out"
    head = reward.head
    reward.save_pretrained(place)
    before = contents(place)
    for bad, options, error in (
        (np.where(np.arange(24) == 3, np.nan, head), {}, r"^score\.weight must be finite"),
        (np.full(24, 1e6, np.float32), {"dtype": "float16"}, r"^score\.weight must fit float16"),
        (head, {"dtype": "int8"}, "^dtype"),
        (head, {"max_shard_size": 0}, "^max_shard_size"),
    ):
        reward.head = bad
        with pytest.raises(ValueError, match=error):
            reward.save_pretrained(place, **options)
        assert contents(place) == before
    reward.head = head
    lora = LoraConfig(r=1, target_modules=("q_proj",))
    adapted = reward_of()
    adapter = init_adapter(jax.random.key(0), adapted.config, lora)
    adapted.params = merge_params(with_adapter(adapted.params, adapted.config, lora), adapter)
    (tmp_path / "file").write_text("")
    for target, where in ((adapted, place), (reward, tmp_path / "file")):
        with pytest.raises(ValueError, match=r"^decoder must have no adapter|^directory must be"):
            target.save_pretrained(where)
    assert contents(place) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "out"]


def test_the_template_comes_along_and_replaces_an_older_one(tmp_path):
    source = TEMPLATE.tokenizer.chat_template.replace("{{", "{{ ' ' }}{{", 1)
    reward = reward_of()
    (tmp_path / "chat_template.jinja").write_text("of an older export")
    (tmp_path / "README.md").write_text("mine")
    reward.save_pretrained(tmp_path, dtype="bfloat16")
    assert not (tmp_path / "chat_template.jinja").exists()
    assert (tmp_path / "README.md").read_text() == "mine"
    assert RewardModel.from_pretrained(tmp_path, dtype=None).template.chat_template.source == (
        TEMPLATE.tokenizer.chat_template
    )
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["dtype"] == "bfloat16" and content["pad_token_id"] is None
    reward.template = Template(TEMPLATE.tokenizer, chat_template=source)
    reward.save_pretrained(tmp_path)
    assert RewardModel.from_pretrained(tmp_path).template.chat_template.source == source
