"""Rewards that look at text alone: exact matches, tags, length, boxes, and GSM8K's numbers."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from twinkle_jax.data import Trajectory
from twinkle_jax.reward.reward import GroundTruths, Reward, completions_of, find_ground_truths

_BOX = "\\boxed{"


def last_boxed(text: str) -> str | None:
    r"""Find the content of the last `\boxed{…}` in a text.

    Args:
        text: any text.

    Returns:
        The content without white space around it; None if there is no box or the last is not
            closed.

    Example:
        >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start:i].strip()
    return None


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str, stem: Callable[[str], str]) -> list[str]:
    """Split a short answer into words, without case, punctuation and articles."""
    bare = text.lower().translate(_PUNCTUATION)
    return [stem(word) for word in _ARTICLES.sub(" ", bare).split()]


def token_f1(answer: str, truth: str, *, stem: Callable[[str], str] = str) -> float:
    """Score a short answer by the words that it shares with the right one.

    The harmonic mean of precision and recall, as SQuAD and HotpotQA measure it: case, punctuation
    and articles do not count. Two answers without words agree.

    Args:
        answer: an answer, such as what [`last_boxed`][twinkle_jax.reward.last_boxed] finds.
        truth: the right one.
        stem: applied to each word; none by default.

    References:
        [SQuAD](https://arxiv.org/abs/1606.05250), section 6.1

    Example:
        >>> token_f1("the city of Delhi", "Delhi city"), token_f1("Rome", "Delhi")
        (0.8, 0.0)
    """
    words, right = answer_words(answer, stem), answer_words(truth, stem)
    if not words or not right:
        return float(words == right)
    return 2 * (Counter(words) & Counter(right)).total() / (len(words) + len(right))


class ExactMatchReward(Reward, name="exact"):
    """1 if a completion is its ground truth, apart from white space around it, otherwise 0.

    Example:
        >>> completion = {"role": "assistant", "content": "7"}
        >>> ExactMatchReward()([{"messages": [completion]}], ["7"])
        [1.0]
    """

    needs_ground_truth = True

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compare each completion with its ground truth, letter by letter."""
        texts = completions_of(trajectories)
        truths = find_ground_truths(trajectories, ground_truths)
        return [float(text.strip() == truth) for text, truth in zip(texts, truths, strict=True)]


class FormatReward(Reward):
    """1 if a completion has a part between each pair of tags, otherwise 0.

    Takes time linear in the length of the text. A completion lacks what the chat template writes
    before it: where the prompt ends with `<think>`, as for DeepSeek-R1, QwQ and Qwen3-Thinking, the
    part `think` never begins and the reward is 0, as in TRL and open-r1. Then put `<think>` before
    each completion that you score.

    Args:
        tags: names of the parts, `<think>…</think>` and `<answer>…</answer>` by default.
        strict: True requires each part once, in this order, with nothing but white space around
            them; False requires each part somewhere.

    Raises:
        ValueError: if there are no tags, or one is empty or in angle brackets.

    Example:
        >>> text = "<think>2 and 2</think> <answer>4</answer>"
        >>> FormatReward()([{"messages": [{"role": "assistant", "content": text}]}])
        [1.0]
        >>> opened = "<think>" + "2 and 2</think> 4"  # the prompt ends with <think>
        >>> FormatReward(["think"])([{"messages": [{"role": "assistant", "content": opened}]}])
        [1.0]
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer"), *, strict: bool = False) -> None:
        if isinstance(tags, str) or not tags or not all(tags):
            raise ValueError(f"tags must be a list of names that are not empty, got {tags!r}")
        if any(sign in tag for tag in tags for sign in "<>"):
            raise ValueError(f"tags must be names without < and >, such as 'think', got {tags!r}")
        self.tags, self.strict = tuple(tags), strict

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Look for the parts in each completion; ground truths are not needed."""
        fits = self._strictly if self.strict else self._somewhere
        return [float(fits(text)) for text in completions_of(trajectories)]

    def _somewhere(self, text: str) -> bool:
        for tag in self.tags:
            start = text.find(f"<{tag}>")
            if start < 0 or text.find(f"</{tag}>", start) < 0:
                return False
        return True

    def _strictly(self, text: str) -> bool:
        at = 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return False
            start, end = text.find(opening), text.find(closing)
            if start < at or end < start or text[at:start].strip():
                return False
            at = end + len(closing)
        return not text[at:].strip()


class OverlongPenalty(Reward):
    r"""DAPO's soft penalty of completions that come near the limit of their length.

    $$R(y) = 0 \text{ if } |y| \le L - C,\quad \frac{(L - C) - |y|}{C} \text{ if } |y| \le L,
    \quad -1 \text{ otherwise}$$

    Args:
        max_length: $L$, tokens.
        buffer: $C$, over how many tokens before the limit the penalty grows.
        tokenizer: counts the tokens of trajectories without a `completion_length`, which those of
            samplers have.

    Raises:
        ValueError: if `buffer` is not in [1, max_length]; when called, if a trajectory has no
            `completion_length` and there is no tokenizer.
        TypeError: if `max_length` or `buffer` is not an int.

    References:
        [DAPO](https://arxiv.org/abs/2503.14476), section 3.4

    Example:
        >>> lengths = [{"completion_length": n, "messages": []} for n in (96, 104, 112, 113)]
        >>> OverlongPenalty(112, 16)(lengths)
        [0.0, -0.5, -1.0, -1.0]
    """

    def __init__(self, max_length: int, buffer: int, *, tokenizer: Any = None) -> None:
        for name, value in (("max_length", max_length), ("buffer", buffer)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
        if not 1 <= buffer <= max_length:
            raise ValueError(f"buffer must be in [1, max_length={max_length}], got {buffer}")
        self.max_length, self.buffer, self.tokenizer = max_length, buffer, tokenizer

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Penalise each completion by its length; ground truths are not needed."""
        penalties = []
        for i, text in enumerate(completions_of(trajectories)):
            length = trajectories[i].get("completion_length")
            if length is None:
                if self.tokenizer is None:
                    raise ValueError(
                        f"trajectories[{i}] must have a completion_length, or this reward a "
                        f"tokenizer, got {sorted(trajectories[i])}"
                    )
                length = len(self.tokenizer.encode(text))
            over = (self.max_length - self.buffer - length) / self.buffer
            penalties.append(max(min(over, 0.0), -1.0) + 0.0)  # + 0.0: no −0.0
        return penalties


# The data set's pattern, on one line, with any number of blanks and at least one digit.
_AFTER_HASHES = re.compile(r"####[ \t]*(-?[.,]*[0-9][0-9.,]*)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
# Dollars and percent around a number, and a full stop after it.
_SIGNS = re.compile(r"^([+-]?)\\?\$|(?:\\?[$%])?\.?$")
_NO_NUMBERS = {"nan", "inf", "infinity"}
_TAIL = 500
_TOLERANCE = Decimal("1e-5")


class GSM8KAccuracyReward(Reward, name="gsm8k"):
    r"""1 if the final number is right, otherwise 0.

    The answer is the content of the last `\boxed{…}`, or else the number after the last `####`, in
    the last 500 characters. Numbers are compared to within 1e-5, ignoring commas, spaces, a dollar
    or percent sign and a full stop at the end; anything else is compared as text.

    References:
        Training Verifiers to Solve Math Word Problems, https://arxiv.org/abs/2110.14168

    Example:
        >>> completion = {"role": "assistant", "content": "So #### 1,234"}
        >>> GSM8KAccuracyReward()([{"messages": [completion]}], ["1234"])
        [1.0]
    """

    needs_ground_truth = True

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Compare each completion's answer with its ground truth."""
        texts = completions_of(trajectories)
        truths = find_ground_truths(trajectories, ground_truths)
        return [float(_same(_answer(x), _bare(y))) for x, y in zip(texts, truths, strict=True)]


class GSM8KFormatReward(Reward):
    r"""1 if there is an answer in `\boxed{…}` or a number after `####`, otherwise 0.

    Example:
        >>> completion = {"role": "assistant", "content": "It is 7."}
        >>> GSM8KFormatReward()([{"messages": [completion]}])
        [0.0]
    """

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: GroundTruths = None, **kwargs: Any
    ) -> list[float]:
        """Look for an answer in each completion; ground truths are not needed."""
        texts = completions_of(trajectories)
        return [float(bool(last_boxed(x) or _AFTER_HASHES.search(x))) for x in texts]


def _answer(completion: str) -> str:
    tail = completion[-_TAIL:]
    boxed = last_boxed(tail)
    if boxed:
        return _bare(boxed)
    numbers = _AFTER_HASHES.findall(tail)
    return _bare(numbers[-1]) if numbers else ""


def _bare(answer: str) -> str:
    return _SIGNS.sub(r"\1", answer.replace(",", "").replace(" ", "").strip())


def _same(answer: str, truth: str) -> bool:
    if not answer or answer.lstrip("+-").casefold() in _NO_NUMBERS:
        return False
    if not (_NUMBER.fullmatch(answer) and _NUMBER.fullmatch(truth)):
        return answer == truth
    return abs(Decimal(answer) - Decimal(truth)) < _TOLERANCE
