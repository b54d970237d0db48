"""One step of a run: collect a rollout, compute its advantages, and update the policy from it."""

import math
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from twinkle_jax.advantage import turn_returns
from twinkle_jax.data import IGNORE, Batch, PromptBatch
from twinkle_jax.data.batch import batch_width
from twinkle_jax.loss import (
    CrossEntropyLoss,
    Loss,
    PreferenceLoss,
    SamplerMismatch,
    sampler_mismatch,
    top_entropy_mask,
)
from twinkle_jax.model import DecoderConfig, Params, Remat, default_attention
from twinkle_jax.model.decoder.lora import RATE, walk
from twinkle_jax.model.decoder.sharding import ROWS
from twinkle_jax.rollout import (
    Rollout,
    RolloutSource,
    Sampled,
    draw_until_signal,
    hosts,
    with_advantages,
)
from twinkle_jax.training.by_name import Estimator
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.gradient import StepSummary, add_summaries, grad_step
from twinkle_jax.training.metrics import Learnt, mismatch_metrics, rollout_facts, update_metrics
from twinkle_jax.training.packing import IntRows, Packing, plan
from twinkle_jax.training.policy import Policy
from twinkle_jax.training.score import Scores, score_batch
from twinkle_jax.training.state import TrainState, apply_gradients
from twinkle_jax.training.teacher import ServedTeacher

RECOMPUTED: dict[str, Remat] = {  # by the names of `update.recompute`
    "auto": True,  # not resolved, since the device's memory is unknown
    "layers": True,
    "elementwise": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": False,
}

_BAND = 2.0  # tokens whose ratio of trainer to sampler is outside [1 / _BAND, _BAND] are counted


class Recipe(NamedTuple):
    """What a step needs besides its state; constant over a run.

    Attributes:
        config: all settings.
        decoder: the architecture; static.
        frozen: parameters that the trained ones are merged over; None if all are trained.
        source: samples and scores trajectories, or lays examples out.
        loss: with the coefficients of the run.
        optimizer: with learning rate 1.
        estimator: of advantages.
        reference: parameters of the reference policy of the KL penalty or of DPO, merged over the
            frozen ones; None without.
        mesh: of parameters and rows; None for one device.
        teacher: judges each sampled token; None without distillation.
    """

    config: TrainConfig
    decoder: DecoderConfig
    frozen: Params | None
    source: RolloutSource
    loss: Loss
    optimizer: optax.GradientTransformation
    estimator: Estimator
    reference: Params | None = None
    mesh: Mesh | None = None
    teacher: Policy | ServedTeacher | None = None


def collect(
    recipe: Recipe,
    params: Params,
    next_prompts: Callable[[], PromptBatch],
    key: jax.Array,
    *,
    sampled: Sampled | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Rollout, list[Rollout]]:
    """Sample trajectories, score them, and compute their advantages.

    Args:
        recipe: of the run.
        params: the current trained parameters.
        next_prompts: returns the prompts of a rollout.
        key: of this step.
        sampled: the step's first rollout, if it has been sampled already.
        check: called before and after scoring; may raise to end the step.

    Returns:
        The rollout to learn from, with advantages, and all rollouts that were sampled. With
        `examples`, these are the rollout, without advantages.
    """
    if recipe.config.examples is not None:  # there is nothing to compare
        examples = recipe.source.score(recipe.source.sample(params, next_prompts(), key))
        return examples, [examples]
    rollout, update = recipe.config.rollout, recipe.config.update

    def draw(number: int) -> Rollout:
        if number == 0 and sampled is not None:
            prompts, drawn = sampled
        else:
            prompts = next_prompts()
            drawn = recipe.source.sample(params, prompts, rollout_key(key, number))
        # The device scores with these models while the host computes rewards.
        if recipe.reference is not None and update.dynamic_sampling == 1:
            drawn = drawn._replace(batch=with_reference(recipe, drawn.batch, drawn.row_lengths))
        if recipe.teacher is not None and update.dynamic_sampling == 1:
            drawn = drawn._replace(teacher_logps=teacher_logps(recipe, drawn))
        drawn = score_rollout(recipe.source, drawn, check)
        if recipe.estimator.needs_greedy_rewards:
            rewards = recipe.source.greedy_rewards(params, prompts, rollout_key(key, number))
            drawn = drawn._replace(greedy_rewards=rewards)
            hosts.together("sampling", check)
        return drawn

    chosen, drawn = draw_until_signal(
        draw,
        prompts=rollout.prompts,
        num_samples=rollout.num_samples,
        rollouts=update.dynamic_sampling,
        compared=partial(_compared, recipe),
    )
    if recipe.teacher is not None and chosen.teacher_logps is None:
        chosen = chosen._replace(teacher_logps=teacher_logps(recipe, chosen))
    if _in_reward(recipe) and chosen.batch.ref_logps is None:
        chosen = chosen._replace(batch=with_reference(recipe, chosen.batch, chosen.row_lengths))
    advantages = credit(recipe, chosen)
    shown = advantages
    if recipe.teacher is not None:
        shown = hosts.read_if_spread(_mean_over_tokens(advantages, chosen.batch))
    elif advantages.ndim == 2:  # per token: show that of the first token
        first = jnp.argmax(chosen.batch.labels != IGNORE, axis=1, keepdims=True)
        shown = hosts.read_if_spread(jnp.take_along_axis(advantages, first, axis=1)[:, 0])
    batch = with_advantages(chosen.batch, advantages)
    return chosen._replace(batch=batch, advantages=shown[:: chosen.rows_each]), drawn


def rollout_key(key: jax.Array, number: int) -> jax.Array:
    """Return the key of one of a step's rollouts; of most steps there is one, number 0."""
    return jax.random.fold_in(key, number)


def credit(recipe: Recipe, rollout: Rollout) -> Float[Array, " rows"] | Float[Array, "rows time"]:
    r"""Compute advantages, one a row or one a position, from rewards and the teacher.

    With a teacher, that of token $y_t$ is $w \, (\log \pi_T(y_t) - \log \pi(y_t))$, where $\pi$ is
    the policy that drew it; $w_r$ times the advantage by rewards is added.
    """
    teacher, settings = rollout.teacher_logps, recipe.config.teacher
    if recipe.teacher is None or teacher is None:
        return _credit_by_rewards(recipe, rollout)
    judged = settings.weight * _log_ratio(teacher, rollout.batch)
    if not settings.reward_weight:
        return judged
    by_rewards = _credit_by_rewards(recipe, rollout)
    by_rewards = by_rewards[:, None] if by_rewards.ndim == 1 else by_rewards
    return judged + settings.reward_weight * by_rewards


def _credit_by_rewards(
    recipe: Recipe, rollout: Rollout
) -> Float[Array, " rows"] | Float[Array, "rows time"]:
    r"""Compute advantages, one a row or one a position, by comparing rewards within each group.

    With `update.credit` `turn`, turn $k$ of an episode is compared with turn $k$ of the other
    episodes of its group that have one, by its $\lambda$-return, see
    [`turn_returns`][twinkle_jax.advantage.turn_returns]: the sum of rewards from this turn on, or
    GAE over turns with `update.gae_lambda` below 1. `mixed` is the mean of that advantage and the
    episode's.
    """
    config, counted = recipe.config, rollout.counted
    of_episodes = _credit_of_episodes(recipe, rollout)
    if of_episodes.ndim == 1:
        of_episodes = jnp.repeat(of_episodes, rollout.rows_each)
    if rollout.episodes is None or config.update.credit == "episode":
        return of_episodes
    shape = len(rollout.episodes), config.rollout.max_turns
    # A row is an episode, a column a turn; episodes have different numbers of turns.
    rewards, has_turn = np.zeros(shape, np.float32), np.zeros(shape, bool)
    lengths = np.zeros(shape, rollout.lengths.dtype)  # sampled tokens of each turn
    for i, episode in enumerate(rollout.episodes):
        rewards[i, : len(episode.turns)] = episode.rewards
        has_turn[i, : len(episode.turns)] = counted is None or counted[i]
        lengths[i, : len(episode.turns)] = [turn.end - turn.start for turn in episode.turns]
    returns = turn_returns(
        rewards,
        config.rollout.num_samples,
        where=has_turn,
        gamma=config.update.discount,
        gae_lambda=config.update.gae_lambda,
    )
    columns = zip(np.asarray(returns).T, has_turn.T, lengths.T, strict=True)
    of_turns = [_estimate(recipe, rollout, *column) for column in columns]
    by_turn = jnp.repeat(jnp.stack(of_turns, axis=1), rollout.rows_each, axis=0)
    assert rollout.turns is not None
    # −1 marks positions outside turns: without a label, so their advantage is not used.
    index = jnp.asarray(np.maximum(rollout.turns, 0), jnp.int32)
    advantages = jnp.take_along_axis(by_turn, index, axis=1)
    if config.update.credit == "turn":
        return advantages
    return (advantages + of_episodes[:, None]) / 2


def _credit_of_episodes(recipe: Recipe, rollout: Rollout) -> jax.Array:
    """Compare whole trajectories; one advantage each, or one a position."""
    counted = rollout.counted
    if not (recipe.estimator.compares_parts and rollout.reward_parts):
        return _estimate(recipe, rollout, rollout.scores, counted, rollout.lengths)
    parts = np.stack([*rollout.reward_parts.values()], axis=1)
    known = ~np.isnan(parts)  # some rewards may not apply to a row
    where = known if counted is None else known & counted[:, None]
    weights = np.asarray([rollout.reward_weights[x] for x in rollout.reward_parts], np.float32)
    return _estimate(recipe, rollout, np.where(known, parts, 0), where, rollout.lengths, weights)


def _in_reward(recipe: Recipe) -> bool:
    """Whether the penalty of the divergence from the reference policy is in rewards."""
    return recipe.config.update.kl_in == "reward" and recipe.reference is not None


@jax.jit
def _reference_log_ratios(batch: Batch) -> Float[Array, "rows time"]:
    """Log-probabilities under the sampling policy, minus those under the reference (k1)."""
    assert batch.old_logps is not None
    assert batch.ref_logps is not None
    return jnp.where(batch.labels != IGNORE, batch.old_logps - batch.ref_logps, 0)


def _estimate(
    recipe: Recipe,
    rollout: Rollout,
    rewards: Any,
    where: Any,
    lengths: Any,
    reward_weights: Any = None,
) -> jax.Array:
    kl, coefficient = None, recipe.config.update.kl_beta
    if _in_reward(recipe):
        kl = _reference_log_ratios(rollout.batch)
        if not recipe.estimator.works_per_token:
            sums = np.asarray(hosts.read_if_spread(jnp.sum(kl, axis=1)))
            of_trajectories = sums.reshape(-1, rollout.rows_each).sum(axis=1)
            rewards, kl = rewards - np.float32(coefficient) * of_trajectories, None
    return recipe.estimator.advantages(
        rewards,
        recipe.config.rollout.num_samples,
        recipe.config.update.scale,
        where=where,
        lengths=lengths,
        greedy_rewards=rollout.greedy_rewards,
        mask=rollout.batch.labels != IGNORE,
        kl=kl,
        kl_coefficient=coefficient,
        reward_weights=reward_weights,
    )


def _compared(recipe: Recipe, rollout: Rollout) -> np.ndarray[Any, Any]:
    """Return what `credit` compares within a group, for `has_signal`."""
    columns = [rollout.scores[:, None]]
    if recipe.estimator.compares_parts and rollout.reward_parts:
        # The sum of normalised rewards, in which these may cancel; 0 in a group without a signal.
        columns = [np.asarray(_credit_of_episodes(recipe, rollout))[:, None]]
    if rollout.episodes is not None and recipe.config.update.credit != "episode":
        discount, longest = recipe.config.update.discount, recipe.config.rollout.max_turns
        returns = np.full((len(rollout.episodes), longest), np.nan, np.float32)
        for row, episode in zip(returns, rollout.episodes, strict=True):
            row[: len(episode.turns)] = episode.returns(discount)
        columns.append(returns)
    return np.concatenate(columns, axis=1)


def score_rollout(source: RolloutSource, drawn: Rollout, check: Callable[[], None]) -> Rollout:
    """Score the rows of each process on it, and gather the rewards of all rows."""
    scored = drawn

    def numbers() -> dict[str, np.ndarray[Any, Any]]:
        nonlocal scored
        check()
        scored = source.score(drawn)
        check()
        arrays = {f"part {name}": part for name, part in scored.reward_parts.items()}
        arrays["sum"] = scored.scores
        if scored.episodes:  # the reward is part of what they got at the end
            arrays["final"] = np.asarray([episode.final_reward for episode in scored.episodes])
        return arrays

    merged = hosts.merge_rows("computing rewards", drawn.held_rows, numbers)
    rewards, finals = merged.pop("sum"), merged.pop("final", np.empty(0))
    for episode, final_reward in zip(scored.episodes or (), finals, strict=True):
        episode.final_reward = float(final_reward)
    parts = {name.removeprefix("part "): part for name, part in merged.items()}
    return scored._replace(rewards=rewards, reward_parts=parts)


def with_reference(recipe: Recipe, batch: Batch, row_lengths: IntRows) -> Batch:
    """Add the reference policy's log-probabilities of a batch's labels."""
    assert recipe.reference is not None  # whose own router chooses
    unrouted = batch._replace(routing=None)
    scores = score(recipe, recipe.reference, unrouted, row_lengths)
    return batch._replace(ref_logps=scores.logps)


def teacher_logps(recipe: Recipe, rollout: Rollout) -> Float[Array, "rows time"]:
    """Score the labels of a rollout with the teacher, at the temperature of the sampler."""
    teacher = recipe.teacher
    assert teacher is not None
    if isinstance(teacher, ServedTeacher):
        return teacher.score(rollout.batch)
    judging = recipe._replace(decoder=teacher.config, frozen=teacher.frozen)
    unrouted = rollout.batch._replace(routing=None)  # its own router chooses
    return score(judging, teacher.params, unrouted, rollout.row_lengths).logps


@jax.jit
def _log_ratio(teacher: Float[Array, "rows time"], batch: Batch) -> Float[Array, "rows time"]:
    """Log-probabilities under the teacher minus those under the sampler; 0 without a label."""
    assert batch.old_logps is not None
    return jnp.where(batch.labels != IGNORE, teacher - batch.old_logps, 0)


@jax.jit
def _mean_over_tokens(values: Float[Array, "rows time"], batch: Batch) -> Float[Array, " rows"]:
    kept = batch.labels != IGNORE
    count = jnp.maximum(jnp.sum(kept, axis=1, dtype=jnp.float32), 1)
    return jnp.sum(jnp.where(kept, values, 0), axis=1) / count


@jax.jit
def _at_high_entropy(
    batch: Batch, entropies: Float[Array, "rows time"], share: Float[Array, ""]
) -> Batch:
    """Set advantages to 0 but at a share of the tokens, so that the others still count in means."""
    assert batch.advantages is not None
    kept = top_entropy_mask(entropies, batch.labels != IGNORE, fraction=share)
    return batch._replace(advantages=jnp.where(kept, batch.advantages, 0))


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
            completions, which takes an extra pass, or only for those of the first update. With
            dropout, a correction, recorded experts or `top_entropy` there is that pass anyway,
            without dropout.

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
        batch = with_reference(recipe, batch, lengths)
    sampled = batch.old_logps is not None  # not so with examples
    facts = rollout_facts(batch, rollout.teacher_logps) if sampled else {}
    mismatch = None
    corrected, recorded = update.correction != "none", update.replay_routing == "trainer"
    noisy = _dropout_key(recipe) is not None  # updates compute with dropout
    several, selective = compare_all and update.mini_batches > 1, update.top_entropy < 1
    if sampled and (corrected or recorded or noisy or several or selective):
        scores = score(
            recipe, state.params, batch, lengths, with_routing=recorded, with_entropy=selective
        )
        mismatch = compare(scores.logps, batch)
        if scores.entropies is not None:
            batch = _at_high_entropy(batch, scores.entropies, update.top_entropy)
        if corrected:  # policy ratios use trainer log-probabilities only; the loss weighs tokens
            batch = batch._replace(old_logps=scores.logps, sampler_logps=batch.old_logps)
        if recorded:
            batch = batch._replace(routing=scores.routing)
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
    if recipe.config.learns_pairs:
        metrics["preference_loss"] = metrics["loss"]
    elif recipe.loss == CrossEntropyLoss():  # and not with other weights of tokens, as in DFT
        metrics["cross_entropy"] = metrics["loss"]
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
    if math.isnan(mean):
        return "the sampler's and the trainer's log-probabilities must be finite, got NaN"
    return (
        "the sampler's log-probabilities must match the trainer's to within update.max_logp_diff="
        f"{config.update.max_logp_diff:g} nats on average, with at most update.max_outside_band="
        f"{config.update.max_outside_band:g} of the tokens twice or half as probable, got "
        f"{mean:.3g} and {outside:.3g}: the sampler has other weights, or computes something else"
    )


# The updates: mini-batches of prompts, packed into micro-batches, whose gradients are summed.


def learn(
    state: TrainState,
    batch: Batch,
    recipe: Recipe,
    *,
    learning_rate: float,
    seed: tuple[int, ...],
    row_lengths: IntRows | None = None,
    mismatch: SamplerMismatch | None = None,
) -> tuple[TrainState, Learnt]:
    """Update a policy from a batch; the state is donated, and nothing comes back to the host.

    An update whose gradient is exactly 0, since no prompt in it has a signal and the loss has no
    other term, is skipped: Adam's moments would still move the parameters. All are skipped where
    the sampler's log-probabilities are NaN or too far from the trainer's, and `update.on_mismatch`
    is `stop`.

    Args:
        state: donated: do not use it after the call.
        batch: rows of a prompt next to each other.
        recipe: of the run.
        learning_rate: of these updates.
        seed: of the order in which prompts are dealt out to mini-batches.
        row_lengths: tokens of each row, so that shorter ones cost less; None: the batch's width.
        mismatch: of the whole batch, if it is known; None compares the rows of the first update,
            unless the adapters have dropout.

    Returns:
        The state after `epochs * mini_batches` updates, and what they did.

    Raises:
        ValueError: if the prompts of the batch cannot be dealt out equally to the mini-batches.
    """
    config, learnt = recipe.config, Learnt([], [], mismatch)
    if row_lengths is None:
        row_lengths = np.full(len(batch.tokens), batch.tokens.shape[1], np.int32)
    dropout_key = _dropout_key(recipe)
    for rows in deal_rows(len(batch.tokens), config, seed):
        total: StepSummary | None = None
        observed: SamplerMismatch | None = None
        keys = None if dropout_key is None else mini_batch_keys(dropout_key, state.rows, len(rows))
        loss = _for_mini_batch(recipe.loss, batch, rows)
        together = config.rows_together
        for part, packing in micro_batches(recipe, batch, rows, row_lengths, together=together):
            state, summary = grad_step(
                state,
                part,
                recipe.decoder,
                loss,
                frozen=recipe.frozen,
                temperature=config.rollout.temperature,
                key=keys,
                compute_dtype=config.dtype,
                remat=RECOMPUTED[config.update.recompute],
                mesh=recipe.mesh,
                transfers=config.mesh.transfers,
                packing=packing,
            )
            comparable = part.old_logps is not None and dropout_key is None
            if learnt.mismatch is None and comparable and summary.logps is not None:
                difference = compare(summary.logps, part)
                observed = difference if observed is None else _add(observed, difference)
            total = summary if total is None else add_summaries(total, summary)
        assert total is not None
        if not learnt.infos and observed is not None:  # later ones compare another policy
            learnt = learnt._replace(mismatch=observed)
        update, matches = config.update, None
        if learnt.mismatch is not None and update.on_mismatch == "stop":
            limits = np.asarray([update.max_logp_diff, update.max_outside_band], np.float32)
            matches = sampler_matches(learnt.mismatch, limits)
        state, info = apply_gradients(
            state,
            recipe.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=config.optimizer.max_grad_norm,
            when=matches,
            skip_zero=True,
            mesh=recipe.mesh,
        )
        learnt.summaries.append(total._replace(logps=None))
        learnt.infos.append(info)
    return state, learnt


def score(
    recipe: Recipe,
    params: Params,
    batch: Batch,
    row_lengths: IntRows,
    *,
    with_routing: bool = False,
    with_entropy: bool = False,
) -> Scores:
    """Score a batch's labels, packed as updates are; and record experts and entropies if asked."""

    def widen(values: Array) -> Array:
        missing = batch.tokens.shape[1] - values.shape[1]
        return jnp.pad(values, ((0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)))

    all_rows = np.arange(len(batch.tokens), dtype=np.int32)
    scores = []
    groups = min(recipe.config.update.mini_batches, len(all_rows))  # an evaluation may have fewer
    for rows in np.array_split(all_rows, groups):
        parts = (
            score_batch(
                params,
                part,
                recipe.decoder,
                frozen=recipe.frozen,
                temperature=recipe.config.rollout.temperature,
                compute_dtype=recipe.config.dtype,
                mesh=recipe.mesh,
                transfers=recipe.config.mesh.transfers,
                packing=packing,
                with_routing=with_routing,
                with_entropy=with_entropy,
            )
            for part, packing in micro_batches(recipe, batch, rows, row_lengths)
        )
        total = reduce(partial(jax.tree.map, jnp.add), parts)  # 0 for rows of other parts
        scores.append(jax.tree.map(widen, total))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *scores)


def deal_rows(rows: int, config: TrainConfig, seed: tuple[int, ...]) -> Iterator[IntRows]:
    """Deal prompts to mini-batches at random, depending on the seed alone."""
    group = config.group_size * config.rows_each
    if rows % (group * config.update.mini_batches):
        raise ValueError(
            "batch must have a multiple of the rows of a prompt times update.mini_batches, "
            f"{group} * {config.update.mini_batches}, got {rows} rows"
        )
    for epoch in range(config.update.epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(rows // group)
        for chosen in np.split(order, config.update.mini_batches):
            members = chosen[:, None] * group + np.arange(group)[None]
            yield members.reshape(-1).astype(np.int32)


def micro_batches(
    recipe: Recipe, batch: Batch, rows: IntRows, row_lengths: IntRows, *, together: int = 1
) -> Iterator[tuple[Batch, Packing]]:
    """Pack a mini-batch into micro-batches, which groups of rows `together` are not split over.

    Each keeps all rows of the mini-batch, and labels only the rows that belong to it: the loss then
    sees few shapes.
    """
    lengths = row_lengths[rows]
    mesh = recipe.mesh
    multiple = 1 if mesh is None else mesh.shape["tensor"]
    width = min(batch_width(int(lengths.max()), multiple=multiple), batch.tokens.shape[1])
    mini_batch = _take_rows(batch, rows, width=width)
    parts = plan(
        lengths,
        width,
        tokens=recipe.config.update.micro_batch_tokens,
        shards=1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"],
        several=takes_segments(recipe),
        multiple=multiple,
        together=together,
    )
    for members, packing in parts:
        yield _label_rows(mini_batch, members), packing


def _for_mini_batch(loss: Loss, batch: Batch, rows: IntRows) -> Loss:
    """Tell a loss that averages over tokens of chosen answers how many a mini-batch has."""
    if not isinstance(loss, PreferenceLoss):
        return loss
    return loss.for_parts(_tokens_per_pair(batch.labels, rows))


@jax.jit
def _tokens_per_pair(labels: Int[Array, "all time"], rows: Int[Array, " rows"]) -> Array:
    chosen = jnp.take(labels, rows[::2], axis=0)
    return jnp.sum(chosen != IGNORE, dtype=jnp.float32) / len(chosen)


def takes_segments(recipe: Recipe) -> bool:
    """Whether a line may hold several rows: not if attention is faster without segments."""
    decoder, dtype = recipe.decoder, jnp.dtype(recipe.config.dtype)
    return all(
        default_attention(heads, dtype) == default_attention(heads, dtype, segmented=True)
        for heads in map(decoder.attention_of, decoder.block)
    )


@partial(jax.jit, static_argnames="mesh")
def on_all_devices(batch: Batch, mesh: Mesh | None) -> Batch:
    """Replicate a batch over all devices, so that choosing rows later needs no transfer."""
    if mesh is None:
        return batch
    on_all = NamedSharding(mesh, PartitionSpec())
    # Arrays of one number a token go in one transfer.
    names = [
        name
        for name, x in batch._asdict().items()
        if x is not None and x.shape == batch.tokens.shape and x.dtype.itemsize == 4
    ]
    bits = [jax.lax.bitcast_convert_type(getattr(batch, name), jnp.int32) for name in names]
    spread = NamedSharding(mesh, PartitionSpec(ROWS))
    stacked = jax.lax.with_sharding_constraint(jnp.stack(bits, axis=1), spread)
    stacked = jax.lax.with_sharding_constraint(stacked, on_all)
    arrays = {
        name: jax.lax.bitcast_convert_type(stacked[:, i], getattr(batch, name).dtype)
        for i, name in enumerate(names)
    }
    return jax.lax.with_sharding_constraint(batch._replace(**arrays), on_all)


@partial(jax.jit, static_argnames="width")
def _take_rows(batch: Batch, rows: Int[Array, " chosen"], *, width: int) -> Batch:
    """Make a batch of chosen rows, and of the first columns."""
    return jax.tree.map(lambda x: jnp.take(x if x.ndim == 1 else x[:, :width], rows, axis=0), batch)


@jax.jit
def _label_rows(batch: Batch, members: Bool[Array, " rows"]) -> Batch:
    """Keep the labels of some rows; the others are padding."""
    labels = jnp.where(members[:, None], batch.labels, IGNORE)
    counted = members if batch.rows is None else members & batch.rows
    return batch._replace(labels=labels, rows=counted)


@jax.jit
def sampler_matches(mismatch: SamplerMismatch, limits: Float[Array, "2"]) -> Bool[Array, ""]:
    """Return whether the sampler's log-probabilities are within the limits of the trainer's."""
    differences = mismatch.metrics()
    close = differences["logp_diff/mean"] <= limits[0]  # not so for NaN
    return close & (differences["ratio_outside"] <= limits[1])


@jax.jit
def compare(logps: Float[Array, "rows time"], batch: Batch) -> SamplerMismatch:
    """Compare the trainer's log-probabilities of a batch's labels with the sampler's."""
    assert batch.old_logps is not None
    kept = batch.labels != IGNORE
    return sampler_mismatch(logps, batch.old_logps, kept, minimum=1 / _BAND, maximum=_BAND)


@jax.jit
def _add(a: SamplerMismatch, b: SamplerMismatch) -> SamplerMismatch:
    return a + b


def _dropout_key(recipe: Recipe) -> jax.Array | None:
    """Return the root key of adapter dropout, from which the keys of each update are derived."""
    if not any(path[-1] == RATE for path, _ in walk(recipe.frozen or {})):
        return None
    return jax.random.fold_in(jax.random.key(recipe.config.seed), 0xD0)


@partial(jax.jit, static_argnames="count")
def mini_batch_keys(key: Key[Array, ""], seen: Int[Array, ""], count: int) -> Key[Array, " count"]:
    """Make the dropout keys of a mini-batch's rows, by the rows that the run has seen before."""
    return jax.random.split(jax.random.fold_in(key, seen), count)
