"""A small checkpoint, a model of it that is ready to train, and settings of a new program."""

import pytest

import twinkle_jax.twinkle as twinkle
from tests.model.families import config_of, params_of
from twinkle_jax.model import Decoder, save_pretrained
from twinkle_jax.twinkle import names
from twinkle_jax.twinkle.model import TransformersModel


@pytest.fixture(autouse=True)
def new_program(monkeypatch):
    """Begin each test as a program begins: with the first settings, and warned of nothing."""
    monkeypatch.setattr(names, "_WARNED", set())
    yield
    twinkle.initialize()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
    directory = tmp_path_factory.mktemp("model") / "qwen3"
    save_pretrained(Decoder(config_of("qwen3"), params_of("qwen3")), directory)
    return directory


@pytest.fixture
def model(checkpoint):
    made = TransformersModel(model_id=checkpoint)
    made.set_loss("GRPOLoss", epsilon=0.2)
    made.set_optimizer("SGD", lr=0.5)
    return made
