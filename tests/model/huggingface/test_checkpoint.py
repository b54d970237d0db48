"""Checkpoints there and back: bits, names, shards, types, placement, files that come along."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.model.families import ALL, config_of, family, params_of, random_params
from twinkle_jax.model import Decoder, load_pretrained, parse_config, save_pretrained
from twinkle_jax.model.huggingface import checkpoint_read

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(
            np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8), strict=True
        )


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


def test_shards_are_as_large_as_asked_and_listed(tmp_path):
    save_pretrained(
        Decoder(config_of("qwen3"), params_of("qwen3")), tmp_path / "out", max_shard_size=9_000
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for file in files:
        tensors = safetensors.numpy.load_file(tmp_path / "out" / file)
        size = sum(x.nbytes for x in tensors.values())
        assert size <= 9_000 or len(tensors) == 1
        assert {index["weight_map"][name] for name in tensors} == {file}
        total += size
    assert index["metadata"]["total_size"] == total


def test_types_on_the_way_out_and_in(tmp_path):
    decoder = Decoder(config_of("qwen3"), params_of("qwen3"))
    save_pretrained(decoder, tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of("qwen3"))
    loaded = load_pretrained(tmp_path / "out")
    assert_same(loaded.params, rounded)
    save_pretrained(loaded, tmp_path / "again")
    assert_same(load_pretrained(tmp_path / "again").params, rounded)
    wide = load_pretrained(tmp_path / "out", dtype="float32").params
    assert_same(wide, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))


def test_layers_of_different_types_need_a_word(tmp_path):
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), tmp_path / "out")
    change(tmp_path / "out", "model.layers.1.mlp.up_proj.weight", lambda x: x.astype(np.float16))
    with pytest.raises(
        ValueError,
        match=r"dtype must be given where layers differ, .*up_proj.* \['float16', 'float32'\]",
    ):
        load_pretrained(tmp_path / "out")
    load_pretrained(tmp_path / "out", dtype="float32")


def change(directory, name, function):
    """Rewrite one tensor of a checkpoint."""
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    tensors[name] = np.ascontiguousarray(function(tensors[name]))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


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
    seen = {}

    def partition(path, shape):
        seen[path] = shape
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
    assert seen["layers/0/mlp/up_proj/kernel"] == kernel.shape and "lm_head/kernel" in seen
    save_pretrained(Decoder(config, loaded), tmp_path / "again")
    assert_same(load_pretrained(tmp_path / "again", mesh=mesh).params, params)


def test_tied_heads_are_not_written_and_copies_of_them_are_accepted(tmp_path):
    config = parse_config(family("qwen3", tie_word_embeddings=True))
    params = random_params(config)
    save_pretrained(Decoder(config, params), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file({**tensors, "lm_head.weight": head}, file)
    assert_same(load_pretrained(tmp_path / "out").params, params)
    head[-1, -1] += 1
    safetensors.numpy.save_file({**tensors, "lm_head.weight": head}, file)
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head"):
        load_pretrained(tmp_path / "out")


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
    tensors["mtp.layers.0.weight"] = np.arange(4, dtype=np.int8)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("size", [5_000_000_000, 9_000])
def test_vision_checkpoints_keep_what_is_not_text(size, tmp_path):
    tensors = vision_checkpoint(tmp_path / "in")
    decoder = load_pretrained(tmp_path / "in")
    assert_same(decoder.params, params_of("qwen3_5_text"))
    save_pretrained(decoder, tmp_path / "out", max_shard_size=size)
    written = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        written |= safetensors.numpy.load_file(file)
    assert written.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(written[name], x, strict=True)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert_same(load_pretrained(tmp_path / "out").params, decoder.params)
    shutil.rmtree(tmp_path / "in")  # without its source, it is the text model
    save_pretrained(decoder, tmp_path / "text")
    config = json.loads((tmp_path / "text/config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert_same(load_pretrained(tmp_path / "text").params, decoder.params)


def test_the_tokenizer_comes_along_and_other_files_stay(tmp_path):
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text("new")
    (tmp_path / "in/chat_template.jinja").write_text("template")
    (tmp_path / "in/secret.txt").write_text("not part of an export")
    decoder = load_pretrained(tmp_path / "in")
    assert decoder.source == tmp_path / "in"
    out = tmp_path / "out"
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), out, max_shard_size=9_000)
    (out / "tokenizer.json").write_text("old")
    (out / "README.md").write_text("mine")
    save_pretrained(decoder, out)
    assert {p.name: p.read_text() for p in out.iterdir() if p.suffix != ".safetensors"} == {
        "config.json": (out / "config.json").read_text(),
        "tokenizer.json": "new",
        "chat_template.jinja": "template",
        "README.md": "mine",
    }
    assert [p.name for p in out.glob("model*")] == ["model.safetensors"]
    save_pretrained(decoder, tmp_path / "in")  # onto its own source
    assert (tmp_path / "in/secret.txt").exists()
    assert_same(load_pretrained(tmp_path / "in").params, decoder.params)


@pytest.mark.parametrize("moment", ["first shard", "later shard", "config", "swap"])
def test_an_interrupted_save_leaves_the_old_export_whole(moment, tmp_path, monkeypatch):
    import twinkle_jax.model.huggingface.atomic_directory as atomic
    import twinkle_jax.model.huggingface.checkpoint_write as write

    out = tmp_path / "out"
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def fail(*arguments, **options):
        raise OSError("no space left on device")

    real, calls = write._write_shard, []

    def fail_later(*arguments):
        calls.append(1)
        return real(*arguments) if len(calls) < 3 else fail()

    module, function, replacement = {
        "first shard": (write, "_write_shard", fail),
        "later shard": (write, "_write_shard", fail_later),
        "config": (write, "export_config", fail),
        "swap": (atomic, "_swap", fail),
    }[moment]
    monkeypatch.setattr(module, function, replacement)
    changed = Decoder(config_of("qwen3"), random_params(config_of("qwen3"), seed=1))
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(changed, out, max_shard_size=9_000)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_is_written_is_read_back(tmp_path, monkeypatch):
    """A writer that stores other bytes, as safetensors 0.8 does for strided arrays, is noticed."""
    real = safetensors.numpy.save_file

    def wrong(tensors, path, **options):
        real({name: np.zeros_like(x) for name, x in tensors.items()}, path, **options)

    monkeypatch.setattr(safetensors.numpy, "save_file", wrong)
    with pytest.raises(OSError, match=r"reads back from .* with other values"):
        save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_targets_that_are_refused(tmp_path):
    decoder = Decoder(config_of("qwen3"), params_of("qwen3"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="directory must be one, or not there yet, got the file"):
        save_pretrained(decoder, tmp_path / "file")
    (tmp_path / "full/inner").mkdir(parents=True)
    with pytest.raises(ValueError, match="directory must hold files only, got 'inner'"):
        save_pretrained(decoder, tmp_path / "full")
    with pytest.raises(ValueError, match="max_shard_size must be at least 1 byte, got 0"):
        save_pretrained(decoder, tmp_path / "out", max_shard_size=0)
    assert {p.name for p in tmp_path.iterdir()} == {"file", "full"}
