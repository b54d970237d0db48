"""Saves that must not happen, places that cannot be replaced, and files that are none."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import config_of, family, params_of
from twinkle_jax.model import Decoder, LoraConfig, load_pretrained, save_pretrained
from twinkle_jax.model.decoder.lora import init_adapter
from twinkle_jax.model.huggingface.adapter_files import load_adapter, save_adapter

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy

NORM = "model.layers.1.post_attention_layernorm.weight"
LORA = LoraConfig(r=2)


def changed(value):
    """The decoder with one entry of one layer's norm replaced."""
    params = jax.tree.map(lambda x: x, params_of("qwen3"))
    layer = params["layers"]["0"]["post_attention_layernorm"]
    layer["scale"] = layer["scale"].at[1, 3].set(value)
    return Decoder(config_of("qwen3"), params)


@pytest.fixture
def export(tmp_path):
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), tmp_path / "out")
    return tmp_path / "out"


def contents(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (np.nan, {}, f"{NORM} must be finite to be saved, got NaN or infinity"),
        (-np.inf, {"max_shard_size": 9_000}, f"{NORM} must be finite to be saved"),
        (np.nan, {"dtype": "bfloat16"}, f"{NORM} must be finite to be saved"),
        (1e6, {"dtype": "float16"}, f"{NORM} must fit float16, got larger values of float32"),
        (3.4e38, {"dtype": "bfloat16"}, f"{NORM} must fit bfloat16"),
        (1.0, {"dtype": "float8_e4m3fn"}, "dtype must be one of float64, .*, got float8_e4m3fn"),
        (1.0, {"dtype": "int8"}, "dtype must be one of float64, float32, .*, got int8"),
    ],
)
def test_what_no_loader_should_read_is_not_written(value, options, message, export):
    before = contents(export)
    with pytest.raises(ValueError, match=message):
        save_pretrained(changed(value), export, **options)
    assert contents(export) == before
    assert [p.name for p in export.parent.iterdir()] == ["out"]


def test_adapters_with_nan_are_not_written(tmp_path):
    config = config_of("qwen3")
    adapter = init_adapter(jax.random.key(0), config, LORA)
    save_adapter(tmp_path / "adapter", config, LORA, adapter)
    before = contents(tmp_path / "adapter")
    broken = jax.tree.map(lambda x: x.at[0, 0, 0].set(jnp.nan), adapter)
    with pytest.raises(ValueError, match=r"lora_A.weight must be finite to be saved"):
        save_adapter(tmp_path / "adapter", config, LORA, broken)
    assert contents(tmp_path / "adapter") == before


KILLED = """
import os, signal, sys
from pathlib import Path
from twinkle_jax.model.huggingface.atomic_directory import replace_directory
with replace_directory(Path(sys.argv[1])) as fresh:
    (fresh / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_save_left_is_removed_by_the_next(export):
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, str(export)], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(export.parent.iterdir())) == 2
    (export.parent / ".out.notes.partial").mkdir()  # somebody else's
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), export)
    assert {p.name for p in export.parent.iterdir()} == {"out", ".out.notes.partial"}


def test_a_mount_point_is_refused():
    for place in ("/", "/proc"):
        with pytest.raises(ValueError, match=r"directory must not be a mount point, .*name a dir"):
            save_pretrained(changed(1.0), place)
        with pytest.raises(ValueError, match="directory must not be a mount point"):
            save_adapter(place, config_of("qwen3"), LORA, {})


@pytest.mark.parametrize("place", [".", "../out", "absolute"])
def test_the_current_directory_is_refused(place, export, monkeypatch):
    """It would be renamed away under the process that stands in it."""
    monkeypatch.chdir(export)
    before = contents(export)
    with pytest.raises(ValueError, match="directory must not be the current directory"):
        save_pretrained(changed(1.0), export if place == "absolute" else place)
    assert contents(export) == before


def test_a_fifo_in_the_target_is_refused(export):
    os.mkfifo(export / "README.md")
    with pytest.raises(ValueError, match=r"directory must hold files only, got 'README.md' in"):
        save_pretrained(changed(1.0), export)


def swap_for(path, kind):
    if path.exists():
        path.unlink()
    os.mkfifo(path) if kind == "FIFO" else path.mkdir()


@pytest.mark.parametrize("kind", ["FIFO", "directory"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_stands_in_the_place_of_a_file_is_not_waited_for(name, kind, export):
    swap_for(export / name, kind)
    with pytest.raises(ValueError, match=f"{name} must be a file, got a {kind}$"):
        load_pretrained(export)


@pytest.mark.parametrize("kind", ["FIFO", "directory"])
def test_the_same_for_shards_and_their_index(kind, tmp_path):
    decoder = Decoder(config_of("qwen3"), params_of("qwen3"))
    for name in ("model.safetensors.index.json", "model-00002"):
        save_pretrained(decoder, tmp_path / name, max_shard_size=20_000)
        path = next(p for p in (tmp_path / name).iterdir() if p.name.startswith(name))
        swap_for(path, kind)
        with pytest.raises(ValueError, match=f"{path.name} must be a file, got a {kind}$"):
            load_pretrained(tmp_path / name)


@pytest.mark.parametrize("kind", ["FIFO", "directory"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_the_same_for_adapters(name, kind, tmp_path):
    config = config_of("qwen3")
    adapter = init_adapter(jax.random.key(0), config, LORA)
    save_adapter(tmp_path / "adapter", config, LORA, adapter)
    swap_for(tmp_path / "adapter" / name, kind)
    with pytest.raises(ValueError, match=f"{name} must be a file, got a {kind}$"):
        load_adapter(tmp_path / "adapter", config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ('{"num_hidden_layers": 1%s}' % ("0" * 30), "num_hidden_layers must be .* at most 4096"),
        ('{"num_hidden_layers": 1%s}' % ("0" * 5000), "config.json must be JSON, got Exceeds"),
        ('{"vocab_size": null}', "vocab_size must be a positive integer .*, got None"),
        ('{"hidden_size": [24]}', r"hidden_size must be a positive integer .*, got \[24\]"),
        ('{"rms_norm_eps": NaN}', "rms_norm_eps must be a finite number, at least 0, got nan"),
        ('{"layer_types": null, "num_hidden_layers": []}', "num_hidden_layers must be"),
    ],
)
def test_impossible_values_are_one_line_that_names_the_key(changes, message, export):
    entries = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in family("qwen3").items())
    text = "{" + entries + ", " + changes[1:]  # the last of two equal keys holds
    (export / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained(export)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_huge_configuration_is_not_read(export):
    with (export / "config.json").open("r+b") as file:
        file.truncate(2**40)  # a hole: it takes no room
    with pytest.raises(ValueError, match=r"config.json must have at most \d+ bytes, got more"):
        load_pretrained(export)


def store(directory, array):
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors[NORM] = array
    safetensors.numpy.save_file(tensors, file)


@pytest.mark.parametrize(
    ("value", "stored", "dtype", "message"),
    [
        (1e6, "float32", "float16", f"{NORM} must fit float16, got larger values of float32"),
        (-3.4e38, "float32", "bfloat16", f"{NORM} must fit bfloat16, got larger values"),
        (1e300, "float64", "float32", f"{NORM} must fit float32, got larger values of float64"),
        # JAX holds no float64 here, so this would be a cast too.
        (1e300, "float64", "float64", f"{NORM} must fit float32, got larger values of float64"),
        (1.0, "float32", "int8", "dtype must be one of float64, float32, .*, got int8"),
        (1.0, "float32", "float8_e5m2", "dtype must be one of .*, got float8_e5m2"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(value, stored, dtype, message, export):
    store(export, np.full(24, value, stored))
    with pytest.raises(ValueError, match=message):
        load_pretrained(export, dtype=dtype)


def test_the_largest_values_that_fit_do(export):
    store(export, np.full(24, 65504.0, np.float32))
    scale = load_pretrained(export, dtype="float16").params["layers"]["0"]
    np.testing.assert_array_equal(scale["post_attention_layernorm"]["scale"][1], 65504)
