"""The second half of a step: the policy learns from what was sampled."""

import jax

from twinkle_jax.model import TrainState
from twinkle_jax.training.step.learner import learn
from twinkle_jax.training.step.recipe import Recipe
from twinkle_jax.training.step.rollout_facts import largest_difference, rollout_facts
from twinkle_jax.training.step.sample_and_score import Sampled
from twinkle_jax.training.step.update_metrics import update_metrics


class StaleSamplerError(RuntimeError):
    """The sampler's log-probabilities are not the trainer's.

    Attributes:
        state: what was to be trained, as it was before the step.
    """

    def __init__(self, difference: float, allowed: float, state: TrainState) -> None:
        super().__init__(
            f"the sampler's log-probabilities must be the trainer's to within {allowed:g}, got a "
            f"difference of {difference:.3g}: it samples from other weights, or computes something "
            "else"
        )
        self.state = state


def train_step(
    state: TrainState,
    recipe: Recipe,
    sampled: Sampled,
    *,
    learning_rate: float,
    seed: tuple[int, ...],
    compare_all: bool = False,
) -> tuple[TrainState, dict[str, float]]:
    """Learn from what was sampled; one transfer brings the numbers to the host.

    Args:
        state: what is trained; donated.
        recipe: of the run.
        sampled: of this step.
        learning_rate: of this step.
        seed: of the order of mini-batches.
        compare_all: whether to compare the sampler's log-probabilities with the trainer's for all
            completions, which takes a pass of its own, or only for those of the first update,
            which is there anyhow. Later updates tell nothing: the policy is another one by then.

    Returns:
        The new state, and the step's metrics.

    Raises:
        RuntimeError: if the sampler's log-probabilities are not the trainer's. No update was
            applied then, and the error's `state` is what came in.
    """
    batch, learner = sampled.batch, recipe.learner
    if recipe.reference is not None and batch.ref_logps is None:
        batch = batch._replace(ref_logps=learner.score(recipe.reference, batch))
    difference = None
    if compare_all and learner.mini_batches > 1:
        difference = largest_difference(learner.score(state.params, batch), batch)
    state, learnt = learn(
        state,
        batch,
        learner,
        group=recipe.num_samples,
        learning_rate=learning_rate,
        seed=seed,
        logp_diff=difference,
        max_logp_diff=recipe.max_logp_diff,
    )
    facts, learnt, _ = jax.device_get((rollout_facts(batch), learnt, sampled.advantages))
    metrics = {name: float(value) for name, value in facts.items()}
    metrics |= update_metrics(learnt) | {"learning_rate": learning_rate}
    found = metrics.get("sampling/logp_diff/max", 0.0)
    if found > recipe.max_logp_diff:
        seen = learner.epochs * len(batch.tokens)
        raise StaleSamplerError(found, recipe.max_logp_diff, state._replace(rows=state.rows - seen))
    return state, metrics
