"""Files that are damaged, missing, hostile or elsewhere; hub ids; which tensor a parameter is."""

import builtins
import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest

from tests import hub_server
from tests.model.families import config_of, family, params_of, random_params
from tests.model.huggingface.tensors import assert_same, rewrite
from twinkle_jax.model import Decoder, load_pretrained, parse_config, save_pretrained
from twinkle_jax.model.huggingface.checkpoint_files import inside, locate

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def refused(directory, message):
    """Loading fails, and no array reaches a device before that."""

    def place(*arguments, **options):
        raise AssertionError("placed before it was checked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", place)
        with pytest.raises(ValueError, match=message):
            load_pretrained(directory)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' + "[" * 100_000, "\ud800"])
def test_configurations_that_are_not_json_objects(export, text):
    (export / CONFIG).write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(export, CONFIG)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", "1" + 30 * "0"),
        ("vocab_size", "null"),
        ("rms_norm_eps", "NaN"),
        ("hidden_size", "[24]"),
    ],
)
def test_errors_name_the_file_and_the_key(name, value, export):
    text = (export / CONFIG).read_text().rstrip().removesuffix("}")
    (export / CONFIG).write_text(f'{text}, "{name}": {value}}}')  # the last of equal keys holds
    refused(export, f"{CONFIG}: {name}")


def test_an_integer_that_python_does_not_read(export):
    (export / CONFIG).write_text(f'{{"num_hidden_layers": 1{5000 * "0"}}}')
    refused(export, CONFIG)


def test_a_huge_configuration_is_not_read(export):
    with (export / CONFIG).open("r+b") as file:
        file.truncate(2**40)  # a hole: it takes no room
    refused(export, CONFIG)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_files(name, export):
    (export / name).unlink()
    refused(export, name)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_files(export, keep):
    file = export / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    refused(export, WEIGHTS)


def test_headers_that_lie_about_their_length(export):
    (export / WEIGHTS).write_bytes((2**62).to_bytes(8, "little") + b"{}")
    refused(export, WEIGHTS)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "state.pkl"])
def test_pickles_are_never_read(export, name):
    (export / WEIGHTS).rename(export / name)
    refused(export, name)


def swap_for(path, kind):
    path.unlink()
    os.mkfifo(path) if kind == "FIFO" else path.mkdir()


@pytest.mark.parametrize("kind", ["FIFO", "directory"])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, INDEX, "model-00002"])
def test_a_fifo_or_a_directory_instead_of_a_file_is_not_waited_for(name, kind, export, sharded):
    directory = export if name in (CONFIG, WEIGHTS) else sharded
    path = next(p for p in sorted(directory.iterdir()) if p.name.startswith(name))
    swap_for(path, kind)
    refused(directory, f"{path.name} .*{kind}")


def reindex(directory, **names):
    """Change the map of an index; None removes a tensor."""
    file = directory / INDEX
    index = json.loads(file.read_text())
    index["weight_map"] |= {name.replace("__", "."): shard for name, shard in names.items()}
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".", "..\\x"]
)
def test_an_index_that_points_elsewhere(sharded, name):
    outside = sharded.parent / "x.safetensors"
    safetensors.numpy.save_file({"model.norm.weight": np.zeros(24, np.float32)}, outside)
    reindex(sharded, model__norm__weight=name)
    refused(sharded, re.escape(repr(name)))


def test_of_a_tensor_in_two_shards_the_index_says_which(sharded):
    last = sorted(sharded.glob("*.safetensors"))[-1]
    before = load_pretrained(sharded).params["norm"]["scale"]
    tensors = safetensors.numpy.load_file(last) | {"model.norm.weight": np.zeros(24, np.float32)}
    safetensors.numpy.save_file(tensors, last)
    assert np.array_equal(load_pretrained(sharded).params["norm"]["scale"], before)
    reindex(sharded, model__norm__weight=last.name)
    assert not load_pretrained(sharded).params["norm"]["scale"].any()
    reindex(sharded, model__norm__weight=None)
    refused(sharded, "'model.norm.weight' in .* and not in the index")


def test_an_index_that_promises_what_a_shard_does_not_hold(sharded):
    last = sorted(sharded.glob("*.safetensors"))[-1].name  # the norm is in the first
    reindex(sharded, model__norm__weight=last)
    refused(sharded, f"'model.norm.weight' in {last}")
    reindex(sharded, model__norm__weight=None, other=last)
    refused(sharded, "'other'")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map(sharded, content):
    (sharded / INDEX).write_text(content)
    refused(sharded, "weight_map")


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    shard.unlink()
    refused(sharded, shard.name)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, "model-00001"])
def test_links_that_lead_out(name, export, sharded):
    directory = sharded if name == "model-00001" else export
    path = next(p for p in directory.iterdir() if p.name.startswith(name))
    path.rename(directory.parent / "elsewhere")
    path.symlink_to("../elsewhere")
    refused(directory, path.name)


def test_the_hubs_cache_may_link_to_its_own_blobs(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1234"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    os.symlink("../../blobs/abc", snapshot / CONFIG)
    os.symlink("../../../elsewhere", snapshot / WEIGHTS)
    assert inside(snapshot, CONFIG).read_text() == "{}"
    with pytest.raises(ValueError, match="link"):
        inside(snapshot, WEIGHTS)
    snapshot.parent.rename(tmp_path / "models")  # only the cache's own folders may
    with pytest.raises(ValueError, match="link"):
        inside(tmp_path / "models/1234", CONFIG)


@pytest.mark.parametrize(
    "name", ["nowhere", "../../etc/nowhere", "a/b/c", "owner/..", "~/nowhere/x", "out/config.json"]
)
def test_neither_a_directory_nor_a_hub_id(name, export, monkeypatch):
    monkeypatch.chdir(export.parent)
    with pytest.raises(ValueError, match=r"^path_or_id"):
        load_pretrained(name)
    with pytest.raises(ValueError, match=r"^--model"):
        locate(name, argument="--model")


def test_an_id_without_a_connection_is_named(monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'twinkle-jax[checkpoints]'")

    def snapshot_download(name, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"^--model must .* 'runs/mine', .* no route to host"):
        locate("runs/mine", argument="--model")


@pytest.mark.parametrize("missing", ["safetensors", "huggingface_hub"])
def test_extras_are_named(export, missing, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.split(".")[0] == missing:
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"\[checkpoints\]"):
        load_pretrained(export if missing == "safetensors" else "owner/name")


ID = "someone/small-qwen3"
SCRIPT = """
import json, sys
import jax, numpy as np
from twinkle_jax.model import load_pretrained

leaves = jax.tree.leaves(load_pretrained(sys.argv[1]).params)
print(json.dumps([np.asarray(leaf).tolist() for leaf in leaves]))
"""


@pytest.fixture
def hub(tmp_path):
    """A server here that answers huggingface_hub as the hub does."""
    pytest.importorskip("huggingface_hub", reason="pip install 'twinkle-jax[checkpoints]'")
    files = tmp_path / "repository"
    with hub_server.serve(files, "models", ID) as (address, asked):
        yield files, address, asked


@pytest.mark.slow
def test_an_id_is_downloaded_once_and_then_found(hub, tmp_path):
    files, address, asked = hub
    params = params_of("qwen3")
    save_pretrained(Decoder(config_of("qwen3"), params), files, max_shard_size=20_000)
    (files / "pytorch_model.bin").write_bytes(b"pickled")
    (files / "modeling_custom.py").write_text("raise SystemExit('never run')")

    def load(**environment):
        done = hub_server.run(SCRIPT, ID, address, tmp_path / "home", **environment)
        assert done.returncode == 0, done.stderr[-2000:]
        expected = [leaf.tolist() for leaf in jax.tree.leaves(params)]
        assert json.loads(done.stdout.splitlines()[-1]) == expected

    load()
    fetched = {pathlib.Path(path).name for path in asked if "/resolve/" in path}
    shards = {path.name for path in files.glob("model-*.safetensors")}
    assert len(shards) > 1
    assert fetched == {CONFIG, INDEX, *shards}
    asked.clear()
    load(HF_HUB_OFFLINE="1")
    assert not asked


@pytest.mark.slow
def test_weights_may_be_left_on_the_hub(hub, tmp_path):
    files, address, _ = hub
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), files, max_shard_size=20_000)
    script = (
        "import sys; from twinkle_jax.model.huggingface.checkpoint_files import locate\n"
        "print(*(path.name for path in locate(sys.argv[1], weights=False).iterdir()))"
    )
    done = hub_server.run(script, ID, address, tmp_path / "home")
    assert done.stdout.split() == [CONFIG], done.stderr[-2000:]


@pytest.mark.slow
def test_files_that_only_the_index_names_are_downloaded(hub, tmp_path):
    """As those of Qwen3.6 in FP8, `layers-0.safetensors`; others are not."""
    files, address, asked = hub
    params = params_of("qwen3")
    save_pretrained(Decoder(config_of("qwen3"), params), files, max_shard_size=20_000)
    index = (files / INDEX).read_text()
    for path in files.glob("model-*.safetensors"):
        number = path.name.split("-")[1]
        index = index.replace(path.name, f"layers-{number}.safetensors")
        path.rename(files / f"layers-{number}.safetensors")
    (files / INDEX).write_text(index)
    (files / "consolidated.safetensors").write_bytes(b"the same once more")
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = hub_server.run(SCRIPT, ID, address, tmp_path / "home", **environment)
        assert done.returncode == 0, done.stderr[-2000:]
        expected = [leaf.tolist() for leaf in jax.tree.leaves(params)]
        assert json.loads(done.stdout.splitlines()[-1]) == expected
    fetched = {pathlib.Path(path).name for path in asked if "/resolve/" in path}
    shards = {path.name for path in files.glob("layers-*.safetensors")}
    assert len(shards) > 1
    assert fetched == {CONFIG, INDEX, *shards}


@pytest.mark.slow
def test_an_id_that_the_hub_does_not_know(hub, tmp_path):
    done = hub_server.run(SCRIPT, "someone/else", hub[1], tmp_path / "home")
    assert done.returncode == 1
    assert "RepositoryNotFoundError" in done.stderr and "someone/else" in done.stderr


# Tensors.


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


def test_layers_of_two_stacks_are_numbered_one_after_the_other(tmp_path):
    config = parse_config(family("glm4_moe", num_hidden_layers=5, first_k_dense_replace=2))
    params = random_params(config)
    save_pretrained(Decoder(config, params), tmp_path / "out")
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    dense, experts = params["layers"]["0"]["mlp"], params["layers"]["1"]["mlp"]
    for layer in range(2):
        np.testing.assert_array_equal(
            stored[f"model.layers.{layer}.mlp.up_proj.weight"], dense["up_proj"]["kernel"][layer].T
        )
    for layer in range(2, 5):
        mlp = f"model.layers.{layer}.mlp"
        correction = experts["gate"]["e_score_correction_bias"][layer - 2]
        np.testing.assert_array_equal(stored[f"{mlp}.gate.e_score_correction_bias"], correction)
        shared = experts["shared_experts"]["down_proj"]["kernel"][layer - 2]
        np.testing.assert_array_equal(stored[f"{mlp}.shared_experts.down_proj.weight"], shared.T)
        down = experts["experts"]["down_proj"]["kernel"][layer - 2]
        np.testing.assert_array_equal(stored[f"{mlp}.experts.3.down_proj.weight"], down[3].T)
    assert not {name for name in stored if "layers.1." in name and "experts" in name}
    assert_same(load_pretrained(tmp_path / "out").params, params)


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
    ("changes", "name"),
    [
        ({"model.norm.weight": None}, "model.norm.weight"),
        (
            {f"model.layers.{i}.mlp.up_proj.bias": np.zeros(40) for i in range(5)},
            "up_proj.bias",
        ),
        ({"model.visual.weight": np.zeros(4)}, "model.visual.weight"),
        ({"model.layers.0.mlp.up_proj.weight": np.zeros((24, 40))}, "up_proj.weight"),
        ({"model.norm.weight": np.zeros(24, np.int8)}, "model.norm.weight"),
    ],
)
def test_tensors_that_do_not_match(changes, name, export):
    rewrite(export, changes)
    refused(export, name)


def test_stored_rotary_frequencies_are_not_read(export):
    """As checkpoints of Llama 2 have them."""
    expected = load_pretrained(export).params
    frequencies = np.ones(4, np.float32)
    rewrite(export, {"model.layers.0.self_attn.rotary_emb.inv_freq": frequencies})
    assert_same(load_pretrained(export).params, expected)


def test_more_layers_than_the_configuration_has(export):
    config = json.loads((export / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": None}
    (export / "config.json").write_text(json.dumps(config))
    refused(export, "model.layers.1.")
