"""The parts of a run's steps: settings, policy, source of rollouts, loss, optimizer."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from twinkle_jax.loss import PolicyLoss
from twinkle_jax.model import Params, Remat
from twinkle_jax.reward import RewardFunction
from twinkle_jax.rollout import (
    Engine,
    EnvironmentFactory,
    LocalEngine,
    MultiTurn,
    RolloutSource,
    SingleTurn,
)
from twinkle_jax.training.by_name import Estimator, make_estimator
from twinkle_jax.training.config import TrainConfig, make_loss, run_optimizer
from twinkle_jax.training.policy import Policy

RECOMPUTED: dict[str, Remat] = {  # by the names of `update.recompute`
    "auto": True,  # not resolved, since the device's memory is unknown
    "layers": True,
    "elementwise": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": False,
}


class Recipe(NamedTuple):
    """What a step needs besides its state; constant over a run.

    Attributes:
        config: all settings.
        policy: the decoder, its template, and frozen parameters under adapters. Its `params` are
            not read.
        source: samples and scores trajectories.
        loss: with the coefficients of the run.
        optimizer: with learning rate 1.
        estimator: of advantages.
        reference: parameters of the reference policy of the KL penalty, merged over the frozen
            ones; None without a penalty.
        mesh: of parameters and rows; None for one device.
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
    """Make the parts of a step from its configuration.

    Args:
        config: of the run.
        policy: before training; its parameters are copied if a reference policy is needed.
        reward: of trajectories and ground truths; may be None with an environment.
        environment: makes environments; None: the policy completes prompts.
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
    """Replace the configuration: for its slots and its token budget."""
    source: Any = recipe.source  # `make_source` makes those with settings
    source = dataclasses.replace(source, settings=config.rollout)
    return recipe._replace(config=config, source=source)


def make_engine(config: TrainConfig, policy: Policy, mesh: Mesh | None = None) -> LocalEngine:
    """Make the engine that samples completions for a run."""
    return LocalEngine(policy.config, policy.template, policy.frozen, config.dtype, mesh)


def make_source(
    config: TrainConfig,
    engine: Engine,
    reward: RewardFunction | None,
    environment: EnvironmentFactory | None = None,
    *,
    width_multiple: int = 1,
) -> RolloutSource:
    """Make the source of rollouts: completions of prompts, or episodes.

    Raises:
        ValueError: without a reward and an environment.
    """
    update = config.update
    options: dict[str, Any] = {
        "reward_timeout": config.reward_timeout,
        "mask_truncated": update.mask_truncated,
        "width_multiple": width_multiple,
    }
    if environment is not None:
        return MultiTurn(
            engine, environment, config.rollout, reward, discount=update.discount, **options
        )
    if reward is None:
        raise ValueError("reward must be given without an environment, got None")
    return SingleTurn(engine, reward, config.rollout, **options)
