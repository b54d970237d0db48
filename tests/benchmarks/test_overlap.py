"""What it saves that a server samples during updates.

`python -m pytest tests/benchmarks/test_overlap.py -s -p no:xdist`. The server of the tests, in a
process of its own with a random Qwen3 of 12,000 parameters, sleeps as long as completions are to
take; an update has 120 epochs. Two minutes.
"""

import json
import multiprocessing
import statistics
import time

import pytest

from tests.sampler.vllm.fake_server import FakeServer, write_checkpoint
from tests.training.options import config_of
from twinkle_jax.training import train

STEPS = 10


def serve(model, seconds, connection):
    """Serve until something arrives; completions that are no probes take some seconds."""

    def wait(handler):
        if handler.body["n"] == 4:
            time.sleep(seconds)
        return False

    with FakeServer(model) as server:
        server.take_over["/v1/completions"] = wait
        connection.send(server.url)
        connection.recv()


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_overlap(tmp_path, seconds):
    model = write_checkpoint(tmp_path / "model")
    rows = [{"prompt": f"{a}+2=", "answer": str(a + 2)} for a in range(6)]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    processes = multiprocessing.get_context("spawn")

    def measure(overlap):
        """Medians of the seconds of a step, and of those in which it waits for completions."""
        output = tmp_path / f"overlap-{overlap}"
        here, there = processes.Pipe()
        server = processes.Process(target=serve, args=(model, seconds, there))
        server.start()
        train(config_of({
            "model": str(model), "task": str(tmp_path / "task.jsonl"), "steps": STEPS,
            "output_dir": str(output), "server.url": here.recv(), "server.overlap": overlap,
            "rollout.prompts": 2, "rollout.num_samples": 4, "rollout.max_new_tokens": 8,
            "rollout.max_prompt_tokens": 32, "update.mini_batches": 2, "update.epochs": 120,
            "reward": "tests.training.test_server:likes_short", "evaluation.every": 0,
            "logging.samples_every": 0,
        }))  # fmt: skip
        here.send("end")
        server.join()
        lines = [json.loads(x) for x in (output / "metrics.jsonl").read_text().splitlines()][4:-1]
        return [statistics.median(line[x] for line in lines) for x in ("step_time", "time/sample")]

    (alone, sampling), (overlapped, waiting) = measure(False), measure(True)
    print(
        f"\nserver {seconds} s: {alone:.2f} s a step, {sampling:.2f} of them sampling; "
        f"overlapped {overlapped:.2f} s, {waiting:.2f} of them waiting"
    )
    assert overlapped < alone
