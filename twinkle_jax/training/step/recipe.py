"""What each step does, and how a configuration says it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from twinkle_jax.advantage import Scale
from twinkle_jax.data import Template
from twinkle_jax.model.decoder.forward import Remat
from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.model.twinkle.optimizers import decayed
from twinkle_jax.reward import RewardFunction
from twinkle_jax.sampler import Sampling
from twinkle_jax.training.configuration.named_estimator import Estimator, make_estimator
from twinkle_jax.training.configuration.named_loss import make_loss
from twinkle_jax.training.configuration.tasks import Task
from twinkle_jax.training.configuration.train_config import TrainConfig
from twinkle_jax.training.policies.text_policy import Policy
from twinkle_jax.training.step.learner import Learner

_MAX_LOGP_DIFF = {"float32": 1e-3, "bfloat16": 1.0}
RECOMPUTED: dict[str, Remat] = {  # by the names of `update.recompute`
    "layers": True,
    "elementwise": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": False,
}


class Recipe(NamedTuple):
    """What a step does; fixed for a run.

    Attributes:
        learner: how the policy learns from a batch.
        template: of the policy.
        reward: of trajectories and ground truths.
        estimator: of advantages.
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
        mesh: devices that parameters and rows are spread over; None for one device.
    """

    learner: Learner
    template: Template
    reward: RewardFunction
    estimator: Estimator
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
    mesh: Mesh | None = None


@functools.cache
def _adamw(betas: tuple[float, float], weight_decay: float) -> optax.GradientTransformation:
    """Make it once: compiled updates are told apart by the object."""
    return optax.adamw(1.0, *betas, weight_decay=weight_decay, mask=decayed)


def make_recipe(
    config: TrainConfig, task: Task, policy: Policy, mesh: Mesh | None = None
) -> Recipe:
    """Choose estimator, loss, optimizer and the rest by the names in a configuration."""
    rollout, update = config.rollout, config.update
    assert rollout.max_new_tokens is not None
    return Recipe(
        learner=_learner(config, policy),
        template=policy.template,
        reward=task.reward,
        estimator=make_estimator(update.advantage, update.advantage_options),
        scale=update.scale,
        sampling=Sampling(
            rollout.temperature,
            rollout.top_k,
            rollout.top_p,
            rollout.min_p,
            stop_tokens=policy.tokenizer.stop_token_ids,
        ),
        num_samples=rollout.num_samples,
        max_new_tokens=rollout.max_new_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        mask_truncated=update.mask_truncated,
        dynamic_sampling=update.dynamic_sampling,
        max_logp_diff=_MAX_LOGP_DIFF[config.dtype],
        reference=jax.tree.map(jnp.copy, policy.params) if update.kl_beta else None,
        reward_timeout=config.reward_timeout,
        mesh=mesh,
    )


def _learner(config: TrainConfig, policy: Policy) -> Learner:
    update, optimizer = config.update, config.optimizer
    assert config.rollout.max_new_tokens is not None
    return Learner(
        config=policy.config,
        loss=make_loss(update, config.rollout.max_new_tokens),
        optimizer=_adamw(optimizer.betas, optimizer.weight_decay),
        temperature=config.rollout.temperature,
        max_grad_norm=optimizer.max_grad_norm,
        epochs=update.epochs,
        mini_batches=update.mini_batches,
        micro_batch_rows=update.micro_batch_rows,
        remat=RECOMPUTED[update.recompute],
        compute_dtype=config.dtype,
    )
