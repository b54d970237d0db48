"""Values on their way in: types, placement on a mesh, tied heads, what does not fit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.model.families import config_of, family, params_of, random_params
from tests.model.huggingface.tensors import assert_same, rewrite
from twinkle_jax.model import Decoder, load_pretrained, parse_config, save_pretrained
from twinkle_jax.model.huggingface import checkpoint_read

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy

NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("leaves", ["small", "large"])
def test_parameters_go_straight_to_their_shards(name, leaves, tmp_path, monkeypatch):
    if leaves == "large":  # written to the device layer by layer
        monkeypatch.setattr(checkpoint_read, "ON_THE_HOST", 0)
    config, params = config_of(name), params_of(name)
    save_pretrained(Decoder(config, params), tmp_path / "out")
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    shapes = {}

    def partition(path, shape):
        shapes[path] = shape
        if path.endswith("conv1d/kernel"):
            return PartitionSpec(None, "fsdp", "tensor")
        if path.startswith("layers/") and path.endswith("kernel"):
            return PartitionSpec("data", "fsdp", "tensor")
        return PartitionSpec("fsdp") if path == "embed_tokens/embedding" else PartitionSpec()

    loaded = load_pretrained(tmp_path / "out", mesh=mesh, partition=partition).params
    assert_same(loaded, params)
    kernel = loaded["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec("data", "fsdp", "tensor")
    assert {s.data.shape for s in kernel.addressable_shards} == {(1, 12, 20)}
    assert loaded["norm"]["scale"].sharding.is_fully_replicated
    assert shapes["layers/0/mlp/up_proj/kernel"] == kernel.shape and "lm_head/kernel" in shapes
    save_pretrained(Decoder(config, loaded), tmp_path / "again")
    assert_same(load_pretrained(tmp_path / "again", mesh=mesh).params, params)


class Counted:
    """An open tensor that notes how many entries are read from the file."""

    def __init__(self, stored, read):
        self.stored, self.read = stored, read

    def __getitem__(self, part):
        self.read.append(self.stored[part].size)
        return self.stored[part]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_each_part_of_a_tensor_is_read_once_and_nothing_else(name, tmp_path, monkeypatch):
    """Devices that hold the same part share what was read."""
    save_pretrained(Decoder(config_of(name), params_of(name)), tmp_path / "out")
    real, read = checkpoint_read.read_part, []
    monkeypatch.setattr(
        checkpoint_read, "read_part", lambda path, x, part: real(path, Counted(x, read), part)
    )
    mesh = jax.make_mesh((4, 2), ("fsdp", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def partition(path, shape):  # the last axis that can be divided
        axes = [axis for axis, size in enumerate(shape) if axis and size % 4 == 0]
        return PartitionSpec(*(None,) * axes[-1], "fsdp") if axes else PartitionSpec()

    decoder = load_pretrained(tmp_path / "out", mesh=mesh, partition=partition)
    assert_same(decoder.params, params_of(name))
    assert sum(read) == sum(leaf.size for leaf in jax.tree.leaves(decoder.params))


def test_types(export):
    params = params_of("qwen3")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    loaded = load_pretrained(export, dtype="bfloat16")
    assert_same(loaded.params, rounded)
    save_pretrained(loaded, export)
    assert_same(load_pretrained(export).params, rounded)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    assert_same(load_pretrained(export, dtype="float32").params, wide)


def test_layers_of_different_types_need_a_dtype(export):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(export, {name: np.zeros((40, 24), np.float16)})
    with pytest.raises(ValueError, match=r"dtype .*up_proj"):
        load_pretrained(export)
    load_pretrained(export, dtype="float32")


def test_a_stored_copy_of_a_tied_head_is_accepted_if_it_is_the_embedding(tmp_path):
    config = parse_config(family("qwen3", tie_word_embeddings=True))
    params = random_params(config)
    save_pretrained(Decoder(config, params), tmp_path / "out")
    head = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert "lm_head.weight" not in head
    head = head["model.embed_tokens.weight"].copy()
    rewrite(tmp_path / "out", {"lm_head.weight": head})
    assert_same(load_pretrained(tmp_path / "out").params, params)
    other = head.copy()
    other[-1, -1] += 1
    for wrong in (other, np.vstack([head, head[:1]])):
        rewrite(tmp_path / "out", {"lm_head.weight": wrong})
        with pytest.raises(ValueError, match="tie_word_embeddings"):
            load_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "stored", "dtype"),
    [
        *((value, np.float32, None) for value in (np.nan, np.inf, -np.inf)),
        *((value, ml_dtypes.bfloat16, "bfloat16") for value in (np.nan, np.inf, -np.inf)),
        (1e6, np.float32, "float16"),
        (-3.4e38, np.float32, "bfloat16"),
        (1e300, np.float64, "float32"),
        (1e300, np.float64, "float64"),  # JAX holds no float64 here, so this is a cast too
    ],
)
def test_values_that_are_not_finite_or_do_not_fit_are_refused_by_name(value, stored, dtype, export):
    values = np.zeros(24, stored)
    values[3] = value
    rewrite(export, {NORM: values})
    with pytest.raises(ValueError, match=f"^{NORM}"):
        load_pretrained(export, dtype=dtype)


def test_the_largest_values_that_fit_do(export):
    rewrite(export, {NORM: np.full(24, 65504.0, np.float32)})
    scale = load_pretrained(export, dtype="float16").params["layers"]["0"]
    np.testing.assert_array_equal(scale["post_attention_layernorm"]["scale"][1], 65504)


@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2"])
def test_types_that_are_not_for_parameters(dtype, export):
    with pytest.raises(ValueError, match=r"^dtype"):
        load_pretrained(export, dtype=dtype)
