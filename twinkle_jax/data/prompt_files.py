"""Prompts, examples and pairs of answers from files: JSON Lines, and Parquet as the hub has it."""

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_jax._package import require
from twinkle_jax.data.rows import parquet_row
from twinkle_jax.data.strict_json import open_text, parse_json
from twinkle_jax.data.trajectory import Message, Tool, Trajectory, make_trajectory

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{2,3})*,\d{3}(\.\d+)?")  # 1,234,567 and 12,34,567
# Names of pyarrow's types whose numbers, as float64, have digits that nobody wrote.
_SHORT_FLOATS = {"halffloat": np.float16, "float": np.float32}
_ANSWERS = ("answer", "ground_truth")
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
    are written out as the file has them: `0.00001` becomes `'0.00001'`, `1e3` becomes `'1000'`.
    Either all records of a file have an answer, or none. Further columns follow in `user_data`
    under their names, as JSON values. A column `tools` of descriptions in OpenAI's format, or of
    the JSON text of such a list, as in TRL, is passed to the chat template, too.

    Args:
        path: the file; or a `.parquet` file with such columns.
        system: a system message for conversations that begin with none; None adds none.
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
        both = [name for name in _ANSWERS if name in record]
        if len(both) == 2 and None in (record["answer"], record["ground_truth"]):
            del record["answer" if record["answer"] is None else "ground_truth"]
        elif len(both) == 2:
            raise ValueError(f"{where} must have 'answer' or 'ground_truth', got both")
        name = "ground_truth" if "ground_truth" in record else "answer"
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
        trajectory = make_trajectory(messages, answer, columns, system)
        if tools := _read_tools(record.get("tools")):
            trajectory["tools"] = tools
        trajectories.append(trajectory)
    return trajectories


def read_examples(path: str | Path, *, system: str | None = None) -> list[Trajectory]:
    r"""Read conversations to learn from, from a file with one JSON object a line.

    A line has one of these forms. Each turn of the assistant is learned, but for those with a
    `"weight"` of 0, as OpenAI's format has it, and those in `"prompt"`:

    - `{"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}`
    - `{"prompt": "2+2=", "completion": "4"}`, or each a list of messages, as TRL has them
    - `{"question": "2+2=", "answer": "Two and two.\n#### 4"}`, as GSM8K has it; all of the answer
      is learned

    A column `tools` is passed to the chat template, as by
    [`read_jsonl`][twinkle_jax.data.read_jsonl]; other columns are not read.

    Args:
        path: the file; or a `.parquet` file with such columns.
        system: a system message for conversations that begin with none; None adds none.

    Returns:
        A trajectory for each record, whose last message is the assistant's.

    Raises:
        ValueError: for a line that is not such a record, named by its number, or no lines at all.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "sums.jsonl")
        >>> _ = path.write_text('{"prompt": "2+2=", "completion": "4"}\n')
        >>> read_examples(path)[0]["messages"][-1]
        {'role': 'assistant', 'content': '4'}
    """
    trajectories = []
    for where, record in _records(path):
        messages = _read_conversation(where, record)
        trajectory = make_trajectory(messages, None, [], system)
        if tools := _read_tools(record.get("tools")):
            trajectory["tools"] = tools
        trajectories.append(trajectory)
    return trajectories


def read_preferences(path: str | Path, *, system: str | None = None) -> list[Trajectory]:
    r"""Read pairs of a chosen and a rejected answer, from a file with one JSON object a line.

    A line has one of these forms. Messages of the answers are compared, not those of the prompt:

    - `{"prompt": "2+2=", "chosen": "4", "rejected": "5"}`, or each a list of messages; `"question"`
      may stand for the prompt of answers that are texts
    - `{"chosen": [...], "rejected": [...]}`, two conversations, whose first messages are the same:
      those are the prompt, which a column `prompt` may repeat

    A column `tools` is passed to the chat template, as by
    [`read_jsonl`][twinkle_jax.data.read_jsonl], and a text in a column `system` is the record's
    system message; other columns are not read.

    Args:
        path: the file; or a `.parquet` file with such columns.
        system: a system message for conversations that begin with none; None adds none.

    Returns:
        A trajectory for each record, which ends with the chosen answer; `'rejected'` in its
        `user_data` is the conversation that ends with the rejected one.

    Raises:
        ValueError: for a line that is not such a record, named by its number, or no lines at all.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "sums.jsonl")
        >>> _ = path.write_text('{"prompt": "2+2=", "chosen": "4", "rejected": "5"}\n')
        >>> read_preferences(path)[0]["user_data"][0][1][-1]
        {'role': 'assistant', 'content': '5'}
    """
    trajectories = []
    for where, record in _records(path):
        instruction = record.get("system")
        if not isinstance(instruction, str) or not instruction:
            instruction = system
        chosen, rejected = (
            make_trajectory(messages, None, [], instruction)["messages"]
            for messages in _read_pair(where, record)
        )
        trajectory = Trajectory(messages=chosen, user_data=[("rejected", rejected)])
        if tools := _read_tools(record.get("tools")):
            trajectory["tools"] = tools
        trajectories.append(trajectory)
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
        number = number.replace(",", "")
        if solution is None or not _NUMBER.fullmatch(number):
            raise ValueError(
                f"{where} must end its 'answer' with '#### number', got {answer[-40:]!r}"
            )
        messages = [Message(role="user", content=question.strip() + instruction)]
        columns = [(key, x) for key, x in record.items() if key not in ("question", "answer")]
        columns = [("solution", solution), *columns]
        trajectories.append(make_trajectory(messages, number, columns, system))
    return trajectories


def download_split(repository: str, split: str, *, subset: str = "main") -> list[Path]:
    """Download the Parquet files of a split of a data set, in the folder that a subset has.

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


def _records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the objects of a file, each with the place that errors name.

    An answer that is a number comes as a `Decimal`, which keeps its digits.
    """
    where = None
    read = _parquet_records if Path(path).suffix == ".parquet" else _json_records
    for where, record in read(path):
        yield where, record
    if where is None:
        raise ValueError(f"{path} must hold at least one record, got none")


def _parquet_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    require("pyarrow", "hub")
    from pyarrow import parquet

    table = parquet.read_table(path)
    kinds = {field.name: str(field.type) for field in table.schema}
    for count, record in enumerate(table.to_pylist(), 1):
        for name in _ANSWERS:
            if kinds.get(name) in _SHORT_FLOATS and record[name] is not None:
                record[name] = Decimal(str(_SHORT_FLOATS[kinds[name]](record[name])))
        yield f"{path}: record {count}", parquet_row(record)


def _json_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_text(Path(path)) as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for count, (number, line) in enumerate(lines, 1):
            where = f"{path}, line {number}: record {count}"
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{where} must be JSON, got {line[:60]!r}: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where} must be a JSON object, got {line[:60]!r}")
            numbers = [name for name in _ANSWERS if type(record.get(name)) in (int, float)]
            if numbers:
                exact = json.loads(line, parse_int=Decimal, parse_float=_decimal)
                record |= {name: exact[name] for name in numbers}
            yield where, record


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
    if not hashes:
        return answer.strip(), None
    number = number.strip()
    return number.replace(",", "") if _THOUSANDS.fullmatch(number) else number, solution.strip()


def _read_prompt(where: str, record: dict[str, Any]) -> tuple[str, list[Message]]:
    """Return which column is the prompt, and its messages."""
    forms = [form for form in ("prompt", "messages") if record.get(form) is not None]
    if len(forms) == 2:
        raise ValueError(f"{where} must have a 'prompt' or 'messages', got both: {_keys(record)}")
    forms = forms or ["question"]
    prompt = record.get(forms[0])
    if isinstance(prompt, str) and prompt and forms != ["messages"]:
        return forms[0], [Message(role="user", content=prompt)]
    if not isinstance(prompt, list) or not prompt or forms == ["question"]:
        raise ValueError(
            f"{where} must have a 'prompt' that is not empty, or 'messages' or a 'question', "
            f"got {_keys(record)}"
        )
    _check_messages(where, prompt)
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{where} must end before the assistant answers, got {prompt[-1]!r:.80}")
    return forms[0], prompt


def _check_messages(where: str, messages: list[Any], *, calls: bool = False) -> None:
    """Check roles and texts; with `calls`, tool calls of the assistant may stand for a text."""
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        has_text = role in _ROLES and isinstance(message.get("content"), str)
        if calls and role == "assistant" and message.get("tool_calls"):
            called = message["tool_calls"]
            if not isinstance(called, list) or not all(isinstance(x, dict) for x in called):
                raise ValueError(
                    f"{where} must have tool_calls that are lists of objects, got {called!r:.80}"
                )
            has_text |= message.get("content") is None
        if not has_text:
            raise ValueError(
                f"{where} must have messages with a role of {', '.join(_ROLES)} and content, "
                f"got {message!r:.80}"
            )


def _read_conversation(where: str, record: dict[str, Any]) -> list[Message]:
    """Return the messages of an example, the last of which is the assistant's."""
    if record.get("messages") is not None:
        if record.get("completion") is not None:
            raise ValueError(f"{where} must have 'messages' or a 'completion', got both")
        parts = [record["messages"]]  # a 'prompt' beside them is their beginning
    else:
        names = ("prompt", "completion")
        if all(record.get(name) is None for name in names):
            names = ("question", "answer")
        prompt, completion = (record.get(name) for name in names)
        if prompt and isinstance(prompt, str):
            prompt = [Message(role="user", content=prompt)]
        if completion and isinstance(completion, str):
            completion = [Message(role="assistant", content=completion)]
        parts = [prompt, completion]
    if not all(isinstance(part, list) and part for part in parts):
        raise ValueError(
            f"{where} must have 'messages', a 'prompt' and a 'completion', or a 'question' and an "
            f"'answer', which are texts or lists of messages, got {_keys(record)}"
            + (": --update.loss dpo learns from pairs" if "rejected" in record else "")
        )
    for part in parts:
        _check_messages(where, part, calls=True)
    if len(parts) == 2:
        parts[0] = _not_learned(parts[0])
    messages: list[Message] = [message for part in parts for message in part]
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{where} must end with the assistant's turn, got {messages[-1]!r:.80}")
    return messages


def _not_learned(prompt: list[Any]) -> list[Any]:
    return [{**x, "weight": 0} if x["role"] == "assistant" else x for x in prompt]


def _read_pair(where: str, record: dict[str, Any]) -> tuple[list[Message], list[Message]]:
    """Return two conversations: with the chosen and with the rejected answer."""
    text, chosen, rejected = (record.get(name) for name in ("prompt", "chosen", "rejected"))
    if text is None and isinstance(chosen, str):
        text = record.get("question")
    prompt: Any = text
    if text and isinstance(text, str):
        prompt = [Message(role="user", content=text)]
    answers: list[Any] = [
        [Message(role="assistant", content=x)] if x and isinstance(x, str) else x
        for x in (chosen, rejected)
    ]
    for part in answers if prompt is None else [prompt, *answers]:
        if not isinstance(part, list) or not part:
            raise ValueError(
                f"{where} must have a 'chosen' and a 'rejected' answer, and a 'prompt' unless both "
                f"begin with it, which are texts or lists of messages, got {_keys(record)}"
            )
        _check_messages(where, part, calls=True)
    for answer in answers:
        if answer[-1]["role"] != "assistant":
            raise ValueError(f"{where} must end with the assistant's turn, got {answer[-1]!r:.80}")
    shared = 0
    while shared < min(map(len, answers)) - 1 and _are_same(*(x[shared] for x in answers)):
        shared += 1
    beginning = answers[0][:shared]
    if isinstance(text, str):
        begins = bool(beginning) and beginning[0]["role"] != "assistant"
        repeated = begins and text in [x["content"] for x in beginning]  # after the system's
    else:
        asked = prompt or []
        repeated = len(asked) <= shared and all(map(_are_same, asked, beginning))
    if repeated:
        prompt, answers = beginning, [answer[shared:] for answer in answers]
    elif any(_is_asked_again(prompt, answer) for answer in answers):
        raise ValueError(
            f"{where} must have conversations that begin with the 'prompt', or answers to it, "
            f"got {_keys(record)}"
        )
    if not prompt:
        raise ValueError(f"{where} must have a 'prompt', got {_keys(record)}")
    chosen, rejected = ([*_not_learned(prompt), *answer] for answer in answers)
    return chosen, rejected


def _are_same(a: Message, b: Message) -> bool:
    """Compare messages; in Parquet each column has its own keys, and None for what is missing."""
    x, y = ({k: value for k, value in m.items() if value is not None} for m in (a, b))
    return x == y


def _is_asked_again(prompt: list[Message], answer: list[Message]) -> bool:
    """Whether an answer begins with another prompt, rather than with a turn that may follow it."""
    first = answer[0]["role"]
    return first == "system" or first == prompt[-1]["role"] == "user"


def _read_tools(column: Any) -> list[Tool]:
    """Read descriptions of tools; a column of another form is the user's own."""
    if isinstance(column, str):
        try:
            column = parse_json(column)
        except ValueError:
            return []
    if not isinstance(column, list):
        return []
    are_tools = (isinstance(x, dict) and isinstance(x.get("function"), dict) for x in column)
    return list(column) if all(are_tools) else []


def _keys(record: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r:.30}" for key, value in record.items()) or "{}"
