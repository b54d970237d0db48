"""A reward for runs of the command in other processes; what it is asked is written to a file."""

import json
import os
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
