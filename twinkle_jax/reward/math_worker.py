"""The worker process of math-verify: reads answers as lines of JSON, and writes verdicts.

It is started as a script, so that pebble's processes never import the user's script
(`test_in_a_script_as_one_writes_it`), nothing is forked from a process in which JAX runs, and
results of workers are unpickled here and not where the policy is trained.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

_MEMORY = 2 << 30  # bytes of address space for each worker
_START = 120.0  # seconds until the first worker must be ready
_SMALL = 1e-3  # math-verify rounds to six decimal places, which leaves fewer than three digits
_TOLERANCE = 1e-3  # of small numbers, relative
_REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.")


@cache
def math_verify() -> tuple[Any, Any, Any]:
    """Load math-verify's parser and comparison, and sympy's equations."""
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Eq, FiniteSet, Interval, MatrixBase, Tuple

    settings = [LatexExtractionConfig(boxed_match_priority=0)]  # no Python expressions

    def read(answer: str) -> list[Any]:
        return parse(
            "\\boxed{" + answer + "}",
            extraction_config=settings,
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )

    def numbers(parsed: Any) -> list[Any]:
        """List the numbers of an answer: itself, its entries, or the ends of an interval."""
        value = parsed.rhs if isinstance(parsed, Eq) else parsed
        if getattr(value, "is_number", False):
            return [value.evalf().doit()]
        entries = (value.start, value.end) if isinstance(value, Interval) else value
        listed = isinstance(value, Interval | Tuple | FiniteSet | MatrixBase)
        return [number for entry in entries for number in numbers(entry)] if listed else []

    def close(truth: Any, answer: Any) -> bool:
        is_small = 0 < abs(truth) < _SMALL
        return not is_small or abs(truth - answer) <= _TOLERANCE * abs(truth)

    def agree(truth: Any, answer: Any) -> bool:
        truths, answers = numbers(truth), numbers(answer)
        if isinstance(truth, FiniteSet) or isinstance(answer, FiniteSet):  # in any order
            return all(any(close(x, y) for y in answers) for x in truths)
        return all(map(close, truths, answers))

    def equal(truth: list[Any], answer: list[Any]) -> bool:
        if not verify(truth, answer, timeout_seconds=None):
            return False
        if truth == answer:
            return True
        pairs = [(x, y) for x in truth for y in answer if numbers(x) and numbers(y)]
        return not pairs or any(agree(x, y) for x, y in pairs)

    return read, equal, Eq


def compare(answer: str, truth: str, seconds: float) -> str:
    """Compare an answer with the truth; runs in a worker."""
    _limit_processor_time(seconds)
    read, equal, equation = math_verify()
    try:
        gold = read(truth)
        if not gold:
            return "unreadable"
        parsed = read(answer)
        # math-verify takes the right-hand side of an equation, so 6 = 5 would be right for 5
        sides = [x for item in parsed if hasattr(item, "atoms") for x in item.atoms(equation)]
        if any(not x.free_symbols and not equal([x.lhs], [x.rhs]) for x in sides):
            return "different"
        return "equal" if equal(gold, parsed) else "different"
    except Exception:
        return "different"


def _limit_processor_time(seconds: float) -> None:
    """Bound the processor time of a task, so that no worker outlives a parent that was killed."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(
            resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, hard)
        )


def prepare_worker() -> None:
    """Limit what a worker may do, after it has loaded what it needs."""
    read, equal, _ = math_verify()
    equal(read("\\frac{1}{2}"), read("0.5"))  # triggers lazy imports of math-verify
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # pebble's own handler is Python and would wait for arithmetic in C to return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.dont_write_bytecode = True
    sys.addaudithook(refuse)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to write files, start processes or connect while a model's answer is read."""
    if event.startswith(_REFUSED) and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(f"{event} while an answer is read")
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise PermissionError("a file opened for writing while an answer is read")


def new_pool(workers: int) -> Any:
    """Start a pool whose workers are forked from a small process that has loaded math-verify."""
    from pebble import ProcessPool

    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:  # not on Windows
        context.set_forkserver_preload(["math_verify", "__main__"])
    pool = ProcessPool(workers, initializer=prepare_worker, context=context)
    pool.schedule(os.getpid).result(_START)
    return pool


def serve(workers: int, seconds: float) -> None:
    """Answer each line of standard input, `[tasks, budget]`, with a line of verdicts.

    A verdict is None where a task took too long, its worker died, or the budget was used up. A
    broken pool ends this process, and the parent starts another.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard what libraries print
    pool = new_pool(workers)
    for line in sys.stdin:
        tasks, budget = json.loads(line)
        futures = [pool.schedule(compare, args=(*task, seconds), timeout=seconds) for task in tasks]
        late = wait(futures, timeout=budget).not_done
        errors = [None if x in late else x.exception() for x in futures]
        broken = [error for error in errors if isinstance(error, BrokenProcessPool)]
        if broken:
            raise broken[0]
        verdicts = [
            None if x in late or error else x.result()
            for x, error in zip(futures, errors, strict=True)
        ]
        print(json.dumps(verdicts), file=answers, flush=True)
        if late:
            pool.stop()
            pool.join()
            pool = new_pool(workers)


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
