"""Episodes over a WebSocket that breaks off in every way, and a server that restarts."""

import threading
import time

import numpy as np
import pytest

from tests.rollout.test_multi_turn import check_scores, sample
from twinkle_jax.rollout import Action, OpenEnvEnvironment, ProcessLimits, find_environment

pytest.importorskip("websockets", reason="pip install 'twinkle-jax[openenv]'")
pytestmark = pytest.mark.exhaustive

from tests.rollout.socket_server import ANSWER, FAULTS, Server, answer  # noqa: E402


def play(server, **options):
    return sample(lambda: OpenEnvEnvironment(server.url, 3.0), max_failed=1.0, **options)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_off_is_no_episode(fault):
    how, cause = FAULTS[fault]
    honest = Server(None)
    try:
        turns = np.asarray([len(e.turns) for e in play(honest).episodes])
    finally:
        honest.stop()
    server = Server(how)
    try:
        rollout = play(server)
    finally:
        server.stop()
    odd = np.asarray([e.seed % 2 == 1 for e in rollout.episodes])
    np.testing.assert_array_equal(rollout.failed, odd & (turns > 2))
    assert {e.cause for e in rollout.episodes if e.failed} == {cause}
    assert {e.attempts for e in rollout.episodes if e.failed} == {2}
    check_scores(rollout)
    deadline = time.monotonic() + 5
    while server.open and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.open == 0  # no session is left


def test_the_time_limit_of_a_run_is_that_of_each_answer():
    server = Server(lambda socket: time.sleep(3))
    try:
        environment = find_environment(f"openenv:{server.url}", limits=ProcessLimits(0.5))()
        environment.reset({}, 1)
        environment.step(Action("1"))
        with pytest.raises(TimeoutError):
            environment.step(Action("1"))
        environment.close()
    finally:
        server.stop()


def test_a_step_without_a_reward_has_reward_0():
    server = Server(lambda socket: socket.send(answer(ANSWER | {"reward": None})))
    try:
        environment = OpenEnvEnvironment(server.url, 3.0)
        environment.reset({}, 1)
        rewards = [environment.step(Action("1"))[1] for _ in range(2)]
        environment.close()
    finally:
        server.stop()
    assert rewards == [0.25, 0.0]


def test_each_call_of_a_turn_is_an_action():
    """Only the first was, and the policy read one answer to all of them."""
    call = '<tool_call>{"name": "act", "arguments": {"guess": "3"}}</tool_call>'
    over = ANSWER | {"observation": {"text": "over"}, "done": True}
    server = Server(lambda socket: socket.send(answer(over)))  # the second of an odd seed
    try:
        environment = OpenEnvEnvironment(server.url, 3.0)
        environment.reset({}, 2)
        messages, reward, done, info = environment.step(
            Action(call * 3 + "<tool_call>{</tool_call>")
        )
        assert [m["role"] for m in messages] == ["tool"] * 4
        assert messages[3]["content"].startswith("Error: ")
        assert (reward, done, info) == (0.75, False, {"tool_errors": 1})
        environment.reset({}, 1)
        messages, reward, done, _ = environment.step(Action(call * 3))
        assert [m["content"] for m in messages] == ["1", "over"]
        assert (reward, done) == (0.5, True)
        environment.close()
    finally:
        server.stop()


def test_text_that_looks_like_a_call_of_another_tool_is_text():
    """Its arguments were sent as an action, which the server refused."""
    other = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    call = '<tool_call>{"name": "act", "arguments": {"guess": "3"}}</tool_call>'
    server = Server(None)
    try:
        environment = OpenEnvEnvironment(server.url, 3.0)
        environment.reset({}, 2)
        for text in ("Action: guess[3]", other):
            messages, *_, info = environment.step(Action(text))
            assert (messages[0]["role"], info) == ("user", {})
        messages, *_, info = environment.step(Action(other + call))
        assert "no tool 'look'" in messages[1]["content"]
        assert info == {"tool_errors": 1}
        environment.close()
    finally:
        server.stop()
    assert server.actions == [{"guess": "Action: guess[3]"}, {"guess": other}, {"guess": "3"}]


def test_a_server_that_restarts_loses_no_episode():
    """Its sessions are lost; each is begun once more, on the server that is there then."""
    server = Server(None)
    expected = [e.as_record() for e in play(server).episodes]

    def restart(socket):
        server.fault = None
        socket.socket.shutdown(2)
        threading.Thread(target=start_again).start()

    def start_again():
        nonlocal server
        server.stop()
        server = Server(None, server.port)

    server.fault = restart
    url = server.url

    class Patient(OpenEnvEnvironment):
        """Waits until the server answers."""

        def __init__(self):
            for _ in range(50):
                try:
                    super().__init__(url, 2.0)
                except OSError:
                    time.sleep(0.1)
                else:
                    return

    rollout = sample(Patient, max_failed=0.0)
    server.stop()
    assert not rollout.failed.any()
    assert any(e.attempts == 2 for e in rollout.episodes)
    records = [e.as_record() | {"attempts": 1} for e in rollout.episodes]
    assert records == [record | {"attempts": 1} for record in expected]
