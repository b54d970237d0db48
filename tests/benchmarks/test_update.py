"""What an update costs: `pytest tests/benchmarks/test_update.py` (extras benchmark, oracle).

One update, value-and-gradient and AdamW, of a small Qwen3 on 64 rows of 16 prompt and 32 completion
tokens, against the same update of transformers' model in PyTorch. Rounds are interleaved, because a
shared machine changes its speed; medians and their ratio are printed. Peak memory is that of a
process which does nothing but this update, less what it held before the first one.
"""

import functools
import multiprocessing
import pathlib
import statistics
import threading
import time

import pytest

from tests.benchmarks.peers.task import COMPLETION, PROMPT, PROMPTS, SAMPLES, SHAPE

ROWS = PROMPTS * SAMPLES
CONFIG = {"model_type": "qwen3", **SHAPE}
VOCABULARIES = (512, 32_768)


def make_data(vocab):
    """Tokens, labels (what follows, where it was sampled), advantages, log-probabilities."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (ROWS, PROMPT + COMPLETION))
    labels = np.full_like(tokens, -100)
    labels[:, PROMPT - 1 : -1] = tokens[:, PROMPT:]
    advantages = np.repeat(rng.normal(size=(ROWS, 1)), tokens.shape[1], 1).astype(np.float32)
    old = np.full(tokens.shape, -np.log(vocab), np.float32)
    return tokens, labels, advantages, old


def jax_update(vocab, remat="dots_with_no_batch_dims_saveable"):
    """Our update: a function that makes one and waits for it."""
    import jax
    import optax

    from twinkle_jax.data import Batch
    from twinkle_jax.loss import GRPOLoss
    from twinkle_jax.model import init_params, parse_config
    from twinkle_jax.training import apply_gradients, grad_step, train_state

    config = parse_config({**CONFIG, "vocab_size": vocab})
    optimizer, loss_fn = optax.adamw(1.0, weight_decay=0.01), GRPOLoss()
    tokens, labels, advantages, old = make_data(vocab)
    batch = jax.device_put(
        Batch(tokens.astype("int32"), labels.astype("int32"), advantages=advantages, old_logps=old)
    )
    remat = remat and getattr(jax.checkpoint_policies, remat)
    state = [train_state(init_params(jax.random.key(0), config), optimizer)]

    def update():
        held, summary = grad_step(state.pop(), batch, config, loss_fn, remat=remat)
        held, _ = apply_gradients(held, optimizer, learning_rate=1e-4, max_grad_norm=1.0)
        state.append(jax.block_until_ready(held))
        return float(summary.loss)

    return update


def torch_update(vocab, micro_batch=ROWS):
    """The same in eager PyTorch."""
    import torch
    import transformers

    torch.set_num_threads(2)
    config = transformers.AutoConfig.for_model(**{**CONFIG, "vocab_size": vocab})
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    tokens, labels, advantages, old = (torch.from_numpy(x) for x in make_data(vocab))
    kept = slice(PROMPT - 1, PROMPT + COMPLETION - 1)
    labels, advantages, old = labels[:, kept], advantages[:, kept], old[:, kept]

    def loss_sum(part):
        # Logits at the labelled positions only, as a careful PyTorch program has them.
        hidden = model.model(input_ids=tokens[part], use_cache=False).last_hidden_state[:, kept]
        logprobs = torch.log_softmax(model.lm_head(hidden), -1)
        logprobs = logprobs.gather(-1, labels[part, :, None])[..., 0]
        ratio = torch.exp(logprobs - old[part])
        clipped = torch.clamp(ratio, 0.8, 1.2)
        return -torch.minimum(ratio * advantages[part], clipped * advantages[part]).mean(1).sum()

    def update():
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, ROWS, micro_batch):
            loss = loss_sum(slice(start, start + micro_batch)) / ROWS
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return update


def packed_gradient(vocab, room, mean):
    """A gradient of 64 completions of geometric length, packed as a run packs them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from twinkle_jax.data import Batch
    from twinkle_jax.loss import GRPOLoss
    from twinkle_jax.model import init_params, parse_config
    from twinkle_jax.training import grad_step, train_state
    from twinkle_jax.training.packing import plan

    config = parse_config({**CONFIG, "vocab_size": vocab})
    rng = np.random.default_rng(0)
    lengths = PROMPT + np.minimum(rng.geometric(1 / mean, ROWS), room)
    shape = ROWS, int(lengths.max())
    tokens = rng.integers(0, vocab, shape).astype(np.int32)
    columns = np.arange(shape[1])[None]
    sampled = (columns >= PROMPT - 1) & (columns < lengths[:, None] - 1)
    labels = np.where(sampled, np.roll(tokens, -1, axis=1), -100)
    advantages = np.repeat(rng.normal(size=(ROWS, 1)), shape[1], 1).astype(np.float32)
    old = np.full(shape, -np.log(vocab), np.float32)
    batch = jax.device_put(Batch(tokens, labels, advantages=advantages, old_logps=old))
    parts = list(plan(lengths, shape[1], tokens=int(lengths.sum()) * 2))
    state = [train_state(init_params(jax.random.key(0), config), optax.adamw(1.0))]

    def gradient():
        held = state.pop()
        for members, packing in parts:
            kept_labels = jnp.where(members[:, None], batch.labels, -100)
            part = batch._replace(labels=kept_labels, rows=jnp.asarray(members))
            held, _ = grad_step(held, part, config, GRPOLoss(), packing=packing)
        state.append(jax.block_until_ready(held))

    return gradient


def test_attention_in_blocks(monkeypatch):
    """Against one block of all queries: `-k blocks`, processor time, without `--benchmark-only`."""
    import jax

    from twinkle_jax.model.decoder import attention

    seconds = {"blocks": [], "one block": []}
    smallest = {"blocks": attention._SMALLEST_BLOCK, "one block": 2**20}
    for _ in range(3):
        for name, times in seconds.items():
            jax.clear_caches()  # both are the same function to JAX
            monkeypatch.setattr(attention, "_SMALLEST_BLOCK", smallest[name])
            gradient = packed_gradient(512, 1024, 128)
            gradient()
            for _ in range(3):
                start = time.process_time()
                gradient()
                times.append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\n{medians}, ratio {medians['blocks'] / medians['one block']:.2f}")


CONTESTANTS = {
    "twinkle_jax": jax_update,
    "... keeping everything": functools.partial(jax_update, remat=False),
    "PyTorch": torch_update,
    "... 4 times 16 rows": functools.partial(torch_update, micro_batch=16),
}


def resident():
    """Bytes of memory that this process holds."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure_memory(name, vocab, pipe):
    """Peak of an update above what the process held without one: sampled while updates run."""
    update = CONTESTANTS[name](vocab)
    before, peak, done = resident(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident())

    update()  # compile, and make the optimizer's state
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(5):
        update()
    done.set()
    watcher.join()
    pipe.send(peak[0] - before)


def peak_memory(name, vocab):
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=measure_memory, args=(name, vocab, theirs))
    process.start()
    peak = ours.recv()
    process.join()
    return peak


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_update(benchmark, vocab):
    pytest.importorskip("transformers", reason="pip install 'twinkle-jax[oracle,benchmark]'")
    updates = {name: make(vocab) for name, make in CONTESTANTS.items()}
    seconds = {name: [] for name in updates}
    for update in updates.values():
        update(), update()
    for _ in range(15):
        for name, update in updates.items():
            start = time.perf_counter()
            update()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["twinkle_jax"] / medians["PyTorch"]
    memory = {name: peak_memory(name, vocab) for name in updates}
    print(f"\nvocabulary {vocab}: {ratio:.2f} of PyTorch's time")
    for name, median in medians.items():
        fastest = min(seconds[name])
        print(
            f"  {name:<25}{median * 1e3:>8.0f} ms (fastest {fastest * 1e3:.0f}), "
            f"peak {memory[name] / 2**20:.0f} MiB"
        )
    benchmark.extra_info.update(medians, ratio=ratio, memory=memory)
    benchmark.pedantic(updates["twinkle_jax"], rounds=3)
