"""What loading costs the host: the parameters, one leaf of them and one tensor, and no more."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")

# In a process of its own, which has allocated nothing before. What it holds is sampled while it
# loads; pages of the mapped file do not count, as the system may drop them at any time.
SCRIPT = """
import json, pathlib, sys, threading
import jax, jax.numpy as jnp, numpy as np
from twinkle_jax.model import Decoder, init_params, load_pretrained, parse_config, save_pretrained

config = parse_config({
    "model_type": "qwen3", "vocab_size": 32768, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
    "tie_word_embeddings": True,
})
if sys.argv[2] == "save":
    save_pretrained(Decoder(config, init_params(jax.random.key(0), config)), sys.argv[1])
    sys.exit()

def held():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

jax.block_until_ready(jax.device_put(np.ones(8)))
before, peak, done = held(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.0005):
        peak = max(peak, held())

watcher = threading.Thread(target=watch)
watcher.start()
model = load_pretrained(sys.argv[1])
jax.block_until_ready(model.params)
done.set()
watcher.join()
sizes = [leaf.nbytes for leaf in jax.tree.leaves(model.params)]
print(json.dumps({"peak": peak - before, "total": sum(sizes), "largest": max(sizes)}))
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_host_holds_one_leaf_and_one_tensor_beside_the_parameters(tmp_path):
    def run(what):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), what]
        root = pathlib.Path(__file__).parents[3]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run("save")
    found = json.loads(run("load"))
    assert found["total"] > 90 * 2**20
    assert found["peak"] > 0.9 * found["total"]  # the watch saw the load
    slack = 16 * 2**20  # code that loading imports
    assert found["peak"] < found["total"] + found["largest"] + slack
