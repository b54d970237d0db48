"""Twinkle's `preprocessor`: from the columns of a data set to trajectories."""

import re
from collections.abc import Sequence
from typing import Any

from twinkle_jax.data import Row, Trajectory
from twinkle_jax.data.rows import to_columns, to_rows
from twinkle_jax.twinkle.names import PAGE, add_submodules


class Preprocessor:
    """Turns rows of a data set into others; a subclass says how for one row, or for columns.

    Example:
        >>> class Shout(Preprocessor):
        ...     def preprocess(self, row):
        ...         return {"text": row["text"].upper()}
        >>> Shout()({"text": ["a", "b"]})
        {'text': ['A', 'B']}
    """

    def preprocess(self, row: Row) -> Any:
        """Return the columns of one row."""
        raise NotImplementedError(f"{type(self).__name__} must have preprocess or __call__")

    def __call__(self, rows: Any) -> Any:
        """Return the columns of many."""
        return self.map_row_to_col([self.preprocess(row) for row in self.map_col_to_row(rows)])

    @staticmethod
    def map_col_to_row(rows: Any) -> list[dict[str, Any]]:
        """Turn columns into rows; rows stay."""
        return rows if isinstance(rows, list) else to_rows(rows)

    @staticmethod
    def map_row_to_col(rows: Any, keys: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """Turn rows into columns; columns stay."""
        if isinstance(rows, dict):
            return rows
        columns = to_columns(rows)
        return columns if keys is None else {key: columns.get(key, []) for key in keys}


class DataFilter:
    """Says which rows of a data set stay."""

    def __call__(self, row: Row) -> bool:
        """Whether this row stays."""
        raise NotImplementedError(f"{type(self).__name__} must have __call__")


def _conversation(
    system: str | None, user: str | None, assistant: str | None = None, **user_data: Any
) -> Trajectory:
    """Make a conversation, without a system prompt or an answer that is None."""
    turns = {"system": system, "user": user or "", "assistant": assistant}
    messages: Any = [{"role": role, "content": x} for role, x in turns.items() if x is not None]
    data = Trajectory(user_data=list(user_data.items())) if user_data else Trajectory()
    return {"messages": messages, **data}


class CompetitionMathProcessor(Preprocessor):
    """`problem` and `solution` as a question and its answer."""

    def preprocess(self, row: Row) -> Trajectory:
        """Return the conversation."""
        return _conversation(None, row["problem"], row["solution"] or "")


class CompetitionMathGRPOProcessor(Preprocessor):
    """`problem` as a prompt for an answer in a box alone; `solution` in `user_data`."""

    system = (
        "You are a helpful math assistant. Respond with only the final answer in the form "
        "\\boxed{...} and nothing else."
    )

    def preprocess(self, row: Row) -> Trajectory:
        """Return the prompt, which ends with an empty message of the assistant, as Twinkle's."""
        return _conversation(self.system, row["problem"], "", solution=row["solution"])


class SelfCognitionProcessor(Preprocessor):
    """`query` and `response`, with a model's and its author's name for `{{NAME}}`, `{{AUTHOR}}`."""

    def __init__(self, model_name: str | None = None, model_author: str | None = None) -> None:
        self.model_name = model_name or "twinkle robot"
        self.model_author = model_author or "twinkle lab"

    def preprocess(self, row: Row) -> Trajectory:
        """Return the conversation."""
        query, response = (
            row[key].replace("{{NAME}}", self.model_name).replace("{{AUTHOR}}", self.model_author)
            for key in ("query", "response")
        )
        return _conversation("You are a helpful assistant.", query, response)


class AlpacaProcessor(Preprocessor):
    """`instruction` and, in a line of its own, `input` as a prompt; `output` as its answer."""

    def preprocess(self, row: Row) -> Trajectory:
        """Return the conversation."""
        parts = [row.get("instruction") or "", row.get("input") or ""]
        prompt = "\n".join(parts if parts[1] else parts[:1])
        return _conversation(None, prompt, row.get("output") or "")


class CountdownProcessor(Preprocessor):
    """`nums` and `response` or `target`: reach a number by arithmetic, each number once."""

    system_prompt = (
        "You are a helpful assistant. You first thinks about the reasoning process "
        "in the mind and then provides the user with the answer."
    )

    def preprocess(self, row: Row) -> Trajectory:
        """Return the prompt."""
        numbers, target = row.get("nums", []), row.get("response", row.get("target", 0))
        query = (
            f"Using the numbers {numbers}, create an equation that equals {target}.\n"
            "You can use basic arithmetic operations (+, -, *, /) and each number can only be used "
            "once.\nShow your work in <think> </think> tags. And return the final equation and "
            "answer in <answer> </answer> tags,\nfor example "
            "<answer> (1 + 2) / 3 * 4 = 4 </answer>."
        )
        return _conversation(self.system_prompt, query, target=target, nums=numbers)


class GSM8KProcessor(Preprocessor):
    r"""`question` as a prompt; the number after `####` of `answer` as `ground_truth`.

    Without `system` it adds Twinkle's system prompt, which asks for steps and `\boxed{}`;
    [`read_gsm8k`][twinkle_jax.data.read_gsm8k] adds none. `add_assistant` keeps the answer.

    Example:
        >>> GSM8KProcessor().preprocess({"question": "2 dozen?", "answer": "#### 24"})["user_data"]
        [('ground_truth', '24')]
    """

    system_prompt = (
        "You are a helpful math assistant. Solve the problem step by step "
        "and put your final answer within \\boxed{}."
    )

    def __init__(self, system: str | None = None, add_assistant: bool = False) -> None:
        self.system = self.system_prompt if system is None else system
        self.add_assistant = add_assistant

    def extract_ground_truth(self, answer_str: str) -> str:
        """Return the number after `####` without commas; empty where there is none."""
        match = re.search(r"####\s*([-\d,.]+)", answer_str)
        return match.group(1).replace(",", "") if match else ""

    def preprocess(self, row: Row) -> Trajectory:
        """Return the prompt, and its answer if asked."""
        answer = row.get("answer", "")
        solution, truth = answer if self.add_assistant else None, self.extract_ground_truth(answer)
        return _conversation(self.system, row["question"], solution, ground_truth=truth)


class EmojiDPOProcessor(Preprocessor):
    """A `positive` and a `negative` conversation of a prompt and two answers, in these columns."""

    def __init__(
        self,
        system: str | None = None,
        chosen_key: str = "answer_zh",
        rejected_key: str = "answer_en",
        prompt_key: str = "prompt",
    ) -> None:
        self.system, self.prompt_key = system, prompt_key
        self.answers = {"positive": chosen_key, "negative": rejected_key}

    def preprocess(self, row: Row) -> dict[str, Any]:
        """Return both conversations."""
        prompt = row.get(self.prompt_key, "")
        return {
            name: _conversation(self.system or None, prompt, row.get(key) or "")
            for name, key in self.answers.items()
        }


_SYSTEM = {
    "zh": (
        "你是一个专业的数学和物理解题助手。请仔细分析题目，"
        "逐步推理解答，并将最终答案用 \\boxed{} 格式给出。"
        "如果有多个答案，请用逗号分隔。"
    ),
    "en": (
        "You are a professional math and physics problem solver. Analyze the problem carefully, "
        "solve it step by step, and provide your final answer in \\boxed{} format. If there are "
        "multiple answers, separate them with commas."
    ),
}


class OlympiadBenchProcessor(Preprocessor):
    """`context` and `question` as a prompt; `final_answer` as `ground_truth`.

    Without `system` it adds Twinkle's system prompt in the language, `zh` or `en`. Problems with
    images are refused: policies read text only.
    """

    def __init__(self, system: str | None = None, language: str = "zh") -> None:
        if language not in _SYSTEM:
            raise ValueError(f"language must be 'zh' or 'en', got {language!r}")
        self.system = _SYSTEM[language] if system is None else system

    def preprocess(self, row: Row) -> Trajectory:
        """Return the prompt."""
        if any(row.get(f"image_{i}") is not None for i in range(1, 10)):
            raise ValueError(
                "a problem must have no images, which policies here do not read: take the subsets "
                f"OE_TO_…; see {PAGE}"
            )
        context, question = row.get("context"), row.get("question", "")
        prompt = f"背景信息：{context}\n\n{question}" if context else question
        answer = row.get("final_answer") or ""
        answers = answer if isinstance(answer, list) else [answer]
        truth = ", ".join(str(x).strip() for x in answers if x)
        return _conversation(self.system, prompt, ground_truth=truth)


add_submodules(__name__, "base", "dpo", "llm", "olympiad_bench")
