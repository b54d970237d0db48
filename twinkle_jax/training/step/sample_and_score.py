"""The first half of a step: prompts are completed, completions are scored, rewards compared."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from twinkle_jax.data import Batch, PromptBatch, Trajectory
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.reward import compute_rewards
from twinkle_jax.sampler import Sampling
from twinkle_jax.training.configuration.named_estimator import estimate
from twinkle_jax.training.policies.devices import fill_rows, row_shards
from twinkle_jax.training.step.recipe import Recipe
from twinkle_jax.training.step.rollout import (
    Rollout,
    Texts,
    draw_rollout,
    encode_prompts,
    read_texts,
)
from twinkle_jax.training.step.training_batch import lay_out, with_advantages


class Sampled(NamedTuple):
    """Prompts of a step with their completions, scored; advantages and batch are on the device."""

    trajectories: list[Trajectory]
    rewards: np.ndarray[Any, Any]
    advantages: Float[Array, " rows"]
    lengths: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    batch: Batch


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
        What was sampled. One transfer brings completions to the host; an estimator that compares
        with greedy completions takes another.
    """
    rollout = _draw(params, recipe, prompts, key, recipe.sampling, recipe.num_samples)
    batch = _prepare(recipe, rollout)  # on the device, while the host decodes and scores
    texts: Texts = read_texts(rollout, prompts, recipe.template)
    check()
    rewards = _score(recipe, texts.trajectories, prompts)
    check()
    where = ~texts.truncated if recipe.mask_truncated else None
    greedy = None
    if recipe.estimator.needs_greedy_rewards:
        greedy = _greedy_rewards(params, recipe, prompts)
        check()
    advantages = estimate(
        recipe.estimator,
        rewards,
        recipe.num_samples,
        recipe.scale,
        where=where,
        lengths=texts.lengths,
        greedy_rewards=greedy,
        mask=rollout.completions.mask,
    )
    batch = with_advantages(batch, advantages)
    shown = advantages if advantages.ndim == 1 else advantages[:, 0]
    return Sampled(texts.trajectories, rewards, shown, texts.lengths, texts.truncated, batch)


def _draw(
    params: Params,
    recipe: Recipe,
    prompts: Sequence[Trajectory],
    key: jax.Array,
    sampling: Sampling,
    num_samples: int,
) -> Rollout:
    tokens, mask = encode_prompts(recipe.template, prompts, longest=recipe.max_prompt_tokens)
    return draw_rollout(
        params,
        recipe.learner.config,
        tokens,
        mask,
        key,
        sampling,
        num_samples=num_samples,
        max_new_tokens=recipe.max_new_tokens,
        compute_dtype=recipe.learner.compute_dtype,
        mesh=recipe.mesh,
    )


def _prepare(recipe: Recipe, rollout: Rollout) -> Batch:
    """Lay a rollout out, and score it by the reference policy if all of it will be learnt from."""
    multiple = 1 if recipe.mesh is None else recipe.mesh.shape["tensor"]
    batch = lay_out(rollout, mask_truncated=recipe.mask_truncated, multiple=multiple)
    if recipe.reference is None or recipe.dynamic_sampling > 1:
        return batch
    return batch._replace(ref_logps=recipe.learner.score(recipe.reference, batch))


def _score(recipe: Recipe, said: list[Trajectory], prompts: PromptBatch) -> np.ndarray[Any, Any]:
    samples = len(said) // len(prompts)
    truths = [truth for truth in prompts.ground_truths for _ in range(samples)]
    scored = compute_rewards(recipe.reward, said, truths, timeout=recipe.reward_timeout)
    return np.asarray(scored, np.float32)


def _greedy_rewards(
    params: Params,
    recipe: Recipe,
    prompts: PromptBatch,
) -> np.ndarray[Any, Any]:
    """Score the most probable completion of each prompt."""
    filled = fill_rows(prompts, row_shards(recipe.mesh))
    greedily = Sampling(0.0, stop_tokens=recipe.sampling.stop_tokens)
    rollout = _draw(params, recipe, filled, jax.random.key(0), greedily, 1)  # nothing is drawn
    said = read_texts(rollout, filled, recipe.template).trajectories
    return _score(recipe, said[: len(prompts)], prompts)
