"""Rotary positions: the rotation, and Llama 3's stretched wavelengths."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from tests.model.reference import frequencies, rotated
from twinkle_jax.model import AttentionConfig, LinearScaling, RopeScaling, Window
from twinkle_jax.model.decoder.rotary import (
    rotary_frequencies,
    rotary_table,
    rotary_tables,
    rotate,
    table_of,
)

HEADS = AttentionConfig(2, 2, head_dim=10, rotary_dim=10, rope_theta=100.0)
LLAMA3 = RopeScaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_length=8192)


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


def test_sliding_layers_have_wavelengths_of_their_own_which_nothing_stretches():
    window = Window(size=3, rope_theta=7.0)
    positions = jnp.array([[0, 1, 5]])
    for stretched in (LLAMA3, LinearScaling(4.0)):
        full = dataclasses.replace(HEADS, rope_scaling=stretched)
        tables = rotary_tables(positions, dataclasses.replace(full, window=window))
        plain = dataclasses.replace(HEADS, rope_theta=7.0)
        for sliding, alone in ((True, plain), (False, full)):
            actual = table_of(tables, jnp.bool_(sliding))
            for x, y in zip(actual, rotary_table(positions, alone), strict=True):
                np.testing.assert_array_equal(x, y)
