"""A small Qwen3, saved, for tests that damage it."""

import pytest

from tests.model.families import config_of, params_of
from twinkle_jax.model import Decoder, save_pretrained


@pytest.fixture
def decoder():
    return Decoder(config_of("qwen3"), params_of("qwen3"))


@pytest.fixture
def export(decoder, tmp_path):
    save_pretrained(decoder, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def sharded(decoder, tmp_path):
    save_pretrained(decoder, tmp_path / "shards", max_shard_size=20_000)
    return tmp_path / "shards"
