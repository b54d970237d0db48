"""Whether a server has the weights that it should have: what it says of tokens is compared."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle_jax.data.sampling_params import SamplingParams
from twinkle_jax.model.twinkle.transformers_model import TransformersModel
from twinkle_jax.sampler.requests.stops import Stops
from twinkle_jax.sampler.vllm.budget import Budget
from twinkle_jax.sampler.vllm.completion_request import completion_request
from twinkle_jax.sampler.vllm.read_completions import Asked, Completions
from twinkle_jax.sampler.vllm.request import Request, ServerError
from twinkle_jax.sampler.vllm.server import Server

_PROMPTS, _TIME, _NEW, _TOP = 4, 24, 16, 8
_NO_STOPS = Stops([], [])

Scores = list[dict[int, float]]


class Probe:
    """A few prompts of random tokens, always the same, and what to ask of them.

    Prompts are not scored themselves: vLLM 0.32 ends on a CPU when it is asked to, with adapters.

    Args:
        vocab: token ids lie below it.
        room: the most tokens of a row.
    """

    def __init__(self, vocab: int, room: int) -> None:
        rng = np.random.default_rng(0x9806E)
        self._new = min(_NEW, room - 1)
        time = min(_TIME, room - self._new)
        self._prompts: list[list[int]] = rng.integers(vocab, size=(_PROMPTS, time)).tolist()
        self._only = int(rng.integers(vocab))
        self._vocab = vocab

    def drawing(self, model: str) -> list[Request]:
        """Ask for tokens after each prompt."""
        return [self._request(model, i, self._new) for i in range(_PROMPTS)]

    def looking(self, model: str) -> list[Request]:
        """Ask what is likely to be the first of them."""
        return [self._request(model, i, 1) for i in range(_PROMPTS)]

    def without_choice(self, model: str) -> Request:
        """Ask for a token where only one is allowed."""
        return self._request(model, 0, 1, allowed_token_ids=[self._only])

    def rows(self, answers: Sequence[Completions]) -> list[list[int]]:
        """Give the tokens of each prompt and those after it."""
        return [
            prompt + answer.drawn[0].tokens
            for prompt, answer in zip(self._prompts, answers, strict=True)
        ]

    def _request(self, model: str, i: int, new: int, **more: Any) -> Request:
        params = SamplingParams(logprobs=min(_TOP, self._vocab))
        asked = Asked(model, self._prompts[i], 1, new, None, params, _NO_STOPS, self._vocab)
        return completion_request(asked, f"probe {i}", **more)


def prove(
    server: Server,
    budget: Budget,
    probe: Probe,
    name: str,
    actor: TransformersModel,
    tolerance: float,
) -> Scores:
    """Have a server draw tokens, and compare what it and the actor say of them.

    Args:
        server: the server.
        budget: the time there is.
        probe: the prompts.
        name: of the model or the adapter on the server.
        actor: whose weights it must have.
        tolerance: by how much log-probabilities may differ on average.

    Returns:
        What the server says, to be compared with what it says later.

    Raises:
        ServerError: if they differ by more, or are not of the distribution that is drawn from.
    """
    check_mode(server.url, server.call(budget, probe.without_choice(name)))
    answers = server.call_all(budget, probe.drawing(name))
    rows = probe.rows(answers)
    scored = actor.forward_only(inputs=[{"input_ids": row} for row in rows])["logps"]
    ours = [
        scores[: len(row) - 1][-len(answer.drawn[0].tokens) :]
        for scores, row, answer in zip(scored, rows, answers, strict=True)
    ]
    said = np.asarray([x[0][1] for answer in answers for x in answer.drawn[0].logprobs])
    whose = "the actor's weights", "the actor"
    _compare(server.url, said, np.concatenate(ours), tolerance, *whose)
    return first_tokens(answers)


def first_tokens(answers: Sequence[Completions]) -> Scores:
    """Give the log-probabilities of the likely tokens behind each prompt."""
    return [dict(answer.drawn[0].logprobs[0]) for answer in answers]


def check_mode(url: str, answer: Completions) -> None:
    """See to it that log-probabilities are those of the distribution that was drawn from.

    Raises:
        ServerError: if a token of which there is no choice has less than probability 1.
    """
    found = answer.drawn[0].logprobs[0][0][1]
    if found < -1e-3:
        raise ServerError(
            f"{url} must give log-probabilities of the distribution that it draws from, 0 where "
            f"one token only is allowed, got {found:.4f}: start it with "
            "--logprobs-mode processed_logprobs"
        )


def check_unchanged(url: str, now: Scores, then: Scores, tolerance: float) -> None:
    """Compare what a server says of likely tokens with what it has said before.

    Raises:
        ServerError: if it differs by more than `tolerance` on average.
    """
    pairs = [
        (new[token], old[token])
        for new, old in zip(now, then, strict=True)
        for token in sorted(new.keys() & old.keys())
    ]
    whose = "the weights of the last sync_weights", "it said then"
    table = np.asarray(pairs).reshape(-1, 2)
    _compare(url, table[:, 0], table[:, 1], tolerance, *whose)


def _compare(
    url: str, said: np.ndarray, wanted: np.ndarray, tolerance: float, what: str, whose: str
) -> None:
    gaps = np.abs(said - wanted)
    if not gaps.size:
        raise ServerError(f"{url} must have {what}, got other likely tokens after every prompt")
    if not np.mean(gaps) <= tolerance:
        worst = int(np.argmax(gaps))
        raise ServerError(
            f"{url} must have {what}: log-probabilities of {gaps.size} probe tokens must differ by "
            f"at most {tolerance:g} on average, got {np.mean(gaps):.3g}, and at most "
            f"{gaps[worst]:.3g}, where the server says {said[worst]:.6f} and {whose} "
            f"{wanted[worst]:.6f}"
        )
