"""Checkpoints in and out: values, placement, what does not fit; round trips, saves that fail."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec

from tests.model.families import ALL, config_of, family, params_of, random_params
from tests.model.huggingface.tensors import assert_same, contents, rewrite, vision_checkpoint
from twinkle_jax.model import (
    Decoder,
    load_pretrained,
    make_mesh,
    parse_config,
    partition_rules,
    save_pretrained,
)
from twinkle_jax.model.huggingface import checkpoint, saving

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")

NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("leaves", ["small", "large"])
def test_parameters_go_straight_to_their_shards(name, leaves, tmp_path, monkeypatch):
    if leaves == "large":  # written to the device layer by layer
        monkeypatch.setattr(checkpoint, "ON_THE_HOST", 0)
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


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_the_first_layers_of_a_checkpoint(name, tmp_path):
    whole, params = config_of(name), params_of(name)
    save_pretrained(Decoder(whole, params), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    count = len(whole.block)
    content |= {"num_hidden_layers": count, "layer_types": list(whole.block), "rope_theta": 5e5}
    config = parse_config(content)
    loaded = load_pretrained(tmp_path / "out", config=config)
    expected = params | {"layers": jax.tree.map(lambda x: x[:1], params["layers"])}
    assert_same(loaded.params, expected)
    assert loaded.config == config != whole and whole.layers > count
    save_pretrained(loaded, tmp_path / "again")
    assert load_pretrained(tmp_path / "again").config == config
    with pytest.raises(ValueError, match="_proj"):
        load_pretrained(tmp_path / "out", config=parse_config(content | {"intermediate_size": 8}))


class Counted:
    """An open tensor that notes how many entries are read from the file."""

    def __init__(self, stored, read):
        self.stored, self.read = stored, read

    def __getitem__(self, part):
        self.read.append(self.stored[part].size)
        return self.stored[part]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "qwen3_moe"])
def test_each_part_of_a_tensor_is_read_once_and_nothing_else(name, tmp_path, monkeypatch):
    """Devices that hold the same part share what was read."""
    save_pretrained(Decoder(config_of(name), params_of(name)), tmp_path / "out")
    real, read = checkpoint.read_part, []
    monkeypatch.setattr(
        checkpoint,
        "read_part",
        lambda path, tensors, *rest: real(path, [Counted(x, read) for x in tensors], *rest),
    )
    mesh = jax.make_mesh((4, 2), ("fsdp", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def partition(path, shape):  # the last axis that can be divided
        axes = [axis for axis, size in enumerate(shape) if axis and size % 4 == 0]
        return PartitionSpec(*(None,) * axes[-1], "fsdp") if axes else PartitionSpec()

    decoder = load_pretrained(tmp_path / "out", mesh=mesh, partition=partition)
    assert_same(decoder.params, params_of(name))
    assert sum(read) == sum(leaf.size for leaf in jax.tree.leaves(decoder.params))


def fused(path, experts):
    """Rewrite the experts of a checkpoint as Qwen3.5's are: stacked, gate and up in one tensor."""
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        gate, up, down = (
            np.stack([tensors.pop(f"{layer}.experts.{e}.{n}_proj.weight") for e in range(experts)])
            for n in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{layer}.experts.down_proj"] = down
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    assert len(layers) == 4


def test_experts_are_stored_one_by_one_or_stacked(tmp_path):
    name = "qwen3_5_moe_text"
    save_pretrained(Decoder(config_of(name), params_of(name)), tmp_path)
    assert_same(load_pretrained(tmp_path).params, params_of(name))
    fused(tmp_path, experts=6)
    assert_same(load_pretrained(tmp_path).params, params_of(name))
    mesh = make_mesh(fsdp=2, tensor=2)
    loaded = load_pretrained(tmp_path, mesh=mesh, partition=partition_rules(mesh))
    assert_same(loaded.params, params_of(name))


@pytest.mark.parametrize(
    "tensor", ["experts.4.gate_proj", "experts.2.up_proj", "experts.3.down_proj"]
)
@pytest.mark.parametrize("value", [np.nan, 1e39])
def test_a_value_that_does_not_fit_is_found_in_its_expert(tensor, value, tmp_path):
    decoder = Decoder(config_of("glm4_moe"), params_of("glm4_moe"))
    save_pretrained(decoder, tmp_path, dtype="float64")
    name = f"model.layers.2.mlp.{tensor}.weight"
    changed = safetensors.numpy.load_file(tmp_path / "model.safetensors")[name]
    changed[-1, -1] = value
    rewrite(tmp_path, {name: changed})
    with pytest.raises(ValueError, match=f"{re.escape(name)} must"):
        load_pretrained(tmp_path, dtype="float32")


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
    with pytest.raises(ValueError, match="dtype"):
        load_pretrained(export)
    load_pretrained(export, dtype="float32")


def test_a_stored_copy_of_a_tied_head_is_accepted_if_it_is_the_embedding(tmp_path):
    # More rows than are compared at once.
    config = parse_config(family("qwen3", tie_word_embeddings=True, vocab_size=4100))
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


def test_a_model_that_was_saved_without_its_head(tmp_path):
    """As Qwen3-Embedding: the names have no prefix."""
    config = parse_config(family("qwen3", tie_word_embeddings=True))
    params = params_of("qwen3") | {}
    params.pop("lm_head")
    save_pretrained(Decoder(config, params), tmp_path / "out")
    tensors = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    rewrite(
        tmp_path / "out",
        dict.fromkeys(tensors) | {name.removeprefix("model."): x for name, x in tensors.items()},
    )
    decoder = load_pretrained(tmp_path / "out")
    assert_same(decoder.params, params)
    save_pretrained(decoder, tmp_path / "again")
    assert (
        safetensors.numpy.load_file(tmp_path / "again/model.safetensors").keys() == tensors.keys()
    )
    text = json.loads((tmp_path / "out/config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "out/config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=r"got none named lm_head\.weight"):
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


def test_parameters_alone_are_no_decoder(tmp_path):
    with pytest.raises(TypeError, match=r"decoder must be a Decoder\(config, params\), got dict"):
        save_pretrained(params_of("qwen3"), tmp_path / "out")


@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2", "bf16"])
def test_types_that_are_not_for_parameters(dtype, export):
    with pytest.raises(ValueError, match=f"^dtype .*bfloat16, got '{dtype}'"):
        load_pretrained(export, dtype=dtype)


@pytest.mark.parametrize("size", [5_000_000_000, 9_000])
@pytest.mark.parametrize("name", ALL)
def test_round_trip_is_bit_exact(name, size, tmp_path):
    decoder = Decoder(config_of(name), params_of(name))
    save_pretrained(decoder, tmp_path / "out", max_shard_size=size)
    loaded = load_pretrained(tmp_path / "out")
    assert loaded.config == decoder.config
    assert_same(loaded.params, decoder.params)
    assert (tmp_path / "out" / "model.safetensors").exists() == (size > 10**6)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("most", [9_000, 1])
def test_shards_are_as_large_as_asked_and_listed(decoder, most, tmp_path):
    save_pretrained(decoder, tmp_path / "out", max_shard_size=most)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))  # so none is empty
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for file in files:
        tensors = safetensors.numpy.load_file(tmp_path / "out" / file)
        size = sum(x.nbytes for x in tensors.values())
        assert size <= most or len(tensors) == 1
        assert {index["weight_map"][name] for name in tensors} == {file}
        total += size
    assert index["metadata"]["total_size"] == total


def test_the_tied_head_of_a_vision_checkpoint_is_compared_with_the_text_models(tmp_path):
    tensors = vision_checkpoint(tmp_path / "in")
    embedding = tensors["model.language_model.embed_tokens.weight"]
    place = tmp_path / "in/config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"tie_word_embeddings": True}))
    changes = {"lm_head.weight": embedding, "model.visual.embed_tokens.weight": embedding + 1}
    rewrite(tmp_path / "in", changes)
    assert "lm_head" not in load_pretrained(tmp_path / "in").params


def test_the_tied_head_of_a_text_model_inside_is_compared_with_its_embedding(tmp_path):
    """As in older checkpoints of Mistral 3, where it stands in `language_model`."""
    text = family("ministral3", tie_word_embeddings=True)
    config = parse_config({"model_type": "mistral3", "text_config": text})
    params = random_params(config)
    save_pretrained(Decoder(config, params), tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors = {f"language_model.{name}": x for name, x in tensors.items()}
    head = tensors["language_model.model.embed_tokens.weight"]
    for copy, accepted in ((head.copy(), True), (head + 1, False)):
        safetensors.numpy.save_file(tensors | {"language_model.lm_head.weight": copy}, file)
        if accepted:
            assert_same(load_pretrained(tmp_path / "out").params, params)
        else:
            with pytest.raises(ValueError, match="tie_word_embeddings"):
                load_pretrained(tmp_path / "out")


def test_projections_that_no_layer_uses_are_kept(tmp_path):
    """Some checkpoints have keys and values of layers that reuse those of others."""
    config, params = config_of("gemma4_text small"), params_of("gemma4_text small")
    save_pretrained(Decoder(config, params), tmp_path / "in")
    unused = {
        f"model.layers.{layer}.self_attn.{name}.weight": np.full((4, 3), layer, np.float32)
        for layer in range(2, 4)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    rewrite(tmp_path / "in", unused)
    decoder = load_pretrained(tmp_path / "in")
    assert_same(decoder.params, params)
    save_pretrained(decoder, tmp_path / "out")
    written = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    expected = safetensors.numpy.load_file(tmp_path / "in/model.safetensors")
    assert written.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(written[name], x, strict=True)
    rewrite(tmp_path / "in", {"model.layers.1.self_attn.k_norm.bias": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"layers.1.self_attn.k_norm.bias"):
        load_pretrained(tmp_path / "in")


def test_the_type_on_the_way_out(decoder, tmp_path):
    save_pretrained(decoder, tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), decoder.params)
    assert_same(load_pretrained(tmp_path / "out").params, rounded)


@pytest.mark.parametrize("size", [5_000_000_000, 9_000])
def test_vision_checkpoints_keep_what_is_not_text(size, tmp_path):
    tensors = vision_checkpoint(tmp_path / "in")
    decoder = load_pretrained(tmp_path / "in")
    assert_same(decoder.params, params_of("qwen3_5_text"))
    save_pretrained(decoder, tmp_path / "out", max_shard_size=size)
    written = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        written |= safetensors.numpy.load_file(file)
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0  # PyTorch refuses tensors that are not aligned
        header = json.loads(data[8 : 8 + length])
        for name in header.keys() - {"__metadata__"}:
            assert header[name]["data_offsets"][0] % written[name].itemsize == 0
    assert written.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(written[name], x, strict=True)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert_same(load_pretrained(tmp_path / "out").params, decoder.params)
    shutil.rmtree(tmp_path / "in")
    with pytest.warns(UserWarning, match="only the text model is written"):
        save_pretrained(decoder, tmp_path / "text")
    config = json.loads((tmp_path / "text/config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert_same(load_pretrained(tmp_path / "text").params, decoder.params)


def test_a_text_checkpoint_keeps_its_multi_token_prediction(tmp_path):
    save_pretrained(Decoder(config_of("qwen3_5_text"), params_of("qwen3_5_text")), tmp_path / "in")
    head = np.arange(3, dtype=np.float32)
    rewrite(tmp_path / "in", {"mtp.layers.0.weight": head})
    before = safetensors.numpy.load_file(tmp_path / "in/model.safetensors")
    save_pretrained(load_pretrained(tmp_path / "in"), tmp_path / "out")
    after = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert after.keys() == before.keys()
    np.testing.assert_array_equal(after["mtp.layers.0.weight"], head)


@pytest.mark.parametrize("further", [3, 4])
def test_a_layer_for_further_tokens_is_kept_and_no_other(further, tmp_path):
    """Checkpoints of GLM-4.5 number it as the next layer; it has the tensors of one, and some."""
    config, params = config_of("glm4_moe"), params_of("glm4_moe")
    save_pretrained(Decoder(config, params), tmp_path / "in")
    names = ("eh_proj.weight", "self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight")
    head = {f"model.layers.{further}.{n}": np.full((2, 3), i, "f4") for i, n in enumerate(names)}
    rewrite(tmp_path / "in", head)
    if further != config.layers:
        with pytest.raises(ValueError, match=r"model\.layers\.4"):
            load_pretrained(tmp_path / "in")
        return
    decoder = load_pretrained(tmp_path / "in")
    assert_same(decoder.params, params)
    save_pretrained(decoder, tmp_path / "out")
    expected = safetensors.numpy.load_file(tmp_path / "in/model.safetensors")
    written = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == expected.keys() and head.keys() < expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(written[name], x, strict=True)
    first = dataclasses.replace(config, layer_kinds=config.layer_kinds[:2])
    save_pretrained(load_pretrained(tmp_path / "in", config=first), tmp_path / "first")
    written = safetensors.numpy.load_file(tmp_path / "first/model.safetensors")
    assert not [name for name in written if name.startswith(("model.layers.2", "model.layers.3"))]
    rewrite(tmp_path / "in", {"model.layers.3.eh_proj.weight": None})
    with pytest.raises(ValueError, match=r"model\.layers\.3"):
        load_pretrained(tmp_path / "in")


def test_corrections_keep_their_digits(tmp_path):
    """As in transformers and vLLM: in 16 bits their sums with scores would be others."""
    config, params = config_of("glm4_moe"), params_of("glm4_moe")
    gate = params["layers"]["1"]["mlp"]["gate"]
    save_pretrained(Decoder(config, params), tmp_path / "out", dtype="bfloat16")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(stored[name], gate["e_score_correction_bias"][0], strict=True)
    assert stored["model.layers.1.mlp.gate.weight"].dtype == ml_dtypes.bfloat16
    for dtype in (None, "bfloat16", "float32"):
        loaded = load_pretrained(tmp_path / "out", dtype=dtype).params["layers"]["1"]["mlp"]["gate"]
        assert_same(loaded["e_score_correction_bias"], gate["e_score_correction_bias"])
        assert loaded["kernel"].dtype == (dtype or "bfloat16")
    rounded = stored[name].astype(ml_dtypes.bfloat16)
    rewrite(tmp_path / "out", {name: rounded, name.replace("1", "2"): rounded})
    loaded = load_pretrained(tmp_path / "out").params["layers"]["1"]["mlp"]["gate"]
    assert_same(loaded["e_score_correction_bias"][0], jnp.asarray(rounded, jnp.float32))


def test_the_tokenizer_comes_along_and_other_files_stay(decoder, export, tmp_path):
    (export / "tokenizer.json").write_text("new")
    (export / "chat_template.jinja").write_text("template")
    (export / "secret.txt").write_text("not part of an export")
    loaded = load_pretrained(export)
    assert loaded.source == export
    target = tmp_path / "target"
    save_pretrained(decoder, target, max_shard_size=9_000)
    (target / "tokenizer.json").write_text("old")
    (target / "generation_config.json").write_text("what ended the old one's completions")
    (target / "README.md").write_text("mine")
    save_pretrained(loaded, target)
    assert {p.name: p.read_text() for p in target.iterdir() if p.suffix != ".safetensors"} == {
        "config.json": (target / "config.json").read_text(),
        "tokenizer.json": "new",
        "chat_template.jinja": "template",
        "README.md": "mine",
    }
    assert [p.name for p in target.glob("model*")] == ["model.safetensors"]
    save_pretrained(loaded, export)  # onto its own source
    assert (export / "secret.txt").exists() and (export / "chat_template.jinja").exists()
    (target / "tokenizer.json").write_text("saved beside it")
    save_pretrained(decoder, target)  # which has no tokenizer
    assert (target / "tokenizer.json").read_text() == "saved beside it"
    assert_same(load_pretrained(export).params, loaded.params)


def test_named_chat_templates_come_along(export, tmp_path):
    (export / "tokenizer.json").write_text("new")
    (export / "additional_chat_templates").mkdir()
    (export / "additional_chat_templates/tool_use.jinja").write_text("tools")
    loaded = load_pretrained(export)
    for target in (tmp_path / "target", export):  # onto its own source too
        save_pretrained(loaded, target)
        assert (target / "additional_chat_templates/tool_use.jinja").read_text() == "tools"
    (tmp_path / "target/additional_chat_templates/tool_use.jinja").write_text("of an older export")
    save_pretrained(loaded, tmp_path / "target")
    assert (tmp_path / "target/additional_chat_templates/tool_use.jinja").read_text() == "tools"
    (tmp_path / "outside.jinja").write_text("elsewhere")
    (export / "additional_chat_templates/link.jinja").symlink_to(tmp_path / "outside.jinja")
    with pytest.raises(ValueError, match="must stay inside"):
        save_pretrained(loaded, tmp_path / "target")


@pytest.mark.parametrize("moment", ["first shard", "later shard", "config", "swap"])
def test_an_interrupted_save_leaves_the_old_export_whole(moment, export, monkeypatch):
    before = contents(export)

    def fail(*arguments, **options):
        raise OSError("no space left on device")

    real, calls = checkpoint.write_safetensors, []

    def fail_later(*arguments):
        calls.append(1)
        return real(*arguments) if len(calls) < 3 else fail()

    module, function, replacement = {
        "first shard": (checkpoint, "write_safetensors", fail),
        "later shard": (checkpoint, "write_safetensors", fail_later),
        "config": (checkpoint, "export_config", fail),
        "swap": (saving, "_swap", fail),
    }[moment]
    monkeypatch.setattr(module, function, replacement)
    changed = Decoder(config_of("qwen3"), random_params(config_of("qwen3"), seed=1))
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(changed, export, max_shard_size=9_000)
    assert contents(export) == before
    assert [p.name for p in export.parent.iterdir()] == ["out"]


def test_what_is_written_is_read_back(decoder, tmp_path, monkeypatch):
    """A disk that stores another bit is noticed."""
    real = checkpoint.import_safetensors

    def flip_a_bit_and_import():
        for file in tmp_path.rglob("*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        return real()

    monkeypatch.setattr(checkpoint, "import_safetensors", flip_a_bit_and_import)
    with pytest.raises(OSError, match="out"):
        save_pretrained(decoder, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_for_a_server_the_head_has_a_tensor_and_the_disk_is_not_waited_for(
    name, tmp_path, monkeypatch
):
    decoder = Decoder(config_of(name), params_of(name))
    options, waits = {"dtype": "bfloat16", "max_shard_size": 9_000}, []
    monkeypatch.setattr(saving.os, "fsync", waits.append)
    checkpoint.save_checkpoint(decoder, tmp_path / "kept", **options)
    assert len(waits) == len(list((tmp_path / "kept").iterdir())) + 2  # and both directories
    waits.clear()
    checkpoint.save_checkpoint(decoder, tmp_path / "out", **options, for_server=True)
    assert not waits
    kept, served = (load_pretrained(tmp_path / place) for place in ("kept", "out"))
    assert not served.config.tie_embeddings
    expected = kept.params
    if decoder.config.tie_embeddings:
        expected |= {"lm_head": {"kernel": expected["embed_tokens"]["embedding"].T}}
    assert_same(served.params, expected)


def test_a_value_that_does_not_fit_the_written_type_is_refused(decoder, tmp_path):
    params = decoder.params | {"norm": {"scale": decoder.params["norm"]["scale"] + 1e5}}
    with pytest.raises(ValueError, match=r"norm\.weight must fit float16"):
        save_pretrained(Decoder(decoder.config, params), tmp_path / "out", dtype="float16")


@pytest.mark.parametrize("failing", [1, 2, "last"])
def test_a_full_disk_is_noticed_at_any_tensor(failing, decoder, tmp_path, monkeypatch):
    """They are written by a thread."""
    real, tensors = Path.open, len(checkpoint.list_tensors(decoder, "model.", None))

    def open_full(path, mode="r", *arguments, **options):
        file = real(path, mode, *arguments, **options)
        if path.suffix == ".safetensors" and mode == "wb":
            writes = iter(range(tensors + 1))
            write = file.write

            def until_full(data):
                if next(writes) == (tensors if failing == "last" else failing):
                    raise OSError(errno.ENOSPC, "no space left")
                return write(data)

            file = SimpleNamespace(write=until_full, close=file.close)
            return contextlib.closing(file)
        return file

    monkeypatch.setattr(Path, "open", open_full)
    monkeypatch.setattr(checkpoint.zlib, "crc32", lambda data: 0)  # what is read back fits
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(decoder, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_not_written_over_an_adapter(decoder, export):
    """From both together, transformers loads the adapter and its base model."""
    (export / "adapter_config.json").write_text("{}")
    before = contents(export)
    with pytest.raises(ValueError, match="adapter"):
        save_pretrained(decoder, export)
    assert contents(export) == before


@pytest.mark.parametrize("wide", [False, True])
def test_a_stack_is_filled_in_place(wide):
    with jax.enable_x64(wide):
        stack = jnp.zeros((2, 3))
        filled = checkpoint._write_piece(stack, jnp.ones(3), np.array([1], np.int32))
        np.testing.assert_array_equal(filled, [[0] * 3, [1] * 3])
        assert stack.is_deleted()


def with_norm(value):
    """The decoder with one entry of one layer's norm replaced."""
    params = jax.tree.map(lambda x: x, params_of("qwen3"))
    layer = params["layers"]["0"]["post_attention_layernorm"]
    layer["scale"] = layer["scale"].at[1, 3].set(value)
    return Decoder(config_of("qwen3"), params)


@pytest.mark.parametrize(
    ("value", "options", "name"),
    [
        (np.nan, {}, NORM),
        (-np.inf, {"max_shard_size": 9_000}, NORM),
        (np.nan, {"dtype": "bfloat16"}, NORM),
        (1e6, {"dtype": "float16"}, NORM),
        (3.4e38, {"dtype": "bfloat16"}, NORM),
        (1.0, {"dtype": "float8_e4m3fn"}, "dtype"),
        (1.0, {"dtype": "int8"}, "dtype"),
        (1.0, {"dtype": "bf16"}, "dtype"),
        (1.0, {"max_shard_size": 0}, "max_shard_size"),
    ],
)
def test_what_no_loader_should_read_is_not_written(value, options, name, export):
    before = contents(export)
    with pytest.raises(ValueError, match=f"^{name}"):
        save_pretrained(with_norm(value), export, **options)
    assert contents(export) == before
    assert [p.name for p in export.parent.iterdir()] == ["out"]


def test_parameters_that_are_not_those_of_the_configuration_are_not_written(export):
    config, params = config_of("qwen3"), params_of("qwen3")
    rows = params["embed_tokens"]["embedding"]
    untied = params | {"lm_head": {"kernel": rows.T}}
    tied = dataclasses.replace(config, tie_embeddings=True)
    before = contents(export)
    for other, changed, name in (
        (config, params | {"embed_tokens": {"embedding": rows[:-1]}}, "embed_tokens/embedding"),
        (tied, untied, "lm_head/kernel"),  # computes with this head, which was lost
        (config, {key: x for key, x in params.items() if key != "norm"}, "norm/scale"),
    ):
        with pytest.raises(ValueError, match=f"decoder must have .* at {name}"):
            save_pretrained(Decoder(other, changed), export)
    assert contents(export) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from twinkle_jax.model.huggingface.saving import replace_directory
with replace_directory(Path(sys.argv[1])) as fresh:
    (fresh / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_killed_save_left_is_removed_by_the_next(decoder, export):
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, str(export)], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(export.parent.iterdir())) == 2
    (export.parent / ".out.notes.partial").mkdir()  # somebody else's
    save_pretrained(decoder, export)
    assert {p.name for p in export.parent.iterdir()} == {"out", ".out.notes.partial"}


@pytest.mark.parametrize("target", ["/", "/proc", "file", "full", "fifo", ".", "../here", "here"])
def test_targets_that_cannot_be_replaced(target, decoder, tmp_path, monkeypatch):
    """A mount point, a file, what holds more than files, and the current directory."""
    for name in ("full/inner", "fifo", "here"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo/README.md")
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    target = tmp_path / target if target in ("file", "full", "fifo", "here") else target
    with pytest.raises(ValueError, match=r"^directory"):
        save_pretrained(decoder, target)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_deleted_current_directory_is_no_obstacle(decoder, tmp_path, monkeypatch):
    """A reward that changed into a directory of its own cost the policy of a whole run."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    save_pretrained(decoder, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
