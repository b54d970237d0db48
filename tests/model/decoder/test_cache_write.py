"""The kernel that writes a token's entry into the cache: what a scatter writes, in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.model import make_mesh
from twinkle_jax.model.decoder.cache_write import write_in_place
from twinkle_jax.model.decoder.cached_step import _write

ROWS, GROUPS, LAYERS = 4, 2, 3


def arrays(width, slots, axis, dtype):
    extents = (slots, width) if axis == 3 else (width, slots)
    keys = jax.random.split(jax.random.key(0))
    stack = jax.random.normal(keys[0], (LAYERS, ROWS, GROUPS, *extents)).astype(dtype)
    return stack, jax.random.normal(keys[1], (ROWS, GROUPS, width))


def expected(stack, new, repeat, length, axis):
    """Said entry by entry."""
    stack, new = np.array(stack), np.asarray(new.astype(stack.dtype))
    for row, slot in enumerate(length):
        if slot < stack.shape[axis]:
            np.moveaxis(stack, axis, 2)[repeat, row, slot] = new[row]
    return stack


CASES = {  # width of a head, slots, their axis, type, where each row writes
    "time along lanes": (64, 256, 4, "bfloat16", [0, 127, 128, 255]),
    "a last block that is not full": (8, 300, 4, "float32", [299, 300, 256, 5]),
    "values of narrow heads": (8, 160, 3, "bfloat16", [159, 0, 130, 160]),
    "values of wide heads": (128, 40, 3, "bfloat16", [15, 16, 39, 40]),
    "less than a block": (8, 12, 4, "float32", [11, 3, 2**30, 0]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["kernel", "mesh", "scatter"])
def test_an_entry_is_written_and_nothing_else(case, way):
    width, slots, axis, dtype, length = CASES[case]
    stack, new = arrays(width, slots, axis, dtype)
    at, repeat = jnp.array(length, jnp.int32), jnp.int32(1)
    if way == "scatter":
        written = _write(stack, new, repeat, at, axis=axis, mesh=None)
    else:
        mesh = make_mesh(data=2, fsdp=2, tensor=2) if way == "mesh" else None
        options = {"axis": axis, "mesh": mesh, "interpret": True}
        written = jax.jit(lambda *xs: write_in_place(*xs, **options))(stack, new, repeat, at)
    assert written.dtype == stack.dtype
    np.testing.assert_array_equal(written, expected(stack, new, 1, length, axis))


def test_heads_that_a_mesh_does_not_divide_stay_whole():
    stack, new = arrays(8, 16, 4, "float32")
    length = [3, 4, 5, 6]
    options = {"axis": 4, "mesh": make_mesh(data=1, fsdp=2, tensor=4), "interpret": True}
    written = write_in_place(stack, new, jnp.int32(0), jnp.array(length, jnp.int32), **options)
    np.testing.assert_array_equal(written, expected(stack, new, 0, length, 4))
