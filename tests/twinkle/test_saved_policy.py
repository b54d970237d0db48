"""Checkpoints: a resumed run is exact, a failed save leaves the old files, weights alone."""

import json

import jax
import numpy as np
import pytest

from tests.model.families import config_of
from tests.twinkle.rows import INPUTS, SIDE, assert_equal
from twinkle_jax.model import Decoder, LoraConfig
from twinkle_jax.twinkle import DeviceMesh
from twinkle_jax.twinkle.model import MegatronModel, TransformersModel

LORA = LoraConfig(r=2, target_modules=("q_proj", "down_proj"), lora_dropout=0.5)


def start(checkpoint, lora=False, seed=3, optimizer="AdamW"):
    model = TransformersModel(checkpoint, seed=seed)
    if lora:
        model.add_adapter_to_model("default", LORA, gradient_accumulation_steps=2)
    model.set_loss("grpo", epsilon=0.2)
    model.set_optimizer(optimizer, lr=0.05)
    model.set_lr_scheduler("CosineAnnealingLR", T_max=9)
    return model


def contents(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def train(model, calls):
    for _ in range(calls):
        model.forward_backward(inputs=INPUTS, **SIDE)
        model.clip_grad_and_step()


@pytest.mark.exhaustive
@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_equals_the_uninterrupted_one(checkpoint, tmp_path, lora):
    """With an adapter, in the middle of an accumulation, and with dropout's noise."""
    model = start(checkpoint, lora)
    train(model, 3)
    place = model.save(
        name="third", output_dir=tmp_path, save_optimizer=True, consumed_train_samples=9
    )
    assert place == tmp_path / "third"
    train(model, 2)
    again = start(checkpoint, lora, seed=0)
    assert again.resume_from_checkpoint(place) == {
        "cur_step": 3,
        "consumed_train_samples": 9,
        "gradient_accumulation_steps": 2 if lora else 1,
    }
    train(again, 2)
    assert_equal(again.state, model.state)
    assert again.learning_rate == model.learning_rate and again.cur_step == 5


@pytest.mark.slow
def test_weights_alone(checkpoint, tmp_path):
    model = start(checkpoint)
    train(model, 1)
    model.save("one", tmp_path, save_optimizer=True)
    for read in (
        lambda m: m.resume_from_checkpoint(tmp_path / "one", resume_only_model=True),
        lambda m: m.load("one", tmp_path),
    ):
        other = TransformersModel(checkpoint)
        read(other)
        assert_equal(other.state.params, model.state.params)
        assert other.cur_step == 0 and other.state.step == 0
    other = start(checkpoint)
    other.load("one", output_dir=tmp_path, load_optimizer=True)
    assert_equal(other.state, model.state)
    assert other.learning_rate == model.learning_rate < 0.05  # the schedule continues


def test_files(checkpoint, tmp_path, monkeypatch):
    model = start(checkpoint)
    train(model, 1)
    monkeypatch.chdir(tmp_path)
    assert str(model.save()) == "output/checkpoint-step-1"
    assert model.save("two", interval=2) is None and not (tmp_path / "two").exists()
    with pytest.raises(ValueError, match="interval"):
        model.save("two", interval=0)
    place = model.save("one", save_optimizer=True)
    names = {path.name for path in place.iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "training_state",
    }
    counters = json.loads((place / "training_state" / "facts.json").read_text())
    assert counters["cur_step"] == counters["lr_steps"] == 1 and counters["lr"] == 0.05
    # Files of the user stay; the training state of older weights is removed.
    (place / "note.txt").write_text("mine")
    model.save("one", save_optimizer=True)
    assert {path.name for path in place.iterdir()} == names | {"note.txt"}
    model.save("one")
    assert {path.name for path in place.iterdir()} == {
        "config.json",
        "model.safetensors",
        "note.txt",
    }


def test_a_save_that_fails_leaves_the_old_one(checkpoint, tmp_path, monkeypatch):
    model = start(checkpoint)
    train(model, 1)
    place = model.save("one", tmp_path, save_optimizer=True)
    before = contents(place)
    train(model, 1)

    def full_disk(directory, arrays, facts):
        (directory / "leaves.json").write_bytes(b"half")
        raise OSError("no space left on device")

    def full_disk_for_weights(decoder, directory, dtype):
        directory.mkdir(exist_ok=True)
        raise OSError("no space left on device")

    monkeypatch.setattr("twinkle_jax.training.checkpoint.write_checkpoint", full_disk)
    with pytest.raises(OSError, match="no space"):
        model.save("one", tmp_path, save_optimizer=True)
    monkeypatch.setattr("twinkle_jax.training.policy.save_pretrained", full_disk_for_weights)
    with pytest.raises(OSError, match="no space"):
        model.save("one", tmp_path)
    assert contents(place) == before
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_what_is_refused(checkpoint, tmp_path):
    model = start(checkpoint)
    train(model, 1)
    place = model.save("one", tmp_path, save_optimizer=True)
    for options in ({"merge": True}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="save_optimizer"):
            model.save("two", tmp_path, save_optimizer=True, **options)
    plain = TransformersModel(checkpoint)
    for call in (
        lambda: plain.save("x", tmp_path, save_optimizer=True),
        lambda: plain.resume_from_checkpoint(place),
    ):
        with pytest.raises(ValueError, match="set_optimizer"):
            call()
    other = start(checkpoint, optimizer="SGD")
    with pytest.raises(ValueError, match="optimizer"):
        other.resume_from_checkpoint(place)
    other.forward_backward(inputs=INPUTS, **SIDE)  # it is still usable
    with pytest.raises(ValueError, match="training_state"):
        model.resume_from_checkpoint(model.save("bare", tmp_path))
    with pytest.raises(ValueError, match=r"^checkpoint_dir .*'no/such/place'"):
        model.resume_from_checkpoint("no/such/place")
    with pytest.raises(ValueError, match=r"^name .*'no/such/place'"):
        model.load("no/such/place")
    file = place / "training_state" / "facts.json"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="training_state"):
        model.resume_from_checkpoint(place)


@pytest.mark.parametrize("adapter_first", [False, True])
def test_an_adapter_and_a_checkpoint_never_share_a_directory(checkpoint, tmp_path, adapter_first):
    """transformers would load both, the adapter over the weights."""
    first, second = start(checkpoint, adapter_first), start(checkpoint, not adapter_first)
    place = first.save("one", tmp_path, save_optimizer=True)
    before = contents(place)
    for model, options in (
        (second, {"save_optimizer": True}),
        (second, {}),
        *([(first, {"merge": True})] if adapter_first else []),
    ):
        with pytest.raises(ValueError, match="adapter"):
            model.save("one", tmp_path, **options)
        assert contents(place) == before
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_configuration_instead_of_the_checkpoints(checkpoint):
    transformers = pytest.importorskip("transformers", reason="pip install 'twinkle-jax[oracle]'")
    whole = TransformersModel(checkpoint)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    config.use_cache = False
    same = TransformersModel(model_id=checkpoint, config=config, ignore_mismatched_sizes=True)
    assert_equal(same.params, whole.params)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    first = MegatronModel(model_id=checkpoint, config=config).params
    expected = whole.params | {"layers": jax.tree.map(lambda x: x[:1], whole.params["layers"])}
    assert_equal(first, expected)
    with pytest.raises(ValueError, match="_proj"):
        TransformersModel(
            checkpoint,
            config=config.to_dict() | {"intermediate_size": 8},
            ignore_mismatched_sizes=True,
        )


@pytest.mark.slow
def test_random_parameters_for_a_configuration(checkpoint, tmp_path):
    config = TransformersModel(checkpoint).config
    mesh = DeviceMesh.from_sizes(fsdp_size=2)
    first, again, other = (
        TransformersModel(config=config, seed=seed, device_mesh=place)
        for seed, place in ((1, None), (1, mesh), (2, None))
    )
    kernel = first.params["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert np.std(kernel) == pytest.approx(0.02, rel=0.1)
    assert_equal(again.params, first.params)
    assert not np.array_equal(kernel, other.params["layers"]["0"]["mlp"]["up_proj"]["kernel"])
    assert_equal(TransformersModel(first.save(tmp_path / "m")).params, first.params)
    with pytest.raises(ValueError, match="model_id or config"):
        TransformersModel()
    with pytest.raises(ValueError, match=r"^model_id .*'no/such/place'"):
        TransformersModel("no/such/place")
    with pytest.raises(ValueError, match="config must be"):
        TransformersModel(Decoder(config, first.params), config=config_of("llama"))


@pytest.mark.parametrize("large", [2**32 + 1, 2**70 + 1])
def test_seeds_differ_in_all_of_their_bits(checkpoint, large):
    """JAX takes them modulo 2^32."""
    config = TransformersModel(checkpoint).config
    first, other = (TransformersModel(config=config, seed=seed) for seed in (1, large))
    assert first.key != other.key

    def differ(one, other, part):
        return not any(np.array_equal(x, other[name]) for name, x in one.items() if part in name)

    assert differ(first.get_state_dict(), other.get_state_dict(), "_proj")
    for seed in (1, large):
        first.add_adapter_to_model(str(seed), LORA, seed=seed)
    adapters = [first.get_state_dict(adapter_name=str(seed)) for seed in (1, large)]
    assert differ(*adapters, "lora_A")
