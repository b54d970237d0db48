"""Data sets of text: GSM8K, mathematics, Countdown, Alpaca, self-cognition, pairs of answers."""

import re
from typing import Any

from twinkle_jax.data import Message, Row, Trajectory
from twinkle_jax.twinkle.preprocessor.base import Preprocessor


def conversation(*turns: tuple[str, Any]) -> list[Message]:
    """Make messages of pairs of a role and a text."""
    return [{"role": role, "content": content} for role, content in turns]  # type: ignore[typeddict-item]


class CompetitionMathProcessor(Preprocessor):
    """`problem` and `solution` as a question and its answer."""

    def preprocess(self, row: Row) -> Trajectory:
        """Return the conversation."""
        return {
            "messages": conversation(("user", row["problem"]), ("assistant", row["solution"])),
        }


class CompetitionMathGRPOProcessor(Preprocessor):
    """`problem` as a prompt for an answer in a box alone; `solution` in `user_data`."""

    system = (
        "You are a helpful math assistant. Respond with only the final answer in the form "
        "\\boxed{...} and nothing else."
    )

    def preprocess(self, row: Row) -> Trajectory:
        """Return the prompt; as Twinkle's it ends with an empty message of the assistant."""
        turns = ("system", self.system), ("user", row["problem"]), ("assistant", "")
        return {
            "messages": conversation(*turns),
            "user_data": [("solution", row["solution"])],
        }


class SelfCognitionProcessor(Preprocessor):
    """`query` and `response`, with a model's name and its author's filled in.

    Args:
        model_name: for `{{NAME}}`.
        model_author: for `{{AUTHOR}}`.
    """

    def __init__(self, model_name: str | None = None, model_author: str | None = None) -> None:
        self.model_name = model_name or "twinkle robot"
        self.model_author = model_author or "twinkle lab"

    def preprocess(self, row: Row) -> Trajectory:
        """Return the conversation."""
        query, response = (
            row[key].replace("{{NAME}}", self.model_name).replace("{{AUTHOR}}", self.model_author)
            for key in ("query", "response")
        )
        system = ("system", "You are a helpful assistant.")
        return {"messages": conversation(system, ("user", query), ("assistant", response))}


class AlpacaProcessor(Preprocessor):
    """`instruction` and, in a line of its own, `input` as a prompt; `output` as its answer."""

    def preprocess(self, row: Row) -> Trajectory:
        """Return the conversation."""
        parts = [row.get("instruction") or "", row.get("input") or ""]
        prompt = "\n".join(parts if parts[1] else parts[:1])
        return {"messages": conversation(("user", prompt), ("assistant", row.get("output") or ""))}


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
        return {
            "messages": conversation(("system", self.system_prompt), ("user", query)),
            "user_data": [("target", target), ("nums", numbers)],
        }


class GSM8KProcessor(Preprocessor):
    r"""`question` as a prompt; the number after `####` of `answer` as `ground_truth`.

    It adds a system prompt, as Twinkle's does and [`read_gsm8k`][twinkle_jax.data.read_gsm8k] does
    not.

    Args:
        system: the system prompt; None for Twinkle's, which asks for steps and `\boxed{}`.
        add_assistant: whether `answer` follows, to train on.

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
        turns = [("system", self.system), ("user", row["question"])]
        turns += [("assistant", answer)] if self.add_assistant else []
        return {
            "messages": conversation(*turns),
            "user_data": [("ground_truth", self.extract_ground_truth(answer))],
        }


class EmojiDPOProcessor(Preprocessor):
    """Makes a `positive` and a `negative` conversation of a prompt and two answers.

    Args:
        system: a system message for both; None for none.
        chosen_key: the column of the better answer.
        rejected_key: the column of the other.
        prompt_key: the column of the prompt.
    """

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
        prompt = [("system", self.system)] if self.system else []
        prompt.append(("user", row.get(self.prompt_key, "")))
        return {
            name: {"messages": conversation(*prompt, ("assistant", row.get(key, "")))}
            for name, key in self.answers.items()
        }
