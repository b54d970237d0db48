"""A rollout: sampled trajectories, as rows to train on and as text; and dynamic sampling."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.advantage import NOISE_ULPS
from twinkle_jax.data import IGNORE, Batch, Template, Trajectory, bucket_size
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.episode import Episode
from twinkle_jax.sampler import LENGTH, Completions

_SMALLEST_WIDTH = 16  # columns: shorter rows are not worth a compilation of their own


class Rollout(NamedTuple):
    """Trajectories that a policy drew; the completions of a prompt stand next to each other.

    Attributes:
        batch: [rows, time] on the device: tokens; labels, which are the tokens that the policy
            chose; and their log-probabilities under it (`old_logps`). Advantages and those of a
            reference policy are added later.
        trajectories: the conversations; the last message is the completion.
        ground_truths: what the reward compares with, one a row.
        lengths: tokens that the policy chose, one number a row.
        row_lengths: columns that a row takes in `batch`, padding left out.
        truncated: True for rows that ran out of room.
        rewards: one a row, in float32; None before they are scored.
        reward_parts: the single rewards, by name, where several are added up.
        greedy_rewards: rewards of the most probable completions, one a prompt, for estimators that
            compare with them.
        advantages: one a row, to look at; those of single tokens are in `batch`.
        failed: True for trajectories whose environment failed; None without environments. They
            have no labels, and no part in statistics.
        episodes: the conversations with environments; None without. The batch has the same number
            of rows for each, one unless a chat template takes several; all else is one a
            trajectory, but for `row_lengths` and `turns`.
        turns: for each position of the batch, the turn that its label belongs to; -1 for others.
        held: rows whose text this process has, where a run has several processes; the others'
            conversations are here without their completion. None: all.
    """

    batch: Batch
    trajectories: list[Trajectory]
    ground_truths: list[Any]
    lengths: np.ndarray[Any, Any]
    row_lengths: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any] | None = None
    reward_parts: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({})
    greedy_rewards: np.ndarray[Any, Any] | None = None
    advantages: Float[Array, " rows"] | None = None
    failed: np.ndarray[Any, Any] | None = None
    episodes: list[Episode] | None = None
    turns: np.ndarray[Any, Any] | None = None
    held: hosts.RowMask | None = None

    @property
    def rows_each(self) -> int:
        """Rows of the batch for each trajectory."""
        return len(self.batch.tokens) // len(self.lengths)

    def counted(self, *, mask_truncated: bool = False) -> np.ndarray[Any, Any] | None:
        """Say which trajectories count in statistics; None for all."""
        left_out = [self.truncated] if mask_truncated else []
        left_out += [] if self.failed is None else [self.failed]
        return ~np.logical_or.reduce(left_out) if left_out else None

    @property
    def held_rows(self) -> hosts.RowMask:
        """Rows whose text this process has."""
        return np.ones(len(self.lengths), bool) if self.held is None else self.held

    @property
    def scores(self) -> np.ndarray[Any, Any]:
        """The rewards of a rollout that has been scored."""
        if self.rewards is None:
            raise ValueError("rollout must be scored first, got one without rewards")
        return self.rewards


def encode_prompts(
    template: Template, prompts: Sequence[Trajectory], *, longest: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Make token ids of prompts, padded on the left to a bucket of lengths, and their mask.

    Args:
        template: of the policy.
        prompts: conversations that end before the assistant speaks.
        longest: the most tokens of a prompt.

    Returns:
        Tokens and mask, [prompts, time].

    Raises:
        ValueError: if a prompt is longer; the message says which.
    """
    return pad_prompts(prompt_ids(template, prompts, longest=longest))


def prompt_ids(
    template: Template, prompts: Sequence[Trajectory], *, longest: int, first: int = 0
) -> list[list[int]]:
    """Make token ids of prompts, the first of which has this number in messages of errors."""
    if not prompts:
        return []
    features = template.batch_encode(prompts, add_generation_prompt=True)
    rows = [[int(token) for token in feature["input_ids"]] for feature in features]
    lengths = [len(row) for row in rows]
    if max(lengths) > longest:
        worst = int(np.argmax(lengths))
        raise ValueError(
            f"prompts must have at most max_prompt_tokens={longest} tokens, got {lengths[worst]} "
            f"in prompt {first + worst}"
        )
    return rows


def pad_prompts(
    rows: Sequence[Sequence[int]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Pad token ids on the left to a bucket of lengths: tokens and mask, [prompts, time]."""
    time = bucket_size(max(map(len, rows)), smallest=8)
    tokens, mask = np.zeros((len(rows), time), np.int32), np.zeros((len(rows), time), bool)
    for i, row in enumerate(rows):
        tokens[i, time - len(row) :] = row
        mask[i, time - len(row) :] = True
    return tokens, mask


def training_batch(
    prompts: Int[Array | np.ndarray, "prompts time"],
    prompt_mask: Bool[Array | np.ndarray, "prompts time"],
    completions: Completions,
    *,
    advantages: Float[Array, " rows"] | None = None,
    width: int | None = None,
    mask_truncated: bool = False,
    multiple: int = 1,
) -> Batch:
    """Lay prompts and their completions out to train on: labels are the next tokens.

    Each row begins with its prompt in column 0 and is padded behind its completion, so that it
    needs no mask. A batch is as wide as its longest row, not as the longest that could be drawn.

    Args:
        prompts: token ids, one row a prompt.
        prompt_mask: True for tokens.
        completions: of [`generate`][twinkle_jax.sampler.generate]; those of a prompt next to each
            other.
        advantages: one for each completion.
        width: columns; None: a bucket that holds the longest row, which waits for the lengths.
        mask_truncated: True takes completions that ran out of room out of the loss.
        multiple: what the width must be a multiple of.

    Returns:
        A batch of [rows, width] tokens.
    """
    if width is None:
        lengths = np.asarray(completions.lengths)
        prompt_lengths = np.asarray(prompt_mask).sum(axis=1)
        rows = np.repeat(prompt_lengths, len(lengths) // len(prompts)) + lengths - 1
        width = batch_width(int(rows.max()), multiple=multiple)
    batch: Batch = _lay_out(
        prompts, prompt_mask, completions, width=width, mask_truncated=mask_truncated
    )
    return batch if advantages is None else with_advantages(batch, advantages)


def batch_width(longest: int, *, multiple: int = 1) -> int:
    """Give the columns of a batch whose longest row has so many tokens: few different numbers."""
    return bucket_size(longest, smallest=_SMALLEST_WIDTH, multiple=multiple)


@partial(jax.jit, static_argnames=("width", "mask_truncated"))
def _lay_out(
    prompts: Int[Array, "prompts time"],
    prompt_mask: Bool[Array, "prompts time"],
    completions: Completions,
    *,
    width: int,
    mask_truncated: bool,
) -> Batch:
    samples = len(completions.tokens) // len(prompts)
    # Prompts to the left: stable, so that their tokens stay in order.
    order = jnp.argsort(~prompt_mask, axis=1, stable=True)
    prompts = jnp.repeat(jnp.take_along_axis(prompts, order, axis=1), samples, axis=0)
    starts = jnp.repeat(jnp.sum(prompt_mask, axis=1, dtype=jnp.int32), samples)[:, None]
    lengths = completions.lengths[:, None].astype(jnp.int32)
    columns = jnp.arange(width, dtype=jnp.int32)[None]

    def pick(values: Array, index: Array) -> Array:
        return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)

    of_prompt = columns < starts
    of_completion = ~of_prompt & (columns < starts + lengths - 1)  # the last one is a label alone
    tokens = jnp.where(of_prompt, pick(prompts, jnp.broadcast_to(columns, of_prompt.shape)), 0)
    tokens = jnp.where(of_completion, pick(completions.tokens, columns - starts), tokens)
    following = columns + 1 - starts  # which token of the completion comes next
    chosen = (following >= 0) & (following < lengths)
    if mask_truncated:
        chosen &= (completions.finish_reasons != LENGTH)[:, None]
    return Batch(
        tokens=tokens.astype(jnp.int32),
        labels=jnp.where(chosen, pick(completions.tokens, following), IGNORE).astype(jnp.int32),
        old_logps=jnp.where(chosen, pick(completions.logprobs, following), 0),
    )


@jax.jit
def with_advantages(
    batch: Batch, advantages: Float[Array, " rows"] | Float[Array, "rows time"]
) -> Batch:
    """Give each token its advantage: one number a row, or one a position."""
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], batch.tokens.shape)
    return batch._replace(advantages=advantages.astype(jnp.float32))


# Dynamic sampling: rollouts until enough prompts have something to learn from.


def has_signal(
    rollout: Rollout, num_samples: int, *, mask_truncated: bool = False
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Say of each prompt whether its rewards differ, so that there is something to learn.

    The same rule as [`group_statistics`][twinkle_jax.advantage.group_statistics], on the host,
    where the rewards are: the device is not waited for.

    Args:
        rollout: scored.
        num_samples: completions of each prompt.
        mask_truncated: True leaves completions that ran out of room out.
    """
    rewards = rollout.scores.reshape(-1, num_samples)
    kept = np.ones(rewards.shape, bool)
    counted = rollout.counted(mask_truncated=mask_truncated)
    if counted is not None:
        kept = counted.reshape(rewards.shape)
    highest = rewards.max(axis=1, where=kept, initial=-np.inf)
    lowest = rewards.min(axis=1, where=kept, initial=np.inf)
    with np.errstate(invalid="ignore", over="ignore"):  # nothing is kept; the largest floats
        rounding = NOISE_ULPS * np.spacing(np.maximum(np.abs(highest), np.abs(lowest)))
        return np.asarray(highest - lowest > rounding)


def draw_until_signal(
    draw: Callable[[int], Rollout],
    *,
    prompts: int,
    num_samples: int,
    rollouts: int,
    mask_truncated: bool = False,
) -> tuple[Rollout, list[Rollout]]:
    """Draw rollouts until enough prompts have a signal.

    Args:
        draw: gives the scored rollout of this number.
        prompts: prompts of an update.
        num_samples: completions of each prompt.
        rollouts: the most rollouts to draw; 1 takes what the first gives.
        mask_truncated: as for `has_signal`.

    Returns:
        What to train on, and all that was drawn. Where the last rollout allowed does not bring
        enough prompts with a signal, others fill up; they change nothing but averages.

    References:
        [DAPO](https://arxiv.org/abs/2503.14476) (Yu et al., 2025)
    """
    drawn = [draw(0)]
    if rollouts == 1:
        return drawn[0], drawn
    signals = [has_signal(drawn[0], num_samples, mask_truncated=mask_truncated)]
    while sum(map(np.sum, signals)) < prompts and len(drawn) < rollouts:
        drawn.append(draw(len(drawn)))
        signals.append(has_signal(drawn[-1], num_samples, mask_truncated=mask_truncated))
    chosen = np.argsort(~np.concatenate(signals), kind="stable")[:prompts].astype(np.int32)
    return _choose(drawn, chosen, num_samples), drawn


def _choose(
    drawn: list[Rollout], groups: np.ndarray[Any, np.dtype[np.int32]], num_samples: int
) -> Rollout:
    """Take groups out of several rollouts, numbered one after the other."""
    rows = (groups[:, None] * num_samples + np.arange(num_samples)).reshape(-1)
    each = drawn[0].rows_each
    of_batch = (rows[:, None] * each + np.arange(each, dtype=np.int32)).reshape(-1)
    width = max(rollout.batch.tokens.shape[1] for rollout in drawn)
    batches = [_pad(rollout.batch, width) for rollout in drawn]

    def pick(name: str, index: np.ndarray[Any, Any]) -> Any:
        values = [getattr(rollout, name) for rollout in drawn]
        return None if values[0] is None else np.concatenate(values)[index]

    trajectories = [t for rollout in drawn for t in rollout.trajectories]
    truths = [truth for rollout in drawn for truth in rollout.ground_truths]
    episodes = [e for rollout in drawn for e in rollout.episodes or ()]
    turns = None
    if drawn[0].turns is not None:
        padded = [np.pad(r.turns, ((0, 0), (0, width - r.turns.shape[1])), constant_values=-1)
                  for r in drawn if r.turns is not None]  # fmt: skip
        turns = np.concatenate(padded)[of_batch]
    return Rollout(
        _take_rows(batches, jnp.asarray(of_batch, jnp.int32)),
        [trajectories[i] for i in rows],
        [truths[i] for i in rows],
        lengths=pick("lengths", rows),
        row_lengths=pick("row_lengths", of_batch),
        truncated=pick("truncated", rows),
        rewards=pick("rewards", rows),
        greedy_rewards=pick("greedy_rewards", groups),
        reward_parts={
            name: np.concatenate([rollout.reward_parts[name] for rollout in drawn])[rows]
            for name in drawn[0].reward_parts
        },
        failed=pick("failed", rows),
        episodes=[episodes[i] for i in rows] if episodes else None,
        turns=turns,
        held=pick("held", rows),
    )


def _pad(batch: Batch, width: int) -> Batch:
    room = ((0, 0), (0, width - batch.tokens.shape[1]))
    fill = {"labels": IGNORE}
    padded = {
        name: array if name == "rows" else jnp.pad(array, room, constant_values=fill.get(name, 0))
        for name, array in batch._asdict().items()
        if array is not None
    }
    return batch._replace(**padded)


@partial(jax.jit)
def _take_rows(batches: list[Any], rows: Int[Array, " rows"]) -> Any:
    """Choose rows out of several trees whose rows stand one after the other."""
    return jax.tree.map(lambda *xs: jnp.take(jnp.concatenate(xs), rows, axis=0), *batches)
