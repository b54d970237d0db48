"""A rollout laid out for training, and what it is worth put beside each token."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twinkle_jax.data import Batch
from twinkle_jax.data.trajectory import IGNORE
from twinkle_jax.training.step.rollout import OUT_OF_ROOM, Rollout


def training_batch(
    rollout: Rollout,
    advantages: Float[Array, " rows"] | Float[Array, "rows completion"],
    *,
    mask_truncated: bool = False,
    multiple: int = 1,
) -> Batch:
    """Lay a rollout out for training: at each position the label is the token that follows.

    Args:
        rollout: what was sampled.
        advantages: one for each completion, or for each of its tokens.
        mask_truncated: True takes completions that ran out of room out of the loss.
        multiple: what the length of the rows must be a multiple of; they are padded on the left.

    Returns:
        A batch of [rows, prompt + completion − 1] tokens, and padding.
    """
    batch = lay_out(rollout, mask_truncated=mask_truncated, multiple=multiple)
    return with_advantages(batch, advantages)


@partial(jax.jit, static_argnames=("mask_truncated", "multiple"))
def lay_out(rollout: Rollout, *, mask_truncated: bool = False, multiple: int = 1) -> Batch:
    """Do what `training_batch` does while advantages are not known yet."""
    drawn = rollout.completions
    samples = len(drawn.tokens) // len(rollout.prompts)
    length = rollout.prompts.shape[1] + drawn.tokens.shape[1] - 1
    room = ((0, 0), (-length % multiple, 0))
    prompts = jnp.repeat(jnp.pad(rollout.prompts, room), samples, axis=0)
    tokens = jnp.concatenate([prompts, drawn.tokens[:, :-1]], axis=1)
    mask = jnp.concatenate(
        [jnp.repeat(jnp.pad(rollout.prompt_mask, room), samples, axis=0), drawn.mask[:, :-1]],
        axis=1,
    )
    learnt = drawn.mask
    if mask_truncated:
        learnt = learnt & (drawn.finish_reasons != OUT_OF_ROOM)[:, None]
    before = ((0, 0), (prompts.shape[1] - 1, 0))
    return Batch(
        tokens=tokens,
        labels=jnp.pad(jnp.where(learnt, drawn.tokens, IGNORE), before, constant_values=IGNORE),
        mask=mask,
        old_logps=jnp.pad(jnp.where(learnt, drawn.logprobs, 0), before),
    )


@jax.jit
def with_advantages(
    batch: Batch, advantages: Float[Array, " rows"] | Float[Array, "rows completion"]
) -> Batch:
    """Give each token its advantage; completions stand at the end of their rows."""
    if advantages.ndim == 1:
        per_token = jnp.broadcast_to(advantages[:, None], batch.tokens.shape)
    else:
        room = batch.tokens.shape[1] - advantages.shape[1]
        per_token = jnp.pad(advantages, ((0, 0), (room, 0)))
    return batch._replace(advantages=per_token.astype(jnp.float32))
