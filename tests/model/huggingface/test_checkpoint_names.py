"""Which tensor belongs to which parameter, its orientation, and tensors that do not match."""

import json

import numpy as np
import pytest

from tests.model.families import config_of, family, params_of, random_params
from tests.model.huggingface.tensors import assert_same, rewrite
from tests.model.huggingface.test_checkpoint_files import refused
from twinkle_jax.model import Decoder, load_pretrained, parse_config, save_pretrained

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy


def test_layers_and_orientation_of_what_is_stored(tmp_path):
    params = params_of("qwen3_5_text")
    save_pretrained(Decoder(config_of("qwen3_5_text"), params), tmp_path / "out")
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    # Layers alternate, so layer 3 is the second repetition of the second member of the block.
    np.testing.assert_array_equal(
        stored["model.layers.3.self_attn.q_proj.weight"],
        params["layers"]["1"]["self_attn"]["q_proj"]["kernel"][1].T,
    )
    np.testing.assert_array_equal(
        stored["model.layers.2.linear_attn.conv1d.weight"][:, 0],
        params["layers"]["0"]["linear_attn"]["conv1d"]["kernel"][1].T,
    )
    np.testing.assert_array_equal(stored["lm_head.weight"], params["lm_head"]["kernel"].T)


def test_square_matrices_are_transposed_too(tmp_path):
    config = parse_config(
        family("qwen3", intermediate_size=24, num_attention_heads=3, num_key_value_heads=3)
    )
    params = random_params(config)
    save_pretrained(Decoder(config, params), tmp_path / "out")
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(
        stored["model.layers.1.mlp.up_proj.weight"],
        params["layers"]["0"]["mlp"]["up_proj"]["kernel"][1].T,
    )
    assert_same(load_pretrained(tmp_path / "out").params, params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "none named model.norm.weight"),
        (
            {f"model.layers.{i}.mlp.up_proj.bias": np.zeros(40) for i in range(5)},
            r"got model.layers.0.mlp.up_proj.bias, .* and 2 more",
        ),
        ({"model.visual.weight": np.zeros(4)}, "got model.visual.weight"),
        ({"model.layers.0.mlp.up_proj.weight": np.zeros((24, 40))}, r"\(40, 24\), got \(24, 40\)"),
        ({"model.norm.weight": np.zeros(24, np.int8)}, r"model.norm.weight"),
    ],
)
def test_tensors_that_do_not_match(changes, message, export):
    rewrite(export, changes)
    refused(export, message)


def test_more_layers_than_the_configuration_has(export):
    config = json.loads((export / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": None}
    (export / "config.json").write_text(json.dumps(config))
    refused(export, "got model.layers.1.")
