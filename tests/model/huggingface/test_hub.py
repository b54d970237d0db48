"""A hub id, through huggingface_hub itself, from a server here that answers as the hub does."""

import json
import pathlib

import jax
import pytest

from tests import hub_server
from tests.model.families import config_of, params_of
from twinkle_jax.model import Decoder, save_pretrained

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
pytest.importorskip("huggingface_hub", reason="pip install 'twinkle-jax[checkpoints]'")

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
    files = tmp_path / "repository"
    with hub_server.serve(files, "models", ID) as (address, asked):
        yield files, address, asked


def load(address, home, name=ID, **environment):
    return hub_server.run(SCRIPT, name, address, home, **environment)


def test_an_id_is_downloaded_once_and_then_found(hub, tmp_path):
    files, address, asked = hub
    params = params_of("qwen3")
    save_pretrained(Decoder(config_of("qwen3"), params), files, max_shard_size=20_000)
    (files / "pytorch_model.bin").write_bytes(b"pickled")
    (files / "modeling_custom.py").write_text("raise SystemExit('never run')")
    expected = [leaf.tolist() for leaf in jax.tree.leaves(params)]

    done = load(address, tmp_path / "home")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    fetched = {pathlib.Path(path).name for path in asked if "/resolve/" in path}
    shards = {path.name for path in files.glob("model-*.safetensors")}
    assert len(shards) > 1
    assert fetched == {"config.json", "model.safetensors.index.json", *shards}

    asked.clear()
    done = load(address, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert not asked


def test_an_id_that_the_hub_does_not_know(hub, tmp_path):
    _, address, _ = hub
    done = load(address, tmp_path / "home", "someone/else")
    assert done.returncode == 1
    assert "RepositoryNotFoundError" in done.stderr
    assert "someone/else" in done.stderr
