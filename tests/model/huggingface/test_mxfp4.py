"""Experts of GPT-OSS in MXFP4: every number to the bit, parts of tensors, what is refused."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.model.families import each, family, hidden, random_params
from tests.model.huggingface.tensors import assert_same, rewrite
from twinkle_jax.model import (
    Decoder,
    load_pretrained,
    make_mesh,
    parse_config,
    partition_rules,
    save_pretrained,
)
from twinkle_jax.model.huggingface import checkpoint as checkpoint_module
from twinkle_jax.model.huggingface.quantized import PackedSlice

UP = "model.layers.{}.mlp.experts.gate_up_proj"
DOWN = "model.layers.{}.mlp.experts.down_proj"
CONFIG = family("gpt_oss", hidden_size=64, intermediate_size=32, head_dim=16)
_GET = "pip install 'twinkle-jax[test,oracle]'"


def numbers(blocks, scales):
    """Unpack one number after the other: a sign, two bits of exponent, one of mantissa."""
    out = np.zeros((*scales.shape, 32))
    for place in np.ndindex(blocks.shape):
        byte = int(blocks[place])
        for half, code in enumerate((byte % 16, byte // 16)):
            exponent, mantissa = code // 2 % 4, code % 2
            size = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
            sign = -1.0 if code >= 8 else 1.0
            group = place[:-1]
            out[*group, 2 * place[-1] + half] = sign * size * 2.0 ** (int(scales[group]) - 127)
    return out.reshape(*scales.shape[:-1], -1).swapaxes(1, 2)


def packed(shape, seed):
    """Random blocks and scales of experts [experts, inputs, outputs]."""
    experts, inputs, outputs = shape
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    return blocks, rng.integers(122, 127, blocks.shape[:3], np.uint8)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint as its authors wrote it, and its parameters."""
    directory, config = tmp_path_factory.mktemp("packed"), parse_config(CONFIG)
    params = random_params(config)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    save_pretrained(Decoder(config, params), directory)
    changes, experts = {}, params["layers"]["0"]["mlp"]["experts"]
    for projection, name in (("gate_up_proj", UP), ("down_proj", DOWN)):
        kernel, layers = experts[projection]["kernel"], []
        for layer in range(config.layers):
            blocks, scales = packed(kernel.shape[1:], seed=layer)
            layers.append(numbers(blocks, scales))
            name_here = name.format(layer)
            changes |= {name_here: None, f"{name_here}_blocks": blocks}
            changes[f"{name_here}_scales"] = scales
        experts[projection]["kernel"] = jnp.asarray(np.stack(layers), jnp.bfloat16)
    rewrite(directory, changes)
    content = json.loads((directory / "config.json").read_text())
    content["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(content))
    return directory, params


@pytest.fixture
def checkpoint(original, tmp_path):
    """A copy to change."""
    for path in original[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_every_pair_of_numbers_with_every_scale():
    """A scale of 255 stands for NaN; with those before it, larger numbers do not fit."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(256, 1)
    scales = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(16, 2)
    whole = slice(0, 1), slice(0, 512), slice(0, 256)
    values = PackedSlice(blocks, scales)[whole]
    fits = np.abs(expected := numbers(blocks, scales)) < 2.0**128
    assert values.dtype == jnp.bfloat16 and not np.isfinite(values[..., 255]).any()
    assert not np.isfinite(values[~fits]).any()
    fits[..., 255] = False
    np.testing.assert_array_equal(values[fits].astype(float), expected[fits])
    zeros = fits & (expected == 0)
    np.testing.assert_array_equal(np.signbit(values[zeros]), np.signbit(expected[zeros]))


def test_it_is_what_transformers_reads():
    torch = pytest.importorskip("torch", reason=_GET)
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason=_GET)
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 128, 4, 16), np.uint8)
    scales = (np.arange(3 * 128 * 4).reshape(3, 128, 4) % 255).astype(np.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    ours = PackedSlice(blocks, scales)[slice(0, 3), slice(0, 128), slice(0, 128)]
    finite = np.isfinite(ours)
    assert finite.mean() > 0.99
    bits = theirs.view(torch.int16).numpy()
    np.testing.assert_array_equal(ours.view(np.int16)[finite], bits[finite])
    assert not torch.isfinite(theirs).numpy()[~finite].any()


def test_parts_are_those_of_the_whole():
    """Also inputs that begin and end inside a group."""
    blocks, scales = packed((3, 96, 10), seed=0)
    whole = numbers(blocks, scales)
    for part in (
        (slice(0, 3), slice(0, 96), slice(0, 10)),
        (slice(1, 2), slice(40, 56), slice(3, 4)),
        (slice(2, 3), slice(31, 65), slice(0, 10)),
        (slice(0, 2), slice(32, 64), slice(9, 10)),
    ):
        np.testing.assert_array_equal(PackedSlice(blocks, scales)[part].astype(float), whole[part])


@pytest.mark.parametrize("axes", each([None, {"fsdp": 4, "tensor": 2}]))
def test_a_checkpoint_is_read_and_written_in_sixteen_bits(axes, original, tmp_path):
    directory, params = original
    mesh = None if axes is None else make_mesh(**axes)
    partition = None if mesh is None else partition_rules(mesh)
    decoder = load_pretrained(directory, mesh=mesh, partition=partition)
    assert_same(decoder.params, params)
    save_pretrained(decoder, tmp_path / "out")
    written = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert not any(name.endswith(("_blocks", "_scales")) for name in written)
    assert written[UP.format(1)].shape == (6, 64, 64)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    again = load_pretrained(tmp_path / "out")
    assert again.config == decoder.config
    assert_same(again.params, params)


def test_another_type_and_blocks_in_another_file_than_scales(original, checkpoint):
    tensors = safetensors.numpy.load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    places = {name: f"model-{int('_scales' in name)}.safetensors" for name in tensors}
    for file in set(places.values()):
        part = {name: x for name, x in tensors.items() if places[name] == file}
        safetensors.numpy.save_file(part, checkpoint / file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (checkpoint / "model.safetensors.index.json").write_text(index)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), original[1])
    assert_same(load_pretrained(checkpoint, dtype="float32").params, wide)


@pytest.mark.exhaustive
def test_transformers_reads_what_is_written(original, tmp_path):
    torch = pytest.importorskip("torch", reason=_GET)
    transformers = pytest.importorskip("transformers", reason=_GET)
    decoder = load_pretrained(original[0], dtype="float32")
    save_pretrained(decoder, tmp_path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values())
    tokens = np.array([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        theirs = model.model(input_ids=torch.tensor(tokens)).last_hidden_state.numpy()
    ours = np.asarray(hidden(decoder.params, decoder.config, jnp.asarray(tokens)))
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


BLOCKS, SCALES = packed((6, 64, 64), seed=0)
NAN = np.where(np.arange(64)[:, None] == 40, 255, SCALES).astype(np.uint8)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"_blocks": BLOCKS[..., :8]}, "_blocks must have the shape .* 16"),
        ({"_blocks": BLOCKS[:, :, 0]}, "_blocks must have the shape .* 16"),
        ({"_blocks": BLOCKS[:5]}, r"_scales must have the shape \(5, 64, 2\)"),
        ({"_scales": SCALES[..., 0]}, r"_scales must have the shape \(6, 64, 2\)"),
        ({"_scales": SCALES.astype(np.float32)}, "_scales must have the type U8, got F32"),
        ({"_blocks": BLOCKS.view(np.int8)}, "_blocks must have the type U8, got I8"),
        ({"_blocks": BLOCKS[:5], "_scales": SCALES[:5]}, r" must have the shape \(6, 64, 64\)"),
        ({"_scales": NAN}, " must be finite"),
        ({"_scales": None}, "got none named model.layers.1.mlp.experts.gate_up_proj"),
        ({"_blocks": None}, "got none named model.layers.1.mlp.experts.gate_up_proj"),
        ({"": np.zeros((6, 64, 64), np.float32)}, " must be stored once"),
    ],
)
def test_what_is_refused_by_name(changes, error, checkpoint):
    name = UP.format(1)
    rewrite(checkpoint, {name + end: x for end, x in changes.items()})
    with pytest.raises(ValueError, match=error) as caught:
        load_pretrained(checkpoint)
    assert name in str(caught.value)


def test_other_families_have_no_packed_tensors(tmp_path):
    config = parse_config(family("qwen3"))
    save_pretrained(Decoder(config, random_params(config)), tmp_path)
    name = "model.layers.1.mlp.up_proj"
    weight = {f"{name}.weight_blocks": BLOCKS, f"{name}.weight_scales": SCALES}
    rewrite(tmp_path, weight)
    with pytest.raises(ValueError, match="no tensors but the model's"):
        load_pretrained(tmp_path)


def test_other_quantisations_are_refused():
    parse_config(CONFIG | {"quantization_config": None})
    for method in ("fp8", 4, None):
        with pytest.raises(ValueError, match=r"^quant_method"):
            parse_config(CONFIG | {"quantization_config": {"quant_method": method}})
    with pytest.raises(ValueError, match=r"^quantization_config"):
        parse_config(family("qwen3", quantization_config={"quant_method": "mxfp4"}))


@pytest.mark.slow
def test_the_host_holds_less_than_the_experts_of_one_layer(tmp_path, monkeypatch):
    """Apart from the result: arrays of NumPy, with which tensors are read."""
    monkeypatch.setattr(checkpoint_module, "ON_THE_HOST", 0)  # of small leaves it holds all
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 32}
    config = parse_config(CONFIG | sizes)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config))
    save_pretrained(Decoder(config, params), tmp_path)
    changes = {}
    for layer in range(config.layers):
        for name, outputs in ((UP.format(layer), 512), (DOWN.format(layer), 256)):
            blocks, scales = packed((32, 256, outputs), seed=0)
            changes |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
    rewrite(tmp_path, changes)
    of_one_layer = 2 * 32 * 256 * (512 + 256)
    tracemalloc.start()
    load_pretrained(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < of_one_layer / 4
