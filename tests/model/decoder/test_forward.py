"""The decoder over whole rows: values, rows that do not see each other, masks, types, errors."""

import dataclasses
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.model.families import (
    NAMES,
    assert_close,
    batch,
    config_of,
    each,
    family,
    fill,
    hidden,
    params_of,
    random_params,
    step,
)
from tests.model.reference import reference_hidden, reference_logits
from twinkle_jax.model import (
    Decoder,
    Window,
    extend,
    hidden_states,
    output_logits,
    output_matrix,
    parameter_shapes,
    parse_config,
)
from twinkle_jax.model.decoder.forward import (
    from_front,
    number_segments,
    segment_positions,
    to_front,
)

ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15], [16, 17, 18, 19, 20]]


@pytest.mark.parametrize("name", each(NAMES, 4, pytest.mark.slow))
def test_equals_the_float64_reference(name):
    """By default those that further tests compare with; transformers' logits are of all."""
    tokens, mask = batch(ROWS, 9, "left")  # on the right: the same bits, below
    params = params_of(name)
    logits = output_logits(params, config_of(name), hidden(params, config_of(name), tokens, mask))
    for row, kept, of_row in zip(ROWS, np.asarray(mask), np.asarray(logits), strict=True):
        assert_close(of_row[kept], reference_logits(params, config_of(name), row))


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True},
        {
            "num_key_value_heads": 1,
            "head_dim": 12,
            "rope_parameters": {"rope_theta": 1e6},
            "rms_norm_eps": 0.1,
        },
    ],
    ids=["tied, ungrouped, biased", "one group, other sizes"],
)
@pytest.mark.parametrize("name", each(["qwen3", "llama", "qwen3_5_text"]))
def test_variants_equal_the_reference(name, changes):
    partial = {"partial_rotary_factor": 0.5} if name == "qwen3_5_text" else {}
    config = parse_config(family(name, **changes, **partial))
    params = random_params(config)
    logits = output_logits(params, config, hidden(params, config, jnp.array(ROWS[:1])))
    expected = reference_logits(params, config, ROWS[0])
    assert_close(logits[0], expected)


@pytest.mark.exhaustive
def test_more_tokens_than_one_chunk_of_the_delta_rule():
    row = list(np.random.default_rng(0).integers(1, 48, 70))
    out = hidden(params_of("qwen3_5_text"), config_of("qwen3_5_text"), jnp.array([row]))
    expected = reference_hidden(params_of("qwen3_5_text"), config_of("qwen3_5_text"), row)
    assert_close(out[0], expected, 1e-4)


@pytest.mark.parametrize("name", each(NAMES))
def test_both_paddings_give_the_same_bits(name):
    outs = []
    for side in ("left", "right"):
        tokens, mask = batch(ROWS, 9, side)
        outs.append(np.asarray(hidden(params_of(name), config_of(name), tokens, mask))[mask])
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("name", each(NAMES))
def test_a_hole_in_the_mask_is_as_if_it_were_not_there(name):
    config, params = config_of(name), params_of(name)
    row, kept = [3, 5, 99, 6, -7, 7, 8, 9, 10], [0, 1, 0, 1, 0, 1, 1, 1, 1]
    mask = jnp.array([kept] * 4, bool)
    out = hidden(params, config, jnp.array([row] * 4), mask)
    assert_close(out[0][mask[0]], reference_hidden(params, config, [5, 6, 7, 8, 9, 10]))


def _weighted_loss(params, config, tokens, mask):
    out = hidden_states(params, config, tokens, mask)
    weights = jnp.sin(jnp.arange(out.shape[-1], dtype=out.dtype))[None, None]
    return jnp.sum(jnp.square(out) * weights, axis=(1, 2))


_gradient = jax.jit(
    jax.grad(lambda p, c, t, m: jnp.sum(_weighted_loss(p, c, t, m))),
    static_argnums=1,
)


@pytest.mark.parametrize("name", each(NAMES))
def test_a_row_in_a_batch_is_the_row_alone_value_and_gradient(name):
    config, params = config_of(name), params_of(name)
    tokens, mask = batch(ROWS, 9, "left")
    together = hidden(params, config, tokens, mask)
    alone = [hidden(params, config, tokens[i : i + 1], mask[i : i + 1]) for i in range(4)]
    # Linear layers sum products in another order for another number of rows, on some CPUs.
    assert_close(together, np.concatenate(alone), 1e-6 if config.delta_net is None else 3e-6)

    # One row at a time, the others being empty: the sum over rows is the batch's gradient.
    total = _gradient(params, config, tokens, mask)
    parts = [
        _gradient(params, config, tokens, mask & (jnp.arange(4) == i)[:, None]) for i in range(4)
    ]
    summed = jax.tree.map(lambda *xs: sum(np.asarray(x, np.float64) for x in xs), *parts)
    for of_batch, of_rows in zip(jax.tree.leaves(total), jax.tree.leaves(summed), strict=True):
        assert_close(of_batch, of_rows, 1e-5)


@pytest.mark.parametrize("name", each(NAMES))
def test_garbage_under_the_mask_changes_no_bit(name):
    config, params = config_of(name), params_of(name)
    tokens, mask = batch(ROWS, 9, "right")
    garbage = jnp.where(mask, tokens, jnp.array([-1, 48, 2**31 - 1, -(2**31)])[:, None])
    clean = hidden(params, config, tokens, mask)
    np.testing.assert_array_equal(clean, hidden(params, config, garbage, mask))
    assert not np.any(np.asarray(clean)[~np.asarray(mask)])
    for a, b in zip(
        jax.tree.leaves(_gradient(params, config, tokens, mask)),
        jax.tree.leaves(_gradient(params, config, garbage, mask)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
        assert np.all(np.isfinite(a))


@pytest.mark.parametrize("bad", [-1, 48])
def test_a_token_outside_the_vocabulary_makes_its_row_nan(bad):
    tokens, mask = batch([[5, bad, 7], *ROWS[1:]], 9, "right")
    out = np.asarray(hidden(params_of("qwen3"), config_of("qwen3"), tokens, mask))
    assert np.all(np.isnan(out[0, :3])) and np.all(np.isfinite(out[1:]))


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_packed_segments_are_rows_of_their_own(name):
    config, params = config_of(name), params_of(name)
    tokens = jnp.array([[1, 5, 6, 7, 8, 12, 13, 14, 15, 16, 3]])
    segments = jnp.array([[9, 1, 1, 1, 1, 2, 2, 2, 4, 1, 9]])
    mask = segments != 9
    out = hidden(params, config, tokens, mask, segment_ids=segments)[0]
    pieces = [[5, 6, 7, 8], [12, 13, 14], [15], [16]]
    expected = np.concatenate([reference_hidden(params, config, piece) for piece in pieces])
    assert_close(out[1:10], expected)


@pytest.mark.exhaustive
def test_packed_gradients_are_the_sum_over_segments():
    config, params = config_of("qwen3_5_text"), params_of("qwen3_5_text")
    tokens = jnp.array([[5, 6, 7, 8, 12, 13, 14]])

    @jax.jit
    def gradient(segments, mask):
        def loss(p):
            out = hidden_states(p, config, tokens, mask, segment_ids=segments)
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss)(params)

    segments = jnp.array([[0, 0, 0, 0, 1, 1, 1]])
    packed = gradient(segments, jnp.ones((1, 7), bool))
    parts = [gradient(segments, segments == i) for i in range(2)]
    for p, a, b in zip(*map(jax.tree.leaves, (packed, *parts)), strict=True):
        assert_close(p, a + b, 1e-4)


def test_positions_are_where_tokens_stand():
    config, params = config_of("qwen2"), params_of("qwen2")
    tokens, mask = batch([ROWS[1]], 4, "left")
    positions = jnp.array([[77, 3, 10, 11]])
    out = hidden(params, config, tokens, mask, positions=positions)
    expected = reference_hidden(params, config, ROWS[1], [3, 10, 11])
    assert_close(out[0, 1:], expected)
    assert np.max(np.abs(expected - reference_hidden(params, config, ROWS[1]))) > 1e-2


@pytest.mark.exhaustive
def test_positions_win_over_segments():
    config, params = config_of("qwen2"), params_of("qwen2")
    out = hidden(
        params,
        config,
        jnp.array([[5, 6, 7]]),
        positions=jnp.array([[0, 4, 9]]),
        segment_ids=jnp.array([[0, 1, 1]]),
    )
    expected = reference_hidden(params, config, [6, 7], [4, 9])
    assert_close(out[0, 1:], expected)


@pytest.mark.exhaustive
def test_remat_changes_no_gradient():
    config, params = config_of("qwen3"), params_of("qwen3")
    tokens, mask = batch(ROWS, 9, "left")

    def gradient(remat):
        def loss(p):
            return jnp.sum(jnp.sin(hidden_states(p, config, tokens, mask, remat=remat)))

        return jax.jit(jax.grad(loss))(params)

    for a, b in zip(*(jax.tree.leaves(gradient(remat)) for remat in (True, False)), strict=True):
        assert_close(a, b, 1e-5)


def test_remat_and_policies_change_what_is_kept():
    config, params = config_of("qwen3"), params_of("qwen3")
    tokens = jnp.ones((4, 32), jnp.int32)

    def kept(remat):
        residuals = jax.eval_shape(
            lambda p: jax.vjp(lambda p: hidden_states(p, config, tokens, remat=remat), p)[1],
            params,
        )
        return sum(x.size for x in jax.tree.leaves(residuals))

    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    assert kept(True) < kept(dots) < kept(False)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("as_users_compile")
def test_types_of_parameters_and_computation_mix():
    config, params = config_of("qwen3_5_text"), params_of("qwen3_5_text")
    tokens, mask = batch(ROWS, 9, "left")
    exact = np.asarray(hidden(params, config, tokens, mask))
    small = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p))(params)
    large = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(jnp.float32), p))(small)
    # float32 computation with bfloat16 parameters: those parameters, exactly.
    wide = hidden(small, config, tokens, mask, compute_dtype="float32")
    np.testing.assert_array_equal(wide, hidden(large, config, tokens, mask))
    # The default is the type of the parameters, and float32 parameters can be computed with in 16.
    low = hidden(params, config, tokens, mask, compute_dtype="bfloat16")
    shape = jax.eval_shape(lambda p: hidden_states(p, config, tokens, mask), small)
    assert low.dtype == shape.dtype == jnp.bfloat16
    error = np.sqrt(np.mean((np.asarray(low, np.float32) - exact) ** 2))
    assert 1e-3 < error < 0.1 * np.sqrt(np.mean(exact**2))


def test_float16_on_a_cpu():
    config, params = config_of("qwen3"), params_of("qwen3")
    tokens = jnp.array([ROWS[0]])
    low = hidden(params, config, tokens, compute_dtype="float16")
    assert low.dtype == jnp.float16
    np.testing.assert_allclose(low, hidden(params, config, tokens), atol=0.02)


def test_logits_are_float32_and_the_matrix_is_width_by_vocabulary():
    params = params_of("qwen3")
    assert output_matrix(params).shape == (24, 48)
    assert (
        output_logits(params, config_of("qwen3"), jnp.ones((2, 24), jnp.bfloat16)).dtype
        == jnp.float32
    )
    tied = {"embed_tokens": {"embedding": jnp.arange(6.0).reshape(3, 2)}}
    # hidden (1, 10) times rows (0, 1), (2, 3), (4, 5): 10, 32, 54
    np.testing.assert_array_equal(
        output_logits(tied, config_of("qwen3"), jnp.array([1.0, 10.0])), [10, 32, 54]
    )


def test_depth_does_not_change_the_program():
    """Layers are scanned: the program of 24 layers is that of 4."""
    sizes = []
    for layers in (4, 24):
        config = parse_config(family("qwen3", num_hidden_layers=layers))
        shapes = jax.eval_shape(lambda c=config: random_params(c))
        lowered = jax.jit(hidden_states, static_argnums=1).lower(
            shapes, config, jax.ShapeDtypeStruct((2, 8), jnp.int32)
        )
        sizes.append(len(lowered.as_text().splitlines()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_gradients_export_for_accelerators(name, platform):
    config = config_of(name)

    def loss(params, tokens, mask):
        return jnp.sum(hidden_states(params, config, tokens, mask, attention="xla"))

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params_of(name))
    rows = [jax.ShapeDtypeStruct((2, 70), dtype) for dtype in (jnp.int32, jnp.bool_)]
    exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=[platform])(shapes, *rows)
    assert exported.platforms == (platform,)


INTS, BOOLS = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("name", "error", "change"),
    [
        ("tokens", ValueError, {"tokens": INTS[0]}),
        ("tokens", TypeError, {"tokens": INTS.astype("float32")}),
        ("mask", ValueError, {"mask": BOOLS[:1]}),
        ("mask", TypeError, {"mask": INTS}),
        ("positions", ValueError, {"positions": INTS[:, :2]}),
        ("positions", TypeError, {"positions": BOOLS}),
        ("segment_ids", ValueError, {"segment_ids": INTS[0]}),
        ("segment_ids", TypeError, {"segment_ids": BOOLS}),
        ("attention", ValueError, {"segment_ids": INTS, "attention": "cudnn"}),
        ("compute_dtype", TypeError, {"compute_dtype": "int32"}),
    ],
)
def test_errors_while_tracing(name, error, change):
    arguments = {"tokens": INTS, **change}
    with pytest.raises(error, match=name):
        jax.eval_shape(
            lambda p: hidden_states(p, config_of("qwen3"), **arguments), params_of("qwen3")
        )


def test_a_window_decides_what_reaches_a_token():
    """One sliding layer that sees 3 tokens: a fourth does not reach it, the third does."""
    changes = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    config = parse_config(family("gemma3_text", **changes))
    params = params_of("gemma3_text")
    params = {**params, "layers": jax.tree.map(lambda x: x[:1], params["layers"])}
    tokens = jnp.array([[5, 6, 7, 8], [9, 6, 7, 8], [5, 9, 7, 8]])
    last = hidden(params, config, tokens)[:, -1]
    np.testing.assert_array_equal(last[0], last[1])
    assert np.abs(last[0] - last[2]).max() > 0.01


@pytest.mark.exhaustive
def test_a_window_as_long_as_the_row_is_none():
    config, params = config_of("gemma3_text"), params_of("gemma3_text")
    tokens = jnp.array([[5, 6, 7, 8, 9]])
    seen = []
    for size in (4, 5, 6):
        window = dataclasses.replace(config.attention.window, size=size)
        heads = dataclasses.replace(config.attention, window=window)
        seen.append(hidden(params, dataclasses.replace(config, attention=heads), tokens))
    assert_close(seen[1], seen[2])
    assert np.abs(seen[0][0, :4] - seen[1][0, :4]).max() < 1e-4
    assert np.abs(seen[0][0, 4] - seen[1][0, 4]).max() > 0.01


@pytest.mark.parametrize("layers", [6, 7])
def test_layers_of_both_kinds_are_one_loop_over_one_layer(layers):
    config = parse_config(family("gemma3_text", num_hidden_layers=layers, layer_types=None))
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    traced = jax.make_jaxpr(partial(hidden_states, config=config))
    program = traced(parameter_shapes(config), tokens=tokens)
    (loop,) = (e for e in program.eqns if e.primitive.name == "scan")
    assert loop.params["length"] == layers
    assert str(loop.params["jaxpr"]).count(" cond[") == 1  # of an attention with a window


@pytest.mark.slow
def test_kinds_of_layers_with_an_attention_each_are_the_same_decoder():
    """What sliding layers share with full ones, written out: on whole rows and in decoding."""
    config, params = config_of("gemma3_text"), params_of("gemma3_text")
    both, window = config.attention, config.attention.window
    full = dataclasses.replace(both, window=None)
    sliding = dataclasses.replace(
        both, rope_theta=window.rope_theta, rope_scaling=None, window=Window(window.size)
    )
    apart = dataclasses.replace(config, attention=sliding, full_attention=full)
    assert apart.block == config.layer_kinds and config.block == ("full_attention",)
    layers = {
        str(i): jax.tree.map(lambda x, i=i: x[i : i + 1], params["layers"]["0"]) for i in range(3)
    }
    split = {**params, "layers": layers}
    tokens, mask = batch([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15]], 8, "right")
    assert_close(hidden(split, apart, tokens, mask), hidden(params, config, tokens, mask), 1e-6)
    last, cache = fill(params, config, tokens, mask, max_length=10)
    last_apart, cache_apart = fill(split, apart, tokens, mask, max_length=10)
    for token in (5, 6):
        assert_close(last_apart, last, 1e-6)
        token = jnp.full(2, token)
        last, cache = step(params, config, token, cache)
        last_apart, cache_apart = step(split, apart, token, cache_apart)
    assert_close(last_apart, last, 1e-6)
    more = jnp.array([[21, 22], [23, 24]])
    _, cache = fill(params, config, tokens, mask, max_length=10)
    _, cache_apart = fill(split, apart, tokens, mask, max_length=10)
    assert_close(
        extend(split, apart, more, cache_apart)[0], extend(params, config, more, cache)[0], 1e-6
    )


# The module.


@pytest.mark.parametrize("name", NAMES)
def test_the_module_is_the_functions(name):
    config, params = config_of(name), params_of(name)
    decoder = Decoder(config, params)
    jax.tree.map(np.testing.assert_array_equal, decoder.params, params)
    graph, state = nnx.split(decoder)
    merged = nnx.merge(graph, jax.tree.map(lambda x: 2 * np.asarray(x), state))
    np.testing.assert_array_equal(merged.norm["scale"][...], 2 * params["norm"]["scale"])
    assert hash(graph) == hash(nnx.split(Decoder(config, params))[0])


@pytest.mark.slow
def test_the_module_computes_logits_and_takes_the_functions_options():
    config, params = config_of("qwen2"), params_of("qwen2")
    tokens = jnp.array([[1, 2, 3, 4]])
    mask, segments = tokens > 1, jnp.array([[0, 0, 1, 1]])
    out = nnx.jit(lambda d: d(tokens, mask, segment_ids=segments))(Decoder(config, params))
    expected = hidden(params, config, tokens, mask, segment_ids=segments)
    np.testing.assert_allclose(out, output_logits(params, config, expected), atol=2e-5)
    assert out.shape == (1, 4, 48)


def test_gradients_of_the_module():
    graph, state = nnx.split(Decoder(config_of("qwen2"), params_of("qwen2")))
    tokens = jnp.array([[1, 2, 3]])
    gradient = jax.eval_shape(jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(tokens))), state)
    shapes = jax.tree.map(lambda x: x.shape, nnx.to_pure_dict(gradient))
    assert shapes == jax.tree.map(lambda x: x.shape, params_of("qwen2"))


def test_the_module_has_no_head_when_tied():
    config = parse_config(family("qwen3", tie_word_embeddings=True))
    decoder = Decoder(config, random_params(config))
    assert not hasattr(decoder, "lm_head") and "lm_head" not in decoder.params


# Rows with their tokens at the front.

_front, _back, _positions = jax.jit(to_front), jax.jit(from_front), jax.jit(segment_positions)
masks = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=3, max_size=3)


@hypothesis.given(masks)
def test_front_holds_what_was_kept_in_order_and_zeros(mask):
    mask, values = np.array(mask), np.arange(1, 19, dtype=np.int32).reshape(3, 6)
    out = np.asarray(_front(jnp.asarray(values), jnp.asarray(mask)))
    for row, kept, moved in zip(values, mask, out, strict=True):
        expected = list(row[kept]) + [0] * int((~kept).sum())
        np.testing.assert_array_equal(moved, expected)


@hypothesis.given(masks)
def test_there_and_back(mask):
    mask, values = np.array(mask), np.arange(1.0, 19, dtype=np.float32).reshape(3, 6)
    moved = _front(jnp.asarray(values), jnp.asarray(mask))
    back = _back(moved[:, :, None], jnp.asarray(mask))[:, :, 0]
    np.testing.assert_array_equal(back, np.where(mask, values, 0))


def test_garbage_that_is_not_kept_does_not_come_back():
    values = jnp.array([[[1.0], [jnp.nan]]])
    mask = jnp.array([[False, True]])
    np.testing.assert_array_equal(_back(values, mask)[0, :, 0], [0, 1])
    gradient = jax.grad(lambda v: jnp.sum(_back(v, mask)))(values)
    np.testing.assert_array_equal(gradient[0, :, 0], [1, 0])


def test_positions_start_anew_in_each_segment():
    ids = jnp.array([[4, 4, 4, 2, 2, 4], [1, 2, 3, 3, 3, 3]])
    np.testing.assert_array_equal(_positions(ids), [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]])


def test_an_id_that_comes_back_is_another_segment():
    ids = jnp.array([[4, 4, 2, 4, 4, 9]])
    np.testing.assert_array_equal(number_segments(ids), [[0, 0, 1, 2, 2, 3]])
