"""A real vLLM server on this machine, in an environment of its own."""

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

PYTHON = "TWINKLE_JAX_VLLM_PYTHON"
_SECONDS = 400
_TRITON = Path(__file__).parent / "triton_on_cpu"


@contextmanager
def vllm_server(model, log, *options, experts=False):
    """Start a server and give its address; a test fails where none starts.

    Args:
        model: a checkpoint.
        log: a file for what the server writes.
        options: of the command, further ones.
        experts: whether it reports the experts of a mixture.
    """
    python = os.environ.get(PYTHON)
    if not python:
        pytest.fail(f"{PYTHON} must name the Python of an environment with vLLM; see docs/sampling")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "64", "--max-num-seqs", "64", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs", *options]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if experts:
        command.append("--enable-return-routed-experts")
        settings |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(_TRITON)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, log)
        yield url
    finally:
        _stop(process)


def _wait(process, url, log):
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"vLLM ended before it was ready:\n{log.read_text()[-3000:]}")
        try:
            with urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310  (our own server)
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vLLM was not ready within {_SECONDS} seconds:\n{log.read_text()[-3000:]}")


def _stop(process):
    """End the server and the processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
