"""Engines draw completions: their interface, and the engine in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.data import Message, Template, Trajectory, bucket_size, message_text
from twinkle_jax.data.batch import pad_tokens
from twinkle_jax.model import DecoderConfig, Params
from twinkle_jax.model.decoder.sharding import row_shards
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.rollout import RolloutConfig
from twinkle_jax.sampler import LENGTH, Completions, Conversations, Sampling, generate
from twinkle_jax.sampler.requests import describe_broken

_MIN_ROWS = 8  # of a call; fewer rows would take as long


class LogitsError(hosts.SharedError):
    """The policy's logits are not finite, so that what was drawn from them is no text."""


class PromptCompletions(NamedTuple):
    """Prompts and their completions, on the device.

    Attributes:
        prompts: token ids, one row a prompt.
        prompt_mask: True for tokens, False for padding.
        completions: those of a prompt are consecutive rows.
    """

    prompts: Int[Array | np.ndarray, "prompts time"]
    prompt_mask: Bool[Array | np.ndarray, "prompts time"]
    completions: Completions


def encode_prompts(
    template: Template, prompts: Sequence[Trajectory], *, longest: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Encode prompts, padded on the left to a bucket of lengths.

    Args:
        template: of the policy.
        prompts: conversations in which the assistant speaks next.
        longest: the most tokens of a prompt.

    Returns:
        Tokens and mask, [prompts, time].

    Raises:
        ValueError: if a prompt is longer, the message says which; or if there are no prompts.
    """
    if not prompts:
        raise ValueError("prompts must be at least one, got none")
    return pad_prompts(prompt_ids(template, prompts, longest=longest))


def prompt_ids(
    template: Template,
    prompts: Sequence[Trajectory],
    *,
    longest: int,
    first: int = 0,
    called: str = "prompts",
) -> list[list[int]]:
    """Encode prompts; errors call them `called`, and the first of them number `first`."""
    if not prompts:
        return []
    features = template.batch_encode(prompts, add_generation_prompt=True)
    rows = [[int(token) for token in feature["input_ids"]] for feature in features]
    lengths = [len(row) for row in rows]
    if max(lengths) > longest:
        worst = int(np.argmax(lengths))
        text = "".join(message_text(message) for message in prompts[worst]["messages"])
        raise ValueError(
            f"{called} must have at most rollout.max_prompt_tokens={longest} tokens, "
            f"got {lengths[worst]} in prompt {first + worst}, {text[:40]!r}"
        )
    return rows


def pad_prompts(
    rows: Sequence[Sequence[int]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Pad token ids on the left to a bucket of lengths; return tokens and mask, [prompts, time]."""
    return pad_tokens(rows, length=bucket_size(max(map(len, rows)), smallest=8), left=True)


class TurnEngine(Protocol):
    """Draws the turns of a fixed number of conversations, each a row of tokens."""

    def go_on(
        self, rows: Mapping[int, Sequence[int]], keys: jax.Array, limits: Mapping[int, int]
    ) -> Completions:
        """Draw the next turn of some of the rows.

        Args:
            rows: all tokens so far of each of these rows, by row number.
            keys: one for each row of the engine.
            limits: the most new tokens of each of these rows, by row number.

        Returns:
            The completions of all rows of the engine, on the host; empty for the other rows.
        """


class Engine(Protocol):
    """Draws completions of prompts from a policy."""

    @property
    def template(self) -> Template:
        """Encodes conversations, and decodes tokens."""

    @property
    def row_shards(self) -> int:
        """Number of devices that rows are spread over; the rows of a call must be a multiple."""

    def draw(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        settings: RolloutConfig,
    ) -> PromptCompletions:
        """Draw `settings.num_samples` completions of each prompt."""

    def converse(self, params: Params, count: int, settings: RolloutConfig) -> TurnEngine:
        """Draw turns of `count` rows, each of at most `settings.max_episode_tokens` tokens."""


@dataclass(frozen=True)
class LocalEngine:
    """Draws with the policy's parameters in this process, on the devices that hold them.

    Attributes:
        config: of the decoder.
        template: of the policy.
        frozen: parameters that those of a call are merged over, such as the base of an adapter.
        compute_dtype: type of activations; None for that of the parameters.
        mesh: of the parameters; None for one device.
        stop_tokens: tokens that end a completion; None for those of the template's tokenizer.
        keep_routing: whether completions have the experts of their tokens.
    """

    config: DecoderConfig
    template: Template
    frozen: Params | None = None
    compute_dtype: DTypeLike | None = None
    mesh: Mesh | None = None
    stop_tokens: Sequence[int] | None = None
    keep_routing: bool = False

    @property
    def row_shards(self) -> int:
        """Number of devices that rows are spread over; the rows of a call must be a multiple."""
        return row_shards(self.mesh)

    def draw(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        settings: RolloutConfig,
    ) -> PromptCompletions:
        """Draw completions, and leave them on the device.

        With several processes, each encodes its share of the prompts.

        Args:
            params: the current trained parameters.
            prompts: conversations in which the assistant speaks next.
            key: of this call; each row draws with a key of its own.
            settings: without `auto` values.

        Raises:
            ValueError: if there are no prompts, a prompt is too long, or the devices do not divide
                the rows.
        """
        if not len(prompts):
            raise ValueError("prompts must not be empty, got none")
        part = hosts.deal(len(prompts))
        parts = hosts.share(
            "encoding prompts",
            lambda: prompt_ids(
                self.template, prompts[part], longest=settings.max_prompt_tokens, first=part.start
            ),
        )
        tokens, mask = pad_prompts([row for part in parts for row in part])
        completions = generate(
            params,
            self.config,
            tokens,
            mask,
            key,
            self.sampling(settings),
            num_samples=settings.num_samples,
            max_new_tokens=settings.max_new_tokens,
            frozen=self.frozen,
            compute_dtype=self.compute_dtype,
            mesh=self.mesh,
            slots=_slots(settings, len(tokens) * settings.num_samples),
            keep_routing=self.keep_routing,
        )
        return PromptCompletions(tokens, mask, completions)

    def sampling(self, settings: RolloutConfig) -> Sampling:
        """Return how the next token is chosen."""
        stops = self.stop_tokens
        return settings.sampling(self.template.tokenizer.stop_token_ids if stops is None else stops)

    def converse(self, params: Params, count: int, settings: RolloutConfig) -> TurnEngine:
        """Draw turns of rows, and keep the keys and values of each row on the device.

        If there are more rows than `settings.slots`, nothing is kept, and each turn reads its row
        from the start.

        Args:
            params: the current trained parameters.
            count: number of rows.
            settings: without `auto` values.
        """
        if settings.slots is not None and count > settings.slots:
            return _RereadingEngine(self, params, count, settings)
        return Conversations(
            params,
            self.config,
            count,
            self.sampling(settings),
            max_length=settings.max_episode_tokens,
            max_new_tokens=settings.max_new_tokens,
            frozen=self.frozen,
            compute_dtype=self.compute_dtype,
            mesh=self.mesh,
            keep_routing=self.keep_routing,
        )


def _slots(settings: RolloutConfig, rows: int) -> int | None:
    return None if settings.slots is None else min(settings.slots, rows)


@dataclass(frozen=True)
class _RereadingEngine:
    """Draws turns of more rows than there are slots: each turn reads its row from the start."""

    engine: LocalEngine
    params: Params
    count: int
    settings: RolloutConfig

    def go_on(
        self, rows: Mapping[int, Sequence[int]], keys: jax.Array, limits: Mapping[int, int]
    ) -> Completions:
        """Draw the next turn of some of the rows, padded to a few sizes."""
        engine, numbers = self.engine, list(rows)
        count = max(1 << (len(rows) - 1).bit_length(), _MIN_ROWS)
        count += -count % engine.row_shards
        time = bucket_size(max(map(len, rows.values())), smallest=32)
        tokens, mask = pad_tokens(list(rows.values()), length=time, count=count, left=True)
        mask[len(rows) :, -1] = True  # padding rows draw one token
        max_tokens = np.ones(count, np.int32)
        max_tokens[: len(rows)] = [limits[number] for number in numbers]
        completions = generate(
            self.params,
            engine.config,
            tokens,
            mask,
            _keys_of(keys, np.asarray(numbers + numbers[:1] * (count - len(rows)))),
            engine.sampling(self.settings),
            max_new_tokens=self.settings.max_new_tokens,
            max_tokens=max_tokens,
            frozen=engine.frozen,
            compute_dtype=engine.compute_dtype,
            mesh=engine.mesh,
            slots=_slots(self.settings, count),
            keep_routing=engine.keep_routing,
        )

        on_host = jax.device_get(jax.tree.map(hosts.read_if_spread, completions))
        return among_all_rows(on_host, numbers, self.count)


def among_all_rows(completions: Completions, numbers: Sequence[int], count: int) -> Completions:
    """Place completions on the host at their rows' numbers; the others of `count` rows are empty.

    Completions beyond these numbers are padding.
    """

    def scatter(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        of_all_rows = np.zeros((count, *values.shape[1:]), values.dtype)
        of_all_rows[list(numbers)] = values[: len(numbers)]
        return of_all_rows

    return jax.tree.map(scatter, completions)


@jax.jit
def _keys_of(keys: jax.Array, index: Int[Array, " count"]) -> jax.Array:
    return jax.random.clone(keys)[index]  # padding rows reuse a key of another row


class Texts(NamedTuple):
    """Completions on the host.

    Attributes:
        trajectories: conversations of the prompts, with the completion as the last message, and
            its `completion_length` in tokens.
        lengths: tokens of each completion.
        truncated: True for completions that reached the limit of tokens.
        held: True for rows that this process has decoded; other trajectories have no completion.
    """

    trajectories: list[Trajectory]
    lengths: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    held: hosts.RowMask


def read_texts(
    drawn: PromptCompletions, prompts: Sequence[Trajectory], template: Template
) -> Texts:
    """Decode completions, on the host that holds them; their tokens come in one transfer.

    Raises:
        LogitsError: if logits were not finite.
    """
    completions = drawn.completions
    held = hosts.held_rows(completions.tokens)
    broken = _not_finite(completions.logprobs, completions.mask)
    tokens, lengths, reasons, broken = hosts.read_held(
        (completions.tokens, completions.lengths, completions.finish_reasons, broken)
    )
    num_samples = len(tokens) // len(prompts)
    trajectories = [prompt for prompt in prompts for _ in range(num_samples)]

    def decode() -> dict[str, np.ndarray[Any, Any]]:
        for i in np.flatnonzero(held):
            text = template.tokenizer.decode(tokens[i, : lengths[i]].tolist())
            messages = [*trajectories[i]["messages"], Message(role="assistant", content=text)]
            length = int(lengths[i])
            trajectories[i] = Trajectory(
                {**trajectories[i], "messages": messages, "completion_length": length}
            )
        return {"lengths": lengths, "reasons": reasons, "broken": broken}

    # Lengths are needed everywhere: every process plans the same micro-batches.
    numbers = hosts.merge_rows("decoding completions", held, decode)
    check_logits(numbers["broken"])
    return Texts(trajectories, numbers["lengths"], numbers["reasons"] == LENGTH, held)


@jax.jit
def _not_finite(
    logprobs: Float[Array, "rows new"], mask: Bool[Array, "rows new"]
) -> Int[Array, " rows"]:
    return jnp.any(jnp.isnan(logprobs) & mask, axis=1).astype(jnp.int32)


def check_logits(broken: np.ndarray[Any, Any]) -> None:
    """Raise a LogitsError if rows drew tokens with NaN as log-probability.

    All processes must call this with all rows.
    """
    if broken.any():
        raise LogitsError(describe_broken(int(broken.sum()), len(broken)))
