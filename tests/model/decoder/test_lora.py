"""Adapters: nothing at first, only they are trained, dropout, PEFT's format, merged on export."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import config_of, fill, hidden, params_of, step
from twinkle_jax.data import Batch
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    decode_step,
    extend,
    hidden_states,
    make_mesh,
    merge_adapter,
    merge_params,
    output_matrix,
    prefill,
    save_adapter,
    save_pretrained,
    shard_like_params,
    with_adapter,
)
from twinkle_jax.model.decoder.layers import project
from twinkle_jax.model.decoder.lora import (
    KEYS,
    drop_out,
    init_adapter,
    read_lora_config,
    with_dropout,
)
from twinkle_jax.sampler import generate
from twinkle_jax.training import score_batch
from twinkle_jax.training.gradient import dropout_keys
from twinkle_jax.twinkle.model import TransformersModel

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
import safetensors.numpy

TIME = 5
ROWS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
ADVANTAGES = [1.0, -1.0, 0.5]
INPUTS = [{"input_ids": row, "labels": [*row[1:], -100]} for row in ROWS]
LORA = LoraConfig(r=3, lora_alpha=6, target_modules=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "qwen3"
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), directory)
    return directory


def test_adapters_share_the_parameters_that_they_are_laid_over():
    """Scale and rate are the adapter's own; whoever trains it keeps its A and B apart."""
    config, params = config_of("qwen3"), params_of("qwen3")
    before = jax.tree.structure(params)
    adapter = init_adapter(jax.random.key(0), config, LORA)
    first = with_adapter(params, config, LORA, adapter)
    second = with_adapter(params, config, LoraConfig(r=2, lora_alpha=1, lora_dropout=0.5))
    assert jax.tree.structure(params) == before
    one, other = (x["layers"]["0"]["self_attn"]["q_proj"] for x in (first, second))
    assert one["kernel"] is other["kernel"]
    assert one.keys() == {"kernel", "lora_A", "lora_B", "lora_scale"}
    assert other.keys() == {"kernel", "lora_scale", "lora_dropout"}
    assert one["lora_scale"].tolist() == [2.0] * config.repeats
    assert other["lora_scale"].tolist() == other["lora_dropout"].tolist() == [0.5] * config.repeats
    merged = merge_adapter(first)  # B is 0
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_second_adapter_is_refused_and_constants_are_replaced():
    """Two adapters on different projections would both act, with the scale of the last."""
    config, params = config_of("qwen3"), params_of("qwen3")
    held = with_adapter(params, config, LORA, init_adapter(jax.random.key(0), config, LORA))
    other = LoraConfig(r=2, target_modules=("q_proj", "k_proj"))
    for adapter in (None, init_adapter(jax.random.key(1), config, other)):
        with pytest.raises(ValueError, match="params must not hold an adapter"):
            with_adapter(held, config, other, adapter)
    dropping = with_adapter(
        params, config, LoraConfig(target_modules="all-linear", lora_dropout=1 / 2)
    )
    again, fresh = (with_adapter(x, config, other) for x in (dropping, params))
    assert jax.tree.structure(again) == jax.tree.structure(fresh)


def test_adapters_alone_are_refused_with_the_argument_that_is_missing():
    config, params = config_of("qwen3"), params_of("qwen3")
    adapter, tokens = init_adapter(jax.random.key(0), config, LORA), jnp.array([[5, 6, 7]])
    batch = Batch(tokens, tokens)
    cache = jax.eval_shape(lambda: prefill(params, config, tokens, max_length=4)[1])
    calls = [
        lambda: hidden_states(adapter, config, tokens),
        lambda: output_matrix(adapter),
        lambda: prefill(adapter, config, tokens, max_length=4),
        lambda: decode_step(adapter, config, tokens[:, 0], cache),
        lambda: score_batch(adapter, batch, config),
        lambda: generate(adapter, config, tokens, None, jax.random.key(1), max_new_tokens=1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"params must hold a whole decoder.*frozen="):
            jax.eval_shape(call)


def adapted(checkpoint, mesh=None):
    model = TransformersModel(checkpoint, mesh=mesh)
    model.add_adapter_to_model("default", LORA)
    model.set_loss("GRPOLoss")
    model.set_optimizer("AdamW", lr=0.05)
    return model


def make_updates(model):
    """Two updates of the adapter, and the scores before and after."""
    before = model.forward_only(inputs=INPUTS)["logps"]
    for _ in range(2):
        model.forward_backward(inputs=INPUTS, advantages=ADVANTAGES)
        model.clip_grad_and_step()
    return model, before, model.forward_only(inputs=INPUTS)["logps"]


@pytest.fixture(scope="module")
def stepped(checkpoint):
    return make_updates(adapted(checkpoint))


def test_an_adapter_changes_nothing_until_it_is_trained_and_then_it_alone(stepped, checkpoint):
    model, before, after = stepped
    base = TransformersModel(checkpoint).forward_only(inputs=INPUTS)["logps"]
    np.testing.assert_array_equal(before, base)
    assert np.abs(after - before).max() > 0.01
    off = model.forward_only(inputs=INPUTS, disable_lora=True)["logps"]
    np.testing.assert_array_equal(off, base)
    assert set(model.state.params["layers"]["0"]) == {"self_attn", "mlp"}
    sizes = [x.size for x in jax.tree.leaves(model.state.params)]
    assert sum(sizes) == 2 * 3 * (24 + 32 + 40 + 24)  # layers, rank, and both sides of each
    for path, x in jax.tree_util.tree_leaves_with_path(params_of("qwen3")):
        frozen = model.group().frozen
        for key in path:
            frozen = frozen[key.key]
        np.testing.assert_array_equal(frozen, x)


@pytest.mark.exhaustive
def test_on_a_mesh_it_learns_what_it_learns_on_one_device(stepped, checkpoint):
    model, _, after = stepped
    spread, _, scores = make_updates(adapted(checkpoint, make_mesh(data=2, fsdp=2, tensor=2)))
    np.testing.assert_allclose(scores, after, atol=2e-5)
    for name, tensor in model.get_state_dict().items():
        np.testing.assert_allclose(spread.get_state_dict()[name], tensor, atol=1e-4, err_msg=name)


def test_files_are_those_of_peft(stepped, tmp_path):
    model, _, after = stepped
    model.save(tmp_path / "adapter")
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 3 and config["lora_alpha"] == 6
    assert config["target_modules"] == ["down_proj", "q_proj"]
    tensors = safetensors.numpy.load_file(tmp_path / "adapter/adapter_model.safetensors")
    shapes = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}"
        shapes[f"{prefix}.self_attn.q_proj.lora_A.weight"] = (3, 24)
        shapes[f"{prefix}.self_attn.q_proj.lora_B.weight"] = (32, 3)
        shapes[f"{prefix}.mlp.down_proj.lora_A.weight"] = (3, 40)
        shapes[f"{prefix}.mlp.down_proj.lora_B.weight"] = (24, 3)
    assert {name: x.shape for name, x in tensors.items()} == shapes
    assert model.get_state_dict().keys() == shapes.keys()
    a = model.state.params["layers"]["0"]["mlp"]["down_proj"]["lora_A"]
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    np.testing.assert_array_equal(tensors[name], a[1].T)
    again = TransformersModel(model.model_id)
    again.load(tmp_path / "adapter")
    np.testing.assert_array_equal(again.forward_only(inputs=INPUTS)["logps"], after)
    model.save(tmp_path / "adapter")  # over an earlier one
    fresh = adapted(model.model_id)
    fresh.load(tmp_path / "adapter")
    np.testing.assert_array_equal(fresh.forward_only(inputs=INPUTS)["logps"], after)


def test_merged_on_export(stepped, tmp_path):
    model, _, after = stepped
    model.save(tmp_path / "merged", merge=True)
    merged = TransformersModel(tmp_path / "merged")
    np.testing.assert_allclose(merged.forward_only(inputs=INPUTS)["logps"], after, atol=2e-5)
    name = "model.layers.1.self_attn.q_proj.weight"
    adapter = model.state.params["layers"]["0"]["self_attn"]["q_proj"]
    kernel = params_of("qwen3")["layers"]["0"]["self_attn"]["q_proj"]["kernel"][1]
    expected = kernel + 2 * adapter["lora_A"][1] @ adapter["lora_B"][1]
    np.testing.assert_allclose(merged.get_state_dict()[name], expected.T, atol=1e-6)


def test_adapters_begin_as_pefts():
    """A uniform up to 1/√in and different in each projection, B zero."""
    config = config_of("qwen3")
    layer = init_adapter(jax.random.key(0), config, LoraConfig(r=8, target_modules="all-linear"))
    layer = layer["layers"]["0"]
    for part, name, width in (("mlp", "up_proj", 24), ("mlp", "down_proj", 40)):
        a = np.asarray(layer[part][name]["lora_A"])
        assert 0.95 * width**-0.5 < np.abs(a).max() <= width**-0.5
        np.testing.assert_array_equal(layer[part][name]["lora_B"], 0)
    gate, up = (layer["mlp"][name]["lora_A"] for name in ("gate_proj", "up_proj"))
    assert np.all(np.asarray(gate) != np.asarray(up))


@pytest.mark.parametrize(
    ("lora", "name"),
    [
        (LoraConfig(r=4), "q_proj/lora_A"),
        (LoraConfig(r=2, target_modules="q_proj"), "v_proj/lora_A"),
        (LoraConfig(r=2, target_modules=("o_proj", "q_proj", "v_proj")), "o_proj/lora_A"),
    ],
)
def test_an_adapter_of_another_configuration_is_refused(lora, name, tmp_path):
    """The scale would be that of another rank, and PEFT would not find the tensors."""
    config, params = config_of("qwen3"), params_of("qwen3")
    adapter = init_adapter(jax.random.key(0), config, LoraConfig(r=2))
    with pytest.raises(ValueError, match=f"adapter .*{name}"):
        with_adapter(params, config, lora, adapter)
    with pytest.raises(ValueError, match=f"adapter .*{name}"):
        save_adapter(tmp_path / "adapter", config, lora, adapter)
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_is_not_lost_nor_without_a_scale(tmp_path):
    config, params, lora = config_of("qwen3"), params_of("qwen3"), LoraConfig(r=2)
    adapter = init_adapter(jax.random.key(0), config, lora)
    with pytest.raises(ValueError, match="merge_adapter"):
        save_pretrained(Decoder(config, with_adapter(params, config, lora, adapter)), tmp_path)
    bare = merge_params(params, adapter)
    with pytest.raises(ValueError, match="with_adapter"):
        hidden_states(bare, config, jnp.array([[5]]))
    with pytest.raises(ValueError, match="with_adapter"):
        merge_adapter(bare)


def test_a_merged_bfloat16_kernel_is_rounded_once():
    # 257.001 lies nearer to 258 than to 256; with 1.001 rounded to 1 first, 257 would go to 256.
    pair = {"lora_A": jnp.ones((1, 1, 1)), "lora_B": jnp.full((1, 1, 1), 1.001)}
    params = {"kernel": jnp.full((1, 1, 1), 256, jnp.bfloat16), "lora_scale": jnp.ones(1), **pair}
    assert float(merge_adapter(params)["kernel"][0, 0, 0]) == 258


def test_merging_copies_nothing_but_the_kernels_with_an_adapter():
    pair = {"lora_A": jnp.ones((1, 1, 1)), "lora_B": jnp.ones((1, 1, 1)), "lora_scale": jnp.ones(1)}
    plain = {"kernel": jnp.ones((1, 1, 1)), "bias": jnp.ones((1, 1))}
    merged = merge_adapter({"q": plain | pair, "k": plain})
    assert merged["k"]["kernel"] is plain["kernel"] and merged["q"]["bias"] is plain["bias"]
    assert float(merged["q"]["kernel"][0, 0, 0]) == 2


def test_an_adapters_scale_is_not_rounded_to_bfloat16():
    """In bfloat16 2/3 is 0.66797 and 0.9 is 0.89844: both would give 254 for 253⅓."""
    one = jnp.ones((1, 1))
    weights = {"kernel": 0 * one, "lora_A": one, "lora_B": one, "lora_scale": jnp.float32(2 / 3)}
    assert float(project(jnp.full((1, 1), 380, jnp.bfloat16), weights)[0, 0]) == 253
    keys = jax.random.split(jax.random.key(0), 64)
    kept = drop_out(jnp.full((64, 1), 228, jnp.bfloat16), jnp.float32(0.1), keys)
    assert set(np.unique(np.asarray(kept, np.float32))) == {0, 253}


def test_a_merged_projection_is_the_adapted_one():
    """A square one: there a matrix that is turned by mistake would fit as well."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (1, 4, 4), "lora_A": (1, 4, 2), "lora_B": (1, 2, 4), "lora_scale": (1,)}
    layers = {name: jnp.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
    x = jnp.float32(rng.normal(size=(3, 4)))
    adapted, merged = (jax.tree.map(lambda y: y[0], p) for p in (layers, merge_adapter(layers)))
    assert merged.keys() == {"kernel"}
    np.testing.assert_allclose(project(x, merged), project(x, adapted), atol=1e-6)


def test_adapters_of_latent_attention_decode_what_whole_rows_get():
    """Decoding does not apply the projection of keys and values to the tokens in its cache."""
    config, lora = config_of("youtu"), LoraConfig(r=3, lora_alpha=2, target_modules="all-linear")
    rng = np.random.default_rng(0)
    adapter = jax.tree.map(
        lambda x: jnp.float32(0.3 * rng.normal(size=x.shape)),
        init_adapter(jax.random.key(0), config, lora),
    )
    params, tokens = with_adapter(params_of("youtu"), config, lora, adapter), jnp.array(ROWS[:1])
    expected = np.asarray(hidden(params, config, tokens))
    plain = hidden(params_of("youtu"), config, tokens)
    assert np.max(np.abs(expected - plain)) > 0.1
    merged = hidden(jax.jit(merge_adapter)(params), config, tokens)
    np.testing.assert_allclose(merged, expected, atol=1e-4)
    cache = fill(params, config, tokens[:, :2], None, max_length=5)[1]
    extended, _ = jax.jit(extend, static_argnums=1)(params, config, tokens[:, 2:], cache)
    np.testing.assert_allclose(extended, expected[:, -1], atol=1e-4)
    for t in range(2, 5):
        last, cache = step(params, config, tokens[:, t], cache)
        np.testing.assert_allclose(last, expected[:, t], atol=1e-4)


def test_every_linear_layer_and_the_bfloat16_base(checkpoint):
    model = TransformersModel(checkpoint, dtype="bfloat16")
    model.add_adapter_to_model("default", {"r": 2, "target_modules": "all-linear"})
    names = {name.split(".")[-3] for name in model.get_state_dict()}
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert names == set(layers)
    assert model.group().frozen["embed_tokens"]["embedding"].dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(model.state.params)} == {jnp.dtype("float32")}
    assert LoraConfig(r=4, lora_alpha=8, use_rslora=True).scale == 4
    mixture = Decoder(config_of("glm4_moe"), params_of("glm4_moe"))
    model = TransformersModel(mixture, dtype="bfloat16")
    model.add_adapter_to_model("default", {"r": 2})
    gate = model.group().frozen["layers"]["1"]["mlp"]["gate"]
    assert (gate["kernel"].dtype, gate["e_score_correction_bias"].dtype) == ("bfloat16", "float32")


NOT_PLAIN = [
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "eva"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "loftq"),
    ("alora_invocation_tokens", [5, 6]),
    ("layer_replication", [[0, 2], [0, 2]]),
    ("use_qalora", True),
    ("lora_bias", True),
    ("megatron_config", {"tensor_model_parallel_size": 2}),
    ("use_dora", True),
    ("use_dora", "false"),
    ("bias", "all"),
    ("fan_in_fan_out", True),
    ("rank_pattern", {"q_proj": 4}),
    ("alpha_pattern", {"q_proj": 4}),
    ("modules_to_save", ["lm_head"]),
    ("layers_to_transform", [0]),
    ("exclude_modules", ["v_proj"]),
    ("target_parameters", ["mlp.weight"]),
    ("trainable_token_indices", [3]),
    ("eva_config", {"rho": 2.0}),
    ("loftq_config", {"loftq_bits": 4}),
    ("use_rslora", "false"),
    ("use_rslora", 1),
    ("lora_alpha", float("nan")),
    ("lora_alpha", float("inf")),
    ("lora_alpha", "16"),
    ("lora_alpha", True),
    ("r", 2.0),
    ("r", 10**30),
    ("target_modules", ["q_proj", 3]),
    ("target_modules", {"q_proj": 1}),
    ("task_type", "SEQ_CLS"),
    ("peft_type", "IA3"),
    ("use_something_new", None),
]


@pytest.mark.parametrize(("name", "value"), NOT_PLAIN)
def test_what_is_not_plain_lora_is_refused_by_name(name, value):
    """Both by `add_adapter_to_model` and by `load`, which ask the same function."""
    for new in (True, False):
        with pytest.raises(ValueError, match=name):
            read_lora_config({"r": 2, name: value}, new=new)


def test_how_a_trained_adapter_began_does_not_matter():
    for start in (False, "gaussian", "orthogonal"):
        with pytest.raises(ValueError, match="init_lora_weights"):
            read_lora_config({"init_lora_weights": start})
        assert read_lora_config({"init_lora_weights": start}, new=False) == LoraConfig()


def test_what_is_no_configuration():
    with pytest.raises(TypeError, match="config"):
        read_lora_config(3)
    with pytest.raises(ValueError, match="use_rslora"):
        LoraConfig(use_rslora="false")
    assert LoraConfig(target_modules=["v_proj", "k_proj"]).target_modules == ("k_proj", "v_proj")


def test_every_default_of_peft_is_taken():
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    assert read_lora_config(peft.LoraConfig(r=4, lora_alpha=12)) == LoraConfig(4, 12)
    written = peft.LoraConfig(target_modules=["o_proj"], task_type="CAUSAL_LM").to_dict()
    assert read_lora_config(written) == LoraConfig(target_modules=("o_proj",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_dropout", 1.0),
        ("use_dora", True),
        ("peft_type", "IA3"),
        ("r", 0),
        ("target_modules", ["q_proj", "qkv"]),
    ],
)
def test_adapters_that_are_refused(name, value, checkpoint):
    model = TransformersModel(checkpoint)
    with pytest.raises(ValueError, match=name):
        model.add_adapter_to_model("default", {name: value})


def test_names_are_new_and_no_checkpoint_goes_over_an_adapter(stepped, checkpoint):
    model = stepped[0]
    with pytest.raises(ValueError, match="adapter_name"):
        model.add_adapter_to_model("default", LORA)
    with pytest.raises(ValueError, match="adapter"):
        model.load(checkpoint)
    with pytest.raises(ValueError, match="directory"):
        model.save(checkpoint)


def test_adapter_files_that_are_refused(stepped, tmp_path):
    model = stepped[0]
    model.save(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    good = safetensors.numpy.load_file(file)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    cases = {
        "missing": (name, {k: v for k, v in good.items() if k != name}),
        "unknown": ("other", good | {"other": good[name]}),
        "transposed": (f"{name} .*shape", good | {name: np.ascontiguousarray(good[name].T)}),
        "NaN": (f"{name} .*finite", good | {name: good[name] * np.float32(np.nan)}),
        "too large": (f"{name} .*finite", good | {name: np.full((3, 40), 1e300)}),
    }
    for message, tensors in cases.values():
        safetensors.numpy.save_file(tensors, file)
        with pytest.raises(ValueError, match=message):
            TransformersModel(model.model_id).load(tmp_path / "adapter")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="safetensors"):
        TransformersModel(model.model_id).load(tmp_path / "adapter")


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_peft_loads_it_and_gives_the_same_scores(stepped, tmp_path):
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    model, _, after = stepped
    model.save(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(model.model_id)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    for i, row in enumerate(ROWS):
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([row])).logits[0]
        logprobs = torch.log_softmax(logits, -1).numpy()
        expected = [logprobs[t, token] for t, token in enumerate(row[1:])]
        np.testing.assert_allclose(after[i, : len(row) - 1], expected, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    again = TransformersModel(model.model_id)
    again.load(tmp_path / "theirs")
    np.testing.assert_array_equal(again.forward_only(inputs=INPUTS)["logps"], after)


# Dropout.

DROPOUT = LoraConfig(r=2, target_modules=("q_proj", "down_proj"), lora_dropout=0.5)


def dropped(x, rate, seeds):
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    return np.asarray(drop_out(jnp.asarray(x), jnp.float32(rate), keys))


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_entries_are_dropped_at_the_rate_and_the_rest_is_scaled(rate):
    x = np.full((8 * 64, 32), 3.0, np.float32)
    actual = dropped(x, rate, range(8 * 64))
    np.testing.assert_allclose(np.unique(actual), [0, 3 / (1 - rate)], rtol=1e-6)
    assert abs(np.mean(actual == 0) - rate) < 0.01  # of 16,384 draws, 3 deviations
    assert abs(actual.mean() - 3) < 0.1


def test_a_tokens_noise_is_its_own():
    both = dropped(np.ones((2, 32), np.float32), 0.5, [3, 4])
    np.testing.assert_array_equal(both[1:], dropped(np.ones((1, 32), np.float32), 0.5, [4]))
    assert (both[0] != both[1]).any()


def test_every_projection_layer_and_token_has_keys_of_its_own():
    tree = {"0": {"q": {"lora_dropout": jnp.ones(3)}, "v": {"lora_dropout": jnp.ones(3)}, "o": {}}}
    tree["outside"] = {"lora_dropout": jnp.ones(())}
    laid = with_dropout(tree, jax.random.split(jax.random.key(0), (2, 2)))
    projections = laid["0"]["q"], laid["0"]["v"], laid["outside"]
    keys = [jax.random.key_data(x[KEYS]) for x in projections]
    assert [x.shape for x in keys] == [(3, 4, 2), (3, 4, 2), (4, 2)] and KEYS not in laid["0"]["o"]
    assert len({tuple(key) for key in np.concatenate([k.reshape(-1, 2) for k in keys])}) == 28


def adapter_model(checkpoint, lora=DROPOUT, **options):
    model = TransformersModel(checkpoint, **options)
    model.add_adapter_to_model("default", lora)
    model.set_loss("grpo")
    model.set_optimizer("SGD", lr=0.1)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype("float32") / 4, x.sharding),
        model.state.params,
    )
    model.state = model.state._replace(params=params)
    return model


def gradient(model, order=(0, 1, 2), size=None):
    model.zero_grad()
    model.forward_backward(
        inputs=[INPUTS[i] for i in order],
        advantages=[ADVANTAGES[i] for i in order],
        micro_batch_size=size,
    )
    return jax.tree.map(np.asarray, model.state.gradient_sum)


def test_adapters_are_spread_over_a_mesh(checkpoint):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    model = adapter_model(checkpoint, mesh=mesh)
    expected = shard_like_params(model.state, mesh)
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), model.state, expected)
    assert all(jax.tree.leaves(same))


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs)


@pytest.mark.exhaustive
def test_noise_depends_on_the_row_and_the_run_alone(checkpoint):
    first = gradient(adapter_model(checkpoint))
    assert distance(gradient(adapter_model(checkpoint), size=2), first) < 1e-5  # micro-batches
    assert distance(gradient(adapter_model(checkpoint, seed=1)), first) > 0.1
    model = adapter_model(checkpoint)
    assert distance(gradient(model), first) == 0
    assert distance(gradient(model), first) > 0.1  # the next rows of the run
    assert model.state.rows == 6  # those that fill up a batch do not count
    without = LoraConfig(r=2, target_modules=("q_proj", "down_proj"))
    assert distance(gradient(adapter_model(checkpoint, without)), first) > 0.1


@pytest.mark.exhaustive
def test_noise_is_the_same_on_many_devices(checkpoint):
    first = gradient(adapter_model(checkpoint))
    for mesh in (make_mesh(data=2), make_mesh(data=2, fsdp=2, tensor=2)):
        assert distance(gradient(adapter_model(checkpoint, mesh=mesh)), first) < 1e-5


def test_scores_are_without_dropout(checkpoint):
    model = adapter_model(checkpoint)
    scores = model.forward_only(inputs=INPUTS)["logps"]
    without = adapter_model(checkpoint, LoraConfig(r=2, target_modules=("q_proj", "down_proj")))
    np.testing.assert_array_equal(scores, without.forward_only(inputs=INPUTS)["logps"])


@pytest.mark.parametrize("rate", [1, 1.0, -0.1, float("nan"), True, "0.1", None])
def test_rates_that_are_refused(rate):
    with pytest.raises(ValueError, match="lora_dropout"):
        LoraConfig(lora_dropout=rate)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_peft_gives_the_same_gradient_with_the_same_noise(checkpoint, tmp_path):
    """PEFT's dropout module is asked to drop what ours does, and to scale as PyTorch's does."""
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    model = adapter_model(checkpoint)
    model.save(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    rows, lines = jnp.ones(3, bool), Batch(jnp.zeros((3, TIME), jnp.int32), None)
    keys = dropout_keys(model.key, model.state.rows, rows, lines, None)
    laid = with_dropout(model.params, keys)

    class Drop(torch.nn.Module):
        def __init__(self, module, keys):
            super().__init__()
            self.rate, self.keys, self.row = module.p, keys, 0

        def forward(self, x):
            ones = jnp.ones(x.shape[1:], jnp.float32)
            kept = drop_out(ones, jnp.float32(0.5), self.keys[self.row, : len(ones)]) > 0
            return x * torch.from_numpy(np.array(kept)) / (1 - self.rate)

    drops = []
    for name, module in theirs.named_modules():
        if hasattr(module, "lora_dropout"):
            *_, layer, block, projection = name.split(".")
            keys = laid["layers"]["0"][block][projection][KEYS][int(layer)].reshape(3, TIME)
            drops.append(Drop(module.lora_dropout["default"], keys))
            assert drops[-1].rate == 0.5
            module.lora_dropout["default"] = drops[-1]
    theirs.train()
    total = 0
    for i, row in enumerate(ROWS):
        for drop in drops:
            drop.row = i
        logits = theirs(input_ids=torch.tensor([row])).logits[0, :-1]
        picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:])[:, None])
        total = total - ADVANTAGES[i] * picked.mean()  # on policy, the ratio is 1
    total.backward()
    ours = gradient(model)["layers"]["0"]
    for name, p in theirs.named_parameters():
        if p.grad is not None:
            *_, layer, block, projection, leaf, _, _ = name.split(".")
            actual = ours[block][projection][leaf][int(layer)].T
            np.testing.assert_allclose(actual, p.grad.numpy(), atol=1e-4 * np.abs(actual).max())
