"""One turn: each prompt is completed several times, and a reward scores the completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.data import IGNORE, Batch, PromptBatch, Trajectory
from twinkle_jax.data.batch import batch_width
from twinkle_jax.model import Params
from twinkle_jax.reward import RewardFunction, TrajectoryScores, score_trajectories
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.engine import Engine, Texts, read_texts
from twinkle_jax.rollout.rollout import (
    Rollout,
    RolloutConfig,
    weights_of_parts,
    with_advantages,
)
from twinkle_jax.sampler import LENGTH, Completions


@dataclass(frozen=True)
class SingleTurn:
    """Completes each prompt, and scores the completions.

    Attributes:
        engine: draws completions.
        reward: of trajectories and ground truths; None: completions have no reward, NaN.
        settings: what is sampled; `prompts` and the settings of episodes are not read, and
            `max_new_tokens` is 512 if it is `auto`.
        reward_timeout: seconds that the reward may take for the completions of a call.
        mask_truncated: exclude truncated completions from statistics and the loss.
        width_multiple: the width of a batch is a multiple of this.
    """

    engine: Engine
    reward: RewardFunction | None
    settings: RolloutConfig = field(default_factory=RolloutConfig)
    reward_timeout: float = 600.0
    mask_truncated: bool = False
    width_multiple: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self.settings.of_source())

    def with_settings(self, **changes: Any) -> "SingleTurn":
        """Return a copy with other settings."""
        return replace(self, settings=replace(self.settings, **changes))

    def sample(self, params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        """Draw completions, and lay them out; their tokens come to the host in one transfer."""
        prompts, samples = PromptBatch.of(prompts), self.settings.num_samples
        drawn = self.engine.draw(params, prompts, key, self.settings)
        texts = read_texts(drawn, prompts, self.engine.template)
        prompt_lengths = np.repeat(np.asarray(drawn.prompt_mask).sum(axis=1), samples)
        row_lengths = prompt_lengths + texts.lengths - 1
        batch = _laid_out(
            *drawn,
            width=batch_width(int(row_lengths.max()), multiple=self.width_multiple),
            mask_truncated=self.mask_truncated,
        )
        return Rollout(
            batch,
            texts.trajectories,
            [truth for truth in prompts.ground_truths for _ in range(samples)],
            texts.lengths,
            row_lengths.astype(np.int32),
            texts.truncated,
            reward_weights=weights_of_parts(self.reward),
            counted=~texts.truncated if self.mask_truncated else None,
            held=texts.held,
        )

    def score(self, rollout: Rollout) -> Rollout:
        """Call the reward once, for the completions that this process holds; NaN for the others."""
        if self.reward is None:
            return rollout._replace(rewards=np.full(len(rollout.lengths), np.nan, np.float32))
        held = np.flatnonzero(rollout.held_rows)
        scores = self._score(
            [rollout.trajectories[i] for i in held], [rollout.ground_truths[i] for i in held]
        )

        def of_all_rows(values: Sequence[float | None]) -> np.ndarray[Any, Any]:
            array = np.full(len(rollout.lengths), np.nan, np.float32)
            array[held] = np.asarray(values, np.float32)
            return array

        parts = {}
        if rollout.reward_weights:
            # NaN where a reward returned None
            parts = {name: of_all_rows(values) for name, values in scores.components.items()}
        return rollout._replace(rewards=of_all_rows(scores.rewards), reward_parts=parts)

    def greedy_rewards(
        self, params: Params, prompts: PromptBatch, key: jax.Array
    ) -> np.ndarray[Any, Any]:
        """Score the most probable completion of each prompt."""
        greedy = self.with_settings(num_samples=1, temperature=0.0)
        return greedy.complete_and_score(params, prompts, key).astype(np.float32)

    def complete_and_score(
        self,
        params: Params,
        prompts: Sequence[Trajectory],
        key: jax.Array,
        check: Callable[[], None] = lambda: None,
    ) -> np.ndarray[Any, Any]:
        """Complete any number of prompts, and score the completions; one number a row, in float64.

        Each is scored in the process that holds it, after `check`, which may raise.
        """
        texts = self.complete(params, prompts, key)
        held = np.flatnonzero(texts.held).tolist()
        samples = self.settings.num_samples
        truths = [x for x in PromptBatch.of(prompts).ground_truths for _ in range(samples)]

        def numbers() -> dict[str, np.ndarray[Any, Any]]:
            check()
            rewards = np.full(len(texts.held), np.nan)
            scores = self._score([texts.trajectories[i] for i in held], [truths[i] for i in held])
            rewards[held] = scores.rewards
            return {"rewards": rewards}

        return hosts.merge_rows("computing rewards", texts.held, numbers)["rewards"]

    def complete(self, params: Params, prompts: Sequence[Trajectory], key: jax.Array) -> Texts:
        """Draw completions of any number of prompts, as text."""
        # Devices must divide the rows: the last prompt is repeated, and its copies are dropped.
        filled = [*prompts, *[prompts[-1]] * (-len(prompts) % self.engine.row_shards)]
        drawn = self.engine.draw(params, filled, key, self.settings)
        texts = read_texts(drawn, filled, self.engine.template)
        rows = len(prompts) * self.settings.num_samples
        return Texts(texts.trajectories[:rows], *(values[:rows] for values in texts[1:]))

    def _score(self, trajectories: Sequence[Trajectory], truths: Sequence[Any]) -> TrajectoryScores:
        assert self.reward is not None
        return score_trajectories(self.reward, trajectories, truths, timeout=self.reward_timeout)


def training_batch(
    prompts: Int[Array | np.ndarray, "prompts time"],
    prompt_mask: Bool[Array | np.ndarray, "prompts time"] | None,
    completions: Completions,
    *,
    advantages: Float[Array, " rows"] | None = None,
    width: int | None = None,
    mask_truncated: bool = False,
) -> Batch:
    """Lay prompts and their completions out to train on: labels are the next tokens.

    Each row begins with its prompt in column 0 and is padded on the right, so that it needs no
    mask. The width is that of the longest row in the batch, not of the longest possible one.

    Args:
        prompts: token ids, one row a prompt.
        prompt_mask: True for tokens. None: all are.
        completions: of [`generate`][twinkle_jax.sampler.generate]; those of a prompt are
            consecutive.
        advantages: one for each completion.
        width: columns; None: the bucket of the longest row. Waits for the lengths, unless the
            longest possible row fits. Where they are traced, longer rows lose their last tokens.
        mask_truncated: exclude truncated completions from the loss.

    Returns:
        A batch of [rows, width] tokens, with the experts of each if the completions have them.

    Raises:
        ValueError: if the completions are not of equal number for each prompt, the mask or the
            advantages have another shape, or a row is longer than `width`.
        TypeError: if the mask is not boolean.
    """
    prompts = prompts if isinstance(prompts, jax.Array) else np.asarray(prompts)
    if prompt_mask is None:
        prompt_mask = np.ones(prompts.shape, bool)
    prompt_mask = prompt_mask if isinstance(prompt_mask, jax.Array) else np.asarray(prompt_mask)
    if prompt_mask.dtype != bool:
        raise TypeError(f"prompt_mask must be bool, got {prompt_mask.dtype}")
    if prompt_mask.shape != prompts.shape:
        raise ValueError(
            f"prompt_mask must have the shape of prompts, {prompts.shape}, got {prompt_mask.shape}"
        )
    count = len(completions.tokens)
    if count % max(len(prompts), 1) or not count:
        raise ValueError(
            f"completions must be of equal number for each of {len(prompts)} prompts, got {count}"
        )
    if width is None or _may_cut(prompts, prompt_mask, completions, width):
        lengths = np.asarray(completions.lengths)
        prompt_lengths = np.asarray(prompt_mask).sum(axis=1)
        longest = int((np.repeat(prompt_lengths, count // len(prompts)) + lengths).max()) - 1
        width = batch_width(longest) if width is None else width
        if width < longest:
            raise ValueError(
                f"width must be at least that of the longest row, {longest}, got {width}"
            )
    return _laid_out(
        prompts,
        prompt_mask,
        completions,
        advantages=advantages,
        width=width,
        mask_truncated=mask_truncated,
    )


def _may_cut(prompts: Any, prompt_mask: Any, completions: Completions, width: int) -> bool:
    """Whether a row may be longer than `width`, and lengths can be looked at."""
    if width >= prompts.shape[1] + completions.tokens.shape[1] - 1:
        return False
    arrays = [x for x in (prompt_mask, completions.lengths) if isinstance(x, jax.Array)]
    return not any(isinstance(x, jax.core.Tracer) or not x.is_fully_addressable for x in arrays)


def _laid_out(
    prompts: Int[Array | np.ndarray, "prompts time"],
    prompt_mask: Bool[Array | np.ndarray, "prompts time"],
    completions: Completions,
    *,
    advantages: Float[Array, " rows"] | None = None,
    width: int,
    mask_truncated: bool,
) -> Batch:
    """Lay rows out as `training_batch` does, in a width that is known to fit them all."""
    routing = completions.routing  # its columns are those of the batch
    if routing is not None:
        completions = completions._replace(routing=None)
        routing = _with_width(routing, width=width)
    batch: Batch = _lay_out(
        prompts, prompt_mask, completions, width=width, mask_truncated=mask_truncated
    )
    batch = batch._replace(routing=routing)
    return batch if advantages is None else with_advantages(batch, advantages)


@partial(jax.jit, static_argnames="width")
def _with_width(
    routing: Int[Array, "rows time layers chosen"], width: int
) -> Int[Array, "rows width layers chosen"]:
    """Cut or pad the experts of tokens; any number serves behind a row."""
    missing = max(width - routing.shape[1], 0)
    return jnp.pad(routing[:, :width], ((0, 0), (0, missing), (0, 0), (0, 0)))


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
    # Move prompts to the left; a stable sort keeps their tokens in order.
    order = jnp.argsort(~prompt_mask, axis=1, stable=True)
    prompts = jnp.repeat(jnp.take_along_axis(prompts, order, axis=1), samples, axis=0)
    starts = jnp.repeat(jnp.sum(prompt_mask, axis=1, dtype=jnp.int32), samples)[:, None]
    lengths = completions.lengths[:, None].astype(jnp.int32)
    columns = jnp.arange(width, dtype=jnp.int32)[None]

    def pick(values: Array, index: Array) -> Array:
        return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)

    of_prompt = columns < starts
    of_completion = ~of_prompt & (columns < starts + lengths - 1)  # the last one is only a label
    tokens = jnp.where(of_prompt, pick(prompts, jnp.broadcast_to(columns, of_prompt.shape)), 0)
    tokens = jnp.where(of_completion, pick(completions.tokens, columns - starts), tokens)
    following = columns + 1 - starts  # index of the next token in the completion
    chosen = (following >= 0) & (following < lengths)
    if mask_truncated:
        chosen &= (completions.finish_reasons != LENGTH)[:, None]
    return Batch(
        tokens=tokens.astype(jnp.int32),
        labels=jnp.where(chosen, pick(completions.tokens, following), IGNORE).astype(jnp.int32),
        old_logps=jnp.where(chosen, pick(completions.logprobs, following), 0),
    )
