"""A policy in files: what a run writes of a checkpoint that holds more than the policy."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.model.families import config_of, params_of
from tests.model.huggingface.tensors import vision_checkpoint
from tests.training.small_run import EVERY_STEP, config, make_files, update
from twinkle_jax.data import Template, small_tokenizer
from twinkle_jax.model import LoraConfig
from twinkle_jax.rollout.engine import prompt_ids
from twinkle_jax.training import (
    LoraSettings,
    MeshConfig,
    export,
    load_policy,
    save_policy,
    small_policy,
    train,
)
from twinkle_jax.training.policy import add_adapter

safetensors = pytest.importorskip("safetensors.numpy")


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with vision and multi-token-prediction tensors, as the hub caches it."""
    make_files(tmp_path)
    whole = vision_checkpoint(tmp_path / "whole")
    small_tokenizer("0123456789+-*()=").save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "preprocessor_config.json").write_text("{}")
    snapshot, blobs = tmp_path / "hub/snapshots/1", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    (tmp_path / "whole").rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    return tmp_path, snapshot, {name: x for name, x in whole.items() if "language" not in name}


def assert_carried(directory, tensors):
    stored = safetensors.load_file(directory / "model.safetensors")
    for name, x in tensors.items():
        np.testing.assert_array_equal(stored[name], x, strict=True)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert "model.language_model.norm.weight" in stored
    assert (directory / "preprocessor_config.json").exists()


@pytest.mark.exhaustive
def test_a_run_keeps_the_tensors_that_it_does_not_train(folder):
    place, model, tensors = folder
    kept = {"model": str(model), "logging": EVERY_STEP, "update": update(kl_beta=0.0)}
    train(config(place, place / "run", steps=1, **kept))
    assert_carried(place / "run/policy", tensors)
    spread = kept | {"mesh": MeshConfig(fsdp=2)}
    train(config(place, place / "run", steps=2, resume="auto", **spread))
    assert_carried(place / "run/policy", tensors)
    export(place / "run", place / "exported", step=1)
    assert_carried(place / "exported", tensors)


@pytest.mark.slow
def test_merged_adapters_keep_them_too(folder):
    place, model, tensors = folder
    lora = LoraSettings(rank=2, target_modules="all-linear")
    train(config(place, place / "run", steps=0, model=str(model), lora=lora))
    export(place / "run", place / "merged", merge=True)
    assert_carried(place / "merged", tensors)


def test_the_tokenizer_beside_an_adapter_is_the_one_it_was_trained_with(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_policy(small_policy(0), base)
    save_policy(add_adapter(small_policy(0), LoraConfig(r=2), base=str(base)), adapter)
    own = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (adapter / "chat_template.jinja").write_text(own)
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    policy = load_policy(str(adapter))
    assert policy.template.chat_template.source == own
    assert policy.tokenizer.stop_token_ids == [1, 3]  # of the base: PEFT does not copy it
    # Merged, it is of use with this template only. transformers writes the base's to a file of its
    # own, which hides the one in tokenizer_config.json.
    (base / "chat_template.jinja").write_text("{{ messages }}")
    save_policy(policy, tmp_path / "merged", merge=True)
    assert load_policy(str(tmp_path / "merged")).template.chat_template.source == own
    (base / "chat_template.jinja").unlink()
    for path in adapter.glob("*token*"):
        path.unlink()
    template = load_policy(str(adapter)).template
    assert template.chat_template.source == small_policy(0).template.chat_template.source


def test_the_chat_template_of_a_script_is_saved(tmp_path):
    """It was left out: what loaded the policy asked it in another way than it was trained."""
    own = "{% for m in messages %}{{ m.content }}{% endfor %}"
    policy = small_policy(0)
    policy = policy._replace(template=Template(policy.tokenizer, chat_template=own))
    save_policy(policy, tmp_path / "base")
    adapted = add_adapter(policy, LoraConfig(r=2), base=str(tmp_path / "base"))
    save_policy(adapted, tmp_path / "adapter")
    for name in ("base", "adapter"):
        assert load_policy(str(tmp_path / name)).template.chat_template.source == own


def test_the_base_of_an_adapter_may_be_a_relative_path(tmp_path, monkeypatch):
    """Of the current directory, as in PEFT, or else of the adapter's."""
    monkeypatch.chdir(tmp_path)
    save_policy(small_policy(0), "base")
    save_policy(add_adapter(small_policy(0), LoraConfig(r=2), base="base"), "adapter")
    assert load_policy("adapter").base == "base"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    message = (
        rf"^base_model_name_or_path of .*adapter_config.json, looked for in {Path.cwd()} and in "
        rf"{tmp_path}/adapter, must be a directory or a hub id"
    )
    with pytest.raises(ValueError, match=message):
        load_policy("../adapter", argument="model")
    (tmp_path / "base").rename(tmp_path / "adapter/base")
    again = load_policy("../adapter")
    assert again.base == str(tmp_path / "adapter/base")  # found from anywhere if saved again


def test_the_adapters_of_a_moved_run_have_its_own_base(tmp_path):
    """A run that was started where it had been has another built-in policy."""
    first, moved = tmp_path / "run", tmp_path / "moved"
    for seed in range(2):
        save_policy(small_policy(seed), first / "base")
        policy = load_policy(str(first / "base"))
        adapted = add_adapter(policy, LoraConfig(r=2), base=str(first / "base"))
        save_policy(adapted, first / "policy")
        if not seed:
            first.rename(moved)
    loaded = load_policy(str(moved / "policy"))
    jax.tree.map(np.testing.assert_array_equal, loaded.weights["embed_tokens"],
                 small_policy(0).params["embed_tokens"])  # fmt: skip
    assert loaded.base == str(moved / "base")


def test_an_adapter_of_another_revision_of_its_base_is_not_laid_over_main(tmp_path):
    """PEFT loads the base at the revision that the adapter names."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_policy(small_policy(), base)
    policy = add_adapter(load_policy(str(base)), LoraConfig(r=2), base=str(base))
    save_policy(policy, adapter)
    content = json.loads((adapter / "adapter_config.json").read_text()) | {"revision": "v2"}
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    load_policy(str(adapter))  # a directory has one revision
    content["base_model_name_or_path"] = "owner/name"
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^revision of .*adapter_config.json must be 'main'"):
        load_policy(str(adapter))


def test_an_adapter_may_bring_the_chat_template_that_its_base_lacks(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_policy(small_policy(0), base)
    save_policy(add_adapter(small_policy(0), LoraConfig(r=2), base=str(base)), adapter)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    assert load_policy(str(adapter)).tokenizer.chat_template == settings["chat_template"]


@pytest.mark.parametrize(
    ("settings", "template", "refused"),
    [
        ({"special": True}, "", False),
        ({"special": True}, "{{ '<image>' }}", True),
        ({"special": False}, "", True),
    ],
)
def test_a_special_token_may_have_no_embedding(settings, template, refused, tmp_path):
    """Gemma 3 1B has the tokenizer of the larger ones, with a token for images."""
    policy = small_policy(0)
    save_policy(policy, tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    (last,) = (x for x in content["added_tokens"] if x["id"] == 0)
    image = last | {"id": policy.config.vocab_size, "content": "<image>"} | settings
    file.write_text(json.dumps(content | {"added_tokens": [*content["added_tokens"], image]}))
    (tmp_path / "chat_template.jinja").write_text(policy.tokenizer.chat_template + template)
    if refused:
        with pytest.raises(ValueError, match=r"ids below .* got '<image>' beyond"):
            load_policy(str(tmp_path))
        return
    loaded = load_policy(str(tmp_path))
    assert len(loaded.tokenizer) == loaded.config.vocab_size + 1
    ids = loaded.template.encode({"messages": [{"role": "user", "content": "<image>1"}]})
    assert max(ids["input_ids"]) < loaded.config.vocab_size


def test_prompts_have_the_limit_of_the_run_alone(tmp_path):
    """Templates of scripts have a limit of 8192 tokens: longer episodes ended a run."""
    save_policy(small_policy(0), tmp_path)
    long = {"messages": [{"role": "user", "content": "1" * 9000}]}
    for policy in (small_policy(0), load_policy(str(tmp_path))):
        (ids,) = prompt_ids(policy.template, [long], longest=9003)
        assert len(ids) == 9003  # with two roles and the end of the turn
        with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens=9000 tokens, got"):
            prompt_ids(policy.template, [long], longest=9000)


def test_the_directory_of_a_run_is_no_checkpoint(tmp_path):
    policy = small_policy(0)
    save_policy(policy, tmp_path / "policy")
    (tmp_path / "config.json").write_text('{"steps": 1}')
    with pytest.raises(ValueError, match=r"model must .* run.*policy"):
        load_policy(str(tmp_path), argument="model")
    save_policy(policy, tmp_path / "other")
    (tmp_path / "policy").rename(tmp_path / "other" / "policy")
    assert load_policy(str(tmp_path / "other")).config == policy.config  # has both


def test_corrections_of_experts_below_an_adapter_keep_their_digits():
    mixture, params = config_of("glm4_moe"), params_of("glm4_moe")
    policy = small_policy(0)._replace(config=mixture, params=params)
    frozen = add_adapter(policy, LoraConfig(r=2), base="", dtype="bfloat16").frozen
    of_frozen, gate = (x["layers"]["1"]["mlp"]["gate"] for x in (frozen, params))
    assert of_frozen["kernel"].dtype == "bfloat16"
    correction = of_frozen["e_score_correction_bias"]
    np.testing.assert_array_equal(correction, gate["e_score_correction_bias"], strict=True)


def test_seeds_differ_in_all_of_their_bits():
    policies = [small_policy(seed) for seed in (1, 2**32 + 1)]
    adapters = [
        add_adapter(policies[0], LoraConfig(r=2), base="", seed=seed) for seed in (1, 2**32 + 1)
    ]
    for one, other in (policies, adapters):
        arrays = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
        assert any(not np.array_equal(x, y) for x, y in arrays)
