"""Tools that fail in every way, for processes of their own."""

import os
import signal
import subprocess
import sys
import time
from array import array

COUNT = [0]


def add(x: int, y: int = 1) -> int:
    """Add two numbers."""
    return x + y


async def later(text: str) -> str:
    """Answer later."""
    return text


def measure() -> dict[str, object]:
    """Measure, in an array that has `tolist` as NumPy's have."""
    return {"counts": array("i", [1, 2])}


def count() -> int:
    """Count calls, in a state that no call sees of another."""
    COUNT[0] += 1
    return COUNT[0]


def identify() -> int:
    """Name the process."""
    return os.getpid()


def show() -> dict:
    """Return what is no JSON."""
    sys.stdout.write("noise\n" * 1000)
    return {1, 2}


def divide() -> float:
    """Raise."""
    return 1 / 0


def hang() -> None:
    """Do not answer."""
    time.sleep(60)


def spin() -> None:
    """Compute for ever, deaf to polite signals."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def fork_and_hang(path: str) -> None:
    """Leave processes of sessions of their own, and hang."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                _remember(path)
                time.sleep(60)
            os._exit(0)
    time.sleep(60)


def fork_and_return(path: str) -> str:
    """Come back twice."""
    if os.fork() == 0:
        os.setsid()
        _remember(path)
        return "child"
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    while not os.path.getsize(path):
        time.sleep(0.01)
    return "parent"


def _remember(path: str) -> None:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


def die() -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    """End as a fault in C does."""
    signal.raise_signal(signal.SIGSEGV)


def leave() -> None:
    """End without a word."""
    os._exit(0)


def close_all() -> None:
    """Close what the answer would go through."""
    os.closerange(0, 256)


def quit_python() -> None:
    """Ask Python to end."""
    sys.exit(3)


def eat() -> int:
    """Take memory."""
    return len(bytearray(1 << 33))


def recurse() -> None:
    """Call itself."""
    recurse()


def lose_connection() -> None:
    """Lose a connection."""
    raise ConnectionResetError("gone")


def flood() -> str:
    """Return 100 MB."""
    return "12" * (50 << 20)


def garbage() -> bytes:
    """Return what is no UTF-8."""
    return b"\xff\xfe1"


def half_character() -> str:
    """Return half a character."""
    return "\ud800"


def forge() -> None:
    """Answer in the process's own words, and with broken lines."""
    for number in range(3, 64):
        try:
            os.write(number, b'{"value": 7\n\xff\n{"failed": 3}\n')
        except OSError:
            continue
    time.sleep(60)


def kill_all() -> None:
    """Kill the process that runs all tools."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
