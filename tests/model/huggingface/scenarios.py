"""What each of two processes does with a checkpoint; `test_saving.py` starts them.

`python -m tests.model.huggingface.scenarios NAME DIRECTORY`
"""

import json
import os
import pathlib
import signal
import sys
import threading

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.processes import join
from twinkle_jax.data import Template, small_tokenizer
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    RewardModel,
    init_params,
    load_adapter,
    load_pretrained,
    make_mesh,
    parse_config,
    partition_rules,
    save_adapter,
    save_pretrained,
    shard_like_params,
)
from twinkle_jax.model.decoder.lora import init_adapter
from twinkle_jax.model.huggingface import checkpoint
from twinkle_jax.training.policy import load_policy, save_policy, small_policy

LARGE = parse_config(  # 244 MiB: 60 layers whose tensors have up to 1 MiB, an embedding of 4
    {
        "model_type": "qwen3",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 60,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
)
LORA = LoraConfig(r=4, target_modules="all-linear")


def make(directory):
    """Write the large model; one process."""
    large = {"params": init_params(jax.random.key(0), LARGE), "config": LARGE}
    save_policy(small_policy()._replace(**large), directory / "model")


def load(directory, name="model"):
    mesh = make_mesh(fsdp=jax.device_count())
    return load_pretrained(directory / name, mesh=mesh, partition=partition_rules(mesh))


def held():
    """Bytes of this process, without pages of mapped files, which the system may drop."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def watched(act):
    """Return a result, and by how many bytes this process grew at most."""
    before, peaks, done = held(), [0], threading.Event()

    def watch():
        while not done.wait(0.0005):
            peaks.append(held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = act()
    finally:
        done.set()
        watcher.join()
    return result, max(peaks) - before


def memory(directory):
    """What the host holds while it loads, and on top of that while it saves."""
    small = load(directory, "small")  # it starts gloo and compiles a few programs
    save_pretrained(small, directory / "small-again")
    mesh = make_mesh(fsdp=jax.device_count())
    params, loading = watched(  # as the command loads it
        lambda: jax.block_until_ready(load_policy(str(directory / "model"), mesh=mesh).params)
    )
    model = Decoder(LARGE, params)
    leaves = jax.tree.leaves(model.params)
    share = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    _, first = watched(lambda: save_pretrained(model, directory / "again"))  # it compiles
    _, saving = watched(lambda: save_pretrained(model, directory / "again"))
    return {"loading": loading, "share": share, "first": first, "saving": saving}


def round_trip(directory):
    """Save what is spread over the processes, model and adapter; say whether it is whole."""
    model = load(directory)
    save_pretrained(model, directory / "again", max_shard_size=20_000)
    names = sorted(path.name for path in (directory / "again").iterdir())
    adapter = init_adapter(jax.random.key(0), model.config, LORA)
    shardings = shard_like_params(adapter, make_mesh(fsdp=jax.device_count()))
    spread = jax.device_put(adapter, shardings)
    save_adapter(directory / "adapter", model.config, LORA, spread)
    mesh = make_mesh(fsdp=jax.device_count())
    head = jax.device_put(np.arange(24, dtype=np.float32), NamedSharding(mesh, PartitionSpec()))
    reward = RewardModel(model.config, model.params, head, Template(small_tokenizer()))
    reward.save_pretrained(directory / "reward")
    read = load_adapter(directory / "adapter", model.config)[1]
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), read, adapter)
    kernel = model.params["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    return {
        "names": names,
        "adapter": all(jax.tree.leaves(same)),
        "spread": not (kernel.is_fully_addressable or kernel.is_fully_replicated),
    }


def load_nan(directory):
    load(directory, "nan")


def load_untied(directory):
    load(directory, "untied")


def load_missing(directory):
    load(directory, ["model", "nowhere"][jax.process_index()])


def _save(directory):
    save_pretrained(load(directory), directory / "again", max_shard_size=20_000)


def save_full_disk(directory):
    """The second file does not fit on the disk."""
    real, calls = checkpoint.write_safetensors, []

    def write_one(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise OSError("no space left on device")
        real(*arguments)

    checkpoint.write_safetensors = write_one
    _save(directory)


def save_killed(directory):
    """The writer ends between two files."""
    checkpoint._write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    _save(directory)


def save_elsewhere(directory):
    save_pretrained(load(directory), directory / f"again-{jax.process_index()}")


def save_nan(directory):
    model = load(directory)
    leaf = model.params["norm"]["scale"]
    params = model.params | {"norm": {"scale": leaf * np.float32(np.nan)}}
    save_pretrained(Decoder(model.config, params), directory / "again")


def save_over_a_file(directory):
    save_pretrained(load(directory), directory / "file")


if __name__ == "__main__":
    scenario, place = sys.argv[1], pathlib.Path(sys.argv[2])
    if scenario != "make":
        join()
    try:
        result = globals()[scenario](place)
    except Exception as error:  # the test looks at it
        result = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(result) + "\n")
