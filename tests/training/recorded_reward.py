"""Rewards for runs of the command in other processes; what they are asked is written to a file."""

import json
import os
from pathlib import Path


def short_answers(trajectories, truths):
    """Like completions of fewer than three characters."""
    said = [[message["content"] for message in t["messages"]] for t in trajectories]
    with Path(os.environ["RECORD"]).open("a") as file:
        file.write(json.dumps(said) + "\n")
    return [float(len(texts[-1]) < 3) for texts in said]
