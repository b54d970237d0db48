"""Prefill and decoding: the same as the full forward at every position, whatever the batch."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.model.families import (
    NAMES,
    assert_close,
    batch,
    config_of,
    each,
    family,
    fill,
    params_of,
    random_params,
    step,
)
from tests.model.reference import reference_hidden
from twinkle_jax.model import (
    decode_step,
    extend,
    make_mesh,
    parse_config,
    prefill,
    take_rows,
    unstack_layers,
)
from twinkle_jax.model.decoder.cache import stack_layers
from twinkle_jax.model.decoder.pages import empty_pages, put_in_pages

PROMPTS = [[5, 6, 7, 8, 9, 10], [12, 13, 14], [15], [16, 17, 18, 19, 20]]
GOES_ON = [[21, 22, 23, 24], [25, 26, 27, 28], [29, 30, 31, 32], [33, 34, 35, 36]]
unstacked_layers = jax.jit(unstack_layers)
in_free_pages = jax.jit(put_in_pages, static_argnames="config")


@pytest.mark.parametrize("name", each(NAMES, 2))
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_position_equals_the_full_forward(name, side):
    config, params = config_of(name), params_of(name)
    last, cache = fill(params, config, *batch(PROMPTS, 6, side), max_length=11)
    expected = [
        reference_hidden(params, config, p + g) for p, g in zip(PROMPTS, GOES_ON, strict=True)
    ]
    for i, prompt in enumerate(PROMPTS):
        assert_close(last[i], expected[i][len(prompt) - 1], 5e-5)
    for t in range(4):
        last, cache = step(params, config, jnp.array([row[t] for row in GOES_ON]), cache)
        for i, prompt in enumerate(PROMPTS):
            assert_close(last[i], expected[i][len(prompt) + t], 5e-5)
    np.testing.assert_array_equal(cache.length, [10, 7, 5, 9])


EXPERTS = {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize(("stacked", "mixture"), [(True, True), (True, False), (False, False)])
def test_layers_reuse_the_keys_of_the_last_layer_of_their_kind(stacked, mixture):
    """Of two repetitions of two sliding layers and a full one; by steps, and several at once."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    changes = {"num_hidden_layers": 9, "layer_types": kinds, "num_kv_shared_layers": 3}
    changes |= {"enable_moe_block": True, **EXPERTS} if mixture else {}
    config = parse_config(family("gemma4_text small", **changes))
    params = random_params(config)
    _, cache = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=11)
    rows = [p + g for p, g in zip(PROMPTS, GOES_ON, strict=True)]
    expected = [reference_hidden(params, config, row) for row in rows]
    weights, steps = (params, cache) if stacked else map(unstacked_layers, (params, cache))
    for t in range(2):
        tokens = jnp.array([row[t] for row in GOES_ON])
        last, steps = step(weights, config, tokens, steps)
        for i, prompt in enumerate(PROMPTS):
            assert_close(last[i], expected[i][len(prompt) + t], 5e-5)
    more = jax.jit(extend, static_argnames="config")
    last, _ = more(params, config, jnp.array(GOES_ON)[:, 2:], steps)
    for i, hidden in enumerate(expected):
        assert_close(last[i], hidden[-1], 5e-5)


@functools.cache
def dense_first(kinds):
    """Two dense layers before three with experts; or, as in no family, layers of two kinds.

    Those that slide have a second rotary table. Linear ones make blocks of two members.
    """
    changes = {"num_hidden_layers": 5, "first_k_dense_replace": 2}
    if kinds == "sliding":
        sliding = ["sliding_attention"] * 2
        changes = {"num_hidden_layers": 4, "layer_types": [*sliding, "full_attention", sliding[0]]}
    names = {"full": "glm4_moe", "sliding": "gemma3_text", "linear": "qwen3_5_moe_text"}
    config = parse_config(family(names[kinds], **({} if kinds == "linear" else changes)))
    if kinds != "full":
        dense = {"sliding": 1, "linear": 2}[kinds]
        experts = config.experts or config_of("glm4_moe").experts
        config = dataclasses.replace(config, experts=experts, dense_layers=dense)
    return config, random_params(config)


@pytest.mark.parametrize("kinds", each(["full", "sliding", "linear"], 1, pytest.mark.slow))
@pytest.mark.parametrize("laid", each(["stacked", "layer by layer"], mark=pytest.mark.slow))
def test_dense_layers_before_those_with_experts(laid, kinds):
    """By `prefill`, `decode_step` and `extend`; experts are recorded, and 0 in dense layers."""
    stacked = laid == "stacked"
    config, params = dense_first(kinds)
    rows = [p + g for p, g in zip(PROMPTS, GOES_ON, strict=True)]
    numbers = [np.full((len(row), config.layers, config.experts.chosen), -1) for row in rows]
    pairs = zip(rows, numbers, strict=True)
    expected = [reference_hidden(params, config, row, routing=chosen) for row, chosen in pairs]
    read = jax.jit(functools.partial(prefill, config=config, max_length=11, keep_routing=True))
    tokens, mask = batch(PROMPTS, 6, "left")
    last, cache = read(params, tokens=tokens, mask=mask)
    weights = params
    if not stacked:
        weights, cache = unstacked_layers(params), unstacked_layers(cache)
        held = {"full": ["01", "01", "1"], "sliding": ["01", "1", "1"], "linear": ["0123"]}
        assert ["".join(sorted(layer)) for layer in cache.layers] == held[kinds]
    for t in range(3):
        for i, prompt in enumerate(PROMPTS):
            assert_close(last[i], expected[i][len(prompt) - 1 + t], 5e-5)
        last, cache = step(weights, config, jnp.array([row[t] for row in GOES_ON]), cache)
    last, cache = jax.jit(extend, static_argnums=1)(
        params, config, jnp.array(GOES_ON)[:, 3:], cache
    )
    assert isinstance(cache.layers, dict) == stacked
    for hidden, row in zip(expected, last, strict=True):
        assert_close(row, hidden[-1], 5e-5)
    for chosen, recorded in zip(numbers, np.asarray(cache.routing), strict=True):
        assert not chosen[:, : config.dense_layers].any()
        recorded = recorded[: len(chosen)]
        np.testing.assert_array_equal(np.sort(recorded, axis=-1), np.sort(chosen, axis=-1))


@pytest.mark.parametrize(
    "kinds", each(["sliding apart", "full", "sliding", "linear"], 1, pytest.mark.slow)
)
@pytest.mark.parametrize("laid", each(["stacked", "layer by layer"], mark=pytest.mark.slow))
def test_dense_layers_before_those_with_experts_in_pages(laid, kinds):
    """The first row begins with two tokens that fill a page; sliding layers may have their own."""
    stacked = laid == "stacked"
    config, params = dense_first(kinds.split()[0])
    window_pages = 12 if "apart" in kinds else None
    rows = [PROMPTS[0][:4], GOES_ON[1]]
    _, prompts = fill(params, config, jnp.array(rows)[:, :2], None, max_length=2)
    weights = params if stacked else unstacked_layers(params)
    prompts = prompts if stacked else unstacked_layers(prompts)
    options = {"rows": 2, "size": 2, "pages": 8, "window_pages": window_pages, "max_length": 8}
    cache = empty_pages(prompts, config, **options)
    first = jnp.array([0])
    cache = in_free_pages(cache, prompts, first, first, first, config=config)
    for token in rows[1][:2]:
        tokens, active = jnp.array([0, token]), jnp.array([False, True])
        _, cache = step(weights, config, tokens, cache, active)
    for t in range(2, 4):
        last, cache = step(weights, config, jnp.array([row[t] for row in rows]), cache)
        for row, hidden in zip(rows, last, strict=True):
            assert_close(hidden, reference_hidden(params, config, row[: t + 1])[-1], 5e-5)
    assert cache.length.tolist() == [4, 4]


def test_heads_of_latent_attention_are_split_over_devices():
    """Though they are one group, which all devices along tensor hold whole."""
    config, params = config_of("deepseek_v3"), params_of("deepseek_v3")
    tokens, mesh = jnp.array([PROMPTS[0][:3]]), make_mesh(tensor=2)
    _, prompts = fill(params, config, tokens[:, :2], None, max_length=2)
    prompts, weights = unstacked_layers(prompts), unstacked_layers(params)
    cache = empty_pages(prompts, config, rows=1, size=2, pages=4, max_length=4)
    first = jnp.array([0])
    cache = in_free_pages(cache, prompts, first, first, first, config=config)
    on_mesh = jax.jit(functools.partial(decode_step, mesh=mesh), static_argnums=1)
    program = on_mesh.trace(weights, config, tokens[:, 2], cache).jaxpr
    split = [
        eqn.params["in_specs"][0]
        for eqn in program.eqns
        if eqn.primitive.name == "shard_map" and len(eqn.invars[0].aval.shape) == 4
    ]
    assert split == [PartitionSpec(("data", "fsdp"), None, "tensor")] * config.layers
    last, _ = on_mesh(weights, config, tokens[:, 2], cache)
    assert_close(last[0], reference_hidden(params, config, PROMPTS[0][:3])[-1], 5e-5)


@pytest.mark.parametrize("name", each(NAMES))
def test_both_paddings_fill_the_same_cache(name):
    filled = [
        fill(params_of(name), config_of(name), *batch(PROMPTS, 6, side), max_length=11)
        for side in ("left", "right")
    ]
    jax.tree.map(np.testing.assert_array_equal, *filled)


@pytest.mark.parametrize("name", each(NAMES))
def test_a_row_in_a_batch_decodes_as_the_row_alone(name):
    config, params = config_of(name), params_of(name)
    tokens, mask = batch(PROMPTS, 6, "left")
    _, together = fill(params, config, tokens, mask, max_length=11)
    _, alone = fill(params, config, tokens[1:2], mask[1:2], max_length=11)
    for t in range(3):
        out, together = step(params, config, jnp.array([row[t] for row in GOES_ON]), together)
        by_itself, alone = step(params, config, jnp.array([GOES_ON[1][t]]), alone)
        assert_close(out[1:2], by_itself, 2e-6)
    row = jax.jit(take_rows)(together, jnp.array([1]))
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6), row, alone)


def assert_same(actual, expected):
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert_close(np.nan_to_num(actual), np.nan_to_num(expected), 2e-6)


@pytest.mark.parametrize("name", each(NAMES))
def test_layers_one_by_one_are_the_stack(name):
    config, params = config_of(name), params_of(name)
    _, stack = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=8)
    unstacked, weights = unstacked_layers(stack), unstacked_layers(params)
    assert unstack_layers(unstacked) is unstacked
    assert unstack_layers(weights) is weights
    assert len(unstacked.layers) == len(weights["layers"]) == config.repeats
    with pytest.raises(ValueError, match="cache"):
        step(weights, config, jnp.ones(4, jnp.int32), stack)
    for t in range(3):  # the last token of the first row finds it full
        tokens, mask = jnp.array([row[t] for row in GOES_ON]), jnp.array([True, True, t < 1, True])
        expected, stack = step(params, config, tokens, stack, mask)
        out, unstacked = step(weights if t else params, config, tokens, unstacked, mask)
        assert_same(out, expected)
    jax.tree.map(assert_same, stack_layers(unstacked).layers, stack.layers)
    np.testing.assert_array_equal(unstacked.length, stack.length)


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_forked_rows_go_on_by_themselves(name):
    config, params = config_of(name), params_of(name)
    _, cache = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=11)
    forked = jax.jit(take_rows)(cache, jnp.array([2, 0, 0, 2]))
    out, forked = step(params, config, jnp.array([7, 7, 8, 8]), forked)
    for i, row in enumerate([[15, 7], PROMPTS[0] + [7], PROMPTS[0] + [8], [15, 8]]):
        assert_close(out[i], reference_hidden(params, config, row)[-1], 5e-5)
    np.testing.assert_array_equal(forked.length, [2, 7, 7, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", each(["qwen3_5_text", "qwen3"]))
def test_rows_that_do_not_go_on_stay_as_they_are(name):
    """The first family has layers of both kinds."""
    config, params = config_of(name), params_of(name)
    _, cache = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=11)
    going = jnp.array([True, False, True, False])
    _, paused = step(params, config, jnp.array([7, 99, 8, -1]), cache, going)
    np.testing.assert_array_equal(paused.length, [7, 3, 2, 5])
    tokens = jnp.array([21, 25, 29, 33])
    out, _ = step(params, config, tokens, paused)
    for i, row in enumerate([[*PROMPTS[0], 7, 21], [*PROMPTS[1], 25], [15, 8, 29]]):
        assert_close(out[i], reference_hidden(params, config, row)[-1], 5e-5)


MORE = [[21, 22, 23, 24], [], [29, 30], [33]]


def read_more(name, cache, rows=MORE, side="right"):
    read = jax.jit(extend, static_argnums=1)
    return read(params_of(name), config_of(name), *_swap(batch(rows, 4, side), cache))


def _swap(arrays, cache):
    return arrays[0], cache, arrays[1]


@pytest.mark.parametrize("name", each(NAMES))
@pytest.mark.parametrize("side", ["left", "right"])
def test_more_tokens_are_read_as_if_they_had_stood_there(name, side):
    config, params = config_of(name), params_of(name)
    _, cache = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=12)
    last, cache = read_more(name, cache, side=side)
    rows = [p + m for p, m in zip(PROMPTS, MORE, strict=True)]
    np.testing.assert_array_equal(cache.length, [len(row) for row in rows])
    for i, row in enumerate(rows):
        if MORE[i]:
            assert_close(last[i], reference_hidden(params, config, row)[-1], 5e-5)
    assert not np.any(last[1])
    last, _ = step(params, config, jnp.array([41, 42, 43, 44]), cache)
    for i, row in enumerate(rows):
        assert_close(last[i], reference_hidden(params, config, [*row, 41 + i])[-1], 5e-5)


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_more_tokens_are_read_by_layers_that_lie_one_by_one(name):
    config, params = config_of(name), params_of(name)
    _, cache = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=12)
    expected, stacked = read_more(name, cache)
    last, unstacked = read_more(name, unstacked_layers(cache))
    np.testing.assert_array_equal(last, expected)
    jax.tree.map(np.testing.assert_array_equal, unstacked, unstacked_layers(stacked))


@pytest.mark.parametrize("name", each(["qwen3_5_text", "qwen3"]))
def test_padding_may_be_longer_than_the_room(name):
    config, params = config_of(name), params_of(name)
    _, cache = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=10)
    tokens, mask = batch([[21, 22], [23], [], [24]], 12, "right")
    last, cache = jax.jit(extend, static_argnums=1)(params, config, tokens, cache, mask)
    for i, row in enumerate([[*PROMPTS[0], 21, 22], [*PROMPTS[1], 23]]):
        assert_close(last[i], reference_hidden(params, config, row)[-1], 5e-5)
    last, _ = step(params, config, jnp.array([31, 32, 33, 34]), cache)
    assert_close(last[2], reference_hidden(params, config, [15, 33])[-1], 5e-5)


@pytest.mark.parametrize("name", each(["qwen3"]))
def test_more_tokens_than_a_row_has_room_for(name):
    config, params = config_of(name), params_of(name)
    _, cache = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=9)
    last, _ = read_more(name, cache)
    assert np.all(np.isnan(last[0]))  # its fourth token has none
    assert np.all(np.isfinite(last[1:]))
    with pytest.raises(ValueError, match="tokens"):
        extend(params, config, jnp.ones((3, 2), jnp.int32), cache)


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_an_empty_row_starts_from_nothing(name):
    config, params = config_of(name), params_of(name)
    last, cache = fill(params, config, *batch([[], *PROMPTS[1:]], 6, "left"), max_length=11)
    assert not np.any(last[0])
    out, cache = step(params, config, jnp.array([9, 1, 1, 1]), cache)
    assert_close(out[0], reference_hidden(params, config, [9])[0], 5e-5)
    np.testing.assert_array_equal(cache.length, [1, 4, 2, 6])


def test_a_prompt_shorter_than_the_convolution_and_layers_of_one_kind():
    """Three linear layers in a row, of which the block has one, and a prompt of two tokens."""
    changes = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    config = parse_config(family("qwen3_5_text", **changes))
    assert config.block == ("linear_attention",) and config.repeats == 3
    params = random_params(config)
    last, cache = fill(params, config, jnp.array([[5, 6]]), max_length=2)
    assert_close(last[0], reference_hidden(params, config, [5, 6])[-1], 5e-5)
    for t in range(3):
        last, cache = step(params, config, jnp.array([7 + t]), cache)
        expected = reference_hidden(params, config, [5, 6, 7, 8, 9][: 3 + t])
        assert_close(last[0], expected[-1], 5e-5)


def test_a_token_that_finds_its_row_full_is_not_forgotten_in_silence():
    config, params = config_of("qwen3"), params_of("qwen3")
    _, cache = fill(params, config, *batch([[5, 6], [7]], 2, "left"), max_length=2)
    out, full = step(params, config, jnp.array([1, 2]), cache)
    assert np.all(np.isnan(out[0])) and np.all(np.isfinite(out[1]))
    for name, stacks in full.layers.items():
        before = cache.layers[name]
        np.testing.assert_array_equal(stacks.keys[:, 0], before.keys[:, 0])
        np.testing.assert_array_equal(stacks.values[:, 0], before.values[:, 0])


def test_the_state_is_float32_and_the_rest_what_is_computed_in():
    config, params = config_of("qwen3_5_text"), params_of("qwen3_5_text")

    def run(params):
        _, cache = prefill(
            params, config, jnp.ones((2, 3), jnp.int32), max_length=5, compute_dtype="bfloat16"
        )
        return decode_step(params, config, jnp.ones(2, jnp.int32), cache, compute_dtype="bfloat16")

    out, cache = jax.eval_shape(run, params)
    types = jax.tree.map(lambda x: x.dtype.name, cache)
    assert types.layers["0"].memory == "float32"
    assert types.layers["0"].window == types.layers["1"].keys == out.dtype.name == "bfloat16"
    assert cache.layers["1"].keys.shape == (2, 2, 2, 8, 5)
    assert cache.layers["0"].memory.shape == (2, 2, 4, 6, 10)


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_steps_compile_once_and_run_in_place(name):
    config, params = config_of(name), params_of(name)

    @functools.partial(jax.jit, donate_argnums=1)
    @chex.assert_max_traces(n=1)
    def next_step(tokens, cache):
        return decode_step(params, config, tokens, cache)

    _, cache = fill(params, config, *batch(PROMPTS, 6, "left"), max_length=11)
    for token in range(3):
        before = cache
        _, cache = next_step(jnp.full(4, token), cache)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))


TOKENS = jnp.ones((2, 3), jnp.int32)


@pytest.mark.parametrize(
    ("name", "error", "arguments", "max_length"),
    [
        ("max_length", ValueError, (TOKENS,), 2),
        ("tokens", ValueError, (TOKENS[0],), 4),
        ("mask", TypeError, (TOKENS, TOKENS), 4),
    ],
)
def test_prefill_errors_while_tracing(name, error, arguments, max_length):
    def run(params):
        return prefill(params, config_of("qwen2"), *arguments, max_length=max_length)

    with pytest.raises(error, match=name):
        jax.eval_shape(run, params_of("qwen2"))


@pytest.mark.parametrize(
    ("name", "error", "tokens", "options"),
    [
        ("tokens", ValueError, TOKENS[0], {}),
        ("tokens", TypeError, TOKENS[:, 0] > 0, {}),
        ("mask", ValueError, TOKENS[:, 0], {"mask": TOKENS[0] > 0}),
        ("mask", TypeError, TOKENS[:, 0], {"mask": TOKENS[:, 0]}),
        ("tokens", ValueError, TOKENS[:, 0], {"mesh": make_mesh(data=2, fsdp=2)}),
    ],
)
def test_step_errors_while_tracing(name, error, tokens, options):
    def run(params):
        config = config_of("qwen2")
        _, cache = prefill(params, config, TOKENS, max_length=4)
        return decode_step(params, config, tokens, cache, **options)

    with pytest.raises(error, match=name):
        jax.eval_shape(run, params_of("qwen2"))


def test_a_row_in_pages_is_decoded_in_64_bits():
    """Indices into the pages are of one type, where Python's integers have 64 bits."""
    config = config_of("qwen3")
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params_of("qwen3"))
        tokens = jnp.array([[5, 6]])
        expected, rows = fill(params, config, tokens, None, max_length=4)
        cache = empty_pages(rows, config, rows=1, size=16, pages=2, max_length=4)
        for token in tokens.T:
            last, cache = step(params, config, token, cache)
        assert_close(last, expected, 1e-12)


def test_rows_in_pages_are_neither_selected_nor_extended():
    """Their lines are pages: rows of them would be parts of other rows."""
    config, params = config_of("qwen3"), params_of("qwen3")
    _, rows = fill(params, config, *batch(PROMPTS, 6, "right"), max_length=11)
    cache = empty_pages(rows, config, rows=4, size=16, pages=8, max_length=64)
    with pytest.raises(ValueError, match=r"cache must hold whole rows, got pages"):
        take_rows(cache, jnp.array([0, 1]))
    with pytest.raises(ValueError, match=r"cache must hold whole rows, got pages"):
        extend(params, config, jnp.array(GOES_ON), cache)
