"""What processes tell each other, as far as one process can see it; the rest needs several."""

import jax
import pytest

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
