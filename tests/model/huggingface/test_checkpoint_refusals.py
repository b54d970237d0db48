"""Checkpoints that are damaged, incomplete or hostile: refused by name, before any allocation."""

import builtins
import json
import os

import jax
import numpy as np
import pytest

from tests.model.families import config_of, family, params_of
from twinkle_jax.model import Decoder, load_pretrained, save_pretrained
from twinkle_jax.model.huggingface.checkpoint_files import inside

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy


@pytest.fixture
def export(tmp_path):
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def sharded(tmp_path):
    decoder = Decoder(config_of("qwen3"), params_of("qwen3"))
    save_pretrained(decoder, tmp_path / "shards", max_shard_size=20_000)
    return tmp_path / "shards"


def rewrite(directory, **changes):
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    for name, x in changes.items():
        tensors[name.replace("__", ".")] = x
    safetensors.numpy.save_file({k: x for k, x in tensors.items() if x is not None}, file)


def refused(directory, message, *, may_place=False):
    """Loading fails, and no array reaches a device before that."""

    def place(*arguments, **options):
        raise AssertionError("placed before it was checked")

    with pytest.MonkeyPatch.context() as patch:
        if not may_place:
            patch.setattr(jax, "device_put", place)
        with pytest.raises(ValueError, match=message):
            load_pretrained(directory)


def test_missing_tensors(export):
    rewrite(export, model__norm__weight=None, model__layers__1__self_attn__k_norm__weight=None)
    refused(
        export,
        "got none named model.layers.1.self_attn.k_norm.weight, model.norm.weight",
    )


def test_extra_tensors(export):
    extra = {f"model__layers__{i}__mlp__up_proj__bias": np.zeros(40) for i in range(5)}
    rewrite(export, **extra)
    refused(
        export,
        r"must hold no tensors but the model's, got model.layers.0.mlp.up_proj.bias, .* and 2 more",
    )


def test_vision_tensors_belong_to_no_other_family(export):
    rewrite(export, model__visual__weight=np.zeros(4))
    refused(export, "no tensors but the model's, got model.visual.weight")


def test_misshapen_tensors(export):
    rewrite(export, model__layers__0__mlp__up_proj__weight=np.zeros((24, 40), np.float32))
    refused(export, r"up_proj.weight must have the shape \(40, 24\), got \(24, 40\)")


def test_types_that_are_no_weights(export):
    rewrite(export, model__norm__weight=np.zeros(24, np.int8))
    refused(export, "model.norm.weight must have a type of F64, F32, F16, BF16, got I8")


def test_more_layers_than_the_configuration_has(export):
    config = json.loads((export / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": None}
    (export / "config.json").write_text(json.dumps(config))
    refused(export, "no tensors but the model's, got model.layers.1.")


def test_unknown_model_type(export):
    (export / "config.json").write_text(json.dumps(family("mamba")))
    refused(export, "model_type must be one of .*, got 'mamba'")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' + "[" * 100_000, "\ud800"])
def test_configurations_that_are_not_json_objects(export, text):
    (export / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(export, "config.json")


def test_no_configuration(export):
    (export / "config.json").unlink()
    refused(export, "must hold config.json, got nothing of that name")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_files(export, keep):
    file = export / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(export, "model.safetensors must be a whole safetensors file, got ")


def test_headers_that_lie_about_their_length(export):
    (export / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    refused(export, "must be a whole safetensors file")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "state.pkl"])
def test_pickles_are_never_read(export, name):
    (export / "model.safetensors").rename(export / name)
    refused(export, f"must hold model.safetensors .*; {name} is pickled, and pickles are never")


def test_nothing_to_read(export):
    (export / "model.safetensors").unlink()
    refused(export, "must hold model.safetensors or model.safetensors.index.json, got neither$")


def reindex(directory, function):
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    function(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".", "..\\x"]
)
def test_an_index_that_points_elsewhere(sharded, name):
    outside = sharded.parent / "x.safetensors"
    safetensors.numpy.save_file({"model.norm.weight": np.zeros(24, np.float32)}, outside)
    reindex(sharded, lambda names: names.update({"model.norm.weight": name}))
    refused(sharded, "file names must be plain, and inside .*, got ")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_that_lead_out(export, name):
    (export / name).rename(export.parent / name)
    os.symlink(export.parent / name, export / name)
    refused(export, f"'{name}' must stay inside .*, got a link to")


def test_a_shard_that_is_a_link_out(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.rename(sharded.parent / "elsewhere")
    os.symlink("../elsewhere", shard)
    refused(sharded, f"'{shard.name}' must stay inside .*, got a link to")


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    shard.unlink()
    refused(sharded, f"must hold {shard.name}, got nothing of that name")


def test_an_index_that_promises_what_a_shard_does_not_hold(sharded):
    last = sorted(sharded.glob("*.safetensors"))[-1].name  # the norm is in the first
    reindex(sharded, lambda names: names.update({"model.norm.weight": last}))
    refused(sharded, f"got 'model.norm.weight' in {last}, which does not hold it")
    reindex(sharded, lambda names: (names.pop("model.norm.weight"), names.update(other=last)))
    refused(sharded, "must name the file of each tensor, got 'other'")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "weight_map must be an object from tensors to files")


@pytest.mark.parametrize(
    "name", ["nowhere", "../../etc/nowhere", "a/b/c", "owner/..", "~/nowhere/x"]
)
def test_ids_that_are_neither(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path_or_id must be a directory or a hub id"):
        load_pretrained(name)


def test_a_file_is_no_directory(export):
    with pytest.raises(ValueError, match="path_or_id must be a directory or a hub id"):
        load_pretrained(export / "config.json")


def test_the_hubs_cache_may_link_to_its_own_blobs(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1234"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    os.symlink("../../blobs/abc", snapshot / "config.json")
    os.symlink("../../../elsewhere", snapshot / "model.safetensors")
    assert inside(snapshot, "config.json").read_text() == "{}"
    with pytest.raises(ValueError, match="must stay inside"):
        inside(snapshot, "model.safetensors")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, "bfloat16"])
def test_weights_that_are_not_numbers(export, value, dtype):
    import ml_dtypes

    x = np.zeros(24, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x[3] = value
    rewrite(export, model__norm__weight=x)
    refused(export, "model.norm.weight must be finite, got NaN or infinity", may_place=True)


@pytest.mark.parametrize("missing", ["safetensors", "huggingface_hub"])
def test_extras_are_named(export, missing, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.split(".")[0] == missing:
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'twinkle-jax\[checkpoints\]'"):
        load_pretrained(export if missing == "safetensors" else "owner/name")
