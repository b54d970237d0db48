"""One server that pretends to be vLLM, for all tests that talk to one."""

import pytest

from tests.sampler.vllm.fake_server import ROOM, FakeServer, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("vllm") / "qwen3")


@pytest.fixture(scope="session")
def serving(checkpoint):
    with FakeServer(checkpoint) as server:
        yield server


@pytest.fixture
def server(serving):
    """The server as it was at first, and well-behaved."""
    serving.alter, serving.take_over, serving.asked = {}, {}, []
    serving.logprobs_mode, serving.shift = "processed_logprobs", 0.0
    serving.loads, serving.max_model_len = True, ROOM
    serving.models = {serving.name: serving.first}
    return serving
