"""Episodes with a real server of OpenEnv 0.10.

`TWINKLE_JAX_OPENENV_PYTHON` names the Python of an environment with `openenv==0.10.0`.
"""

import os
import socket
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.rollout import games
from tests.rollout.test_multi_turn import sample
from twinkle_jax.rollout import Action, find_environment

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        "TWINKLE_JAX_OPENENV_PYTHON" not in os.environ,
        reason="TWINKLE_JAX_OPENENV_PYTHON must name a Python with `pip install openenv==0.10.0`",
    ),
]


def start(port):
    script = Path(__file__).with_name("openenv_server.py")
    server = subprocess.Popen(
        [os.environ["TWINKLE_JAX_OPENENV_PYTHON"], str(script), str(port)],
        stdout=subprocess.DEVNULL,
    )
    for _ in range(300):
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
        except OSError:
            assert server.poll() is None
            time.sleep(0.2)
        else:
            return server
    raise TimeoutError("the server does not answer")


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start(port)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def test_episodes_are_those_of_the_same_game_in_this_process(url):
    here, there = sample(games.Guess), sample(find_environment(f"openenv:{url}"))
    assert [e.as_record() for e in here.episodes] == [e.as_record() for e in there.episodes]
    assert [e.rows for e in here.episodes] == [e.rows for e in there.episodes]
    assert not there.failed.any()


def test_calls_are_actions_and_wrong_ones_are_told(url):
    environment = find_environment(f"openenv:{url}")()
    assert environment.reset({}, 7) == "0-9="
    parameters = environment.tools[0]["function"]["parameters"]
    assert parameters["required"] == ["guess"]
    call = '<tool_call>{"name": "act", "arguments": {"guess": "3"}}</tool_call>'
    assert environment.step(Action(call))[:3] == ([{"role": "tool", "content": "+"}], 0.0, False)
    wrong = environment.step(Action(call.replace("guess", "guesses")))
    assert wrong[0][0]["content"].startswith("Error: VALIDATION_ERROR")
    assert wrong[3] == {"tool_errors": 1}
    assert environment.step(Action("7"))[1:3] == (1.0, True)
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR"):
        environment.step(Action("crash"))
    environment.close()


def test_no_session_is_left_open(url):
    """The server allows 16 at a time: five times eight episodes leave none behind."""
    for _ in range(5):
        assert not sample(find_environment(f"openenv:{url}")).failed.any()


def test_a_server_that_goes_away_is_a_lost_connection():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start(port)
    made = []

    class Dying:
        def __init__(self):
            self.inner = find_environment(f"openenv:http://127.0.0.1:{port}")()
            self.reset, self.close, self.count = self.inner.reset, self.inner.close, 0
            made.append(self)

        def step(self, action):
            if server.poll() is None:
                server.kill()
                server.wait()
            return self.inner.step(action)

    try:
        rollout = sample(Dying, max_failed=1.0)
    finally:
        server.kill()
        server.wait()
    causes = {e.cause for e in rollout.episodes if e.failed}
    assert rollout.failed.any()
    assert causes <= {"connection", "raised"}
    assert made
