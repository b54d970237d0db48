"""Pairs of answers."""

from typing import Any

from twinkle_jax.twinkle.preprocessor.base import Preprocessor, Row


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
        """Give both conversations."""
        prompt = [{"role": "system", "content": self.system}] if self.system else []
        prompt.append({"role": "user", "content": row.get(self.prompt_key, "")})
        return {
            name: {"messages": [*prompt, {"role": "assistant", "content": row.get(key, "")}]}
            for name, key in self.answers.items()
        }
