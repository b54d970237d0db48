"""One step of a run: collect a rollout, compute its advantages, and learn from it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from twinkle_jax.advantage import turn_returns
from twinkle_jax.data import IGNORE, Batch, PromptBatch
from twinkle_jax.model import Params
from twinkle_jax.rollout import (
    Rollout,
    RolloutSource,
    draw_until_signal,
    hosts,
    with_advantages,
)
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.learning import Recipe, compare, learn, on_all_devices, score
from twinkle_jax.training.metrics import mismatch_metrics, rollout_facts, update_metrics
from twinkle_jax.training.packing import IntRows
from twinkle_jax.training.state import TrainState


def collect(
    recipe: Recipe,
    params: Params,
    next_prompts: Callable[[], PromptBatch],
    key: jax.Array,
    *,
    check: Callable[[], None] = lambda: None,
) -> tuple[Rollout, list[Rollout]]:
    """Sample trajectories, score them, and compute their advantages.

    Args:
        recipe: of the run.
        params: the current trained parameters.
        next_prompts: returns the prompts of a rollout.
        key: of this step.
        check: called before and after scoring; may raise to end the step.

    Returns:
        The rollout to learn from, with advantages, and all rollouts that were sampled.
    """
    rollout, update = recipe.config.rollout, recipe.config.update

    def draw(number: int) -> Rollout:
        prompts = next_prompts()
        drawn = recipe.source.sample(params, prompts, jax.random.fold_in(key, number))
        if recipe.reference is not None and update.dynamic_sampling == 1:
            # The device scores with the reference policy while the host computes rewards.
            drawn = drawn._replace(batch=_with_reference(recipe, drawn.batch, drawn.row_lengths))
        drawn = score_rollout(recipe.source, drawn, check)
        if recipe.estimator.needs_greedy_rewards:
            drawn = drawn._replace(greedy_rewards=recipe.source.greedy_rewards(params, prompts))
            hosts.together("sampling", check)
        return drawn

    chosen, drawn = draw_until_signal(
        draw,
        prompts=rollout.prompts,
        num_samples=rollout.num_samples,
        rollouts=update.dynamic_sampling,
        mask_truncated=update.mask_truncated,
    )
    advantages = credit(recipe, chosen)
    shown = advantages
    if advantages.ndim == 2:  # per token: show that of the first token
        first = jnp.argmax(chosen.batch.labels != IGNORE, axis=1, keepdims=True)
        shown = hosts.read_if_spread(jnp.take_along_axis(advantages, first, axis=1)[:, 0])
    batch = with_advantages(chosen.batch, advantages)
    return chosen._replace(batch=batch, advantages=shown[:: chosen.rows_each]), drawn


def credit(recipe: Recipe, rollout: Rollout) -> Float[Array, " rows"] | Float[Array, "rows time"]:
    r"""Compute advantages, one a row or one a position, by comparing rewards within each group.

    With `update.credit` `turn`, turn $k$ of an episode is compared with turn $k$ of the other
    episodes of its group that have one, by its $\lambda$-return, see
    [`turn_returns`][twinkle_jax.advantage.turn_returns]: the sum of rewards from this turn on, or
    GAE over turns with `update.gae_lambda` below 1. `mixed` is the mean of that advantage and the
    episode's.
    """
    config = recipe.config
    counted = rollout.counted(mask_truncated=config.update.mask_truncated)

    def advantages_of(rewards: Any, where: Any) -> jax.Array:
        return recipe.estimator.advantages(
            rewards,
            config.rollout.num_samples,
            config.update.scale,
            where=where,
            lengths=rollout.lengths,
            greedy_rewards=rollout.greedy_rewards,
            mask=rollout.batch.labels != IGNORE,
        )

    of_episodes = advantages_of(rollout.scores, counted)
    if of_episodes.ndim == 1:
        of_episodes = jnp.repeat(of_episodes, rollout.rows_each)
    if rollout.episodes is None or config.update.credit == "episode":
        return of_episodes
    shape = len(rollout.episodes), config.rollout.max_turns
    # A row is an episode, a column a turn; episodes have different numbers of turns.
    rewards, has_turn = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for i, episode in enumerate(rollout.episodes):
        rewards[i, : len(episode.turns)] = episode.rewards
        has_turn[i, : len(episode.turns)] = counted is None or counted[i]
    returns = turn_returns(
        rewards,
        config.rollout.num_samples,
        where=has_turn,
        gamma=config.update.discount,
        gae_lambda=config.update.gae_lambda,
    )
    columns = zip(np.asarray(returns).T, has_turn.T, strict=True)
    of_turns = [advantages_of(turn, where) for turn, where in columns]
    by_turn = jnp.repeat(jnp.stack(of_turns, axis=1), rollout.rows_each, axis=0)
    assert rollout.turns is not None
    # −1 marks positions outside turns: without a label, so their advantage is not used.
    index = jnp.asarray(np.maximum(rollout.turns, 0), jnp.int32)
    advantages = jnp.take_along_axis(by_turn, index, axis=1)
    if config.update.credit == "turn":
        return advantages
    return (advantages + of_episodes[:, None]) / 2


def score_rollout(source: RolloutSource, drawn: Rollout, check: Callable[[], None]) -> Rollout:
    """Score the rows of each process on it, and gather the rewards of all rows."""
    scored, episodes = drawn, drawn.episodes or ()

    def numbers() -> dict[str, np.ndarray[Any, Any]]:
        nonlocal scored
        check()
        scored = source.score(drawn)
        check()
        arrays = {"": scored.scores, **scored.reward_parts}
        if episodes:  # the reward function has added to what environments gave at the end
            arrays["final"] = np.asarray([episode.final_reward for episode in episodes])
        return arrays

    merged = hosts.merge_rows("computing rewards", drawn.held_rows, numbers)
    for episode, final_reward in zip(episodes, merged.pop("final", []), strict=True):
        episode.final_reward = float(final_reward)
    return scored._replace(rewards=merged.pop(""), reward_parts=merged)


def _with_reference(recipe: Recipe, batch: Batch, row_lengths: IntRows) -> Batch:
    assert recipe.reference is not None
    return batch._replace(ref_logps=score(recipe, recipe.reference, batch, row_lengths))


class SamplerMismatchError(hosts.SharedError):
    """The sampler's log-probabilities differ too much from the trainer's.

    Attributes:
        state: as it was before the step.
    """

    def __init__(self, message: str, state: TrainState) -> None:
        super().__init__(message)
        self.state = state


def train_step(
    state: TrainState,
    recipe: Recipe,
    rollout: Rollout,
    *,
    learning_rate: float,
    seed: tuple[int, ...],
    compare_all: bool = False,
) -> tuple[TrainState, dict[str, float]]:
    """Learn from a rollout; all metrics are moved to the host in one transfer.

    Args:
        state: what is trained; donated: do not use it after the call.
        recipe: of the run.
        rollout: of this step, with advantages.
        learning_rate: of this step.
        seed: of the order of mini-batches.
        compare_all: whether to compare the sampler's log-probabilities with the trainer's for all
            completions, which takes an extra pass, or only for those of the first update.

    Returns:
        The new state, and the step's metrics.

    Raises:
        SamplerMismatchError: if the sampler's log-probabilities differ too much from the trainer's
            and `update.on_mismatch` is `stop`. No update was applied; the error's `state` is the
            one passed in.
    """
    update, lengths = recipe.config.update, rollout.row_lengths
    batch = on_all_devices(rollout.batch, recipe.mesh)  # a few numbers a token: cheap to replicate
    if recipe.reference is not None and batch.ref_logps is None:
        batch = _with_reference(recipe, batch, lengths)
    facts = rollout_facts(batch)
    mismatch = None
    corrected = update.correction != "none"
    if corrected or (compare_all and update.mini_batches > 1):
        logps = score(recipe, state.params, batch, lengths)
        mismatch = compare(logps, batch)
        if corrected:  # policy ratios use trainer log-probabilities only; the loss weighs tokens
            batch = batch._replace(old_logps=logps, sampler_logps=batch.old_logps)
    state, learnt = learn(
        state,
        batch,
        recipe,
        learning_rate=learning_rate,
        seed=seed,
        row_lengths=lengths,
        mismatch=mismatch,
    )
    if learnt.mismatch is not None:
        described = mismatch_metrics(learnt.mismatch)
        facts |= {f"sampling/{name}": value for name, value in described.items()}
    learnt = learnt._replace(mismatch=None)
    facts, learnt, _ = jax.device_get((facts, learnt, rollout.advantages))
    metrics = {name: float(value) for name, value in facts.items()}
    metrics |= update_metrics(learnt) | {"learning_rate": learning_rate}
    problem = describe_mismatch(metrics, recipe.config)
    if problem is not None and update.on_mismatch == "stop":
        rows = len(batch.tokens) if batch.rows is None else int(np.sum(batch.rows))
        counted = update.epochs * rows
        raise SamplerMismatchError(problem, state._replace(rows=state.rows - counted))
    return state, metrics


def describe_mismatch(metrics: dict[str, float], config: TrainConfig) -> str | None:
    """Describe the difference between sampler and trainer; None if it is within the limits."""
    mean = metrics.get("sampling/logp_diff/mean", 0.0)
    outside = metrics.get("sampling/ratio_outside", 0.0)
    if mean <= config.update.max_logp_diff and outside <= config.update.max_outside_band:
        return None
    return (
        "the sampler's log-probabilities must match the trainer's to within update.max_logp_diff="
        f"{config.update.max_logp_diff:g} nats on average, with at most update.max_outside_band="
        f"{config.update.max_outside_band:g} of the tokens twice or half as probable, got "
        f"{mean:.3g} and {outside:.3g}: the sampler has other weights, or computes something else"
    )
