"""Dynamic sampling (DAPO): rollouts until enough prompts have something to learn from."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from twinkle_jax.advantage import NOISE_ULPS
from twinkle_jax.data import IGNORE, Batch
from twinkle_jax.rollout.rollout import Rollout


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
