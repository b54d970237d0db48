"""Checkpoints in FP8: every number to the bit, parts of tensors, what is saved, what is refused."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.model.families import batch, each, family, hidden, random_params
from tests.model.huggingface.tensors import assert_same, vision_checkpoint
from twinkle_jax.data import Template, small_tokenizer
from twinkle_jax.model import (
    Decoder,
    RewardModel,
    load_pretrained,
    make_mesh,
    output_logits,
    parse_config,
    partition_rules,
    save_pretrained,
)
from twinkle_jax.model.huggingface import checkpoint as checkpoint_module
from twinkle_jax.model.huggingface.quantized import ScaledSlice, fp8_block

_GET = "pip install 'twinkle-jax[test,oracle]'"
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 10],  # which divide few of the sizes here
    "modules_to_not_convert": ["lm_head"],
}
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "layers.3.eh_proj", "visual")


def number(byte):
    """Read one number: a sign, four bits of exponent, three of mantissa; 127 stands for NaN."""
    exponent, mantissa = byte // 8 % 16, byte % 8
    if byte % 128 == 127:
        return np.nan
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if byte >= 128 else size


def products(numbers, scales, block):
    """Multiply each number by the scale of its block, in float32."""
    whole = scales.astype(np.float32).repeat(block[0], -2).repeat(block[1], -1)
    rows, columns = numbers.shape[-2:]
    return numbers.astype(np.float32) * whole[..., :rows, :columns]


def in_blocks(values, block):
    """Round a matrix, or one for each expert, to FP8: numbers, and a scale for each block."""
    *experts, rows, columns = values.shape
    grid = (*experts, -(-rows // block[0]), -(-columns // block[1]))
    scales = np.zeros(grid, np.float32)
    for place in np.ndindex(*grid):
        at = (*(slice(i * b, (i + 1) * b) for i, b in zip(place[-2:], block, strict=True)),)
        scales[place] = np.abs(values[(*place[:-2], *at)].astype(np.float32)).max() / 448
    whole = scales.repeat(block[0], -2).repeat(block[1], -1)[..., :rows, :columns]
    return (values.astype(np.float32) / whole).astype(jnp.float8_e4m3fn), scales


_TYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float8_e5m2": "F8_E5M2"}
_TYPES |= {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TYPES |= {"int64": "I64", "int8": "I8", "uint8": "U8"}


def write(path, tensors):
    """Write a file as safetensors has them, whose library takes no FP8 from NumPy."""
    header, end = {}, 0
    for name, x in tensors.items():
        offsets = [end, end := end + x.nbytes]
        kind = _TYPES[x.dtype.name]
        header[name] = {"dtype": kind, "shape": x.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(path):
    return safetensors.numpy.load_file(path / "model.safetensors")


def set_quantization(directory, value):
    content = json.loads((directory / "config.json").read_text())
    content["quantization_config"] = value
    (directory / "config.json").write_text(json.dumps(content))


def fp8_checkpoint(plain, directory, *, quantization=FP8, block=(16, 10), end="_scale_inv"):
    """Write a checkpoint again in FP8, and in the first one's place what it stands for."""
    directory.mkdir()
    (directory / "config.json").write_text((plain / "config.json").read_text())
    set_quantization(directory, quantization)
    tensors, expected = {}, read(plain)
    for name, x in list(expected.items()):
        tensors[name] = x
        if x.ndim < 2 or "conv1d" in name or any(part in name for part in KEPT):
            continue
        size = tuple(b or n for b, n in zip(block, x.shape[-2:], strict=True))
        tensors[name], scales = in_blocks(x, size)
        tensors[name + end] = scales
        expected[name] = products(tensors[name], scales, size).astype(jnp.bfloat16)
    write(directory / "model.safetensors", tensors)
    safetensors.numpy.save_file(expected, plain / "model.safetensors")
    return tensors


def bfloat16_checkpoint(name, directory, **changes):
    config = parse_config(family(name, **changes))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config))
    save_pretrained(Decoder(config, params), directory)
    return directory


@pytest.fixture
def pair(tmp_path):
    """A checkpoint of DeepSeek-V3 in FP8, its tensors, and the same in bfloat16."""
    plain = bfloat16_checkpoint("deepseek_v3", tmp_path / "plain")
    return tmp_path / "fp8", fp8_checkpoint(plain, tmp_path / "fp8"), plain


# Numbers and parts.


def test_every_number_and_its_scale():
    numbers = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.float32([[0.1, -3.7e-3], [1e30, 2.0**-130]])
    values = ScaledSlice(numbers.view(jnp.float8_e4m3fn), scales, (8, 9))[:]
    assert values.dtype == np.float32
    for row, column in np.ndindex(16, 16):
        scale = scales[row // 8, column // 9]
        expected = np.float32(number(int(numbers[row, column]))) * scale
        np.testing.assert_array_equal(values[row, column], expected)


@pytest.mark.parametrize("block", [(128, 128), (300, 200), (1, 200)])
def test_parts_are_those_of_the_whole(block):
    """Also parts that begin and end inside a block, or hold several of them."""
    values = np.random.default_rng(0).standard_normal((3, 300, 200))
    numbers, scales = in_blocks(values, block)
    whole = products(numbers, scales, block)
    stack, matrix = (ScaledSlice(numbers[i], scales[i], block) for i in (slice(3), 1))
    for rows, columns in (
        (slice(0, 300), slice(0, 200)),
        (slice(127, 129), slice(100, 101)),
        (slice(130, 290), slice(127, 200)),
        (slice(299, 300), slice(0, 128)),
    ):
        part = slice(1, 3), rows, columns
        np.testing.assert_array_equal(stack[part], whole[part], strict=True)
        np.testing.assert_array_equal(matrix[part[1:]], whole[1][part[1:]], strict=True)
        np.testing.assert_array_equal(matrix[rows], whole[1][rows], strict=True)


def test_parts_of_more_rows_than_are_multiplied_at_a_time():
    values = np.random.default_rng(0).standard_normal((2500, 3))
    numbers, scales = in_blocks(values, (100, 2))
    part = slice(150, 2450)
    expected = products(numbers, scales, (100, 2))[part]
    np.testing.assert_array_equal(ScaledSlice(numbers, scales, (100, 2))[part], expected)


# Checkpoints.


@pytest.mark.parametrize("axes", [None, {"fsdp": 4, "tensor": 2}])
def test_a_checkpoint_is_read_and_written_in_sixteen_bits(axes, pair, tmp_path):
    mesh = None if axes is None else make_mesh(**axes)
    partition = None if mesh is None else partition_rules(mesh)
    decoder = load_pretrained(pair[0], mesh=mesh, partition=partition)
    expected = load_pretrained(pair[2])
    assert_same(decoder.params, expected.params)
    assert decoder.config == expected.config
    save_pretrained(decoder, tmp_path / "out")
    written = read(tmp_path / "out")
    assert not any("scale" in name for name in written)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    again = load_pretrained(tmp_path / "out")
    assert again.config == decoder.config
    assert_same(again.params, expected.params)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_products_are_rounded_once(dtype, pair):
    name = "model.layers.0.mlp.down_proj.weight"
    whole = products(pair[1][name], pair[1][name + "_scale_inv"], (16, 10))
    decoder = load_pretrained(pair[0], dtype=dtype)
    leaf = decoder.params["layers"]["0"]["mlp"]["down_proj"]["kernel"]
    np.testing.assert_array_equal(np.asarray(leaf)[0], whole.T.astype(dtype), strict=True)
    if dtype != "float32":
        assert (whole != whole.astype(dtype)).any()


def test_scales_in_another_file_and_of_another_type(pair):
    """Scales in bfloat16, as Qwen's, and powers of two, as in `"scale_fmt": "ue8m0"`."""
    directory, tensors, plain = pair
    scales = [name for name in tensors if name.endswith("_scale_inv")]
    for i, name in enumerate(scales):
        to = jnp.bfloat16 if i % 2 else jnp.float8_e8m0fnu
        tensors[name] = tensors[name].astype(to)
    expected = read(plain)
    for name in scales:
        weight = name.removesuffix("_scale_inv")
        whole = products(tensors[weight], tensors[name], (16, 10))
        expected[weight] = whole.astype(jnp.bfloat16)
    safetensors.numpy.save_file(expected, plain / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {name: f"layers-{int('_scale_inv' in name)}.safetensors" for name in tensors}
    for file in set(places.values()):
        write(directory / file, {name: x for name, x in tensors.items() if places[name] == file})
    index = json.dumps({"metadata": {}, "weight_map": places})
    (directory / "model.safetensors.index.json").write_text(index)
    set_quantization(directory, FP8 | {"scale_fmt": "ue8m0"})
    assert_same(load_pretrained(directory).params, load_pretrained(plain).params)


@pytest.mark.parametrize("name", each(["phi3", "qwen3_5_moe_text", "glm4"], 2))
def test_fused_projections_and_stacked_experts(name, tmp_path):
    plain = bfloat16_checkpoint(name, tmp_path / "plain")
    if name == "qwen3_5_moe_text":  # as the authors' checkpoints in 16 bits have them
        tensors = read(plain)
        for layer in range(4):
            experts = f"model.layers.{layer}.mlp.experts."
            parts = [
                np.stack([tensors.pop(f"{experts}{e}.{part}_proj.weight") for e in range(6)])
                for part in ("gate", "up", "down")
            ]
            tensors[f"{experts}gate_up_proj"] = np.concatenate(parts[:2], axis=1)
            tensors[f"{experts}down_proj"] = parts[2]
        safetensors.numpy.save_file(tensors, plain / "model.safetensors")
    stored = fp8_checkpoint(plain, tmp_path / "fp8")
    if name == "qwen3_5_moe_text":  # left out
        stored["model.layers.2.mlp.experts.gate_up_proj_activation_scale"] = np.ones(6, np.float32)
        write(tmp_path / "fp8/model.safetensors", stored)
    fused = "qkv_proj.weight" if name == "phi3" else "gate_up_proj"
    assert any(fused in x and x.endswith("_scale_inv") for x in stored)
    mesh = make_mesh(fsdp=4, tensor=2)
    decoder = load_pretrained(tmp_path / "fp8", mesh=mesh, partition=partition_rules(mesh))
    assert_same(decoder.params, load_pretrained(plain).params)


GROUP = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    },
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "output_activations": None,
}
COMPRESSED = {  # as of GLM-4.5-FP8
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "global_compression_ratio": 1.5,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
}


def weights(**changes):
    group = GROUP | {"weights": GROUP["weights"] | changes}
    return COMPRESSED | {"config_groups": {"group_0": group}}


def test_a_scale_for_each_channel(tmp_path):
    plain = bfloat16_checkpoint("glm4_moe", tmp_path / "plain")
    options = {"quantization": COMPRESSED, "block": (1, None), "end": "_scale"}
    stored = fp8_checkpoint(plain, tmp_path / "fp8", **options)
    assert stored["model.layers.1.mlp.experts.5.down_proj.weight_scale"].shape == (24, 1)
    assert_same(load_pretrained(tmp_path / "fp8").params, load_pretrained(plain).params)


@pytest.mark.parametrize(
    ("quantization", "ends"),
    [
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
            ("_scale_inv", "activation_scale"),
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("_scale", "input_scale")),
        (weights(strategy="tensor"), ("_scale", "input_scale")),
    ],
)
def test_a_scale_for_each_tensor(quantization, ends, tmp_path):
    """As in Ministral 3, with scales of activations, which are left out."""
    plain = bfloat16_checkpoint("ministral3", tmp_path / "plain")
    options = {"quantization": quantization, "block": (None, None), "end": ends[0]}
    stored = fp8_checkpoint(plain, tmp_path / "fp8", **options)
    for i, name in enumerate([name for name in stored if name.endswith(ends[0])]):
        shape = ((), (1,), (1, 1))[i % 3]
        stored[name] = stored[name].reshape(shape)
        stored[name.replace(f"weight{ends[0]}", ends[1])] = np.ones(shape, np.float32)
    assert any(name.endswith(ends[1]) for name in stored)
    write(tmp_path / "fp8/model.safetensors", stored)
    assert_same(load_pretrained(tmp_path / "fp8").params, load_pretrained(plain).params)


# What is saved.


def with_further_layer(plain):
    """Add a layer that predicts a further token, as DeepSeek-V3 and GLM-4.5 have one."""
    tensors, rng = read(plain), np.random.default_rng(1)
    shapes = {"eh_proj": (24, 48), "self_attn.o_proj": (24, 20), "mlp.experts.0.up_proj": (16, 24)}
    shapes |= {"enorm": (24,)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(jnp.bfloat16)
        tensors[f"model.layers.3.{name}.weight"] = values
    safetensors.numpy.save_file(tensors, plain / "model.safetensors")


def test_carried_tensors_are_written_in_sixteen_bits(tmp_path):
    """In FP8 they would stand for other numbers, without a quantization_config."""
    plain = bfloat16_checkpoint("deepseek_v3", tmp_path / "plain")
    with_further_layer(plain)
    stored = fp8_checkpoint(plain, tmp_path / "fp8")
    name = "model.layers.3.mlp.experts.0.up_proj.weight"
    assert stored[name].dtype == jnp.float8_e4m3fn and name + "_scale_inv" in stored
    decoder = load_pretrained(tmp_path / "fp8")
    save_pretrained(decoder, tmp_path / "out")
    written, expected = read(tmp_path / "out"), read(plain)
    assert written.keys() == expected.keys()
    for name, x in expected.items():
        assert x.dtype == written[name].dtype
        np.testing.assert_array_equal(x, written[name], err_msg=name)
    save_pretrained(decoder, tmp_path / "fp8")  # in place of what it was read from
    assert read(tmp_path / "fp8").keys() == expected.keys()
    assert_same(load_pretrained(tmp_path / "fp8").params, decoder.params)


def test_carried_tensors_must_be_finite(tmp_path):
    plain = bfloat16_checkpoint("deepseek_v3", tmp_path / "plain")
    with_further_layer(plain)
    stored = fp8_checkpoint(plain, tmp_path / "fp8")
    name = "model.layers.3.self_attn.o_proj.weight"
    stored[name + "_scale_inv"][0, 1] = np.nan
    write(tmp_path / "fp8/model.safetensors", stored)
    decoder = load_pretrained(tmp_path / "fp8")
    with pytest.raises(ValueError, match="must be finite") as caught:
        save_pretrained(decoder, tmp_path / "out")
    assert name in str(caught.value) and not (tmp_path / "out").exists()


def test_an_enclosing_model_loses_its_quantization_config(tmp_path):
    """It is beside `text_config`, whose tensors have another prefix."""
    tensors = vision_checkpoint(tmp_path / "plain")
    fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8")
    decoder = load_pretrained(tmp_path / "fp8", dtype="bfloat16")
    expected = load_pretrained(tmp_path / "plain", dtype="bfloat16")
    assert_same(decoder.params, expected.params)
    save_pretrained(decoder, tmp_path / "out")
    content = json.loads((tmp_path / "out/config.json").read_text())
    assert "text_config" in content and "quantization_config" not in content
    written = read(tmp_path / "out")
    assert written.keys() == tensors.keys()
    for name in ("model.visual.blocks.0.weight", "model.visual.counts", "mtp.layers.0.weight"):
        np.testing.assert_array_equal(written[name], tensors[name], strict=True)


def test_the_first_layers_alone(pair):
    directory, _, plain = pair
    content = json.loads((plain / "config.json").read_text())
    config = parse_config(content | {"num_hidden_layers": 2})
    assert_same(*(load_pretrained(path, config=config).params for path in (directory, plain)))


def test_a_copy_of_a_tied_head(tmp_path):
    plain = bfloat16_checkpoint("qwen3", tmp_path / "plain", tie_word_embeddings=True)
    stored = fp8_checkpoint(plain, tmp_path / "fp8")
    embedding = "model.embed_tokens.weight"
    stored[embedding], scales = in_blocks(stored[embedding], (16, 10))
    stored |= {f"{embedding}_scale_inv": scales, "lm_head.weight": stored[embedding]}
    for factor in (1.0, 1.01):
        stored["lm_head.weight_scale_inv"] = scales * np.float32(factor)
        write(tmp_path / "fp8/model.safetensors", stored)
        if factor == 1:
            params = load_pretrained(tmp_path / "fp8").params
            expected = products(stored[embedding], scales, (16, 10)).astype(jnp.bfloat16)
            np.testing.assert_array_equal(params["embed_tokens"]["embedding"], expected)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from"):
        load_pretrained(tmp_path / "fp8")


def test_a_reward_model(tmp_path):
    """A head for tokens is not read; that for scores may be in FP8, too."""
    plain = bfloat16_checkpoint("qwen3", tmp_path / "plain")
    stored = fp8_checkpoint(plain, tmp_path / "fp8")
    head = stored["lm_head.weight"]
    stored["lm_head.weight"], stored["lm_head.weight_scale_inv"] = in_blocks(head, (16, 10))
    write(tmp_path / "fp8/model.safetensors", stored)
    template = Template(small_tokenizer("0123456789"))
    options, name = {"template": template, "new_head": True}, "model.layers.0.mlp.up_proj.weight"
    models = [RewardModel.from_pretrained(tmp_path / x, **options) for x in ("plain", "fp8")]
    exact = products(stored[name], stored[name + "_scale_inv"], (16, 10))
    leaf = models[1].params["layers"]["0"]["mlp"]["up_proj"]["kernel"][0]
    np.testing.assert_array_equal(leaf, exact.T, strict=True)  # on a CPU in float32
    rounded = models[0].params["layers"]["0"]["mlp"]["up_proj"]["kernel"][0]
    np.testing.assert_array_equal(leaf.astype(jnp.bfloat16), rounded.astype(jnp.bfloat16))
    score, scales = in_blocks(np.linspace(-1, 1, 24)[None], (16, 10))
    stored |= {"score.weight": score, "score.weight_scale_inv": scales}
    write(tmp_path / "fp8/model.safetensors", stored)
    model = RewardModel.from_pretrained(tmp_path / "fp8", template=template)
    np.testing.assert_array_equal(model.head, products(score, scales, (16, 10))[0])


# What is refused.

NAME = "model.layers.1.mlp.experts.2.down_proj.weight"  # [24, 16], in blocks of [16, 10]
SCALE = f"{NAME}_scale_inv"
NUMBERS, SCALES = in_blocks(np.random.default_rng(0).standard_normal((24, 16)), (16, 10))
BAD = np.where(np.eye(2, dtype=bool), np.nan, SCALES)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({SCALE: None}, "must have scales, .*weight_scale_inv, got none"),
        ({NAME: None}, "must be of a tensor .* in F8_E4M3, got no such tensor"),
        ({NAME: NUMBERS.astype(jnp.bfloat16)}, "must be of a tensor .*, got BF16"),
        ({NAME: NUMBERS.astype(jnp.float8_e5m2)}, "must be of a tensor .*, got F8_E5M2"),
        ({SCALE: SCALES.T[:, :1]}, r"must have the shape \(2, 2\), .*, got \(2, 1\)"),
        ({SCALE: SCALES.reshape(-1)}, r"must have the shape \(2, 2\), .*, got \(4,\)"),
        ({SCALE: SCALES[0, 0]}, r"must have the shape \(2, 2\), .*, got \(\)"),
        ({SCALE: SCALES.astype(np.uint8)}, "must have a type of F32, .* got U8"),
        ({NAME: NUMBERS[:20]}, r"must have the shape \(24, 16\), got \(20, 16\)"),
        ({NAME: NUMBERS.reshape(-1)}, "must have two or three axes"),
        ({SCALE: BAD}, "must be finite"),
        ({SCALE: np.full((2, 2), np.inf, np.float32), NAME: 0 * NUMBERS}, "must be finite"),
        ({SCALE: np.full((2, 2), 3e38, np.float32)}, "must be finite"),
        ({NAME: np.full((24, 16), 127, np.uint8).view(jnp.float8_e4m3fn)}, "must be finite"),
        ({f"{NAME}_scale": SCALES}, "must have scales, .*, got .*weight_scale beside it"),
        ({"model.layers.0.self_attn.k_scale": SCALES}, "no tensors but the model's.*k_scale"),
    ],
)
def test_tensors_that_are_refused_by_name(changes, error, pair):
    directory, tensors, _ = pair
    tensors |= changes
    write(directory / "model.safetensors", {k: x for k, x in tensors.items() if x is not None})
    with pytest.raises(ValueError, match=error) as caught:
        load_pretrained(directory)
    assert NAME in str(caught.value) or "k_scale" in str(caught.value)


def test_without_a_quantization_config(pair):
    set_quantization(pair[0], None)
    with pytest.raises(ValueError, match=r"quantization_config for .* in F8_E4M3, got none"):
        load_pretrained(pair[0])


def test_larger_numbers_than_a_type_has(pair):
    directory, tensors, _ = pair
    tensors[SCALE] = np.full((2, 2), 1e6, np.float32)
    write(directory / "model.safetensors", tensors)
    load_pretrained(directory)
    with pytest.raises(ValueError, match="must fit float16") as caught:
        load_pretrained(directory, dtype="float16")
    assert NAME in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "block"),
    [
        (FP8, (16, 10)),
        ({"quant_method": "fp8"}, (None, None)),
        (FP8 | {"fmt": "float8_e4m3fn", "scale_fmt": "ue8m0"}, (16, 10)),  # MiniMax, DeepSeek-V3.1
        (FP8 | {"weight_block_size": None, "dequantize": False}, (None, None)),  # Ministral 3
        ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, (None, None)),
        (COMPRESSED, (1, None)),
        (COMPRESSED | {"format": "naive-quantized", "sparsity_config": {}}, (1, None)),
        (COMPRESSED | {"sparsity_config": {"format": "dense"}, "transform_config": {}}, (1, None)),
        (weights(strategy="tensor"), (None, None)),
        (weights(strategy="block", block_structure=[128, 64]), (128, 64)),
        (COMPRESSED | {"config_groups": {"a": GROUP, "b": GROUP | {"format": None}}}, (1, None)),
        (COMPRESSED | {"config_groups": {"a": GROUP | {"input_activations": None}}}, (1, None)),
    ],
)
def test_spellings_of_quantization_config(quantization, block):
    assert fp8_block({"quantization_config": quantization}) == block
    assert fp8_block({"text_config": {"quantization_config": quantization}}) == block
    parse_config(family("qwen3", quantization_config=quantization))


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ({}, "quant_method"),
        ("fp8", "JSON object"),
        ({"quant_method": None}, "quant_method"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ({"quant_method": "mxfp4"}, "quant_method"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method"),
        (FP8 | {"fmt": "e5m2"}, "fmt"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme"),
        (FP8 | {"scale_fmt": "e4m3"}, "scale_fmt"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype"),
        (FP8 | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        (FP8 | {"kv_cache_scheme": "static"}, "kv_cache_scheme"),
        (FP8 | {"bits": 8}, "bits"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128, True]}, "weight_block_size"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size"),
        (COMPRESSED | {"format": "pack-quantized"}, "format"),
        (COMPRESSED | {"format": "mixed-precision"}, "format"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format"),
        (COMPRESSED | {"config_groups": {}}, "config_groups"),
        (COMPRESSED | {"config_groups": {"a": ["Linear"]}}, "a must be"),
        (COMPRESSED | {"config_groups": {"a": {"targets": ["Linear"]}}}, "num_bits"),
        (
            COMPRESSED | {"config_groups": {"a": GROUP | {"format": "nvfp4-pack-quantized"}}},
            "format",
        ),
        (COMPRESSED | {"config_groups": {"a": GROUP | {"output_activations": {}}}}, "output_act"),
        (
            COMPRESSED | {"config_groups": {"a": GROUP | {"input_activations": {"num_bits": 4}}}},
            "num_bits",
        ),
        (weights(num_bits=4), "num_bits"),
        (weights(type="int"), "type"),
        (weights(symmetric=False), "symmetric"),
        (weights(strategy="group"), "strategy"),
        (weights(group_size=32), "group_size"),
        (weights(dynamic=True), "dynamic"),
        (weights(actorder="group"), "actorder"),
        (weights(strategy="block", block_structure="128x128"), "block_structure"),
        (weights(strategy="block"), "block_structure"),
        (weights(zero_point=1), "zero_point"),
    ],
)
def test_a_quantization_config_that_is_refused(quantization, key):
    for config in (
        family("qwen3", quantization_config=quantization),
        {
            "model_type": "qwen3_5",
            "text_config": family("qwen3_5_text"),
            "quantization_config": quantization,
        },
    ):
        with pytest.raises(ValueError, match=rf"^quantization_config.*{key}"):
            parse_config(config)


def test_groups_with_scales_of_several_kinds():
    groups = {"a": GROUP, "b": weights(strategy="tensor")["config_groups"]["group_0"]}
    with pytest.raises(ValueError, match="one strategy, got 2"):
        fp8_block({"quantization_config": COMPRESSED | {"config_groups": groups}})


# As torch and transformers have it.


def torch_checkpoint(name, directory, block, **changes):
    """Write a model of transformers' in FP8; return it with the weights that this stands for."""
    torch = pytest.importorskip("torch", reason=_GET)
    transformers = pytest.importorskip("transformers", reason=_GET)
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**family(name, **changes))
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for part, x in [*model.named_parameters(), *model.named_buffers()]:
            if not part.endswith("inv_freq"):
                x.copy_((0.7 if "norm" in part else 0.0) + 0.3 * torch.randn_like(x))
    plain = directory / "plain"
    model.save_pretrained(plain)
    tensors, dequantised = load_file(plain / "model.safetensors"), {}
    for part, x in list(tensors.items()):
        dequantised[part] = x
        if x.ndim != 2 or any(kept in part for kept in KEPT):
            continue
        (rows, columns), (high, wide) = x.shape, block
        quantised = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-rows // high), -(-columns // wide))
        spread = torch.empty(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scales[i, j] = spread[at] = x[at].float().abs().max() / 448
                quantised[at] = (x[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
        tensors |= {part: quantised, f"{part}_scale_inv": scales}
        dequantised[part] = (quantised.float() * spread).to(torch.bfloat16)
    assert any(part.endswith("_scale_inv") for part in tensors)
    save_file(dequantised, plain / "model.safetensors", {"format": "pt"})
    (directory / "fp8").mkdir()
    names = sorted(tensors)
    places = {part: f"model-{i % 3}.safetensors" for i, part in enumerate(names)}
    for file in set(places.values()):
        some = {part: tensors[part] for part in names if places[part] == file}
        save_file(some, directory / "fp8" / file, {"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": places})
    (directory / "fp8/model.safetensors.index.json").write_text(index)
    (directory / "fp8/config.json").write_text((plain / "config.json").read_text())
    set_quantization(directory / "fp8", FP8 | {"weight_block_size": list(block)})
    return transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


TORCH_CASES = [
    ("deepseek_v3", (16, 10), {}),
    ("phi3", (16, 10), {}),
    ("qwen3", (128, 128), {"hidden_size": 160, "intermediate_size": 300, "head_dim": 72}),
    ("qwen3_moe", (16, 10), {}),
    ("glm4_moe", (16, 10), {}),
    ("glm4", (7, 11), {}),
]


@pytest.mark.parametrize("case", each(TORCH_CASES, 2))
def test_it_is_what_torch_computes(case, tmp_path):
    """Every parameter to the bit, in one piece and on a mesh, and transformers' logits."""
    name, block, changes = case
    model = torch_checkpoint(name, tmp_path, block, **changes)
    decoder = load_pretrained(tmp_path / "fp8")
    expected = load_pretrained(tmp_path / "plain")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(decoder.params)} <= {"bfloat16", "float32"}
    assert_same(decoder.params, expected.params)
    mesh = make_mesh(fsdp=4, tensor=2)
    spread = load_pretrained(tmp_path / "fp8", mesh=mesh, partition=partition_rules(mesh))
    assert_same(spread.params, expected.params)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), decoder.params)
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]
    tokens, mask = batch(rows, 6, "right")
    ours = output_logits(params, decoder.config, hidden(params, decoder.config, tokens, mask))
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(rows)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_transformers_reads_the_same(name, tmp_path):
    """It converts them itself, where blocks divide all sizes."""
    torch = pytest.importorskip("torch", reason=_GET)
    transformers = pytest.importorskip("transformers", reason=_GET)
    pytest.importorskip("accelerate")
    torch_checkpoint(name, tmp_path, (8, 4))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8",
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=(8, 4)
        ),
    )
    for part, x in model.state_dict().items():
        assert x.dtype == torch.bfloat16, part
    model.config.quantization_config = None
    decoder = load_pretrained(tmp_path / "fp8")
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        theirs = model.float()(input_ids=tokens).logits.numpy()
    params = jax.tree.map(lambda x: x.astype(jnp.float32), decoder.params)
    states = hidden(params, decoder.config, jnp.asarray(tokens.numpy(), jnp.int32))
    ours = output_logits(params, decoder.config, states)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.slow
def test_the_host_holds_less_than_one_layer(tmp_path, monkeypatch):
    """Apart from the result: arrays of NumPy, with which tensors are read."""
    monkeypatch.setattr(checkpoint_module, "ON_THE_HOST", 0)  # of small leaves it holds all
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32}
    plain = bfloat16_checkpoint("qwen3_moe", tmp_path / "plain", **sizes)
    fp8_checkpoint(
        plain,
        tmp_path / "fp8",
        quantization=FP8 | {"weight_block_size": [128, 128]},
        block=(128, 128),
    )
    of_one_layer = 2 * 32 * 256 * 256 * 3
    tracemalloc.start()
    load_pretrained(tmp_path / "fp8")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < of_one_layer / 4
