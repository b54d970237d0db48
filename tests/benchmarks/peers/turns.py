"""A reward that makes a run wait for its turn, and so tells how long each of its steps took.

From one call of the reward to the next a library finishes its update and draws the next rollout:
one whole step, whatever the library does in it. The time between a call and the go-ahead is not its
own. Where nobody gives one, the run goes on by itself, and prints.
"""

import os
import sys
import time

_REPLIES = "STEP_TIMES"  # the file descriptor that times are written to


class Turns:
    """Scores completions by their share of different words, one call a step.

    Args:
        room: the most tokens of a completion; shorter ones have one token more than words.
    """

    def __init__(self, room):
        self._room = room
        self._began = time.perf_counter()
        self._processor = time.process_time()

    def __call__(self, completions):
        """Give the scores, once it is this run's turn again."""
        words = [completion.split() for completion in completions]
        self.count(sum(min(len(completion) + 1, self._room) for completion in words))
        return [len(set(completion)) / max(len(completion), 1) for completion in words]

    def count(self, tokens):
        """Tell how long the step before took, and wait until the next one may begin.

        Args:
            tokens: of the rollout that has just been drawn: an update by them follows.
        """
        took = time.perf_counter() - self._began, time.process_time() - self._processor
        line = f"{took[0]} {took[1]} {tokens}\n"
        if replies := os.environ.get(_REPLIES):
            os.write(int(replies), line.encode())
            if not sys.stdin.readline():
                os._exit(0)
        else:
            print("step", line, end="", flush=True)
        self._began, self._processor = time.perf_counter(), time.process_time()


def environment(replies):
    """Give a contestant's environment: as users compile, and its times to a file descriptor."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return {**kept, _REPLIES: str(replies)}
