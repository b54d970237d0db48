"""What attention sees; which implementation is chosen, and which are refused."""

import dataclasses
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import family
from twinkle_jax.model import (
    AttentionConfig,
    default_attention,
    hidden_states,
    parameter_shapes,
    parse_config,
)
from twinkle_jax.model.decoder.attention import (
    Heads,
    _attend_pages,
    attend_causally,
    choose_attention,
    first_seen,
)
from twinkle_jax.model.decoder.cache import KeyValues, Pages
from twinkle_jax.model.decoder.pages import PageTable, Places

HEADS = AttentionConfig(8, 2, head_dim=128, rotary_dim=128, rope_theta=1e6)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "backend", "capability", "segmented", "expected"),
    [
        (128, "bfloat16", "gpu", 8.0, False, "cudnn"),
        (128, "float16", "gpu", 8.9, False, "cudnn"),
        (256, "bfloat16", "gpu", 9.0, False, "cudnn"),
        (64, "bfloat16", "gpu", 10.0, False, "cudnn"),
        (256, "bfloat16", "gpu", 8.9, False, "xla"),
        (264, "bfloat16", "gpu", 9.0, False, "xla"),
        (100, "bfloat16", "gpu", 9.0, False, "xla"),
        (128, "bfloat16", "gpu", 7.5, False, "xla"),
        (128, "float32", "gpu", 9.0, False, "xla"),
        (128, "bfloat16", "gpu", 9.0, True, "xla"),
        (128, "bfloat16", "tpu", None, False, "splash"),
        (64, "float32", "tpu", None, True, "splash"),
        (256, "bfloat16", "tpu", None, False, "splash"),
        (264, "bfloat16", "tpu", None, False, "xla"),
        (128, "float16", "tpu", None, False, "xla"),
        (128, "bfloat16", "cpu", None, False, "xla"),
        (128, "bfloat16", None, None, False, "xla"),
        # No number can be read off the devices here, as off other vendors' GPUs.
        (128, "bfloat16", "gpu", None, False, "xla"),
    ],
)
def test_choice(head_dim, dtype, backend, capability, segmented, expected):
    chosen = default_attention(
        dataclasses.replace(HEADS, head_dim=head_dim),
        dtype,
        segmented=segmented,
        backend=backend,
        compute_capability=capability,
    )
    assert chosen == expected


@pytest.mark.parametrize("changes", [{"soft_cap": 50.0}, {"sinks": True}])
def test_soft_caps_and_sinks_are_beyond_cudnn(changes):
    heads = dataclasses.replace(HEADS, **changes)
    where = {"gpu": "xla", "tpu": "splash"}
    for backend, expected in where.items():
        chosen = default_attention(heads, "bfloat16", backend=backend, compute_capability=9.0)
        assert chosen == expected


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [("gpu", "9.0", "cudnn"), ("cuda", "7.5", "xla"), ("rocm", "gfx942", "xla")],
)
def test_the_devices_of_the_mesh_are_asked(platform, capability, expected):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    mesh = types.SimpleNamespace(devices=np.array([device, device]))
    kinds = {"full_attention": HEADS, "sliding_attention": dataclasses.replace(HEADS, head_dim=512)}
    chosen = choose_attention(None, kinds, "bfloat16", segmented=False, mesh=mesh)
    assert chosen == {"full_attention": expected, "sliding_attention": "xla"}


def test_kinds_of_layers_that_a_named_implementation_does_not_fit_take_their_own():
    kinds = {"full_attention": dataclasses.replace(HEADS, head_dim=512), "sliding_attention": HEADS}
    named = partial(choose_attention, dtype="float32", segmented=False, mesh=None)
    chosen = named("splash", kinds)
    assert chosen == {"full_attention": "xla", "sliding_attention": "splash"}
    with pytest.raises(ValueError, match="attention must be 'xla' for heads of width 512"):
        named("splash", {"full_attention": kinds["full_attention"]})


@pytest.mark.parametrize(
    ("attention", "head_dim", "dtype"),
    [
        ("cudnn", 8, "float32"),
        ("flash", 8, "float32"),
        ("splash", 264, "float32"),
        ("splash", 8, "float16"),
    ],
)
def test_an_implementation_that_is_not_there_is_refused(attention, head_dim, dtype):
    config = parse_config(family("qwen3", head_dim=head_dim))

    def run(params):
        tokens = jnp.ones((1, 2), jnp.int32)
        return hidden_states(params, config, tokens, attention=attention, compute_dtype=dtype)

    with pytest.raises(ValueError, match="attention"):
        jax.eval_shape(run, parameter_shapes(config))


def test_a_sliding_layer_sees_as_many_tokens_as_its_window_has():
    """Itself included; alike where whole rows are read and where one token is."""
    config, time = parse_config(family("gemma3_text", sliding_window=3)), 6
    places = np.arange(time)
    nothing = jnp.zeros((1, time, 1, time))  # so that all that is seen weighs the same
    heads = Heads(nothing, (nothing, jnp.eye(time)[None, :, None]), None)
    static = ((True, 3), (False, time))
    for sliding, number in (*static, *((jnp.bool_(sliding), n) for sliding, n in static)):
        options = {"implementation": "xla", "mesh": None}
        attended = attend_causally(heads, config.attention, sliding, None, **options)
        expected = (places <= places[:, None]) & (places > places[:, None] - number)
        np.testing.assert_array_equal(attended[0, :, 0] > 0, expected)
        first = first_seen(config.attention, jnp.asarray(places), sliding)
        np.testing.assert_array_equal(np.maximum(first, 0), expected.argmax(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sliding", "packed", "sinks"),
    [
        *((sliding, packed, None) for sliding in (False, True) for packed in (False, True)),
        (True, True, [0.7, 100.0]),
        pytest.param(False, False, [0.7, 100.0], marks=pytest.mark.exhaustive),
    ],
)
def test_long_rows_are_computed_in_blocks_of_queries(sliding, packed, sinks):
    """Every block sees its segment, its past and its window, as one float64 softmax says."""
    rows, time, window = 2, 2 * 128 + 45, 70
    config = parse_config(family("gemma3_text", sliding_window=window)).attention
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, rows, time, 2, 4)).astype(np.float32)
    arrays = [query, key, value] + ([] if sinks is None else [np.array(sinks, np.float32)])
    ends = np.array([[100, 130, time], [256, 257, time]])
    segments = np.sum(np.arange(time)[None, :, None] >= ends[:, None], axis=2) + 1

    @jax.jit
    def attend(*arrays):
        ids = jnp.asarray(segments, jnp.int32) if packed else None
        options = {"implementation": "xla", "mesh": None}
        heads = Heads(arrays[0], tuple(arrays[1:3]), None, *arrays[3:])
        return attend_causally(heads, config, jnp.bool_(sliding), ids, **options)

    def reference(query, key, value, sinks=None):
        back = np.arange(time)[:, None] - np.arange(time)
        seen = np.broadcast_to(
            (back >= 0) & (back < (window if sliding else time)), (2, *back.shape)
        )
        if packed:
            seen = seen & (segments[:, :, None] == segments[:, None])
        logits = np.einsum("bthw,bshw->bhts", query, key) * config.scale
        weights = np.where(seen[:, None], np.exp(logits), 0)
        sink = 0 if sinks is None else np.exp(sinks)[:, None, None]
        weights /= weights.sum(axis=-1, keepdims=True) + sink
        return np.einsum("bhts,bshw->bthw", weights, value)

    wide = [x.astype(np.float64) for x in arrays]
    np.testing.assert_allclose(attend(*arrays), reference(*wide), atol=2e-6)
    # A step along a direction changes the sum of outputs as the gradient says.
    weight = rng.standard_normal(query.shape)
    total = jax.grad(
        lambda *x: jnp.sum(attend(*x) * weight.astype(np.float32)), tuple(range(len(arrays)))
    )
    for i, gradient in enumerate(total(*arrays)):
        direction, step = rng.standard_normal(gradient.shape), 1e-5
        moved = [
            reference(*(x + sign * step * direction if j == i else x for j, x in enumerate(wide)))
            for sign in (1, -1)
        ]
        slope = np.sum((moved[0] - moved[1]) * weight) / (2 * step)
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), slope, rtol=1e-4)


LENGTH = np.array([20, 3, 8])  # of rows in pages of 8 tokens; 3 owns the free ones
PAGES = Pages(jnp.array([2, 0, 3, 0, 1, 0, 2, 3]), jnp.array([8, 16, 0, 0, 0, 8, 0, 8]))
PLACES = Places(jnp.array([1, 4, 0]), jnp.array([4, 3, 0]))


SINKS = np.array([[0.5, -1.0, 3.0], [1.5, 40.0, -200.0]], np.float32)


def attend_by_page(backend, broken=None, places=PLACES, first=None, scale=0.5, sinks=None):
    """Attend to random pages, a row with a key that is not finite; what comes out, and went in."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(3, 2, *n, 4)).astype("f4") for n in ((3,), (), ()))
    keys = rng.normal(size=(1, 8, 2, 4, 8)).astype("f4")
    values = rng.normal(size=(1, 8, 2, 8, 4)).astype("f4")
    keys[:, 2], keys[:, 7, :, 0] = np.nan, np.inf  # what earlier rows have left
    if broken is not None:
        keys[0, 1, :, 0, 2] = broken  # row 0, token 18
    attended, cached = jax.jit(_attend_pages, static_argnames=("config", "backend", "in_kernel"))(
        jnp.asarray(query),
        (jnp.asarray(key), jnp.asarray(value)),
        KeyValues(jnp.asarray(keys), jnp.asarray(values)),
        jnp.int32(0),
        jnp.bool_(False),
        (PageTable(PAGES, places),),
        jnp.asarray(LENGTH, jnp.int32),
        None if first is None else jnp.asarray(first, jnp.int32),
        None if sinks is None else jnp.asarray(sinks),
        config=AttentionConfig(6, 2, 4, rotary_dim=4, rope_theta=1e4, multiplier=scale),
        backend="cpu" if backend == "kernel" else backend,  # elsewhere it is interpreted
        in_kernel=backend == "kernel",
    )
    return np.asarray(attended), query, cached


@pytest.mark.parametrize("backend", ["cpu", "gpu", "kernel"])
@pytest.mark.parametrize(
    ("scale", "first", "sinks"),
    [
        *((scale, first, None) for scale in (0.5, 300.0) for first in (None, [17, 0, 7])),
        (0.5, [17, 0, 7], SINKS),
        pytest.param(300.0, None, SINKS, marks=pytest.mark.exhaustive),
    ],
)
def test_attention_by_page_is_that_of_whole_rows(backend, scale, first, sinks):
    """Pages in any order, some of which a window leaves out; free ones hold what is not finite."""
    options = {"first": first, "scale": scale, "sinks": sinks}
    attended, query, (keys, values) = attend_by_page(backend, **options)
    for row, length in enumerate(LENGTH):
        pages = [int(p) for p in np.argsort(PAGES.start) if PAGES.owner[p] == row]
        seen = slice(first[row] if first else 0, length + 1)
        k = np.concatenate([keys[0, p] for p in pages], axis=2)[..., seen].astype("f8")
        v = np.concatenate([values[0, p] for p in pages], axis=1)[:, seen].astype("f8")
        logits = scale * query[row].astype("f8") @ k
        sink = np.full((2, 3, 1), -np.inf) if sinks is None else sinks[..., None].astype("f8")
        most = np.maximum(logits.max(-1, keepdims=True), sink)
        weights = np.exp(logits - most)
        expected = weights / (weights.sum(-1, keepdims=True) + np.exp(sink - most)) @ v
        np.testing.assert_allclose(attended[row], expected, atol=1e-5 * max(1, scale / 10))


@pytest.mark.parametrize("backend", ["cpu", "gpu", "kernel"])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("first", [None, [17, 0, 7]])
@pytest.mark.parametrize("scale", [0.5, 300.0])
def test_a_key_that_is_not_finite_breaks_its_row_only(backend, broken, first, scale):
    options = {"first": first, "scale": scale}
    attended, query, _ = attend_by_page(backend, broken, **options)
    hit = (query[0, ..., 0] > 0) | np.isnan(broken)  # a logit of minus infinity breaks nothing
    np.testing.assert_array_equal(np.isnan(attended[0]).all(-1), hit)
    assert hit.any()
    np.testing.assert_array_equal(attended[1:], attend_by_page(backend, **options)[0][1:])


@pytest.mark.parametrize("backend", ["cpu", "gpu", "kernel"])
def test_a_row_without_a_page_for_its_token_is_lost(backend):
    places = Places(PLACES.page.at[1].set(8), PLACES.slot)
    attended = attend_by_page(backend, places=places)[0]
    assert np.isnan(attended).all((1, 2, 3)).tolist() == [False, True, False]
    np.testing.assert_array_equal(attended[[0, 2]], attend_by_page(backend)[0][[0, 2]])
