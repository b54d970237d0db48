"""One step of a run: a rollout with advantages, and the updates that learn from it."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.advantage import turn_returns
from twinkle_jax.data import Batch, PromptBatch
from twinkle_jax.data.trajectory import IGNORE
from twinkle_jax.loss import PolicyLoss, SamplerMismatch, kl_k3, sampler_mismatch
from twinkle_jax.model import Params, Remat, default_attention
from twinkle_jax.reward import RewardFunction
from twinkle_jax.rollout import (
    Engine,
    EnvironmentFactory,
    LocalEngine,
    MultiTurn,
    Rollout,
    RolloutSource,
    SingleTurn,
    draw_until_signal,
    episode_metrics,
    has_signal,
    hosts,
    with_advantages,
)
from twinkle_jax.rollout.rollout import batch_width
from twinkle_jax.sampler import Sampling
from twinkle_jax.training.config import TrainConfig, make_loss, run_optimizer
from twinkle_jax.training.estimator import Estimator, estimate, make_estimator
from twinkle_jax.training.gradient import StepSummary, add_summaries, grad_step
from twinkle_jax.training.packing import Packing, plan
from twinkle_jax.training.policy import Policy
from twinkle_jax.training.score import score_batch
from twinkle_jax.training.state import TrainState
from twinkle_jax.training.update import UpdateInfo, apply_gradients

Rows = np.ndarray[Any, np.dtype[np.int32]]

_BAND = 2.0  # tokens whose ratio of trainer to sampler is outside [1 / _BAND, _BAND] are counted

RECOMPUTED: dict[str, Remat] = {  # by the names of `update.recompute`
    "layers": True,
    "elementwise": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": False,
}


class Recipe(NamedTuple):
    """What a step needs besides the state that it changes; fixed for a run.

    Attributes:
        config: all settings.
        policy: the decoder, its template, and frozen parameters under adapters. Its `params` are
            not read.
        source: draws and scores trajectories.
        loss: of tokens, with the coefficients of the run.
        optimizer: with learning rate 1.
        estimator: of advantages.
        reference: parameters of the policy that the divergence is taken from, laid over the frozen
            ones; None without one.
        mesh: devices that parameters and rows are spread over; None for one device.
    """

    config: TrainConfig
    policy: Policy
    source: RolloutSource
    loss: PolicyLoss
    optimizer: optax.GradientTransformation
    estimator: Estimator
    reference: Params | None = None
    mesh: Mesh | None = None


def make_recipe(
    config: TrainConfig,
    policy: Policy,
    reward: RewardFunction | None,
    *,
    environment: EnvironmentFactory | None = None,
    mesh: Mesh | None = None,
) -> Recipe:
    """Make what a configuration names.

    Args:
        config: of the run.
        policy: as training begins; its parameters are copied where a reference policy is needed.
        reward: of trajectories and ground truths; may be None with an environment.
        environment: makes what the policy talks to; None: it completes prompts.
        mesh: devices; None for one.
    """
    update = config.update
    reference = None
    if update.kl_beta:
        # Under adapters the frozen parameters alone are the reference.
        reference = {} if policy.lora else jax.tree.map(jnp.copy, policy.params)
    source = make_source(
        config,
        make_engine(config, policy, mesh),
        reward,
        environment,
        width_multiple=1 if mesh is None else mesh.shape["tensor"],
    )
    return Recipe(
        config,
        policy,
        source,
        make_loss(config),
        run_optimizer(config),
        make_estimator(update.advantage, update.advantage_options),
        reference,
        mesh,
    )


def with_config(recipe: Recipe, config: TrainConfig) -> Recipe:
    """Change the slots and the budget of micro-batches."""
    source: Any = recipe.source  # all that a recipe is made with have an engine
    engine = dataclasses.replace(source.engine, slots=config.rollout.slots)
    return recipe._replace(config=config, source=dataclasses.replace(source, engine=engine))


def make_engine(config: TrainConfig, policy: Policy, mesh: Mesh | None = None) -> LocalEngine:
    """Make what draws completions for a run."""
    rollout = config.rollout
    return LocalEngine(
        policy.config,
        policy.template,
        rollout.max_new_tokens,
        rollout.max_prompt_tokens,
        policy.frozen,
        config.dtype,
        mesh,
        rollout.slots,
    )


def make_source(
    config: TrainConfig,
    engine: Engine,
    reward: RewardFunction | None,
    environment: EnvironmentFactory | None = None,
    *,
    width_multiple: int = 1,
) -> RolloutSource:
    """Make what a configuration draws through: completions of prompts, or episodes."""
    rollout, update = config.rollout, config.update
    sampling = Sampling(
        rollout.temperature,
        rollout.top_k,
        rollout.top_p,
        rollout.min_p,
        rollout.repetition_penalty,
        engine.template.tokenizer.stop_token_ids,
    )
    if environment is None:
        assert reward is not None
        return SingleTurn(
            engine,
            reward,
            sampling,
            rollout.num_samples,
            config.reward_timeout,
            update.mask_truncated,
            width_multiple,
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"environment must be used by one process, got {jax.process_count()} processes"
        )
    return MultiTurn(
        engine,
        environment,
        sampling,
        rollout.num_samples,
        reward,
        max_turns=rollout.max_turns,
        max_episode_tokens=rollout.max_episode_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
        history=rollout.history,
        cohorts=rollout.cohorts,
        timeout=rollout.environment_timeout,
        threads=rollout.environment_threads,
        max_failed=rollout.max_failed,
        max_observation=rollout.max_observation,
        tool_format=rollout.tool_format,
        reward_timeout=config.reward_timeout,
        mask_truncated=update.mask_truncated,
        width_multiple=width_multiple,
        discount=update.discount,
    )


# The first half: rollouts.


def collect(
    recipe: Recipe,
    params: Params,
    next_prompts: Callable[[], PromptBatch],
    key: jax.Array,
    *,
    check: Callable[[], None] = lambda: None,
) -> tuple[Rollout, list[Rollout]]:
    """Draw trajectories, score them, and compare their rewards.

    Args:
        recipe: of the run.
        params: what is trained, as it is now.
        next_prompts: gives the prompts of a rollout.
        key: of this step.
        check: called before and after scoring; may raise to end the step.

    Returns:
        What to learn from, with advantages, and all rollouts that were drawn.
    """
    rollout, update = recipe.config.rollout, recipe.config.update

    def draw(number: int) -> Rollout:
        prompts = next_prompts()
        drawn = recipe.source.sample(params, prompts, jax.random.fold_in(key, number))
        if recipe.reference is not None and update.dynamic_sampling == 1:
            # The device scores by the reference policy while the host computes rewards.
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
    if advantages.ndim == 2:  # one a token: that of the first
        first = jnp.argmax(chosen.batch.labels != IGNORE, axis=1, keepdims=True)
        shown = hosts.read_if_spread(jnp.take_along_axis(advantages, first, axis=1)[:, 0])
    batch = with_advantages(chosen.batch, advantages)
    return chosen._replace(batch=batch, advantages=shown[:: chosen.rows_each]), drawn


def credit(recipe: Recipe, rollout: Rollout) -> Float[Array, " rows"] | Float[Array, "rows time"]:
    r"""Compare the rewards of each group: advantages of rows, or of positions.

    With `update.credit` `turn`, turn $k$ of an episode is compared with turn $k$ of the others of
    its group that have one, by its $\lambda$-return, see
    [`turn_returns`][twinkle_jax.advantage.turn_returns]: the rewards from it on, or GAE over turns
    with `update.gae_lambda` below 1. `mixed` is the mean of that and of what the episode's return
    gives.
    """
    config, each = recipe.config, rollout.rows_each
    counted = rollout.counted(mask_truncated=config.update.mask_truncated)

    def compare(rewards: Any, where: Any) -> jax.Array:
        return estimate(
            recipe.estimator,
            rewards,
            config.rollout.num_samples,
            config.update.scale,
            where=where,
            lengths=rollout.lengths,
            greedy_rewards=rollout.greedy_rewards,
            mask=rollout.batch.labels != IGNORE,
        )

    of_episodes = compare(rollout.scores, counted)
    if of_episodes.ndim == 1:
        of_episodes = jnp.repeat(of_episodes, each)
    if rollout.episodes is None or config.update.credit == "episode":
        return of_episodes
    shape = len(rollout.episodes), config.rollout.max_turns
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
    of_turns = [compare(worth, where) for worth, where in columns]
    by_turn = jnp.repeat(jnp.stack(of_turns, axis=1), each, axis=0)
    assert rollout.turns is not None
    index = jnp.asarray(np.maximum(rollout.turns, 0), jnp.int32)
    advantages = jnp.take_along_axis(by_turn, index, axis=1)
    if config.update.credit == "turn":
        return advantages
    return (advantages + of_episodes[:, None]) / 2


def score_rollout(source: RolloutSource, drawn: Rollout, check: Callable[[], None]) -> Rollout:
    """Score the rows of each process there, and bring the rewards of all rows together."""
    scored = drawn

    def numbers() -> dict[str, np.ndarray[Any, Any]]:
        nonlocal scored
        check()
        scored = source.score(drawn)
        check()
        return {"": scored.scores, **scored.reward_parts}

    merged = hosts.merge_rows("computing rewards", drawn.held_rows, numbers)
    return scored._replace(rewards=merged.pop(""), reward_parts=merged)


def _with_reference(recipe: Recipe, batch: Batch, row_lengths: Rows) -> Batch:
    assert recipe.reference is not None
    return batch._replace(ref_logps=score(recipe, recipe.reference, batch, row_lengths))


# The second half: updates.


class Learnt(NamedTuple):
    """What the updates of a step did; arrays on the device.

    Attributes:
        summaries: of each update's loss.
        infos: of each update: gradient norm, and whether it was applied.
        mismatch: differences between the sampler's log-probabilities and those of the policy before
            the first update; None if the batch has none.
    """

    summaries: list[StepSummary]
    infos: list[UpdateInfo]
    mismatch: SamplerMismatch | None


def learn(
    state: TrainState,
    batch: Batch,
    recipe: Recipe,
    *,
    learning_rate: float,
    seed: tuple[int, ...],
    row_lengths: Rows | None = None,
    mismatch: SamplerMismatch | None = None,
) -> tuple[TrainState, Learnt]:
    """Update a policy from a batch; the state is donated, and nothing comes back to the host.

    An update whose gradient is exactly 0, since no prompt in it has a signal and the loss has no
    other term, is skipped: Adam's moments would move the parameters on without a reason. All are
    skipped where the sampler's log-probabilities are too far from the trainer's and
    `update.on_mismatch` is `stop`.

    Args:
        state: what is trained; donated: do not use it after the call.
        batch: rows of a prompt next to each other.
        recipe: of the run.
        learning_rate: of these updates.
        seed: of the order in which prompts are dealt out to mini-batches.
        row_lengths: tokens of each row, so that shorter ones cost less; None: the batch's width.
        mismatch: of the whole batch, if it is known; None compares the rows of the first update.

    Returns:
        The state after `epochs * mini_batches` updates, and what they did.
    """
    config, learnt = recipe.config, Learnt([], [], mismatch)
    row_lengths = _lengths(batch, row_lengths)
    for rows in deal_rows(len(batch.tokens), config, seed):
        total: StepSummary | None = None
        observed: SamplerMismatch | None = None
        for part, packing in micro_batches(recipe, batch, rows, row_lengths):
            state, summary = grad_step(
                state,
                part,
                recipe.policy.config,
                recipe.loss,
                frozen=recipe.policy.frozen,
                temperature=config.rollout.temperature,
                key=_dropout_key(config),
                compute_dtype=config.dtype,
                remat=RECOMPUTED[config.update.recompute],
                mesh=recipe.mesh,
                packing=packing,
            )
            if learnt.mismatch is None and part.old_logps is not None and summary.logps is not None:
                difference = compare(summary.logps, part)
                observed = difference if observed is None else _add(observed, difference)
            total = summary if total is None else add_summaries(total, summary)
        assert total is not None
        if not learnt.infos and observed is not None:  # later ones compare another policy
            learnt = learnt._replace(mismatch=observed)
        update = config.update
        limits = np.asarray([update.max_logp_diff, update.max_outside_band], np.float32)
        if update.on_mismatch == "warn":
            limits = np.full_like(limits, np.inf)
        state, info = apply_gradients(
            state,
            recipe.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=config.optimizer.max_grad_norm,
            when=_is_wanted(state.gradient_sum, learnt.mismatch, limits),
            mesh=recipe.mesh,
        )
        learnt.summaries.append(total._replace(logps=None))
        learnt.infos.append(info)
    return state, learnt


def score(
    recipe: Recipe, params: Params, batch: Batch, row_lengths: Rows | None = None
) -> Float[Array, "rows time"]:
    """Compute the log-probabilities of a batch's labels, packed as updates are."""
    width = batch.tokens.shape[1]
    every = np.arange(len(batch.tokens), dtype=np.int32)
    lengths = _lengths(batch, row_lengths)
    scores = []
    for rows in np.split(every, recipe.config.update.mini_batches):
        total: Float[Array, "rows time"] | None = None
        for part, packing in micro_batches(recipe, batch, rows, lengths):
            logps = score_batch(
                params,
                part,
                recipe.policy.config,
                frozen=recipe.policy.frozen,
                temperature=recipe.config.rollout.temperature,
                compute_dtype=recipe.config.dtype,
                mesh=recipe.mesh,
                packing=packing,
            ).logps
            total = logps if total is None else total + logps  # 0 for rows of other parts
        assert total is not None
        scores.append(jnp.pad(total, ((0, 0), (0, width - total.shape[1]))))
    return jnp.concatenate(scores)


def _lengths(batch: Batch, row_lengths: Rows | None) -> Rows:
    if row_lengths is not None:
        return row_lengths
    return np.full(len(batch.tokens), batch.tokens.shape[1], np.int32)


def deal_rows(rows: int, config: TrainConfig, seed: tuple[int, ...]) -> Iterator[Rows]:
    """Deal prompts out to mini-batches at random, the same way whenever the seed is the same."""
    group = config.rollout.num_samples * config.rows_each
    for epoch in range(config.update.epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(rows // group)
        for chosen in np.split(order, config.update.mini_batches):
            members = chosen[:, None] * group + np.arange(group)[None]
            yield members.reshape(-1).astype(np.int32)


def micro_batches(
    recipe: Recipe, batch: Batch, rows: Rows, row_lengths: Rows
) -> Iterator[tuple[Batch, Packing]]:
    """Pack a mini-batch into micro-batches.

    Each has all rows of the mini-batch, with the labels of its own alone, so that the shapes that
    the loss sees are few.
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
    )
    for members, packing in parts:
        yield _label_rows(mini_batch, members), packing


def takes_segments(recipe: Recipe) -> bool:
    """Whether a line may hold several rows: cuDNN's attention cannot keep them apart."""
    config, dtype = recipe.policy.config.attention, jnp.dtype(recipe.config.dtype)
    return default_attention(config, dtype) != "cudnn"


@partial(jax.jit, static_argnames="width")
def _take_rows(batch: Batch, rows: Int[Array, " chosen"], *, width: int) -> Batch:
    """Make a batch of chosen rows, and of the first columns."""
    return jax.tree.map(lambda x: jnp.take(x if x.ndim == 1 else x[:, :width], rows, axis=0), batch)


@jax.jit
def _label_rows(batch: Batch, members: Bool[Array, " rows"]) -> Batch:
    """Keep the labels of some rows; the others only fill up the batch."""
    labels = jnp.where(members[:, None], batch.labels, IGNORE)
    counted = members if batch.rows is None else members & batch.rows
    return batch._replace(labels=labels, rows=counted)


@jax.jit
def _is_wanted(
    gradients: Any, mismatch: SamplerMismatch | None, limits: Float[Array, "2"]
) -> Bool[Array, ""]:
    """Say whether there is a gradient (NaN counts), from a sampler that is the trained policy."""
    anything = jnp.any(jnp.stack([jnp.any(g != 0) for g in jax.tree.leaves(gradients)]))
    if mismatch is None:
        return anything
    differences = mismatch.metrics()
    too_far = differences["logp_diff/mean"] > limits[0]
    return anything & ~(too_far | (differences["ratio_outside"] > limits[1]))


@jax.jit
def compare(logps: Float[Array, "rows time"], batch: Batch) -> SamplerMismatch:
    """Compare the trainer's log-probabilities of a batch's labels with the sampler's."""
    assert batch.old_logps is not None
    kept = batch.labels != IGNORE
    return sampler_mismatch(logps, batch.old_logps, kept, minimum=1 / _BAND, maximum=_BAND)


@jax.jit
def _add(a: SamplerMismatch, b: SamplerMismatch) -> SamplerMismatch:
    return a + b


def _dropout_key(config: TrainConfig) -> jax.Array | None:
    """Give the root key of adapters' dropout; each row of a run has its own noise below it."""
    if not (config.lora.rank and config.lora.dropout):
        return None
    return jax.random.fold_in(jax.random.key(config.seed), 0xD0)


class SamplerMismatchError(hosts.SharedError):
    """The sampler's log-probabilities are not the trainer's.

    Attributes:
        state: what was to be trained, as it was before the step.
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
    """Learn from a rollout; one transfer brings the numbers to the host.

    Args:
        state: what is trained; donated: do not use it after the call.
        recipe: of the run.
        rollout: of this step, with advantages.
        learning_rate: of this step.
        seed: of the order of mini-batches.
        compare_all: whether to compare the sampler's log-probabilities with the trainer's for all
            completions, which takes a pass of its own, or for those of the first update alone.

    Returns:
        The new state, and the step's metrics.

    Raises:
        SamplerMismatchError: if the sampler's log-probabilities are not the trainer's and
            `update.on_mismatch` is `stop`. No update was applied, and the error's `state` is what
            came in.
    """
    batch, update, lengths = rollout.batch, recipe.config.update, rollout.row_lengths
    if recipe.reference is not None and batch.ref_logps is None:
        batch = _with_reference(recipe, batch, lengths)
    facts = rollout_facts(batch)
    mismatch = None
    corrected = update.correction != "none"
    if corrected or (compare_all and update.mini_batches > 1):
        logps = score(recipe, state.params, batch, lengths)
        mismatch = compare(logps, batch)
        if corrected:  # ratios of policies are the trainer's alone; the loss weighs the tokens
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
        described = _describe_on_device(learnt.mismatch)
        facts |= {f"sampling/{name}": value for name, value in described.items()}
    learnt = learnt._replace(mismatch=None)
    facts, learnt, _ = jax.device_get((facts, learnt, rollout.advantages))
    metrics = {name: float(value) for name, value in facts.items()}
    metrics |= update_metrics(learnt) | {"learning_rate": learning_rate}
    problem = describe_mismatch(metrics, recipe.config)
    if problem is not None and update.on_mismatch == "stop":
        rows = len(batch.tokens) if batch.rows is None else int(np.sum(batch.rows))
        seen = update.epochs * rows
        raise SamplerMismatchError(problem, state._replace(rows=state.rows - seen))
    return state, metrics


def describe_mismatch(metrics: dict[str, float], config: TrainConfig) -> str | None:
    """Say how the sampler differs from the trainer, if it differs by more than it may."""
    mean = metrics.get("sampling/logp_diff/mean", 0.0)
    outside = metrics.get("sampling/ratio_outside", 0.0)
    if mean <= config.update.max_logp_diff and outside <= config.update.max_outside_band:
        return None
    return (
        "the sampler's log-probabilities must be the trainer's to within update.max_logp_diff="
        f"{config.update.max_logp_diff:g} nats on average, with at most update.max_outside_band="
        f"{config.update.max_outside_band:g} of the tokens twice or half as probable, got "
        f"{mean:.3g} and {outside:.3g}: it samples from other weights, or computes something else"
    )


# Metrics of a step, under the names that TRL has given them.


@jax.jit
def rollout_facts(batch: Batch) -> dict[str, Float[Array, ""]]:
    """Estimate entropy and the divergence from the reference policy from samples."""
    assert batch.old_logps is not None
    kept = batch.labels != IGNORE
    tokens = jnp.maximum(jnp.sum(kept, dtype=jnp.float32), 1)
    facts = {"entropy": -jnp.sum(jnp.where(kept, batch.old_logps, 0)) / tokens}
    if batch.ref_logps is not None:
        divergence = kl_k3(batch.old_logps, batch.ref_logps, kept)
        facts["kl"] = jnp.sum(jnp.where(kept, divergence, 0)) / tokens
    return facts


@jax.jit
def _describe_on_device(mismatch: SamplerMismatch) -> dict[str, Float[Array, ""]]:
    """Compute metrics of a mismatch where it is, so that they are read with the others."""
    return mismatch.metrics()


def rollout_metrics(
    drawn: Sequence[Rollout], config: TrainConfig, started: float
) -> dict[str, float]:
    """Describe all that a step has sampled; `started` is when, by `time.perf_counter`."""
    samples = config.rollout.num_samples
    rewards = np.concatenate([r.scores for r in drawn]).astype(np.float64)
    lengths = np.concatenate([r.lengths for r in drawn])
    truncated = np.concatenate([r.truncated for r in drawn])
    masked = config.update.mask_truncated
    signal = np.concatenate([has_signal(r, samples, mask_truncated=masked) for r in drawn])
    deviations = rewards.reshape(-1, samples).std(axis=1, ddof=1)
    episodes = [episode for r in drawn for episode in r.episodes or ()]
    if episodes:  # a limit of turns cuts nothing off
        truncated = np.asarray([episode.ended == "length" for episode in episodes])
    if any(episode.failed for episode in episodes):  # they say nothing about the policy
        kept = ~np.asarray([episode.failed for episode in episodes])
        groups = kept.reshape(-1, samples)
        several = groups.sum(axis=1) > 1
        deviations = rewards.reshape(-1, samples)[several].std(
            axis=1, ddof=1, where=groups[several]
        )
        rewards, lengths, truncated = rewards[kept], lengths[kept], truncated[kept]
        deviations = deviations if len(deviations) else np.zeros(1)
    if not len(rewards):
        return episode_metrics(episodes)
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(deviations.mean()),
        "frac_reward_zero_std": float(1 - signal.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "time/sample": time.perf_counter() - started,
    }
    if not truncated.all():
        metrics["completions/mean_terminated_length"] = float(lengths[~truncated].mean())
    for name in drawn[0].reward_parts:
        scores = np.concatenate([r.reward_parts[name] for r in drawn]).astype(np.float64)
        scores = scores[~np.isnan(scores)]  # rows about which this reward says nothing
        if scores.size:
            metrics[f"rewards/{name}/mean"] = float(scores.mean())
            metrics[f"rewards/{name}/std"] = float(scores.std())
    return metrics | (episode_metrics(episodes) if episodes else {})


def update_metrics(learnt: Learnt) -> dict[str, float]:
    """Average over the updates of a step, and count those that were skipped."""

    def mean(values: Sequence[Any]) -> float:
        return float(np.mean(np.asarray(values, np.float64)))

    skipped = [info for info in learnt.infos if not info.applied]
    without_signal = sum(info.gradient_norm == 0 for info in skipped)
    metrics = {
        "loss": mean([s.loss_sum / max(float(s.denominator), 1.0) for s in learnt.summaries]),
        "grad_norm": mean([info.gradient_norm for info in learnt.infos]),
        "skipped_updates": float(len(skipped) - without_signal),
        "updates_without_signal": float(without_signal),
    }
    losses = [s.metrics for s in learnt.summaries if s.metrics is not None]
    if losses:
        low = mean([m.clip_fraction_low for m in losses])
        high = mean([m.clip_fraction_high for m in losses])
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "approx_kl": mean([m.approximate_kl for m in losses]),
        }
    return metrics
