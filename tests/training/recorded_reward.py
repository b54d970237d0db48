"""A reward for runs of the command in other processes; what it is asked is written to a file."""

import json
import os
import time
from pathlib import Path

from tests.training.signal_at import SIGNAL


def short_answers(trajectories, truths):
    """Like completions of fewer than three characters."""
    texts = [[message["content"] for message in t["messages"]] for t in trajectories]
    with Path(os.environ["RECORD"]).open("a") as file:
        file.write(json.dumps(texts) + "\n")
    if SIGNAL is not None:
        SIGNAL.on_reward()
    return [float(len(contents[-1]) < 3) for contents in texts]


def faulty_short_answers(trajectories, truths):
    """The same, but for one call, which `FAULT=raise:3` in the environment names."""
    rewards = short_answers(trajectories, truths)
    kind, _, number = os.environ.get("FAULT", ":").partition(":")
    calls = len(Path(os.environ["RECORD"]).read_text().splitlines())
    if not number or calls != int(number):
        return rewards
    if kind == "raise":
        raise ZeroDivisionError("of the reward")
    if kind == "hang":
        time.sleep(600)
    return [float("nan")] * len(rewards)
