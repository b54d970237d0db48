"""Prompts and their answers, from files or generated on demand; and their order in a run."""

import abc
import hashlib
import json
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np

from twinkle_jax._package import require
from twinkle_jax.data.rows import parquet_row
from twinkle_jax.data.strict_json import open_text, parse_json
from twinkle_jax.data.trajectory import Message, PromptBatch, Tool, Trajectory

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{2,3})*,\d{3}(\.\d+)?")  # 1,234,567 and 12,34,567
# Names of pyarrow's types whose numbers, as float64, have digits that nobody wrote.
_SHORT_FLOATS = {"halffloat": np.float16, "float": np.float32}
_ANSWERS = ("answer", "ground_truth")
_DIGITS = 400  # of an answer; every float64's shortest form fits
_ROLES = ("system", "user", "assistant", "tool")
_FOR_EVALUATION = 5  # one problem in five
_TRIES = 64  # problems of reasoning-gym to look through for one of the right split

# Tasks of reasoning-gym with one right answer each, written as text. The others are scored by the
# task's own code, which for some runs what the model wrote as Python.
_ALLOWED = (
    "base_conversion",
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "decimal_arithmetic",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "leg_counting",
    "letter_counting",
    "number_format",
    "products",
    "simple_equations",
    "spell_backward",
    "time_intervals",
    "word_sorting",
)


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
        trajectory = _trajectory(messages, answer, columns, system)
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
        trajectory = _trajectory(messages, None, [], system)
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
            _trajectory(messages, None, [], instruction)["messages"]
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
        trajectories.append(_trajectory(messages, number, columns, system))
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


def _trajectory(
    messages: list[Message], answer: str | None, columns: list[tuple[str, Any]], system: str | None
) -> Trajectory:
    if system is not None and messages[0]["role"] != "system":
        messages = [Message(role="system", content=system), *messages]
    truth = [] if answer is None else [("ground_truth", answer)]
    return Trajectory(messages=messages, user_data=[*truth, *columns])


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


def _is_for_evaluation(problem: str) -> bool:
    digest = hashlib.sha256(problem.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _FOR_EVALUATION == 0


def _check(split: str, size: int) -> None:
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a positive int, got {size!r}")


def _sum(draw: random.Random, largest: int) -> tuple[str, int]:
    a, b = draw.randint(0, largest), draw.randint(0, largest)
    return f"{a}+{b}", a + b


def _sum_or_difference(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return (f"{a}+{b}", a + b) if draw.random() < 0.5 else (f"{a}-{b}", a - b)


def _product(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(2, 9), draw.randint(10, 99)
    return f"{a}*{b}", a * b


def _three_terms(draw: random.Random) -> tuple[str, int]:
    a, b, c = draw.randint(10, 99), draw.randint(2, 9), draw.randint(2, 9)
    return (f"{a}+{b}*{c}", a + b * c) if draw.random() < 0.5 else (f"{a}-{b}*{c}", a - b * c)


def _brackets(draw: random.Random) -> tuple[str, int]:
    a, b, c, d = (draw.randint(1, 19) for _ in range(4))
    return f"({a}+{b})*({c}-{d})", (a + b) * (c - d)


_LEVELS: dict[int, Callable[[random.Random], tuple[str, int]]] = {
    1: partial(_sum, largest=9),
    2: partial(_sum, largest=49),
    3: _sum_or_difference,
    4: _product,
    5: _three_terms,
    6: _brackets,
}


class GeneratedPrompts(Sequence[Trajectory]):
    """Prompts that are made when they are read."""

    size: int

    @abc.abstractmethod
    def make(self, index: int) -> Trajectory:
        """Make the prompt of an index from 0, always the same one."""

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        """Return one prompt, or several."""
        if isinstance(index, slice):
            return [self.make(i) for i in range(self.size)[index]]
        return self.make(range(self.size)[index])


class ArithmeticTask(GeneratedPrompts):
    """Problems such as `3+4=`, whose answers are integers.

    The text of a problem decides whether it is for training or evaluation, whatever the seed, so
    no problem is in both splits. The splits draw from different seeds, too.

    Args:
        level: 1 sums of digits, 2 sums of numbers below 50, 3 sums and differences of two digits,
            4 products, 5 three terms, 6 brackets.
        split: `'train'` or `'eval'`; one problem in five is for evaluation.
        size: how many problems.
        seed: of the problems.
        prompt: the user's message; `{problem}` stands for the problem.
        system: a system message at the beginning of each conversation; None adds none.

    Raises:
        ValueError: for another level or split, a size below 1, or a prompt without the problem.

    Example:
        >>> task = ArithmeticTask(3, size=100)
        >>> task[0]["messages"], task[0]["user_data"]
        ([{'role': 'user', 'content': '79-69='}], [('ground_truth', '10')])
    """

    def __init__(
        self,
        level: int = 1,
        *,
        split: Literal["train", "eval"] = "train",
        size: int = 10_000,
        seed: int = 0,
        prompt: str = "{problem}=",
        system: str | None = None,
    ) -> None:
        if level not in _LEVELS:
            raise ValueError(f"level must be one of {list(_LEVELS)}, got {level!r}")
        _check(split, size)
        if "{problem}" not in prompt:
            raise ValueError(f"prompt must hold {{problem}}, got {prompt!r}")
        self.level, self.split, self.size, self.seed = level, split, size, seed
        self.prompt, self.system = prompt, system

    def make(self, index: int) -> Trajectory:
        """Make the problem of an index, always the same one."""
        problem, answer = self.problem(index)
        message = Message(role="user", content=self.prompt.replace("{problem}", problem))
        return _trajectory([message], str(answer), [], self.system)

    def problem(self, index: int) -> tuple[str, int]:
        """Draw a problem and its answer, until one of this split comes up."""
        draw = random.Random(f"{self.split} {self.level} {self.seed} {index}")  # noqa: S311
        while True:
            problem, answer = _LEVELS[self.level](draw)
            if _is_for_evaluation(problem) == (self.split == "eval"):
                return problem, answer

    @property
    def fingerprint(self) -> str:
        """Identifies the problems, for checkpoints."""
        name = f"arithmetic {self.level} {self.split} {self.size} {self.seed} {self.prompt!r}"
        return name if self.system is None else f"{name} {self.system!r}"


class ReasoningGymTask(GeneratedPrompts):
    """A task of reasoning-gym; only its questions and answers are used, never its scores.

    Score it by `ExactMatchReward`, `GSM8KAccuracyReward` or `MathReward`. The text of a question
    decides whether it is for training or evaluation, so no question is in both splits.

    Args:
        name: of the task, one of `ReasoningGymTask.allowed`.
        split: `'train'` or `'eval'`.
        size: how many problems.
        seed: of the problems.
        instruction: what follows each question.
        options: arguments of the task.

    Raises:
        ValueError: for a task that is not allowed, another split, or a size below 1.
        ImportError: if reasoning-gym is not installed, the extra `reasoning-gym`.
    """

    allowed = _ALLOWED

    def __init__(
        self,
        name: str,
        *,
        split: Literal["train", "eval"] = "train",
        size: int = 10_000,
        seed: int = 0,
        instruction: str = "",
        **options: Any,
    ) -> None:
        if name not in _ALLOWED:
            raise ValueError(f"name must be one of {', '.join(_ALLOWED)}, got {name!r}")
        _check(split, size)
        require("reasoning_gym", "reasoning-gym")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns while it is imported
            import reasoning_gym

        self._problems = reasoning_gym.create_dataset(
            name, seed=seed, size=size * _TRIES, **options
        )
        self.split, self.size, self.instruction = split, size, instruction
        others = sorted(options.items())
        self.fingerprint = f"reasoning-gym {name} {split} {size} {seed} {instruction!r} {others}"

    def make(self, index: int) -> Trajectory:
        """Make the problem of an index, always the same one."""
        start = index * _TRIES
        for i in range(start, start + _TRIES):
            problem = self._problems[i]
            if _is_for_evaluation(problem["question"]) == (self.split == "eval"):
                message = Message(role="user", content=problem["question"] + self.instruction)
                return _trajectory([message], str(problem["answer"]), [], None)
        raise ValueError(f"the task must have questions for {self.split!r}, got none at {index}")


class PromptLoader:
    """Iterates over prompts in shuffled batches, endlessly by default; batches hold copies.

    Pass `shuffle=False, epochs=1` for what Twinkle's `DataLoader` does: in order, once.

    Each epoch has each prompt once, in an order that depends on the seed and the epoch alone.
    Batches may span two epochs; only the last one may be smaller. A checkpoint stores
    `get_state()`, and `set_state` continues from it.

    Args:
        prompts: trajectories: a list, or a sequence that computes them, such as
            [`ArithmeticTask`][twinkle_jax.data.ArithmeticTask].
        batch_size: prompts a batch.
        seed: of the order.
        shuffle: False keeps the order of the prompts.
        epochs: number of passes; None: endless.

    Raises:
        ValueError: if there are no prompts, or a number is not positive.
        ImportError: if grain is not installed.

    Example:
        >>> from twinkle_jax.data import ArithmeticTask
        >>> loader = PromptLoader(ArithmeticTask(1, size=10), 4, epochs=2)
        >>> [len(batch.ground_truths) for batch in loader]
        [4, 4, 4, 4, 4]
    """

    def __init__(
        self,
        prompts: Sequence[Trajectory],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        require("grain", "data")
        from grain import MapDataset

        for name, value in (
            ("batch_size", batch_size),
            ("epochs", 1 if epochs is None else epochs),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"seed must be an int in [0, 2**32), got {seed!r}")
        if not len(prompts):
            raise ValueError("prompts must not be empty, got none")
        self.prompts, self.batch_size, self.epochs = prompts, batch_size, epochs
        order = MapDataset.range(len(prompts))
        order = order.shuffle(seed=seed) if shuffle else order
        self._order = order.repeat(epochs)
        self._total = None if epochs is None else epochs * len(prompts)
        self._position = 0
        first = [int(self._order[i]) for i in range(min(len(prompts), 8))]
        self._fingerprint = {
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "prompts": len(prompts),
            "data": prompts_fingerprint(prompts),
            "order": _digest([first]),
        }

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._position // len(self.prompts)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PromptBatch:
        end = self._position + self.batch_size
        end = end if self._total is None else min(end, self._total)
        if end <= self._position:
            raise StopIteration
        batch = [self.prompts[int(self._order[i])] for i in range(self._position, end)]
        self._position = end
        return PromptBatch(batch)

    def get_state(self) -> dict[str, Any]:
        """Return the position, and a fingerprint of prompts and order, as JSON values."""
        return {"position": self._position, "fingerprint": dict(self._fingerprint)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where a loader of the same prompts, batch size and seed was.

        Args:
            state: what `get_state` returned.

        Raises:
            ValueError: if prompts, batch size, seed or order differ.
        """
        position, fingerprint = state.get("position"), state.get("fingerprint")
        if not isinstance(position, int) or position < 0 or not isinstance(fingerprint, Mapping):
            raise ValueError(f"state must be what get_state returns, got {dict(state)!r:.80}")
        for name, value in self._fingerprint.items():
            if fingerprint.get(name) != value:
                raise ValueError(
                    f"{name} must be {fingerprint.get(name)!r}, as it was when the state was "
                    f"saved, got {value!r}"
                )
        self._position = position


def prompts_fingerprint(prompts: Sequence[Trajectory]) -> str:
    """Hash prompts, in their order."""
    fingerprint = getattr(prompts, "fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else _digest(prompts)


def _digest(records: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()[:16]
