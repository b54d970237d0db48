"""Comparing trees of parameters to the bit, and changing tensors of a saved checkpoint."""

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(
            np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8), strict=True
        )


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def rewrite(directory, changes):
    """Replace tensors of a checkpoint in one file; None removes one."""
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file) | changes
    safetensors.numpy.save_file({k: x for k, x in tensors.items() if x is not None}, file)
