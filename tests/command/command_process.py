"""The command in a process of its own, which may get a signal when a function is called.

`SIGNAL_AT=grad_step:3:SIGKILL:0` sends SIGKILL at the third call of a function of that name in
twinkle_jax, which then takes 0 seconds longer; `compile` stands for the compilation of a program.
"""

import os
import signal
import sys
import time

import jax

from twinkle_jax.command import main

COMPILE = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # told just before XLA compiles


class SignalAt:
    """Sends this process a signal when its moment has come."""

    def __init__(self, described):
        self.name, count, number, seconds = described.split(":")
        self.count, self.number = int(count), signal.Signals[number]
        self.seconds = float(seconds)

    def begin(self):
        if self.name == "compile":
            jax.monitoring.register_event_duration_secs_listener(self.compiled)
        else:
            sys.setprofile(self.called)

    def called(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name == self.name and "twinkle_jax" in code.co_filename:
            self.once_more()

    def compiled(self, event, duration, **kwargs):
        if event == COMPILE:
            self.once_more()

    def once_more(self):
        self.count -= 1
        if self.count == 0:
            sys.stdout.write(f"signal at {self.name}\n")
            sys.stdout.flush()
            os.kill(os.getpid(), self.number)
            time.sleep(self.seconds)


if __name__ == "__main__":
    if "SIGNAL_AT" in os.environ:
        SignalAt(os.environ["SIGNAL_AT"]).begin()
    sys.exit(main())
