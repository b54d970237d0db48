"""Data sets in files: prompts and answers in JSON Lines, and GSM8K as it is published."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twinkle_jax.data.hub_data import parquet_records
from twinkle_jax.data.trajectory import Message, Trajectory

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_ROLES = ("system", "user", "assistant", "tool")


def read_jsonl(
    path: str | Path,
    *,
    system: str | None = None,
    check_answer: Callable[[str], bool] | None = None,
) -> list[Trajectory]:
    r"""Read prompts and answers from a file with one JSON object a line.

    Args:
        path: a file of lines such as `{"prompt": "2+2=", "answer": "4"}`. `"messages"` may stand
            in place of `"prompt"`; what else a line holds is kept in `user_data`.
        system: what the system says first in each conversation.
        check_answer: returns False for an answer that no reward could read.

    Returns:
        A trajectory for each line, its answer as `'ground_truth'` in `user_data`.

    Raises:
        ValueError: for a line that is not such a record, named by its number, or no lines at all.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "sums.jsonl")
        >>> _ = path.write_text('{"prompt": "2+2=", "answer": 4}\n')
        >>> read_jsonl(path)[0]["user_data"]
        [('ground_truth', '4')]
    """
    found = []
    for where, record in _records(path):
        messages = _messages(where, record)
        answer = record.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise ValueError(f"{where} must have an 'answer', text or a number, got {answer!r:.80}")
        text = str(answer).strip()
        if not text or (check_answer is not None and not check_answer(text)):
            raise ValueError(f"{where} must have an 'answer' that can be read, got {answer!r:.80}")
        kept = [(k, x) for k, x in record.items() if k not in ("prompt", "messages", "answer")]
        found.append(_trajectory(messages, text, kept, system))
    return found


def read_gsm8k(
    path: str | Path, *, system: str | None = None, instruction: str = ""
) -> list[Trajectory]:
    r"""Read GSM8K from a file in its own format.

    Args:
        path: JSON Lines with `"question"` and `"answer"`, whose last line is `#### 1,234`; or, as
            the hub has it, a `.parquet` file with these columns.
        system: what the system says first in each conversation.
        instruction: what follows each question.

    Returns:
        A trajectory for each problem. `'ground_truth'` is the number without commas, `'solution'`
        the text before it.

    Raises:
        ValueError: for a line that is not such a record, named by its number, or no lines at all.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "train.jsonl")
        >>> _ = path.write_text('{"question": "2 dozen?", "answer": "2*12\\n#### 24"}\n')
        >>> read_gsm8k(path)[0]["user_data"]
        [('ground_truth', '24'), ('solution', '2*12')]
    """
    found = []
    for where, record in _records(path):
        question, answer = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not question.strip() or not isinstance(answer, str):
            raise ValueError(f"{where} must have a 'question' and an 'answer', got {_keys(record)}")
        solution, hashes, number = answer.rpartition("####")
        number = number.strip().replace(",", "")
        if not hashes or not _NUMBER.fullmatch(number):
            raise ValueError(
                f"{where} must end its 'answer' with '#### number', got {answer[-40:]!r}"
            )
        said = [Message(role="user", content=question.strip() + instruction)]
        found.append(_trajectory(said, number, [("solution", solution.strip())], system))
    return found


def _trajectory(
    messages: list[Message], answer: str, kept: list[tuple[str, Any]], system: str | None
) -> Trajectory:
    if system is not None:
        messages = [Message(role="system", content=system), *messages]
    return Trajectory(messages=messages, user_data=[("ground_truth", answer), *kept])


def _records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the objects of a file, each with the words that name it."""
    if Path(path).suffix == ".parquet":
        yield from parquet_records(path)
        return
    count = 0
    with Path(path).open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            count += 1
            where = f"{path}, line {number}: record {count}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} must be JSON, got {line[:60]!r}: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where} must be a JSON object, got {line[:60]!r}")
            yield where, record
    if not count:
        raise ValueError(f"{path} must hold at least one record, got none")


def _messages(where: str, record: dict[str, Any]) -> list[Message]:
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(prompt, str) and prompt and messages is None:
        return [Message(role="user", content=prompt)]
    if prompt is not None or not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{where} must have a 'prompt' that is not empty, or 'messages', got {_keys(record)}"
        )
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(message.get("content"), str):
            raise ValueError(
                f"{where} must have messages with a role of {', '.join(_ROLES)} and content, "
                f"got {message!r:.80}"
            )
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{where} must end before the assistant answers, got {messages[-1]!r:.80}")
    return messages


def _keys(record: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r:.30}" for key, value in record.items()) or "{}"
