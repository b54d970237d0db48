"""A hub id, through huggingface_hub itself, from a server here that answers as the hub does."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import jax
import pytest

from tests.model.families import config_of, params_of
from twinkle_jax.model import Decoder, save_pretrained

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
pytest.importorskip("huggingface_hub", reason="pip install 'twinkle-jax[checkpoints]'")

ID, COMMIT = "someone/small-qwen3", "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import json, sys
import jax, numpy as np
from twinkle_jax.model import load_pretrained

leaves = jax.tree.leaves(load_pretrained(sys.argv[1]).params)
print(json.dumps([np.asarray(leaf).tolist() for leaf in leaves]))
"""


@pytest.fixture
def hub(tmp_path):
    """Serve a directory under the addresses of the hub; says where, and what was asked for."""
    files, asked = tmp_path / "repository", []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            asked.append(self.path)
            path = self.path.split("?")[0]
            if path == f"/api/models/{ID}/revision/main":
                siblings = [{"rfilename": p.name} for p in sorted(files.iterdir())]
                body = json.dumps({"id": ID, "sha": COMMIT, "siblings": siblings}).encode()
                self.answer(200, body, Content_Type="application/json")
            elif path == f"/api/models/{ID}/tree/{COMMIT}":
                entries = [
                    {"type": "file", "oid": "", "size": p.stat().st_size, "path": p.name}
                    for p in sorted(files.iterdir())
                ]
                self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
            elif path.startswith(f"/{ID}/resolve/") and (files / pathlib.Path(path).name).exists():
                body = (files / pathlib.Path(path).name).read_bytes()
                tag = f'"{hashlib.sha256(body).hexdigest()}"'
                self.answer(200, body, ETag=tag, X_Repo_Commit=COMMIT)
            else:
                self.answer(404, X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield files, f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def load(address, home, name=ID, **environment):
    """Load by id in a process of its own, because addresses are read at import."""
    settings = {"JAX_PLATFORMS": "cpu", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    settings |= {"HF_ENDPOINT": address, "HF_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, name],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parents[3],
        env={**os.environ, **settings, **environment},
    )


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
