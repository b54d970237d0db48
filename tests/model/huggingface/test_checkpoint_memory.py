"""What checkpoints cost the host: loading, the parameters and a tensor; saving, one shard."""

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
import jax, numpy as np, safetensors.numpy
from twinkle_jax.model import Decoder, init_params, load_pretrained, parse_config, save_pretrained

config = parse_config({
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
    "tie_word_embeddings": True,
})

def held():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

def watched(act):
    before, peaks, done = held(), [0], threading.Event()
    def watch():
        while not done.wait(0.0005):
            peaks.append(held())
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = act()
    done.set()
    watcher.join()
    return result, max(peaks) - before

if sys.argv[2] == "make":
    save_pretrained(Decoder(config, init_params(jax.random.key(0), config)), sys.argv[1])
    sys.exit()
jax.block_until_ready(jax.device_put(np.ones(8)))
model, loading = watched(lambda: jax.block_until_ready(load_pretrained(sys.argv[1])))
sizes = [leaf.nbytes for leaf in jax.tree.leaves(model.params)]
found = {"loading": loading, "total": sum(sizes), "largest": max(sizes)}
options = {"max_shard_size": 16 * 2**20}
save_pretrained(model, sys.argv[1] + "-first", **options)  # it compiles a few programs
found["saving"] = watched(lambda: save_pretrained(model, sys.argv[1] + "-shards", **options))[1]
print(json.dumps(found))
"""
MIB = 2**20


@pytest.mark.exhaustive
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_host_holds_one_tensor_beside_the_parameters_and_one_shard(tmp_path):
    def run(what):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), what]
        root = pathlib.Path(__file__).parents[3]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run("make")
    found = json.loads(run("load"))
    assert found["total"] > 240 * MIB and found["largest"] == 64 * MIB  # layers of one projection
    assert found["loading"] > 0.9 * found["total"]  # the watch saw the load
    assert found["loading"] < found["total"] + 40 * MIB  # a tensor of 1 MiB, and a few programs
    assert found["saving"] < 40 * MIB
