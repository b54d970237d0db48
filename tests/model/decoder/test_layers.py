"""Projection, norm, scaled embeddings; rotary positions, and what stretches their wavelengths."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from tests.model.families import config_of
from tests.model.reference import frequencies, rotated
from twinkle_jax.model import (
    AttentionConfig,
    LinearScaling,
    ProportionalScaling,
    RopeScaling,
    Window,
    YarnScaling,
)
from twinkle_jax.model.decoder.layers import (
    embed,
    layer_output,
    map_logits,
    norm,
    output_logits,
    project,
    rms_norm,
    rotary_frequencies,
    rotary_table,
    rotary_tables,
    rotate,
    table_of,
)

HEADS = AttentionConfig(2, 2, head_dim=10, rotary_dim=10, rope_theta=100.0)
LLAMA3 = RopeScaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_length=8192)
YARN = YarnScaling(factor=4.0, original_length=8192, attention_factor=1.25)


def test_project_by_hand():
    weights = {"kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    x = jnp.array([[1.0, 10.0]])
    np.testing.assert_array_equal(project(x, weights), [[31, 42]])
    biased = project(x, {**weights, "bias": jnp.array([0.5, -1.0])})
    np.testing.assert_array_equal(biased, [[31.5, 41]])
    assert project(x.astype(jnp.bfloat16), weights).dtype == jnp.bfloat16


def sine_of_projection(x, kernel):
    """Its gradients depend on both factors."""
    return jnp.sin(project(x, {"kernel": kernel}))


def test_proportional_positions_by_hand():
    """Of four pairs the first two rotate, as without the scaling, and the others stay."""
    heads = AttentionConfig(
        1, 1, head_dim=8, rotary_dim=8, rope_theta=16.0, rope_scaling=ProportionalScaling(0.5)
    )
    np.testing.assert_array_equal(rotary_frequencies(heads), [1, 0.5, 0, 0])  # 16^(-1/4) = 1/2
    third = dataclasses.replace(heads, rope_scaling=ProportionalScaling(0.49))
    np.testing.assert_array_equal(rotary_frequencies(third), [1, 0, 0, 0])
    turned = rotate(jnp.ones((1, 1, 1, 8)), rotary_table(jnp.array([[2]]), heads))[0, 0, 0]
    cos, sin = np.cos([2, 1]), np.sin([2, 1])
    np.testing.assert_allclose(turned, [*(cos - sin), 1, 1, *(cos + sin), 1, 1], rtol=1e-6)


def test_the_number_of_a_layer_multiplies_and_gets_no_gradient():
    config = dataclasses.replace(config_of("qwen3"), layer_scalars=True)

    def total(x, number):
        return layer_output(config, x, {"layer_scalar": number}).sum()

    x, number = jnp.array([[1.0, 2.0]]), jnp.array([0.5])
    assert total(x, number) == 1.5
    of_x, of_number = jax.grad(total, argnums=(0, 1))(x, number)
    np.testing.assert_array_equal(of_x, [[0.5, 0.5]])
    assert of_number == 0
    assert layer_output(config_of("qwen3"), x, {}) is x


def test_a_norm_without_a_weight():
    x = jnp.array([[3.0, 4.0, 0.0, 0.0]])
    np.testing.assert_allclose(rms_norm(x, None, epsilon=0.0), [[1.2, 1.6, 0, 0]], rtol=1e-6)
    assert rms_norm(x.astype(jnp.bfloat16), None, epsilon=1e-6).dtype == jnp.bfloat16


def test_derivatives_of_a_projection():
    """Of both factors, forwards and backwards."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, kernel = (jnp.asarray(rng.standard_normal(s)) for s in ((7, 3), (3, 5)))
        check_grads(jax.jit(sine_of_projection), (x, kernel), order=1, modes=("fwd", "rev"))
        out, change = jax.jvp(sine_of_projection, (x, kernel), (x, kernel))
        np.testing.assert_allclose(change, 2 * (x @ kernel) * np.cos(x @ kernel), rtol=1e-12)
        np.testing.assert_array_equal(out, sine_of_projection(x, kernel))


def test_logits_are_float32_sums():
    """1 + 2⁻¹⁰ is no bfloat16."""
    params = {"lm_head": {"kernel": jnp.array([[1.0], [2.0**-10]])}}
    logits = output_logits(params, config_of("qwen3"), jnp.ones((1, 2), jnp.bfloat16))
    assert logits.dtype == jnp.float32 and float(logits[0, 0]) == 1 + 2**-10


def test_logits_of_a_few_positions_at_a_time_are_those_of_all():
    """Of 48 positions, three times 16; and of 20, which 16 does not divide, at once."""

    def scores(logits, labels):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logprobs, labels[..., None], -1)[..., 0], logits.max(-1)

    rng, config = np.random.default_rng(0), config_of("gemma2")
    kernel = jnp.asarray(rng.standard_normal((4, 7)), jnp.float32)
    for time in (48, 20):
        hidden = jnp.asarray(rng.standard_normal((2, time, 4)), jnp.float32)
        labels = jnp.asarray(rng.integers(7, size=(2, time)))

        def in_parts(kernel, hidden=hidden, labels=labels):
            params = {"lm_head": {"kernel": kernel}}
            return map_logits(scores, params, config, hidden, labels)

        def at_once(kernel, hidden=hidden, labels=labels):
            params = {"lm_head": {"kernel": kernel}}
            return scores(output_logits(params, config, hidden), labels)

        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        both = []
        for f in (in_parts, at_once):

            def of_one(kernel, f=f):
                results = f(kernel)
                return jnp.sin(results[0]).sum(), results

            both.append(jax.jit(jax.grad(of_one, has_aux=True))(kernel))
        jax.tree.map(close, *both)


def test_gradients_of_a_head_in_bfloat16_add_up_over_chunks():
    """300 chunks of 16 positions: in bfloat16 4096 + 16 is 4096."""
    hidden, labels = jnp.ones((1, 4800, 4), jnp.bfloat16), jnp.full((1, 4800, 1), 3)

    @jax.grad
    def gradient(kernel):
        params = {"lm_head": {"kernel": kernel}}
        pick = partial(jnp.take_along_axis, axis=-1)
        return jnp.sum(map_logits(pick, params, config_of("qwen3"), hidden, labels))

    expected = np.zeros((4, 7))
    expected[:, 3] = 4800
    for dtype in (jnp.bfloat16, jnp.float32):
        np.testing.assert_array_equal(gradient(jnp.ones((4, 7), dtype)), expected)


def test_rms_norm_by_hand():
    # mean square (1 + 49) / 2 = 25, and 25 + 11 = 36: divided by 6
    x = jnp.array([[6.0, 42.0]]) / 6
    out = rms_norm(x, jnp.array([2.0, 3.0]), epsilon=11.0)
    np.testing.assert_allclose(out, [[1 / 3, 3.5]], rtol=1e-6)
    centred = rms_norm(x, jnp.array([1.0, 2.0]), epsilon=11.0, centred=True)
    np.testing.assert_allclose(centred, [[1 / 3, 3.5]], rtol=1e-6)


def test_rms_norm_is_float32_inside():
    """The mean of 300 small squares is neither rounded nor lost in 16 bits."""
    out = rms_norm(jnp.full((3, 300), 1e-3, jnp.bfloat16), jnp.ones(300), epsilon=0.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)


def to_bfloat16(values):
    return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float64)


def test_rms_norm_rounds_where_each_family_does():
    """Plain weights multiply what was rounded; centred ones, and OLMo's, multiply in float32."""
    x, scale = jnp.array([[1.0, 1.4921875]], jnp.bfloat16), jnp.full(2, 1.0078125)
    unit = np.asarray(x, np.float64) / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))
    rounded = np.asarray(jnp.asarray(unit, jnp.bfloat16), np.float64)
    plain = np.asarray(rms_norm(x, scale, epsilon=0.0), np.float64)
    centred = np.asarray(rms_norm(x, scale - 1, epsilon=0.0, centred=True), np.float64)
    np.testing.assert_array_equal(plain, to_bfloat16(rounded * 1.0078125))
    np.testing.assert_array_equal(centred, to_bfloat16(unit * 1.0078125))
    assert (plain != centred).all()
    for name, expected in (("qwen3", plain), ("olmo2", centred), ("olmo3", centred)):
        config = dataclasses.replace(config_of(name), norm_epsilon=0.0)
        np.testing.assert_array_equal(norm(config, x, {"scale": scale}), expected)


def test_the_scale_of_embeddings_is_rounded_to_the_type_that_is_computed_in():
    """√24 = 4.898979; the nearest bfloat16, with 8 bits, is 4.90625."""
    config, table = config_of("gemma3_text"), jnp.ones((48, 24))
    embedded = embed(config, table, jnp.array([3]), jnp.dtype("bfloat16"))
    assert embedded.dtype == jnp.bfloat16 and float(embedded[0, 0]) == 4.90625
    embedded = embed(config, table, jnp.array([3]), jnp.dtype("float32"))
    assert float(embedded[0, 0]) == np.float32(24**0.5)
    assert float(embed(config_of("qwen3"), table, jnp.array([3]), jnp.dtype("float32"))[0, 0]) == 1


def test_gradients_of_a_token_that_occurs_often_add_up_in_bfloat16():
    """In bfloat16 256 + 1 is 256."""
    config, table = config_of("qwen3"), jnp.ones((48, 24), jnp.bfloat16)
    tokens = jnp.array([*[3] * 1000, 5, 48])  # the last one is outside the vocabulary

    @jax.grad
    def gradient(table):
        embedded = embed(config, table, tokens, jnp.dtype("bfloat16"))
        return jnp.sum(embedded.astype(jnp.float32))

    expected = np.zeros((48, 24))
    expected[[3, 5]] = [[1000], [1]]
    np.testing.assert_array_equal(gradient(table), expected)


# Rotary positions.


def test_rotation_equals_complex_multiplication():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 2, 10)).astype(np.float32)
    positions = np.array([[0, 1, 2], [7, 100, 3]])
    for dim in (10, 6):
        heads = dataclasses.replace(HEADS, rotary_dim=dim)
        out = rotate(jnp.asarray(x), rotary_table(jnp.asarray(positions), heads))
        for b, t, h in np.ndindex(2, 3, 2):
            expected = rotated(x[b, t, h].astype(np.float64), positions[b, t], heads)
            np.testing.assert_allclose(out[b, t, h], expected, atol=2e-5)


def test_rotation_keeps_lengths_and_the_type():
    heads = AttentionConfig(1, 1, head_dim=4, rotary_dim=4, rope_theta=10.0)
    out = rotate(jnp.ones((1, 2, 1, 4), jnp.bfloat16), rotary_table(jnp.array([[0, 5]]), heads))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out[0, 0], np.float32), 1)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(out[0, 1], np.float32)), 2, rtol=1e-2)


def test_llama_3_by_hand():
    # Three pairs of base 64: 1, 1/4 and 1/16. Over a length of 16 pi they turn 8, 2 and 1/2 times.
    # Above 4 turns a pair stays, below 1 it is 8 times slower; 2 is a third of the way from 1 to 4,
    # so 1/4 times (1/3 + 2/3 / 8) = 5/48.
    scaling = RopeScaling(8.0, 1.0, 4.0, 16)
    heads = dataclasses.replace(HEADS, rotary_dim=6, rope_theta=64.0, rope_scaling=scaling)
    actual = rotary_frequencies(dataclasses.replace(heads, rope_scaling=None))
    np.testing.assert_allclose(actual, [1, 1 / 4, 1 / 16], rtol=1e-15)
    turning = dataclasses.replace(scaling, original_length=16 * np.pi)
    actual = rotary_frequencies(dataclasses.replace(heads, rope_scaling=turning))
    np.testing.assert_allclose(actual, [1, 5 / 48, 1 / 128], rtol=1e-14)


def test_llama_3_equals_its_definition_by_wavelength():
    heads = AttentionConfig(8, 8, 128, 128, rope_theta=5e5, rope_scaling=LLAMA3)
    actual = rotary_frequencies(heads)
    np.testing.assert_allclose(actual, frequencies(heads), rtol=1e-12)
    plain = rotary_frequencies(dataclasses.replace(heads, rope_scaling=None))
    assert actual[0] == plain[0] and actual[-1] == plain[-1] / 8


def test_yarn_by_hand():
    # Four pairs of base 16: 1, 1/2, 1/4 and 1/8. Over a length of 16 pi they turn 8, 4, 2 and 1
    # times. Pair 0 turns beta_fast = 8 times and stays, pair 3 turns beta_slow = 1 time and is 4
    # times slower. Between them 1/3 and 2/3 of the factor: 1/2 (2/3 + 1/12) = 3/8, 1/4 (1/3 + 1/6).
    # A beta_fast of 16 would be pair -1, and counts as pair 0 too.
    def check(expected, length, **changes):
        scaling = dataclasses.replace(YARN, original_length=length * np.pi, **changes)
        heads = AttentionConfig(1, 1, 8, 8, rope_theta=16.0, rope_scaling=scaling)
        np.testing.assert_allclose(rotary_frequencies(heads), expected, rtol=1e-11)

    for fast in (8.0, 16.0):
        check([1, 3 / 8, 1 / 8, 1 / 32], 16, beta_fast=fast, beta_slow=1.0, truncate=False)
    # With 18 pi these are pairs 0.17 and 3.17, truncated 0 and 4: 1/4, 1/2 and 3/4 of the factor.
    check([1, 13 / 32, 5 / 32, 7 / 128], 18, beta_fast=8.0, beta_slow=1.0)
    # Both ends at pair 1: the pairs after it are 4 times slower.
    check([1, 1 / 2, 1 / 16, 1 / 32], 16, beta_fast=4.0, beta_slow=4.0, truncate=False)


def test_the_attention_factor_of_yarn_multiplies_cosines_and_sines():
    heads = dataclasses.replace(HEADS, rope_scaling=YARN)
    positions = jnp.array([[0, 1, 20_000]])
    for x in np.square(rotary_table(positions, heads)).sum(axis=0).ravel():
        np.testing.assert_allclose(x, 1.25**2, rtol=1e-6)
    unit = dataclasses.replace(heads, rope_scaling=dataclasses.replace(YARN, attention_factor=1.0))
    scaled, plain = rotary_table(positions, heads), rotary_table(positions, unit)
    np.testing.assert_array_equal(scaled, 1.25 * np.asarray(plain))


def test_sliding_layers_have_wavelengths_of_their_own_which_nothing_stretches():
    window = Window(size=3, rope_theta=7.0)
    positions = jnp.array([[0, 1, 5]])
    for stretched in (LLAMA3, LinearScaling(4.0), YARN):
        full = dataclasses.replace(HEADS, rope_scaling=stretched)
        config = dataclasses.replace(
            config_of("gemma3_text"), attention=dataclasses.replace(full, window=window)
        )
        tables = rotary_tables(positions, config)
        plain = dataclasses.replace(HEADS, rope_theta=7.0)
        for sliding, alone in ((True, plain), (False, full)):
            actual = table_of(tables, jnp.bool_(sliding))
            for x, y in zip(actual, rotary_table(positions, alone), strict=True):
                np.testing.assert_array_equal(x, y)
