"""Dynamic sampling (DAPO): rollouts until enough prompts have something to learn from."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from twinkle_jax.advantage import NOISE_ULPS
from twinkle_jax.data import Batch
from twinkle_jax.training.step.recipe import Recipe
from twinkle_jax.training.step.sample_and_score import Sampled


def has_signal(sampled: Sampled, recipe: Recipe) -> np.ndarray[Any, Any]:
    """Say of each prompt whether its rewards differ, so that there is something to learn.

    As `group_statistics` says it, but on the host, where the rewards are: the device need not be
    waited for.
    """
    rewards = sampled.rewards.reshape(-1, recipe.num_samples)
    kept = np.ones(rewards.shape, bool)
    if recipe.mask_truncated:
        kept = ~sampled.truncated.reshape(rewards.shape)
    most = rewards.max(axis=1, where=kept, initial=-np.inf)
    least = rewards.min(axis=1, where=kept, initial=np.inf)
    with np.errstate(invalid="ignore", over="ignore"):  # none is kept; the largest floats
        rounding = NOISE_ULPS * np.spacing(np.maximum(np.abs(most), np.abs(least)))
        return np.asarray(most - least > rounding)


def fill_up(
    draw: Callable[[int], Sampled], recipe: Recipe, wanted: int
) -> tuple[Sampled, list[Sampled]]:
    """Draw rollouts until enough prompts have a signal (dynamic sampling, DAPO).

    Args:
        draw: gives the rollout of this number.
        recipe: of the run.
        wanted: prompts of an update.

    Returns:
        What to train on, and all that was drawn. Where the last rollout allowed does not bring
        enough prompts with a signal, the others fill up; they change nothing but averages.
    """
    drawn = [draw(0)]
    if recipe.dynamic_sampling == 1:
        return drawn[0], drawn
    signals = [has_signal(drawn[0], recipe)]
    while sum(map(np.sum, signals)) < wanted and len(drawn) < recipe.dynamic_sampling:
        drawn.append(draw(len(drawn)))
        signals.append(has_signal(drawn[-1], recipe))
    signal = np.concatenate(signals)
    chosen = np.argsort(~signal, kind="stable")[:wanted].astype(np.int32)
    longest = max(s.batch.tokens.shape[1] for s in drawn)
    batches = [_padded(s.batch, longest) for s in drawn]
    rows = (chosen[:, None] * recipe.num_samples + np.arange(recipe.num_samples)).reshape(-1)
    trajectories = [t for s in drawn for t in s.trajectories]
    together = {
        name: np.concatenate([getattr(s, name) for s in drawn])[rows]
        for name in ("rewards", "advantages", "lengths", "truncated")
    }
    batch = _keep_groups(batches, jnp.asarray(chosen), group=recipe.num_samples)
    return Sampled([trajectories[i] for i in rows], **together, batch=batch), drawn


def _padded(batch: Batch, time: int) -> Batch:
    """Pad on the left, so that completions of all rollouts end in the same column."""
    room = ((0, 0), (time - batch.tokens.shape[1], 0))
    fill = {"labels": -100}
    return batch._replace(
        **{
            name: jnp.pad(array, room, constant_values=fill.get(name, 0))
            for name, array in batch._asdict().items()
            if array is not None
        }
    )


@partial(jax.jit, static_argnames="group")
def _keep_groups(batches: list[Any], chosen: Int[Array, " groups"], *, group: int) -> Any:
    """Choose groups of rows out of several trees whose rows stand one after the other."""
    rows = (chosen[:, None] * group + jnp.arange(group, dtype=chosen.dtype)[None]).reshape(-1)
    return jax.tree.map(lambda *xs: jnp.take(jnp.concatenate(xs), rows, axis=0), *batches)
