"""Experts that are recorded while tokens are drawn: those that the trainer's router chooses."""

import functools

import jax
import numpy as np
import pytest

from tests.model.decoder.test_routing import NAMES, model_of
from tests.model.families import batch, config_of, each, params_of
from tests.sampler.vllm.fake_server import write_checkpoint
from twinkle_jax.data import Batch, SamplingParams
from twinkle_jax.model import (
    decode_step,
    extend,
    make_mesh,
    prefill,
    shard_like_params,
    unstack_layers,
)
from twinkle_jax.rollout import LocalEngine, RolloutConfig
from twinkle_jax.sampler import (
    Conversations,
    JaxSampler,
    Sampling,
    conversations_memory,
    generate,
    generate_memory,
    sizes,
)
from twinkle_jax.training import score_batch
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.model.transformers.moe.router_replay import RouterReplayAction

read_prompts = jax.jit(prefill, static_argnames=("config", "max_length", "keep_routing"))
read_more, step = (jax.jit(f, static_argnames="config") for f in (extend, decode_step))

PROMPTS = [[5, 6, 7, 8, 9], [12, 13], [15], [16, 17, 18, 19]]
ROOM = 40


@pytest.fixture(params=each(["whole rows", "pages"], mark=pytest.mark.slow))
def laid_out(request, monkeypatch):
    """Whole rows, as on a CPU, or pages, as on GPUs and TPUs."""
    if request.param == "pages":
        monkeypatch.setattr(sizes, "_PAGE", {"cpu": 16})
        monkeypatch.setattr(sizes, "_SHORT", 0)


def chosen_by_router(name, rows):
    """The experts of all tokens of rows in the trainer's forward pass, row by row."""
    config, params = model_of(name)
    filled = [*rows, *[[1]] * (16 - len(rows))]  # compiled once, however many rows there are
    tokens, mask = batch(filled, 64, "right")
    labels = np.where(mask, 1, -100)
    scored = score_batch(params, Batch(tokens, labels), config, with_routing=True)
    return [np.asarray(scored.routing[i, : len(row)]) for i, row in enumerate(rows)]


def draw(name, how=generate, mesh=None, **options):
    config, params = model_of(name)
    if mesh is not None:
        params = jax.device_put(params, shard_like_params(params, mesh))
    tokens = batch(PROMPTS, 6, "left")
    options |= {"num_samples": 4, "max_new_tokens": ROOM, "keep_routing": True, "mesh": mesh}
    sampling = Sampling(0.9, stop_tokens=[3])
    return how(params, config, *tokens, jax.random.key(0), sampling, **options)


def in_one_program(params, config, *args, **options):
    return jax.jit(lambda params: generate(params, config, *args, **options))(params)


def assert_routed(name, drawn):
    """Each token but the last has the experts that the trainer's router chooses for it."""
    rows = [
        [*PROMPTS[i // 4], *np.asarray(drawn.tokens[i, : drawn.lengths[i]]).tolist()]
        for i in range(4 * len(PROMPTS))
    ]
    assert min(drawn.lengths) < 16 < max(drawn.lengths)  # tokens of a page
    assert drawn.routing.dtype == np.uint8
    for i, expected in enumerate(chosen_by_router(name, rows)):
        np.testing.assert_array_equal(drawn.routing[i, : len(expected) - 1], expected[:-1])


@pytest.mark.parametrize("name", each(NAMES, mark=pytest.mark.slow))
@pytest.mark.parametrize("laid", each(["stacked", "layer by layer"], mark=pytest.mark.slow))
def test_of_tokens_that_are_read(name, laid):
    """By `prefill`, `extend` and `decode_step`; layers lie in a stack on TPUs."""
    config, params = model_of(name)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (3, 12))
    mask = np.arange(5) >= [[0], [2], [4]]  # the other tokens are padding
    options = {"max_length": 16, "keep_routing": True}
    _, cache = read_prompts(params, config, rows[:, :5], mask, **options)
    _, cache = read_more(params, config, rows[:, 5:8], cache, np.ones((3, 3), bool))
    if laid == "layer by layer":
        params, cache = unstack_layers(params), unstack_layers(cache)
    for column in range(8, 12):
        active = np.array([True, column != 9, True])
        _, cache = step(params, config, rows[:, column], cache, active)
    read = [rows[0], np.delete(rows[1, 2:], 9 - 2), rows[2, 4:]]
    for i, expected in enumerate(chosen_by_router(name, [row.tolist() for row in read])):
        np.testing.assert_array_equal(cache.routing[i, : len(expected)], expected)


@pytest.mark.parametrize("name", each(NAMES, mark=pytest.mark.slow))
@pytest.mark.usefixtures("laid_out")
def test_of_completions(name):
    assert_routed(name, draw(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"slots": 8, "refill": 2}, {"how": in_one_program}, {"mesh": {"fsdp": 4, "tensor": 2}}],
    ids=["slots", "one program", "mesh"],
)
@pytest.mark.usefixtures("laid_out")
def test_however_rows_are_drawn(options):
    if "mesh" in options:
        options = {"mesh": make_mesh(**options["mesh"])}
    assert_routed("qwen3_moe", draw("qwen3_moe", **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", each(["qwen3_moe", "qwen3_5_moe_text"]))
@pytest.mark.parametrize("slots", [None, 2], ids=["kept", "read again"])
@pytest.mark.usefixtures("laid_out")
def test_of_all_turns(name, slots):
    """Of prompts, completions and observations; kept rows are read once, others at each turn."""
    config, params = model_of(name)
    engine = LocalEngine(config, None, stop_tokens=[3], keep_routing=True)
    settings = RolloutConfig(max_new_tokens=8, max_episode_tokens=64, slots=slots)
    engine = engine.converse(params, len(PROMPTS), settings)
    rows = dict(enumerate(map(list, PROMPTS)))
    for turn in range(3):
        keys = jax.random.split(jax.random.key(turn), len(rows))
        called = {i: row for i, row in rows.items() if turn != 1 or i != 2}
        drawn = engine.go_on(called, keys, dict.fromkeys(called, 8))
        for i, row in called.items():
            row += drawn.tokens[i, : drawn.lengths[i]].tolist()
        for i, expected in zip(called, chosen_by_router(name, called.values()), strict=True):
            np.testing.assert_array_equal(drawn.routing[i, : len(expected) - 1], expected[:-1])
        for i, row in called.items():
            row += [20 + i, 21, 22]


def test_a_row_that_is_no_longer_continued_is_read_again():
    """Experts of tokens that were replaced are replaced."""
    config, params = model_of("qwen3_moe")
    rows = Conversations(params, config, 1, max_length=ROOM, max_new_tokens=4, keep_routing=True)
    keys = jax.random.split(jax.random.key(0), 1)
    first = rows.go_on({0: [5, 6, 7, 8]}, keys)
    row = [5, 6, 9, 10, 11, 12, 13, 14, 15]
    drawn = rows.go_on({0: row}, keys)
    row += drawn.tokens[0, : drawn.lengths[0]].tolist()
    [expected] = chosen_by_router("qwen3_moe", [row])
    np.testing.assert_array_equal(drawn.routing[0, : len(row) - 1], expected[:-1])
    np.testing.assert_array_equal(drawn.routing[0, :2], first.routing[0, :2])


def test_a_policy_without_experts_has_none_to_keep(tmp_path):
    place = write_checkpoint(tmp_path / "dense")
    with pytest.raises(ValueError, match="return_routed_experts"):
        JaxSampler(model_id=place, return_routed_experts=True)
    config, params = config_of("qwen3"), params_of("qwen3")
    ask = {"max_new_tokens": 2, "keep_routing": True}
    with pytest.raises(ValueError, match="keep_routing"):
        generate(params, config, *batch(PROMPTS, 6, "left"), jax.random.key(0), **ask)
    with pytest.raises(ValueError, match="keep_routing"):
        Conversations(params, config, 2, max_length=8, **ask)
    config, params = model_of("qwen3_moe")
    tokens = batch(PROMPTS, 6, "left")
    ask = functools.partial(generate, params, config, *tokens, max_new_tokens=2)
    assert jax.eval_shape(ask, jax.random.key(0)).routing is None


@pytest.mark.slow
def test_sequences_have_those_that_a_model_records(tmp_path):
    """In columns of the feature that the sampler returns; padding and the last token have none."""
    place = write_checkpoint(tmp_path / "mixture", name="qwen3_moe")
    sampler = JaxSampler(model_id=place, return_routed_experts=True)
    prompts = [{"input_ids": [5, 6, 7], "attention_mask": [0, 1, 1]}, {"input_ids": [8]}]
    drawn = sampler.sample(prompts, SamplingParams(max_tokens=6, seed=1), num_samples=2).inputs
    model = TransformersModel(model_id=place, enable_router_replay=True)
    plain = [{**feature, "routed_experts": None} for feature in drawn]
    record = {"router_replay_action": RouterReplayAction.RECORD}
    recorded = model.forward_only(inputs=plain, **record)["routed_experts"]
    for feature, expected in zip(drawn, recorded, strict=True):
        size = len(feature["input_ids"])
        kept = np.flatnonzero(feature.get("attention_mask", np.ones(size)))
        experts = feature["routed_experts"]
        assert len(experts) == size
        np.testing.assert_array_equal(experts[kept[:-1]], expected[kept[:-1]])
        assert (np.delete(experts, kept[:-1], axis=0) == -1).all()
    without = JaxSampler(model_id=place).sample(prompts, SamplingParams(max_tokens=6)).inputs[0]
    assert "routed_experts" not in without


@pytest.mark.slow
def test_memory_counts_them():
    """A byte for each layer and expert of a token: in slots, and in what is returned."""
    config, params = model_of("qwen3_moe")
    rows, room = 16, 512
    of_rows = rows * room * config.layers * config.experts.chosen
    functions = [
        functools.partial(
            generate_memory, prompts=rows, prompt_tokens=257, num_samples=1, max_new_tokens=256
        ),
        functools.partial(conversations_memory, rows=rows, max_length=513, max_new_tokens=256),
    ]
    for function, least in zip(functions, (2, 3), strict=True):
        without, kept = (function(params, config, keep_routing=keep) for keep in (False, True))
        assert least * of_rows <= kept - without <= (least + 3) * of_rows
