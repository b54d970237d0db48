"""Prompts from files: JSON Lines, GSM8K's own files, Parquet files of the hub."""

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from twinkle_jax.data.missing_extra import require
from twinkle_jax.data.strict_json import parse_json
from twinkle_jax.data.trajectory import Message, Trajectory

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_DIGITS = 400  # of an answer; every float64's shortest form fits
_ROLES = ("system", "user", "assistant", "tool")


def read_jsonl(
    path: str | Path,
    *,
    system: str | None = None,
    check_answer: Callable[[str], bool] | None = None,
) -> list[Trajectory]:
    r"""Read prompts and answers from a file with one JSON object a line.

    A line has one of these forms, and any further columns:

    - `{"prompt": "2+2=", "answer": 4}`
    - `{"prompt": [{"role": "user", "content": "2+2="}], "answer": 4}`, as TRL has it
    - `{"messages": [{"role": "user", "content": "2+2="}], "answer": 4}`
    - `{"question": "2+2=", "answer": "Two and two.\n#### 4"}`, as GSM8K has it; without `####` the
      text is the answer

    The answer becomes `'ground_truth'` in `user_data`, and may be called so in the file. Numbers
    are written out as the file has them: `0.00001` becomes `'0.00001'`, `1e3` becomes `'1000'`. A
    file may omit answers, but only in all records. Further columns follow in `user_data` under
    their names, as JSON values.

    Args:
        path: the file; or a `.parquet` file with such columns.
        system: a system message at the beginning of each conversation; None adds none.
        check_answer: returns False for an answer that the reward cannot read. With it, every
            record needs an answer.

    Returns:
        A trajectory for each record.

    Raises:
        ValueError: for a line that is not such a record, named by its number, or no lines at all.
            Duplicate keys, NaN, Infinity and numbers beyond float64 are errors too.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "sums.jsonl")
        >>> _ = path.write_text('{"prompt": "2+2=", "answer": 4, "level": 1}\n')
        >>> read_jsonl(path)[0]["user_data"]
        [('ground_truth', '4'), ('level', 1)]
    """
    trajectories: list[Trajectory] = []
    answered = True if check_answer is not None else None
    for where, record in _records(path):
        form, messages = _read_prompt(where, record)
        name = "ground_truth" if "ground_truth" in record else "answer"
        if name == "ground_truth" and "answer" in record:
            raise ValueError(f"{where} must have 'answer' or 'ground_truth', got both")
        answered = name in record if answered is None else answered
        columns = [(k, x) for k, x in record.items() if k not in ("prompt", "messages", form, name)]
        answer = None
        if answered:
            answer, solution = _read_answer(where, name, record.get(name), gsm8k=form == "question")
            if not answer or (check_answer is not None and not check_answer(answer)):
                raise ValueError(
                    f"{where} must have {name!r} that can be read, got {record[name]!r:.80}"
                )
            if solution is not None and "solution" not in record:
                columns.append(("solution", solution))
        elif name in record:
            raise ValueError(f"{where} must have no {name!r}, as the records before it have none")
        trajectories.append(_trajectory(messages, answer, columns, system))
    return trajectories


def read_gsm8k(
    path: str | Path, *, system: str | None = None, instruction: str = ""
) -> list[Trajectory]:
    r"""Read GSM8K from a file in its own format; adds no system prompt and no instruction.

    Twinkle's `GSM8KProcessor` adds a system prompt that asks for steps and `\boxed{}`: pass
    `system` or `instruction` for one.

    Args:
        path: JSON Lines with `"question"` and `"answer"`, whose last line is `#### 1,234`; or, as
            the hub has it, a `.parquet` file with these columns.
        system: a system message at the beginning of each conversation; None adds none.
        instruction: text after each question.

    Returns:
        A trajectory for each problem. `'ground_truth'` is the number without commas, `'solution'`
        the text before it.

    Raises:
        ValueError: for a line that is not such a record, named by its number, or no lines at all.
        ImportError: for a `.parquet` file, if pyarrow is not installed.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "train.jsonl")
        >>> _ = path.write_text('{"question": "2 dozen?", "answer": "2*12\\n#### 24"}\n')
        >>> read_gsm8k(path)[0]["user_data"]
        [('ground_truth', '24'), ('solution', '2*12')]
    """
    trajectories = []
    for where, record in _records(path):
        question, answer = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not question.strip() or not isinstance(answer, str):
            raise ValueError(f"{where} must have a 'question' and an 'answer', got {_keys(record)}")
        number, solution = _split_gsm8k(answer)
        if solution is None or not _NUMBER.fullmatch(number):
            raise ValueError(
                f"{where} must end its 'answer' with '#### number', got {answer[-40:]!r}"
            )
        messages = [Message(role="user", content=question.strip() + instruction)]
        columns = [(key, x) for key, x in record.items() if key not in ("question", "answer")]
        columns = [("solution", solution), *columns]
        trajectories.append(_trajectory(messages, number, columns, system))
    return trajectories


def download_split(repository: str, split: str, *, subset: str = "main") -> list[Path]:
    """Download a split of a data set, unless it is in huggingface_hub's cache.

    Args:
        repository: its id, such as `openai/gsm8k`.
        split: `train` or `test`.
        subset: the folder of the files.

    Returns:
        Its Parquet files, in order.

    Raises:
        ValueError: if the data set has no such files.
        ImportError: if huggingface_hub or pyarrow is not installed.
    """
    require("huggingface_hub", "hub")
    require("pyarrow", "hub")
    from huggingface_hub import snapshot_download

    pattern = f"{subset}/{split}-*.parquet"
    folder = snapshot_download(repository, repo_type="dataset", allow_patterns=[pattern])
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise ValueError(f"task must be a data set with files {pattern}, got {repository!r}")
    return files


def _trajectory(
    messages: list[Message], answer: str | None, columns: list[tuple[str, Any]], system: str | None
) -> Trajectory:
    if system is not None:
        messages = [Message(role="system", content=system), *messages]
    truth = [] if answer is None else [("ground_truth", answer)]
    return Trajectory(messages=messages, user_data=[*truth, *columns])


def _records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the objects of a file, each with the place that errors name.

    An answer that is a number comes as a `Decimal`, which keeps its digits.
    """
    if Path(path).suffix == ".parquet":
        require("pyarrow", "hub")
        from pyarrow import parquet

        for number, record in enumerate(parquet.read_table(path).to_pylist(), 1):
            yield f"{path}: record {number}", record
        return
    count = 0
    with Path(path).open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            count += 1
            where = f"{path}, line {number}: record {count}"
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{where} must be JSON, got {line[:60]!r}: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where} must be a JSON object, got {line[:60]!r}")
            exact: dict[str, Any] | None = None
            for name in ("answer", "ground_truth"):
                if type(record.get(name)) in (int, float):
                    exact = exact or json.loads(line, parse_int=Decimal, parse_float=_decimal)
                    record[name] = exact[name]
            yield where, record
    if not count:
        raise ValueError(f"{path} must hold at least one record, got none")


def _decimal(literal: str) -> Decimal:
    try:
        return Decimal(literal)
    except InvalidOperation:  # an exponent beyond that of Decimal
        return Decimal("NaN")


def _read_answer(where: str, name: str, answer: Any, *, gsm8k: bool) -> tuple[str, str | None]:
    """Read an answer as text, numbers with all their digits; and the solution before it."""
    if isinstance(answer, str):
        return _split_gsm8k(answer) if gsm8k else (answer.strip(), None)
    if isinstance(answer, bool) or not isinstance(answer, int | float | Decimal):
        raise ValueError(f"{where} must have {name!r}, text or a number, got {answer!r:.80}")
    number = answer if isinstance(answer, Decimal) else Decimal(str(answer))
    # Check the exponent first: 1e999999999 written out would fill the memory.
    if not number.is_finite() or abs(number.adjusted()) + len(number.as_tuple().digits) > _DIGITS:
        raise ValueError(
            f"{where} must have {name!r} of at most {_DIGITS} digits, got {answer!s:.80}"
        )
    return format(number, "f"), None


def _split_gsm8k(answer: str) -> tuple[str, str | None]:
    """Split GSM8K's answers into the number, without commas, and the solution before it."""
    solution, hashes, number = answer.rpartition("####")
    plain = number.strip().replace(",", "")
    if not hashes:
        return answer.strip(), None
    return plain if _NUMBER.fullmatch(plain) else number.strip(), solution.strip()


def _read_prompt(where: str, record: dict[str, Any]) -> tuple[str, list[Message]]:
    """Return which column is the prompt, and its messages."""
    forms = [form for form in ("prompt", "messages") if record.get(form) is not None]
    forms = forms or ["question"]
    prompt = record.get(forms[0]) if len(forms) == 1 else None
    if isinstance(prompt, str) and prompt and forms != ["messages"]:
        return forms[0], [Message(role="user", content=prompt)]
    if not isinstance(prompt, list) or not prompt or forms == ["question"]:
        raise ValueError(
            f"{where} must have a 'prompt' that is not empty, or 'messages' or a 'question', "
            f"got {_keys(record)}"
        )
    for message in prompt:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(message.get("content"), str):
            raise ValueError(
                f"{where} must have messages with a role of {', '.join(_ROLES)} and content, "
                f"got {message!r:.80}"
            )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{where} must end before the assistant answers, got {prompt[-1]!r:.80}")
    return forms[0], prompt


def _keys(record: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r:.30}" for key, value in record.items()) or "{}"
