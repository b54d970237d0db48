"""One step of training: sample, score, compare, learn, and say in numbers what happened."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax.advantage import Advantage, group_statistics
from twinkle_jax.advantage.inputs.settings import Scale
from twinkle_jax.data import Batch, PromptBatch, Template, Trajectory
from twinkle_jax.model import TrainState, score_batch
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.reward import compute_rewards
from twinkle_jax.reward.checked import RewardFunction
from twinkle_jax.sampler import Sampling
from twinkle_jax.training.rollout import (
    Texts,
    draw_rollout,
    encode_prompts,
    read_texts,
    training_batch,
)
from twinkle_jax.training.update import Learner, Learnt, keep_groups, learn, rollout_facts


class Recipe(NamedTuple):
    """What a step does; fixed for a run.

    Attributes:
        learner: how the policy learns from a batch.
        template: of the policy.
        reward: of trajectories and ground truths.
        advantage: of rewards.
        scale: of the advantages.
        sampling: how tokens are drawn.
        num_samples: completions a prompt.
        max_new_tokens: the most tokens of a completion.
        max_prompt_tokens: the most tokens of a prompt.
        mask_truncated: whether completions that ran out of room are left out.
        dynamic_sampling: the most rollouts for one update.
        max_logp_diff: how far the sampler's log-probabilities may be from the trainer's.
        reference: parameters that the policy is held near; None for no reference.
        reward_timeout: seconds that a reward may take.
    """

    learner: Learner
    template: Template
    reward: RewardFunction
    advantage: Advantage
    scale: Scale
    sampling: Sampling
    num_samples: int
    max_new_tokens: int
    max_prompt_tokens: int
    mask_truncated: bool = False
    dynamic_sampling: int = 1
    max_logp_diff: float = 1e-3
    reference: Params | None = None
    reward_timeout: float = 600.0


class Sampled(NamedTuple):
    """Prompts of a step with their completions, scored; on the host but for the batch."""

    trajectories: list[Trajectory]
    rewards: np.ndarray[Any, Any]
    advantages: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    batch: Batch


class InterruptedRunError(Exception):
    """Raised between the parts of a step when the run shall end; the state is as it was."""


def sample_and_score(
    params: Params,
    recipe: Recipe,
    prompts: PromptBatch,
    key: jax.Array,
    check: Callable[[], None] = lambda: None,
) -> Sampled:
    """Draw completions, score them on the host, and lay them out with their advantages.

    Args:
        params: of the policy.
        recipe: of the run.
        prompts: of this rollout.
        key: of this rollout.
        check: called before and after scoring; may raise to end the step.

    Returns:
        What was sampled. One transfer brings completions to the host.
    """
    tokens, mask = encode_prompts(recipe.template, prompts, longest=recipe.max_prompt_tokens)
    rollout = draw_rollout(
        params,
        recipe.learner.config,
        tokens,
        mask,
        key,
        recipe.sampling,
        num_samples=recipe.num_samples,
        max_new_tokens=recipe.max_new_tokens,
        compute_dtype=recipe.learner.compute_dtype,
    )
    texts: Texts = read_texts(rollout, prompts, recipe.template)
    check()
    truths = [truth for truth in prompts.ground_truths for _ in range(recipe.num_samples)]
    scored = compute_rewards(
        recipe.reward, texts.trajectories, truths, timeout=recipe.reward_timeout
    )
    rewards = np.asarray(scored, np.float32)
    check()
    where = ~texts.truncated if recipe.mask_truncated else None
    advantages = recipe.advantage(rewards, recipe.num_samples, recipe.scale, where=where)
    batch = training_batch(rollout, advantages, mask_truncated=recipe.mask_truncated)
    return Sampled(
        texts.trajectories, rewards, np.asarray(advantages), texts.lengths, texts.truncated, batch
    )


def has_signal(sampled: Sampled, recipe: Recipe) -> np.ndarray[Any, Any]:
    """Say of each prompt whether its rewards differ, so that there is something to learn."""
    where = ~sampled.truncated if recipe.mask_truncated else None
    return np.asarray(group_statistics(sampled.rewards, recipe.num_samples, where=where).has_signal)


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
    batch = keep_groups(batches, jnp.asarray(chosen), group=recipe.num_samples)
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


def train_step(
    state: TrainState,
    recipe: Recipe,
    sampled: Sampled,
    *,
    learning_rate: float,
    seed: tuple[int, ...],
) -> tuple[TrainState, dict[str, float]]:
    """Learn from what was sampled; one transfer brings the numbers to the host.

    Args:
        state: what is trained; donated.
        recipe: of the run.
        sampled: of this step.
        learning_rate: of this step.
        seed: of the order of mini-batches.

    Returns:
        The new state, and the step's metrics.

    Raises:
        RuntimeError: if the sampler's log-probabilities are not the trainer's.
    """
    batch = sampled.batch
    if recipe.reference is not None:
        scores = score_batch(
            recipe.reference,
            batch,
            recipe.learner.config,
            temperature=recipe.learner.temperature,
            compute_dtype=recipe.learner.compute_dtype,
        )
        batch = batch._replace(ref_logps=scores.logps)
    state, learnt = learn(
        state,
        batch,
        recipe.learner,
        group=recipe.num_samples,
        learning_rate=learning_rate,
        seed=seed,
    )
    facts, learnt = jax.device_get((rollout_facts(batch), learnt))
    metrics = {name: float(value) for name, value in facts.items()}
    metrics |= _update_metrics(learnt) | {"learning_rate": learning_rate}
    difference = metrics.get("sampling/logp_diff/max", 0.0)
    if difference > recipe.max_logp_diff:
        raise RuntimeError(
            "the sampler's log-probabilities must be the trainer's to within "
            f"{recipe.max_logp_diff:g}, got a difference of {difference:.3g}: it samples from "
            "other weights, or computes something else"
        )
    return state, metrics


def _update_metrics(learnt: Learnt) -> dict[str, float]:
    """Average over the updates of a step; the first tells how far sampler and trainer differ."""

    def mean(values: Sequence[Any]) -> float:
        return float(np.mean(np.asarray(values, np.float64)))

    applied = [bool(info.applied) for info in learnt.infos]
    metrics = {
        "loss": mean([s.loss_sum / max(float(s.denominator), 1.0) for s in learnt.summaries]),
        "grad_norm": mean([info.gradient_norm for info in learnt.infos]),
        "skipped_updates": float(len(applied) - sum(applied)),
    }
    found = [s.metrics for s in learnt.summaries if s.metrics is not None]
    if found:
        low = mean([m.clip_fraction_low for m in found])
        high = mean([m.clip_fraction_high for m in found])
        ratios = np.asarray([found[0].ratio_min, found[0].ratio_max], np.float64)
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "approx_kl": mean([m.approximate_kl for m in found]),
            "sampling/logp_diff/max": float(np.max(np.abs(np.log(ratios)))),
        }
    return metrics


def sample_metrics(drawn: Sequence[Sampled], recipe: Recipe, began: float) -> dict[str, float]:
    """Describe all that a step has sampled, under the names that TRL has given them."""
    rewards = np.concatenate([s.rewards for s in drawn]).astype(np.float64)
    lengths = np.concatenate([s.lengths for s in drawn])
    truncated = np.concatenate([s.truncated for s in drawn])
    signal = np.concatenate([has_signal(s, recipe) for s in drawn])
    groups = rewards.reshape(-1, recipe.num_samples)
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(groups.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float(1 - signal.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "time/sample": time.perf_counter() - began,
    }
    if not truncated.all():
        metrics["completions/mean_terminated_length"] = float(lengths[~truncated].mean())
    return metrics
