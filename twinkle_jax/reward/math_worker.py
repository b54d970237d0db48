"""The process in which math-verify runs: answers come in as lines of JSON, verdicts go out.

It is started as a script, knows nothing of the rest, and can be killed at any time. What it must
not do while it reads a model's answer, an audit hook refuses: files, processes, connections.
"""

import contextlib
import json
import logging
import os
import sys
from typing import Any

_REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.")


def _verdict(verify: Any, parse: Any, answer: str, truth: str) -> bool | None:
    """Whether two answers are the same; None if the truth cannot be read."""
    gold = parse(truth)
    if not gold:
        return None
    return bool(verify(gold, parse(answer), timeout_seconds=None))


def _load() -> tuple[Any, Any]:
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    settings = [LatexExtractionConfig(boxed_match_priority=0)]  # no Python expressions

    def read(answer: str) -> Any:
        return parse(
            "\\boxed{" + answer + "}",
            extraction_config=settings,
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )

    _verdict(verify, read, "\\frac{1}{2}", "0.5")  # what it imports late, it imports now
    return verify, read


def _limit(gigabytes: int, seconds: float | None) -> None:
    """Bound memory and processor time, so that nothing outlives a parent that was killed."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    with contextlib.suppress(ValueError, OSError):  # a system that has no such limit
        if seconds is None:
            resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
        else:
            soft = int(used.ru_utime + used.ru_stime + seconds) + 2
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED) and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(f"{event} while an answer is read")
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise PermissionError("a file opened for writing while an answer is read")


def _serve(timeout: float) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print goes nowhere
    sys.dont_write_bytecode = True
    try:
        verify, parse = _load()
        _limit(2, None)
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    sys.addaudithook(_refuse)
    for line in sys.stdin:
        answer, truth = json.loads(line)
        _limit(2, timeout)
        try:
            verdict = _verdict(verify, parse, answer, truth)
        except (Exception, RecursionError):
            verdict = False
        print(json.dumps({"verdict": verdict}), file=answers, flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
