"""Trees of parameters compared to the bit; checkpoints with changed and with other tensors."""

import json

import jax
import numpy as np
import pytest

from tests.model.families import family, params_of
from twinkle_jax.model import Decoder, parse_config, save_pretrained

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


def vision_checkpoint(directory):
    """A checkpoint as the hub has them for Qwen3.5: nested, with tensors that are not text."""
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": family("qwen3_5_text"),
        "vision_config": {"depth": 1},
    }
    params = params_of("qwen3_5_text")
    save_pretrained(Decoder(parse_config(config), params), directory)
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    tensors["model.visual.blocks.0.weight"] = np.arange(6, dtype=np.float16).reshape(2, 3)
    tensors["model.visual.counts"] = np.arange(5, dtype=np.int64)
    tensors["mtp.layers.0.weight"] = np.arange(3, dtype=np.int8)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return tensors
