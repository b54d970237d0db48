"""Moving rows to the front and back."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.model.decoder.left_align import (
    from_front,
    number_segments,
    segment_positions,
    to_front,
)

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
