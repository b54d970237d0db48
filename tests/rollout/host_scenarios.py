"""What each of two processes tells the other; `test_hosts.py` starts them."""

import json
import sys
from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils

from tests.processes import join
from twinkle_jax.model import make_mesh
from twinkle_jax.rollout import hosts

VALUES = np.arange(24, dtype=np.float32).reshape(8, 3)
LONG = "é" * 5000  # more bytes than a message has room for


def spread(*axes):
    sharding = jax.NamedSharding(make_mesh(fsdp=jax.device_count()), jax.P(*axes))
    return jax.make_array_from_callback(VALUES.shape, sharding, lambda index: VALUES[index])


def outcome(call):
    """The name and the message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def fail_in(process, error):
    def compute():
        if jax.process_index() == process:
            raise error

    return outcome(lambda: hosts.together("counting sheep", compute))


def transfers_of(text):
    """How many transfers a message takes, sent three times by one process."""
    counts, send = [], multihost_utils.process_allgather

    def counted(*args, **options):
        counts[-1] += 1
        return send(*args, **options)

    with mock.patch.object(multihost_utils, "process_allgather", counted):
        for _ in range(3):
            counts.append(0)
            texts = hosts.share(f"send {len(text)}", lambda: text if hosts.is_first() else "")
            assert texts == [text, ""]
    return counts


def fail_in_one_and_interrupt_the_other():
    def compute():
        raise ZeroDivisionError if jax.process_index() else hosts.InterruptedRunError

    return outcome(lambda: hosts.together("x", compute))


def fail_in_both():
    """As `fail` does inside of a call that is shared."""
    return outcome(lambda: hosts.together("x", lambda: hosts.fail(ValueError("mesh must fit"))))


def shared_in_another_order():
    """As where the devices of the second process are listed first."""
    send = multihost_utils.process_allgather
    with mock.patch.object(multihost_utils, "process_allgather", lambda x: send(x)[::-1]):
        return hosts.share("x", jax.process_index)


def numbers():
    """Of its own rows; what it gives for the others must not be read."""
    held = hosts.held_rows(spread("fsdp"))
    return {"square": np.where(held, np.arange(8.0) ** 2, -1).astype(np.float32)}


def facts():
    index, rows = jax.process_index(), spread("fsdp")
    first_alone = np.full(8, index == 0)
    return {
        "held": hosts.held_rows(rows).tolist(),
        "held of what all have": hosts.held_rows(spread()).tolist(),
        "read": hosts.read_held(rows).tolist(),
        "read if spread": hosts.read_if_spread(rows).tolist(),
        "shared": hosts.share("x", lambda: [index, LONG if index else "short", float("inf")]),
        "decided": hosts.first_decides("x", lambda: f"by {index}"),
        "agreed": hosts.agreed("x", lambda: index),
        "failed": fail_in(1, ZeroDivisionError("of sheep")),
        "interrupted": fail_in(0, hosts.InterruptedRunError("received SIGTERM")),
        "failed and interrupted": fail_in_one_and_interrupt_the_other(),
        "failed in both": fail_in_both(),
        "in another order": shared_in_another_order(),
        "shared error": outcome(lambda: hosts.fail(ValueError("mesh must fit"))),
        "merged": hosts.merge_rows("x", hosts.held_rows(rows), numbers)["square"].tolist(),
        "of the first": hosts.merge_rows("x", first_alone, lambda: {"a": VALUES[:, 1]})[
            "a"
        ].tolist(),
        "of one row": hosts.merge_rows(
            "x", first_alone & (np.arange(8) == 2), lambda: {"a": VALUES[:, 1]}
        )["a"].tolist(),
        "names": sorted(hosts.merge_rows("x", first_alone, lambda: {f"by {index}": VALUES[:, 0]})),
        "transfers": [
            transfers_of("short"),
            transfers_of("x" * 2046),  # with its quotes, the room of a first message
            transfers_of("x" * 2047),
            transfers_of(LONG),
            transfers_of(LONG * 20),
        ],
        "part": [hosts.deal(5).start, hosts.deal(5).stop],
        "is first": hosts.is_first(),
    }


if __name__ == "__main__":
    join()
    sys.stdout.write(json.dumps(facts()) + "\n")
