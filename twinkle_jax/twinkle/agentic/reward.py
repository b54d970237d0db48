"""`twinkle_agentic.reward`: answers in a box, steps of reasoning, use of tools."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import takewhile
from typing import Any

from twinkle_jax._package import require
from twinkle_jax.data import completion_text, message_text
from twinkle_jax.reward import GroundTruths, Reward, last_boxed, token_f1
from twinkle_jax.reward.text import answer_words
from twinkle_jax.twinkle.names import add_submodules

# Words that an answer may have, or lack, without being wrong: "6 feet tall" is "6 feet".
_FILLERS = frozenset([
    "long", "tall", "high", "wide", "deep", "heavy", "old", "large", "small", "big", "short",
    "away", "ago", "approximately", "about", "around", "over", "under", "below", "above", "total",
    "roughly", "nearly", "almost", "exactly",
])  # fmt: skip
_ERRORS = ("ERROR", "Error:")  # the second is what `ToolManager` answers a call that fails
_STEP = re.compile(r"^[^\S\n]*step\s*(\d+)\s*[.:]", re.IGNORECASE | re.MULTILINE)


@cache
def _stemmer() -> Callable[[str], str]:
    require("nltk", "nltk")
    stem = import_module("nltk.stem").PorterStemmer().stem
    return cache(lambda word: stem(word) if len(word) >= 4 and word.isalpha() else word)


def _extract_final_answer(completion: str) -> str:
    """Return the content of the last box that is closed; empty without one."""
    while "\\boxed{" in completion:
        answer = last_boxed(completion)
        if answer is not None:
            return answer
        completion = completion[: completion.rfind("\\boxed{")]
    return ""


def _f1_score(prediction: str, gold: str) -> tuple[float, float]:
    """Return `token_f1` of the stems, 1 if only fillers differ, and whether all stems agree."""
    stem = _stemmer()
    words, right = answer_words(prediction or "", stem), answer_words(gold or "", stem)
    score, same = token_f1(prediction or "", gold or "", stem=stem), float(words == right)
    further, missing = set(words) - set(right), set(right) - set(words)
    if score and not missing and all(x.isdigit() or x in _FILLERS for x in further):
        score = 1.0 if further else score
    if score and not further and missing and missing <= _FILLERS:
        score = 1.0
    return score, same


class F1Reward(Reward):
    r"""Shared words of the answer in the last `\boxed{…}` and the best `ground_truth`.

    Words are stems of nltk's `PorterStemmer`. Of nested boxes the inner one counts.

    Args:
        answer_pattern: a regular expression for answers without a box; the last match counts.
    """

    def __init__(self, answer_pattern: str | re.Pattern[str] | None = None) -> None:
        self._pattern = None if answer_pattern is None else re.compile(answer_pattern)

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: GroundTruths = None,
        **kwargs: Any,
    ) -> list[float]:
        """Score the last assistant message of each; ground truths are those of `user_data`."""
        return [self._score(trajectory) for trajectory in trajectories]

    def _score(self, trajectory: Mapping[str, Any]) -> float:
        answer = self._answer(completion_text(trajectory))
        pairs = trajectory.get("user_data") or ()
        golds = [value for name, value in pairs if name == "ground_truth" and value]
        return max(_f1_score(answer, gold)[0] for gold in golds or [""])

    def _answer(self, text: str) -> str:
        answer = _extract_final_answer(text)
        if answer or self._pattern is None:
            return answer
        matches = self._pattern.findall(text) or [""]
        last = matches[-1][0] if isinstance(matches[-1], tuple) else matches[-1]
        return str(last).strip()


class CoTReward(Reward):
    r"""0.3 for 3 to 6 numbered lines `Step N:`, 0.1 for more, and 0 without a `\boxed{`."""

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: GroundTruths = None,
        **kwargs: Any,
    ) -> list[float]:
        """Count the steps in the assistant's messages of each trajectory."""
        return [self._score(trajectory.get("messages") or ()) for trajectory in trajectories]

    def _score(self, messages: Sequence[Mapping[str, Any]]) -> float:
        turns = [message_text(m) for m in messages if m.get("role") == "assistant"]
        text = "\n".join(turns)
        steps = len({number.lstrip("0") for number in _STEP.findall(text)})
        if "\\boxed{" not in text or steps < 3:
            return 0.0
        return 0.3 if steps <= 6 else 0.1


class ToolExploreReward(F1Reward):
    """1 for 1 to 3 turns whose tools returned something, 0.5 for more, if the answer is right.

    Otherwise 0. Errors do not count; Twinkle's class counts those of `ToolManager`, `Error: …`.

    Args:
        f1_threshold: the `F1Reward` from which an answer is right.
        answer_pattern: as for `F1Reward`.
    """

    def __init__(
        self, f1_threshold: float = 0.5, answer_pattern: str | re.Pattern[str] | None = None
    ) -> None:
        super().__init__(answer_pattern)
        self._threshold = f1_threshold

    def _score(self, trajectory: Mapping[str, Any]) -> float:
        if super()._score(trajectory) < self._threshold:
            return 0.0
        messages = trajectory.get("messages") or []
        useful = 0
        for i, message in enumerate(messages):
            if message.get("role") == "assistant" and message.get("tool_calls"):
                answers = takewhile(lambda m: m.get("role") == "tool", messages[i + 1 :])
                texts = [message_text(answer).lstrip() for answer in answers]
                useful += any(text and not text.startswith(_ERRORS) for text in texts)
        return 0.0 if not useful else 1.0 if useful <= 3 else 0.5


add_submodules(__name__, "f1")
