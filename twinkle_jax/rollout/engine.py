"""Who draws completions: an interface, and the engine in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from twinkle_jax.data import Message, Template, Trajectory, bucket_size
from twinkle_jax.model import DecoderConfig, Params
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.rollout import pad_prompts, prompt_ids
from twinkle_jax.sampler import LENGTH, Completions, Conversations, Sampling, generate

_FEWEST_ROWS = 8  # of a call: fewer take as long


class Drawn(NamedTuple):
    """Completions of some prompts, on the device.

    Attributes:
        prompts: their tokens, one row a prompt.
        prompt_mask: True for tokens.
        completions: those of a prompt stand next to each other.
    """

    prompts: Int[Array | np.ndarray, "prompts time"]
    prompt_mask: Bool[Array | np.ndarray, "prompts time"]
    completions: Completions


class TurnEngine(Protocol):
    """Draws turns of a fixed number of rows, which grow in between."""

    def go_on(
        self, rows: Mapping[int, Sequence[int]], keys: jax.Array, limits: Mapping[int, int]
    ) -> Completions:
        """Draw what follows some of the rows.

        Args:
            rows: by the number of a row, all its tokens so far.
            keys: one for each row, used for those that are named.
            limits: by the number of a row, the most tokens that it may get.

        Returns:
            The completions of all rows, on the host; of those that are not named, no tokens.
        """


class Engine(Protocol):
    """Draws completions of prompts from a policy.

    Attributes:
        template: turns conversations into tokens and tokens into text.
        stop_tokens: tokens that end a completion.
        row_shards: the rows of a call must be a multiple of this.
    """

    @property
    def template(self) -> Template:
        """What turns conversations into tokens, and tokens into text."""

    @property
    def row_shards(self) -> int:
        """Over how many devices rows are spread: their number must be a multiple of it."""

    def draw(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        sampling: Sampling,
        *,
        num_samples: int,
    ) -> Drawn:
        """Draw `num_samples` completions of each prompt."""

    def converse(
        self, params: Params, count: int, sampling: Sampling, *, max_length: int
    ) -> TurnEngine:
        """Draw turns of `count` rows, each of at most `max_length` tokens."""


@dataclass(frozen=True)
class LocalEngine:
    """Draws with the policy's own parameters, in this process, on the devices where they lie.

    Attributes:
        config: the decoder.
        template: of the policy.
        max_new_tokens: the most tokens of a completion.
        max_prompt_tokens: the most tokens of a prompt.
        frozen: parameters over which those of a call are laid: the base of an adapter.
        compute_dtype: type of activations; None for that of the parameters.
        mesh: devices; None for one.
        slots: rows that are drawn at a time; None for all.
    """

    config: DecoderConfig
    template: Template
    max_new_tokens: int
    max_prompt_tokens: int = 1024
    frozen: Params | None = None
    compute_dtype: DTypeLike | None = None
    mesh: Mesh | None = None
    slots: int | None = None

    @property
    def row_shards(self) -> int:
        """Over how many devices rows are spread: their number must be a multiple of it."""
        return 1 if self.mesh is None else int(self.mesh.shape["data"] * self.mesh.shape["fsdp"])

    def draw(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        sampling: Sampling,
        *,
        num_samples: int,
    ) -> Drawn:
        """Draw completions; nothing comes back to the host.

        With several processes, each encodes its share of the prompts.

        Args:
            params: what is trained, as it is now.
            prompts: conversations that end before the assistant speaks.
            key: of this call; each row draws with a key of its own.
            sampling: temperature, filters and stop tokens.
            num_samples: completions of each prompt.

        Raises:
            ValueError: if a prompt is too long, or the devices do not divide the rows.
        """
        part = hosts.deal(len(prompts))
        parts = hosts.share(
            "encoding prompts",
            lambda: prompt_ids(
                self.template, prompts[part], longest=self.max_prompt_tokens, first=part.start
            ),
        )
        tokens, mask = pad_prompts([row for part in parts for row in part])
        completions = generate(
            params,
            self.config,
            tokens,
            mask,
            key,
            sampling,
            num_samples=num_samples,
            max_new_tokens=self.max_new_tokens,
            frozen=self.frozen,
            compute_dtype=self.compute_dtype,
            mesh=self.mesh,
            slots=None if self.slots is None else min(self.slots, len(tokens) * num_samples),
        )
        return Drawn(tokens, mask, completions)

    def converse(
        self, params: Params, count: int, sampling: Sampling, *, max_length: int
    ) -> TurnEngine:
        """Draw turns of rows whose keys and values stay on the device in between.

        Where they are more than `slots`, nothing is kept, and each turn reads its row again.

        Args:
            params: what is trained, as it is now.
            count: how many rows.
            sampling: temperature, filters and stop tokens.
            max_length: the most tokens of a row.
        """
        if self.slots is not None and count > self.slots:
            return _ReadAgain(self, params, count, sampling)
        return Conversations(
            params,
            self.config,
            count,
            sampling,
            max_length=max_length,
            max_new_tokens=self.max_new_tokens,
            frozen=self.frozen,
            compute_dtype=self.compute_dtype,
            mesh=self.mesh,
        )


@dataclass(frozen=True)
class _ReadAgain:
    """Draws turns of more rows than there are slots: each turn reads its row from the start."""

    engine: LocalEngine
    params: Params
    count: int
    sampling: Sampling

    def go_on(
        self, rows: Mapping[int, Sequence[int]], keys: jax.Array, limits: Mapping[int, int]
    ) -> Completions:
        """Draw what follows some of the rows, padded to few different sizes."""
        engine, numbers = self.engine, list(rows)
        count = max(1 << (len(rows) - 1).bit_length(), _FEWEST_ROWS)
        count += -count % engine.row_shards
        time = bucket_size(max(map(len, rows.values())), smallest=32)
        tokens, mask = np.zeros((count, time), np.int32), np.zeros((count, time), bool)
        for i, row in enumerate(rows.values()):
            tokens[i, time - len(row) :], mask[i, time - len(row) :] = row, True
        mask[len(rows) :, -1] = True  # rows that fill up draw one token
        most = np.ones(count, np.int32)
        most[: len(rows)] = [limits[number] for number in numbers]
        completions = generate(
            self.params,
            engine.config,
            tokens,
            mask,
            _keys_of(keys, np.asarray(numbers + numbers[:1] * (count - len(rows)))),
            self.sampling,
            max_new_tokens=engine.max_new_tokens,
            max_tokens=most,
            frozen=engine.frozen,
            compute_dtype=engine.compute_dtype,
            mesh=engine.mesh,
            slots=None if engine.slots is None else min(engine.slots, count),
        )

        def in_place(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            placed = np.zeros((self.count, *values.shape[1:]), values.dtype)
            placed[numbers] = values[: len(rows)]
            return placed

        placed: Completions = jax.tree.map(
            in_place, jax.device_get(jax.tree.map(hosts.read_if_spread, completions))
        )
        return placed


@jax.jit
def _keys_of(keys: jax.Array, index: Int[Array, " count"]) -> jax.Array:
    return jax.random.clone(keys)[index]  # rows that fill up may draw what others do


class Texts(NamedTuple):
    """Completions on the host.

    Attributes:
        trajectories: the prompts' conversations, each with a completion as its last message.
        lengths: tokens of each completion.
        truncated: True for completions that ran out of room.
        held: rows that this process has decoded; the others' completions are left out.
    """

    trajectories: list[Trajectory]
    lengths: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    held: hosts.RowMask


def read_texts(drawn: Drawn, prompts: Sequence[Trajectory], template: Template) -> Texts:
    """Bring completions to the host that holds them, all in one transfer, and decode them."""
    tokens, lengths, reasons, held = _read_completions(drawn.completions)
    num_samples = len(tokens) // len(prompts)
    trajectories = []
    for i, (row, length) in enumerate(zip(tokens, lengths, strict=True)):
        prompt = prompts[i // num_samples]
        if not held[i]:
            trajectories.append(prompt)
            continue
        text = template.tokenizer.decode(row[:length].tolist())
        answer = Message(role="assistant", content=text)
        trajectories.append(Trajectory({**prompt, "messages": [*prompt["messages"], answer]}))
    return Texts(trajectories, lengths, reasons == LENGTH, held)


def _read_completions(completions: Completions) -> tuple[np.ndarray[Any, Any], ...]:
    """Read tokens, lengths, finish reasons, and whose tokens this process has."""
    if not hosts.several():
        tokens, lengths, reasons = jax.device_get(
            (completions.tokens, completions.lengths, completions.finish_reasons)
        )
        return tokens, lengths, reasons, np.ones(len(lengths), bool)
    # Lengths are needed everywhere: every process plans the same micro-batches.
    numbers = hosts.stack(completions.lengths, completions.finish_reasons)
    lengths, reasons = hosts.read_all(numbers)
    tokens = completions.tokens
    return hosts.read_held(tokens), lengths, reasons, hosts.held_rows(tokens)
