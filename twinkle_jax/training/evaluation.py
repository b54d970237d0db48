"""Evaluation of a policy on held-out problems: accuracy, mean reward, pass@k."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twinkle_jax.data import IGNORE, Batch, PromptBatch, Trajectory
from twinkle_jax.data.template import Template
from twinkle_jax.loss import LossOutput, PreferenceLoss, PreferenceMetrics
from twinkle_jax.model import Params
from twinkle_jax.reward import RewardFunction
from twinkle_jax.rollout import (
    Engine,
    Episode,
    LocalEngine,
    MultiTurn,
    RolloutConfig,
    SingleTurn,
    check_failures,
    hosts,
)
from twinkle_jax.rollout.engine import LogitsError
from twinkle_jax.sampler.jax_sampler import key_of_seed
from twinkle_jax.sampler.sizes import check_count
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.examples import example_rows
from twinkle_jax.training.policy import Policy
from twinkle_jax.training.step import Recipe, on_all_devices, score, with_reference
from twinkle_jax.training.task import Task

_Rewards = np.ndarray[Any, Any]
BATCH = 256
"""Problems that are sampled together, or examples that are scored."""


def evaluate(
    policy: Policy,
    prompts: Sequence[Trajectory],
    reward: RewardFunction,
    settings: RolloutConfig,
    *,
    engine: Engine | None = None,
    params: Params | None = None,
    pass_k: int = 0,
    batch: int = BATCH,
    seed: int = 0,
    compute_dtype: DTypeLike | None = None,
    reward_timeout: float = 600.0,
    mesh: Mesh | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    r"""Evaluate a policy on prompts with known answers.

    $$\text{accuracy} = \overline{[r \ge 1]}, \qquad
      \text{pass@}k = \overline{1 - \tbinom{n - c}{k} / \tbinom{n}{k}}$$

    with the rewards $r$ of greedy completions, and $c$ of $n = 2k$ sampled completions of a prompt
    with a reward of 1 or more.

    Args:
        policy: to evaluate.
        prompts: with their ground truths.
        reward: of trajectories and ground truths.
        settings: of sampling; `prompts` and `num_samples` are not read. The temperature and the
            filters are those of the samples for pass@k; greedy completions have temperature 0.
        engine: what draws; None: this process.
        params: in place of the policy's trained parameters.
        pass_k: k of pass@k; 0 leaves it out.
        batch: prompts at once.
        seed: of the samples for pass@k.
        compute_dtype: type of activations, without an engine.
        reward_timeout: seconds that the reward may take for a batch.
        mesh: of the parameters, without an engine; None for one device.
        check: called before a batch is sampled and before it is scored; may raise to end the
            evaluation.

    Returns:
        `accuracy`; `reward`, the mean reward of greedy completions; and `pass@k` with `pass_k`.

    Raises:
        ValueError: if there are no prompts.

    References:
        pass@k: Evaluating Large Language Models Trained on Code, https://arxiv.org/abs/2107.03374
    """
    if engine is None:
        engine = LocalEngine(policy.config, policy.template, policy.frozen, compute_dtype, mesh)
    source = SingleTurn(engine, reward, settings, reward_timeout)
    check_count("pass_k", pass_k, 0)
    evaluated = policy.params if params is None else params

    def rewards(sampler: SingleTurn) -> _Rewards:
        def score(chosen: PromptBatch, key: jax.Array) -> _Rewards:
            return sampler.complete_and_score(evaluated, chosen, key, check)

        return _in_batches(score, prompts, batch, seed, check)

    results = _accuracy(rewards(source.with_settings(num_samples=1, temperature=0.0)))
    if pass_k:
        results |= _pass_at(pass_k, rewards(source.with_settings(num_samples=2 * pass_k)))
    return results


def evaluate_episodes(
    source: MultiTurn,
    params: Params,
    prompts: Sequence[Trajectory],
    *,
    pass_k: int,
    seed: int,
    check: Callable[[], None],
) -> dict[str, float]:
    """Evaluate a policy on episodes with environments; like `evaluate`, with returns as rewards.

    Returns:
        `accuracy`, the share of greedy episodes with a return of 1 or more; `reward`, their mean
        return; `turns`, their mean number; `failed`, the share whose environment failed, which are
        excluded from the rest; and `pass@k` with `pass_k`. Means of no episodes are left out.

    Raises:
        ValueError: if there are no prompts.
        EnvironmentFailureError: if too many environments failed.
    """
    check_count("pass_k", pass_k, 0)

    def play(player: MultiTurn) -> tuple[_Rewards, list[Episode]]:
        episodes: list[Episode] = []

        def score(chosen: PromptBatch, key: jax.Array) -> _Rewards:
            returns, played = player.play_and_score(params, chosen, key)
            episodes.extend(played)
            return returns

        returns = _in_batches(score, prompts, BATCH, seed, check)
        check_failures(episodes, player.settings.max_failed)
        return returns, episodes

    greedy, episodes = play(source.with_settings(num_samples=1, temperature=0.0))
    results = _accuracy(greedy) | {"failed": float(np.isnan(greedy).mean())}
    turns = [len(episode.turns) for episode in episodes if not episode.failed]
    if turns:
        results["turns"] = float(np.mean(turns))
    if pass_k:
        results |= _pass_at(pass_k, play(source.with_settings(num_samples=2 * pass_k))[0])
    return results


def evaluate_examples(
    recipe: Recipe,
    template: Template,
    params: Params,
    examples: Sequence[Trajectory],
    *,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Compute the mean of -log p over the tokens of the assistant, in nats: `cross_entropy`.

    Of pairs, compute means of the loss, `preference_loss`, and of the implicit rewards that it
    compares: `preference_accuracy`, the share of pairs whose chosen answer has the higher one, and
    `preference_margin`, their difference.

    Raises:
        LogitsError: if a result is not finite.
    """
    multiple = 1 if recipe.mesh is None else recipe.mesh.shape["tensor"]
    totals: dict[str, float] = {}
    count, chosen_tokens, loss = 0, 0, recipe.loss
    for start in range(0, len(examples), BATCH):
        hosts.together("evaluating", check)
        batch, lengths = example_rows(template, examples[start : start + BATCH], multiple=multiple)
        labels = np.asarray(batch.labels)
        batch = on_all_devices(batch, recipe.mesh)
        if recipe.reference is not None:
            batch = with_reference(recipe, batch, lengths)
        logps = score(recipe, params, batch, lengths).logps
        if isinstance(loss, PreferenceLoss):
            sums = _sums_of_pairs(logps, batch, loss)
            count += len(labels) // 2
            chosen_tokens += int(np.sum(labels[::2] != IGNORE))
        else:
            sums = _sums_of_tokens(logps, batch)
            count += int(np.sum(labels != IGNORE))
        for name, value in hosts.read_if_spread(sums).items():
            totals[name] = totals.get(name, 0.0) + float(value)
        if not all(map(math.isfinite, totals.values())):
            raise LogitsError(
                "the policy's logits must be finite, got NaN or infinity for held-out examples: "
                "its parameters or activations are too large, or not numbers"
            )
    over_tokens = totals.pop("over_tokens", 0.0)
    results = {name: total / count for name, total in totals.items()}
    if over_tokens:
        results["preference_loss"] += over_tokens / chosen_tokens
    return results


@jax.jit
def _sums_of_tokens(logps: Float[Array, "rows time"], batch: Batch) -> dict[str, Array]:
    counted = jnp.where(batch.labels != IGNORE, logps, 0)
    return {"cross_entropy": -jnp.sum(counted, dtype=jnp.float32)}


@partial(jax.jit, static_argnames="loss")
def _sums_of_pairs(
    logps: Float[Array, "rows time"], batch: Batch, loss: PreferenceLoss
) -> dict[str, Array]:
    def total(tokens_per_pair: float) -> LossOutput:
        return loss.for_parts(tokens_per_pair)(
            {"labels": batch.labels}, {"logps": logps}, ref_logps=batch.ref_logps, denominator=1.0
        )

    output, pairs = total(math.inf), len(logps) / 2  # without a cross entropy over tokens
    assert isinstance(output.metrics, PreferenceMetrics)
    return {
        "preference_loss": output.loss,
        "over_tokens": total(1.0).loss - output.loss,
        "preference_accuracy": pairs * output.metrics.accuracy,
        "preference_margin": pairs * output.metrics.margin,
    }


def _in_batches(
    score: Callable[[PromptBatch, jax.Array], _Rewards],
    prompts: Sequence[Trajectory],
    batch: int,
    seed: int,
    check: Callable[[], None],
) -> _Rewards:
    """Score prompts, some at a time, each batch with a key of its own; [prompts, samples]."""
    if not len(prompts):
        raise ValueError("prompts must not be empty, got none")
    check_count("batch", batch)
    rows = []
    for number, start in enumerate(range(0, len(prompts), batch)):
        hosts.together("evaluating", check)
        key = jax.random.fold_in(key_of_seed(seed), number)
        rows.append(score(PromptBatch(prompts[start : start + batch]), key))
    return np.concatenate(rows).reshape(len(prompts), -1)


def _accuracy(greedy: _Rewards) -> dict[str, float]:
    """Average rewards of greedy completions or episodes; NaN for those that failed."""
    kept = greedy[~np.isnan(greedy)]
    if not kept.size:
        return {}
    return {"accuracy": float((kept >= 1).mean()), "reward": float(kept.mean())}


def _pass_at(k: int, rewards: _Rewards) -> dict[str, float]:
    """Compute pass@k from 2k samples of each prompt; prompts with a failed one are left out."""
    complete = rewards[~np.isnan(rewards).any(axis=1)]
    if not complete.size:
        return {}
    counts = (complete >= 1).sum(axis=1).tolist()
    chances = [1 - math.comb(2 * k - right, k) / math.comb(2 * k, k) for right in counts]
    return {f"pass@{k}": float(np.mean(chances))}


def held_out(
    config: TrainConfig,
    task: Task,
    policy: Policy,
    *,
    engine: Engine | None = None,
    params: Params | None = None,
    recipe: Recipe | None = None,
    mesh: Any = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Evaluate a policy, or its current parameters, on the task's held-out problems.

    The cross-entropy of examples needs the recipe of the run.
    """
    if not task.held_out:
        return {}
    if config.task == "examples":
        assert recipe is not None
        scored = policy.params if params is None else params
        return evaluate_examples(recipe, policy.template, scored, task.held_out, check=check)
    reward = task.judge or task.reward
    settings = replace(config.rollout, slots=config.evaluation.slots or config.rollout.slots)
    if engine is None:
        engine = LocalEngine(policy.config, policy.template, policy.frozen, config.dtype, mesh)
    if task.environment is not None:
        source = MultiTurn(
            engine,
            task.environment,
            settings,
            reward,
            discount=config.update.discount,
            reward_timeout=config.reward_timeout,
        )
        return evaluate_episodes(
            source,
            policy.params if params is None else params,
            task.held_out,
            pass_k=config.evaluation.pass_k,
            seed=config.seed,
            check=check,
        )
    assert reward is not None
    return evaluate(
        policy,
        task.held_out,
        reward,
        settings,
        engine=engine,
        params=params,
        pass_k=config.evaluation.pass_k,
        seed=config.seed,
        reward_timeout=config.reward_timeout,
        check=check,
    )
