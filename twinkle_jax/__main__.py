"""The script `twinkle-jax`, and `python -m twinkle_jax`: Ctrl-C ends it with one line."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType


def main() -> int:
    """Run the command, which is imported after the handler of Ctrl-C is installed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as after nohup
        signal.signal(signal.SIGINT, _end)
    from twinkle_jax.command import main as run_command

    return run_command()


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: a KeyboardInterrupt may be lost in a callback of JAX, and is a traceback.

    Files are replaced in one step, and `train` has a handler of its own while a run is active.
    """
    with suppress(Exception):
        sys.stdout.flush()
    os.write(2, b"twinkle-jax: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
