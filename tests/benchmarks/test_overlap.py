"""What it saves that a server samples during updates.

`python -m pytest tests/benchmarks/test_overlap.py -s -p no:xdist`. The server of the tests, with
a random Qwen3 of 12,000 parameters, sleeps as long as completions are to take; updates of 30 epochs
take about as long. A minute.
"""

import json
import statistics
import time

import pytest

from tests.sampler.vllm.fake_server import FakeServer, write_checkpoint
from tests.training.options import config_of
from twinkle_jax.training import train

STEPS = 12


@pytest.mark.parametrize("seconds", [0.3, 0.6])
def test_overlap(tmp_path, seconds):
    model = write_checkpoint(tmp_path / "model")
    rows = [{"prompt": f"{a}+2=", "answer": str(a + 2)} for a in range(6)]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def step_seconds(overlap):
        output = tmp_path / f"overlap-{overlap}"
        with FakeServer(model) as server:

            def wait(handler):
                if handler.body["n"] == 4:  # not a probe
                    time.sleep(seconds)
                return False

            server.take_over["/v1/completions"] = wait
            train(config_of({
                "model": str(model), "task": str(tmp_path / "task.jsonl"), "steps": STEPS,
                "output_dir": str(output), "server.url": server.url, "server.overlap": overlap,
                "rollout.prompts": 2, "rollout.num_samples": 4, "rollout.max_new_tokens": 8,
                "rollout.max_prompt_tokens": 32, "update.mini_batches": 2, "update.epochs": 30,
                "reward": "tests.training.test_server:likes_short", "evaluation.every": 0,
                "logging.samples_every": 0,
            }))  # fmt: skip
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        return statistics.median([line["step_time"] for line in lines][4:-1])

    alone, overlapped = step_seconds(False), step_seconds(True)
    print(f"\nserver {seconds} s: {alone:.2f} s a step, overlapped {overlapped:.2f} s")
    assert overlapped < alone
