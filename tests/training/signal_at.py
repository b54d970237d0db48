"""A signal to this process at a moment that a user can see.

`SIGNAL_AT=reward:3:SIGKILL:0` in the environment sends SIGKILL when the reward is called for the
third time, and has the call take 0 seconds longer. The moments:

* `reward`: the reward is called.
* `draw`: completions are being drawn, of a step or of an evaluation.
* `update`: so many seconds after the reward has been called, while the policy learns from it.
* `compile`: a program is about to be compiled.
* `write`: the arrays of a checkpoint are on the host, and are being written.

In place of a signal, the name of an error of Python's, such as `MemoryError`, raises it.
"""

import builtins
import os
import signal
import sys
import threading
import time

import jax

from twinkle_jax.rollout import engine

EVENTS = {
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "compile",
    "/jax/orbax/write/blocking_d2h_duration_secs": "write",
}


class SignalAt:
    """Sends this process a signal when its moment has come."""

    def __init__(self, description):
        self.moment, count, name, seconds = description.split(":")
        self.count, self.signal, self.seconds = int(count), name, float(seconds)
        jax.monitoring.register_event_listener(self.on_event)
        jax.monitoring.register_event_duration_secs_listener(self.on_event)
        if self.moment == "draw":
            self.watch_draws()

    def watch_draws(self):
        generate = engine.generate

        def watched(*args, **options):
            drawn = generate(*args, **options)  # the devices work, the host does not wait for them
            self.reach()
            return drawn

        engine.generate = watched

    def on_event(self, event, *args, **kwargs):
        if EVENTS.get(event) == self.moment:
            self.reach()

    def on_reward(self):
        if self.moment in ("reward", "update"):
            self.reach()

    def reach(self):
        self.count -= 1
        if self.count == 0 and self.moment == "update":
            threading.Timer(self.seconds, self.send).start()
        elif self.count == 0:
            self.send()
            time.sleep(self.seconds)

    def send(self):
        sys.stdout.write(f"signal at {self.moment}\n")
        sys.stdout.flush()
        if not self.signal.startswith("SIG"):
            raise getattr(builtins, self.signal)("of this process alone")
        os.kill(os.getpid(), signal.Signals[self.signal])


SIGNAL = SignalAt(os.environ["SIGNAL_AT"]) if "SIGNAL_AT" in os.environ else None
