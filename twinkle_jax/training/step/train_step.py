"""The second half of a step: the policy learns from what was sampled."""

import jax

from twinkle_jax.model import TrainState, score_batch
from twinkle_jax.training.step.learner import learn, rollout_facts
from twinkle_jax.training.step.recipe import Recipe
from twinkle_jax.training.step.sample_and_score import Sampled
from twinkle_jax.training.step.update_metrics import update_metrics


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
    facts, learnt, _ = jax.device_get((rollout_facts(batch), learnt, sampled.advantages))
    metrics = {name: float(value) for name, value in facts.items()}
    metrics |= update_metrics(learnt) | {"learning_rate": learning_rate}
    difference = metrics.get("sampling/logp_diff/max", 0.0)
    if difference > recipe.max_logp_diff:
        raise RuntimeError(
            "the sampler's log-probabilities must be the trainer's to within "
            f"{recipe.max_logp_diff:g}, got a difference of {difference:.3g}: it samples from "
            "other weights, or computes something else"
        )
    return state, metrics
