"""Adapters in PEFT's format: to the bit, with a tokenizer, as PEFT and transformers open them."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import config_of, params_of
from tests.model.huggingface.tensors import assert_same, contents  # skips without safetensors
from twinkle_jax.data import Template, Tokenizer, small_tokenizer
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    hidden_states,
    init_params,
    load_adapter,
    load_pretrained,
    merge_adapter,
    output_logits,
    parse_config,
    save_adapter,
    save_pretrained,
    with_adapter,
)
from twinkle_jax.model.decoder.lora import check_adapter, init_adapter, without_adapter

CONFIG = config_of("qwen3")
LORAS = [
    LoraConfig(r=2),
    LoraConfig(r=3, lora_alpha=5.5, target_modules="all-linear", lora_dropout=0.1),
    LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=("q_proj", "down_proj")),
]


def drawn(config, lora, seed=0):
    """An adapter whose B is not zero."""
    adapter = init_adapter(jax.random.key(seed), config, lora)
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(size=x.shape) / 4, jnp.float32), adapter
    )


@pytest.fixture
def saved(tmp_path):
    save_adapter(tmp_path / "adapter", CONFIG, LORAS[0], drawn(CONFIG, LORAS[0]))
    return tmp_path / "adapter"


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "glm4_moe"])
def test_round_trip_is_bit_exact(name, lora, tmp_path):
    config = config_of(name)
    lora = lora if name == "qwen3" else LoraConfig(r=3, target_modules="all-linear")
    adapter = drawn(config, lora)
    save_adapter(tmp_path / "adapter", config, lora, adapter, base="owner/name")
    read, again = load_adapter(tmp_path / "adapter", config)
    assert_same(again, adapter)
    assert (read.scale, read.r, read.lora_dropout) == (lora.scale, lora.r, lora.lora_dropout)
    content = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == "owner/name"
    assert content["modules_to_save"] is None and content["use_rslora"] == lora.use_rslora
    save_adapter(tmp_path / "again", config, read, again, base="owner/name")
    assert contents(tmp_path / "again") == contents(tmp_path / "adapter")


def test_the_tokenizer_is_written_beside_it_and_stays(tmp_path):
    lora, adapter = LORAS[0], drawn(CONFIG, LORAS[0])
    target = tmp_path / "adapter"
    save_adapter(target, CONFIG, lora, adapter, tokenizer=small_tokenizer())
    assert Tokenizer.from_pretrained(target).chat_template == small_tokenizer().chat_template
    template = Template(small_tokenizer(), chat_template="{{ messages[0].content }}")
    save_adapter(target, CONFIG, lora, adapter, tokenizer=template)
    assert Template(target).chat_template.source == "{{ messages[0].content }}"
    (target / "README.md").write_text("PEFT's model card")
    before = contents(target)
    save_adapter(target, CONFIG, lora, adapter)
    assert contents(target) == before
    save_adapter(target, CONFIG, lora, adapter, tokenizer=Template(small_tokenizer()))
    assert Tokenizer.from_pretrained(target).chat_template == small_tokenizer().chat_template


@pytest.mark.parametrize("values", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_not_written(values, saved):
    before = contents(saved)
    broken = jax.tree.map(lambda x: x.at[0, 0, 0].set(values), drawn(CONFIG, LORAS[0]))
    with pytest.raises(ValueError, match=r"lora_A.weight"):
        save_adapter(saved, CONFIG, LORAS[0], broken)
    assert contents(saved) == before


def test_places_that_are_refused(saved, export):
    for place in ("/", saved.parent / "out", saved / "adapter_config.json"):
        with pytest.raises(ValueError, match=r"^directory"):
            save_adapter(place, CONFIG, LORAS[0], drawn(CONFIG, LORAS[0]))
    with pytest.raises(ValueError, match=r"^directory"):
        load_adapter("nowhere", CONFIG)


@pytest.mark.parametrize("kind", ["FIFO", "directory"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_fifo_or_a_directory_instead_of_a_file_is_not_waited_for(name, kind, saved):
    (saved / name).unlink()
    os.mkfifo(saved / name) if kind == "FIFO" else (saved / name).mkdir()
    with pytest.raises(ValueError, match=name):
        load_adapter(saved, CONFIG)


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.filterwarnings("ignore")
def test_peft_and_transformers_open_it(lora, tmp_path):
    """From the directory alone: base model, adapter, tokenizer; and back from what PEFT saves."""
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    template = Template(small_tokenizer())
    config = parse_config(
        json.loads(CONFIG.original) | {"vocab_size": max(48, len(template.tokenizer))}
    )
    params = init_params(jax.random.key(1), config)
    save_pretrained(Decoder(config, params), tmp_path / "base")
    adapter, target = drawn(config, lora), tmp_path / "adapter"
    save_adapter(target, config, lora, adapter, base=str(tmp_path / "base"), tokenizer=template)

    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(target).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    messages = [{"role": "user", "content": "2+2="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == list(template.encode({"messages": messages}, True)["input_ids"])
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids])).logits.numpy()
    merged = with_adapter(params, config, lora, adapter)
    logits = output_logits(merged, config, hidden_states(merged, config, jnp.asarray([ids])))
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    without = output_logits(params, config, hidden_states(params, config, jnp.asarray([ids])))
    assert np.abs(without - expected).max() > 1e-2

    read = peft.LoraConfig.from_pretrained(target)
    plain = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        target_modules=read.target_modules,
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=str(tmp_path / "base"),
    )
    ignored = {"peft_version"}  # ours has none
    assert {k: v for k, v in read.to_dict().items() if k not in ignored} == {
        k: v for k, v in plain.to_dict().items() if k not in ignored
    }
    theirs.save_pretrained(tmp_path / "theirs")
    again_lora, again = load_adapter(tmp_path / "theirs", config)
    assert_same(again, adapter)
    assert again_lora.scale == lora.scale


def save_peft_adapter(folder, config, params, **options):
    """Write a base, and a random adapter of PEFT's; return the logits of the two for 5, 6 and 7."""
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    save_pretrained(Decoder(config, params), folder / "base")
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folder / "base"),
        peft.LoraConfig(init_lora_weights=False, **options),
    ).eval()
    model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7]])).logits.numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        (r".*self_attn\.(q|v)_proj", "q_proj v_proj"),
        (["self_attn.q_proj"], "q_proj"),
    ],
)
def test_projections_that_peft_found_by_a_pattern(targets, names, tmp_path):
    """PEFT writes the pattern, the end of a name, or the whole name of each projection."""
    params = params_of("qwen3")
    expected = save_peft_adapter(tmp_path, CONFIG, params, r=2, target_modules=targets)
    lora, adapter = load_adapter(tmp_path / "adapter", CONFIG)
    assert lora.target_modules == tuple(names.split())
    merged = with_adapter(params, CONFIG, lora, adapter)
    logits = output_logits(merged, CONFIG, hidden_states(merged, CONFIG, jnp.asarray([[5, 6, 7]])))
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("targets", "names"),
    [("all-linear", "down_proj gate_up_proj o_proj qkv_proj"), (["qkv_proj"], "qkv_proj")],
)
def test_adapters_of_fused_projections(targets, names, tmp_path):
    """Phi-3 stores queries, keys and values in one tensor, whose adapter has one A for all."""
    config, params = config_of("phi3"), params_of("phi3")
    options = {"r": 3, "lora_alpha": 4, "target_modules": targets}
    expected = save_peft_adapter(tmp_path, config, params, **options)
    lora, adapter = load_adapter(tmp_path / "adapter", config)
    assert lora.target_modules == tuple(names.split())
    over = with_adapter(params, config, lora, adapter)
    scale = np.abs(expected).max()
    for changed in (over, merged := merge_adapter(over)):
        logits = output_logits(
            changed, config, hidden_states(changed, config, jnp.asarray([[5, 6, 7]]))
        )
        np.testing.assert_allclose(logits, expected, atol=1e-5 * scale)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    assert_same(without_adapter(over), params)
    # Frozen parameters without their adapter, such as a reference policy.
    frozen = with_adapter(params, config, lora)
    tokens = jnp.asarray([[5, 6, 7]])
    assert_same(hidden_states(frozen, config, tokens), hidden_states(params, config, tokens))
    assert_same(merge_adapter(frozen), params)
    assert_same(without_adapter(frozen), params)
    save_adapter(tmp_path / "again", config, lora, adapter)
    assert_same(load_adapter(tmp_path / "again", config)[1], adapter)
    with pytest.raises(ValueError, match=r"target_modules .*'qkv_proj'.*\('q_proj',\)"):
        init_adapter(jax.random.key(0), config, LoraConfig(target_modules=("q_proj",)))


def test_types_that_are_refused(saved):
    """NumPy has no such type."""
    path = saved / "adapter_model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    for name in header.keys() - {"__metadata__"}:
        header[name]["dtype"] = "F8_E4M3"
        header[name]["data_offsets"] = [x // 4 for x in header[name]["data_offsets"]]
    text = json.dumps(header).encode()
    count = max(x["data_offsets"][1] for x in header.values() if "data_offsets" in x)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(count))
    with pytest.raises(ValueError, match=r"lora_.* must have a type of F64, F32.*, got F8_E4M3"):
        load_adapter(saved, CONFIG)


def test_targets_that_are_not_those_of_the_tensors_are_refused(saved):
    path = saved / "adapter_config.json"
    content = json.loads(path.read_text())
    for targets in (["self_attn.q_proj"], ["layers.0.self_attn.q_proj", "v_proj"]):
        path.write_text(json.dumps(content | {"target_modules": targets}))
        with pytest.raises(ValueError, match="target_modules"):
            load_adapter(saved, CONFIG)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("name", ["gemma4_text mixture", "gemma4_text small", "gpt_oss", "youtu"])
def test_adapters_of_all_projections_are_pefts(name, tmp_path):
    """Of Gemma 4: the router's, but no experts', nor values' where they are the keys.

    With embeddings for each layer, the projection to these, outside the layers. Of GPT-OSS those of
    attention alone. Of latent attention all five.
    """
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    config = config_of(name)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**json.loads(config.original))
    )
    theirs.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(theirs, settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for called, x in theirs.named_parameters():
            if "lora_B" in called:
                x.copy_(torch.randn_like(x) / 4)
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs.eval()(input_ids=torch.tensor([[2, 3, 5, 7]])).logits.numpy()
    decoder = load_pretrained(tmp_path / "base")
    lora, adapter = load_adapter(tmp_path / "adapter", decoder.config)
    params = with_adapter(decoder.params, decoder.config, lora, adapter)
    hidden = hidden_states(params, decoder.config, jnp.asarray([[2, 3, 5, 7]]))
    np.testing.assert_allclose(output_logits(params, decoder.config, hidden), expected, atol=1e-4)
    everything = LoraConfig(r=2, target_modules="all-linear")
    check_adapter(decoder.config, everything, adapter)
    merged = merge_adapter(params)
    hidden = hidden_states(merged, decoder.config, jnp.asarray([[2, 3, 5, 7]]))
    np.testing.assert_allclose(output_logits(merged, decoder.config, hidden), expected, atol=1e-4)
    save_adapter(tmp_path / "again", decoder.config, lora, adapter)
    assert_same(load_adapter(tmp_path / "again", decoder.config)[1], adapter)
    if name == "gemma4_text small":
        assert adapter["per_layer_model_projection"]["lora_A"].shape == (24, 2)
        return
    if name == "youtu":
        latent = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
        assert set(adapter["layers"]["0"]["self_attn"]) == latent
        return
    assert "v_proj" in adapter["layers"]["0"]["self_attn"]
    if config.model_type == "gpt_oss":
        assert adapter["layers"]["0"].keys() == {"self_attn"}
        return
    assert "v_proj" not in adapter["layers"]["1"]["self_attn"]
    assert "lora_A" in adapter["layers"]["0"]["router"]["proj"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_peft_opens_that_of_attention_in_a_decoder_of_two_stacks(tmp_path):
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    config, params = config_of("glm4_moe"), params_of("glm4_moe")
    lora = LoraConfig(r=2, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    adapter = drawn(config, lora)
    save_pretrained(Decoder(config, params), tmp_path / "base")
    save_adapter(tmp_path / "adapter", config, lora, adapter)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs.eval()(input_ids=torch.tensor([[2, 3, 5, 7]])).logits.numpy()
    adapted = with_adapter(params, config, lora, adapter)
    hidden = hidden_states(adapted, config, jnp.asarray([[2, 3, 5, 7]]))
    np.testing.assert_allclose(output_logits(adapted, config, hidden), expected, atol=1e-4)


_VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "patch_size": 4}
_VISION |= {"num_attention_heads": 1}
_TOWERS = {
    "gemma3": _VISION | {"image_size": 8},
    "gemma4": _VISION | {"num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 4},
}
_AUDIO = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "output_proj_dims": 8}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("name", _TOWERS)
def test_peft_opens_that_of_a_model_with_towers(name, tmp_path):
    """PEFT warns of tensors that it does not find, and then has a model without the adapter.

    Projections of the vision tower and of Gemma 4's audio tower have the names of the decoder's.
    """
    get = "pip install 'twinkle-jax[test,oracle]'"
    peft = pytest.importorskip("peft", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    transformers = pytest.importorskip("transformers", reason=get)
    text = json.loads(config_of(f"{name}_text").original)
    settings = {"text_config": text, "vision_config": _TOWERS[name]}
    settings |= {"mm_tokens_per_image": 4} if name == "gemma3" else {"audio_config": _AUDIO}
    theirs = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(name, **settings)
    )
    theirs.save_pretrained(tmp_path / "base")
    params, config = (decoder := load_pretrained(tmp_path / "base")).params, decoder.config
    lora = LoraConfig(r=2, target_modules=("q_proj", "v_proj"))
    adapter = drawn(config, lora)
    save_adapter(tmp_path / "adapter", config, lora, adapter, base=str(tmp_path / "base"))

    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([[2, 3, 5, 7]])).logits.numpy()
    merged = with_adapter(params, config, lora, adapter)
    logits = output_logits(
        merged, config, hidden_states(merged, config, jnp.asarray([[2, 3, 5, 7]]))
    )
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    for directory in ("adapter", "theirs"):
        assert_same(load_adapter(tmp_path / directory, config)[1], adapter)
    flat = parse_config(text)  # as saved before: the names of the text model
    save_adapter(tmp_path / "flat", flat, lora, adapter)
    assert_same(load_adapter(tmp_path / "flat", config)[1], adapter)
