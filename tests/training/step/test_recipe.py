"""What a configuration says is what a step does: every setting arrives."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.advantage import PKPOAdvantage
from twinkle_jax.loss import DAPOLoss
from twinkle_jax.model import apply_gradients, train_state
from twinkle_jax.sampler import Sampling
from twinkle_jax.training import (
    Estimator,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    small_policy,
)
from twinkle_jax.training.configuration.resolve import resolve
from twinkle_jax.training.configuration.tasks import make_task
from twinkle_jax.training.step.recipe import RECOMPUTED, Recipe, make_recipe

POLICY = small_policy(0)
BETAS, WEIGHT_DECAY, RATE = (0.6, 0.8), 0.3, 0.01
ROLLOUT = RolloutConfig(128, 4, 5, 77, 0.7, 6, 0.9, 0.01)
UPDATE = UpdateConfig(
    advantage="pkpo",
    advantage_options={"k": 2},
    scale="none",
    loss="dapo",
    epsilon=0.1,
    epsilon_high=0.4,
    kl_beta=0.3,
    mask_truncated=True,
    dynamic_sampling=3,
    epochs=2,
    mini_batches=8,
    micro_batch_rows=16,
    recompute="elementwise",
)
OPTIMIZER = OptimizerConfig(betas=BETAS, weight_decay=WEIGHT_DECAY, max_grad_norm=0.2)
NOT_OF_A_STEP = {"prompts", "learning_rate", "warmup_steps", "decay", "max_skipped"}


def make(**changes) -> Recipe:
    config = resolve(TrainConfig(**changes))
    return make_recipe(config, make_task(config), POLICY)


def test_the_small_policy_is_as_large_as_it_says():
    assert round(sum(x.size for x in jax.tree.leaves(POLICY.params)), -3) == 114_000


def test_every_setting_arrives():
    made = make(
        rollout=ROLLOUT, update=UPDATE, optimizer=OPTIMIZER, dtype="bfloat16", reward_timeout=7.0
    )
    learner = made.learner
    assert made.sampling == Sampling(0.7, 6, 0.9, 0.01, stop_tokens=POLICY.tokenizer.stop_token_ids)
    assert (made.num_samples, made.max_new_tokens, made.max_prompt_tokens) == (4, 5, 77)
    assert made.estimator == Estimator(PKPOAdvantage(), {"k": 2})
    assert (made.scale, made.mask_truncated, made.dynamic_sampling) == ("none", True, 3)
    assert made.reward_timeout == 7
    assert make().max_logp_diff <= 1e-3 < made.max_logp_diff <= 1  # bfloat16 rounds more
    assert learner.loss == DAPOLoss(epsilon=0.1, epsilon_high=0.4, beta=0.3)
    assert (learner.temperature, learner.max_grad_norm) == (0.7, 0.2)
    assert (learner.epochs, learner.mini_batches, learner.micro_batch_rows) == (2, 8, 16)
    assert (learner.compute_dtype, learner.remat) == ("bfloat16", RECOMPUTED["elementwise"])
    jax.tree.map(np.testing.assert_array_equal, made.reference, POLICY.params)
    same = {
        field.name
        for part in (ROLLOUT, UPDATE, OPTIMIZER)
        for field in fields(part)
        if getattr(part, field.name) == getattr(type(part)(), field.name)
    }
    assert same == NOT_OF_A_STEP  # whoever adds a setting says here where it arrives


def test_the_optimizer_is_adamw_which_leaves_norms_alone():
    """Against the paper's equations in float64, for two updates."""
    optimizer = make(optimizer=OPTIMIZER).learner.optimizer
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 2)), "norm": {"scale": rng.normal(size=2)}}
    gradients = [jax.tree.map(lambda x: rng.normal(size=x.shape), params) for _ in range(2)]
    state = train_state(jax.tree.map(jnp.float32, params), optimizer)
    first = second = jax.tree.map(np.zeros_like, params)
    (b1, b2), decay = BETAS, {"kernel": WEIGHT_DECAY, "norm": {"scale": 0.0}}
    for t, gradient in enumerate(gradients, 1):
        given = {"denominator": jnp.float32(1), "tokens": jnp.float32(1)}
        state = state._replace(gradient_sum=jax.tree.map(jnp.float32, gradient), **given)
        state, _ = apply_gradients(state, optimizer, learning_rate=RATE)
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, gradient)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, second, gradient)
        params = jax.tree.map(
            lambda x, m, v, d, t=t: (
                x - RATE * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8) + d * x)
            ),
            params,
            first,
            second,
            decay,
        )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), state.params, params)


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("layers", True),
        ("elementwise", jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        ("nothing", False),
    ],
)
def test_what_is_recomputed_has_a_name(name, remat):
    assert make(update=UpdateConfig(recompute=name)).learner.remat is remat
