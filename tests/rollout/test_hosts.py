"""What processes tell each other: seen from one, and by two that are started."""

import math

import jax
import numpy as np
import pytest

from tests import processes
from tests.rollout.host_scenarios import LONG, VALUES
from twinkle_jax.rollout import hosts


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_each_item_is_worked_on_by_one_process(monkeypatch, processes):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for count in range(20):
        done = []
        for index in range(processes):
            monkeypatch.setattr(jax, "process_index", lambda index=index: index)
            done += range(count)[hosts.deal(count)]
        assert done == list(range(count))


def test_one_process_computes_and_raises_as_without_hosts():
    assert hosts.share("adding", lambda: 1 + 1) == [2]
    with pytest.raises(ZeroDivisionError):
        hosts.together("dividing", lambda: 1 / 0)
    with pytest.raises(ValueError, match="mesh"):
        hosts.fail(ValueError("mesh must fit"))


def test_what_two_processes_tell_each_other():
    ended = processes.run("tests.rollout.host_scenarios", devices=2)
    assert [process.code for process in ended] == [0, 0], ended
    first, second = facts = [process.result for process in ended]
    # Rows that one process has, and rows that both have: each is read by one of them.
    assert first["held"] == [True] * 4 + [False] * 4
    assert second["held"] == [False] * 4 + [True] * 4
    assert (first["held of what all have"], second["held of what all have"]) == (
        [True] * 8,
        [False] * 8,
    )
    for number, fact in enumerate(facts):
        rows = np.arange(8)[:, None] // 4 == number
        np.testing.assert_array_equal(fact["read"], np.where(rows, VALUES, 0))
        np.testing.assert_array_equal(fact["read if spread"], VALUES)
        assert fact["shared"] == [[0, "short", math.inf], [1, LONG, math.inf]]
        assert fact["decided"] == "by 0"
        assert fact["agreed"] == number
        kind, message = fact["failed"]
        assert kind == "SharedError"
        assert message.startswith("process 1 of 2 (")
        assert message.endswith("counting sheep: ZeroDivisionError: of sheep")
        kind, message = fact["interrupted"]
        assert kind == "InterruptedRunError"
        assert message.startswith("process 0 of 2 (")
        assert message.endswith(") received SIGTERM")
        # An error is told, also where the other process has a signal; once is enough.
        assert fact["failed and interrupted"][0] == "SharedError"
        assert fact["failed in both"] == ["SharedError", "mesh must fit"]
        assert fact["in another order"] == [0, 1]
        assert fact["shared error"] == ["SharedError", "mesh must fit"]
        np.testing.assert_array_equal(fact["merged"], np.arange(8.0) ** 2)
        np.testing.assert_array_equal(fact["of the first"], VALUES[:, 1])
        only = np.where(np.arange(8) == 2, VALUES[:, 1], np.nan)
        np.testing.assert_array_equal(fact["of one row"], only)
        # There is room for what a call has sent before, up to a limit.
        assert fact["transfers"] == [[1, 1, 1], [1, 1, 1], [2, 1, 1], [2, 1, 1], [2, 2, 2]]
        assert fact["names"] == ["by 0"]
        assert fact["is first"] is (number == 0)
    assert (first["part"], second["part"]) == ([0, 3], [3, 5])
