"""Estimators and optimizers by their names: what they need, treat apart and refuse."""

import contextlib
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.model.families import assert_close, each
from twinkle_jax.advantage import ESTIMATORS, Advantage, get_advantage, remax_advantage
from twinkle_jax.data import ArithmeticTask, PromptBatch
from twinkle_jax.reward import FunctionReward
from twinkle_jax.training import (
    Estimator,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    collect,
    make_estimator,
    make_optimizer,
    make_recipe,
    make_schedule,
    small_policy,
)
from twinkle_jax.training.by_name import decayed, muon_dimensions

OPTIONS = {"pass_at_k": {"k": 2}, "pkpo": {"k": 2}}
NAMES = sorted([*ESTIMATORS, "reinforce_plus_plus"])
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 1.0, 1.0], np.float32)
LENGTHS = np.array([1, 2, 3, 4, 4, 3, 2, 1])
MASK = jnp.arange(4)[None, :] < jnp.asarray(LENGTHS)[:, None]


def estimated(name, *, where=None, **options):
    estimator = make_estimator(name, OPTIONS.get(name, {}) | options)
    greedy = np.array([0.5, 1.0], np.float32) if estimator.needs_greedy_rewards else None
    advantages = estimator.advantages(
        REWARDS, 4, "none", where=where, lengths=LENGTHS, greedy_rewards=greedy, mask=MASK
    )
    return np.asarray(advantages)


@pytest.mark.parametrize("name", NAMES)
def test_any_estimator_by_its_name(name):
    estimates = estimated(name)
    assert estimates.shape in ((8,), (8, 4))
    assert np.isfinite(estimates).all() and (estimates != 0).any()
    where = np.arange(8) != 3
    assert not estimated(name, where=where)[3].any()


def test_lengths_and_greedy_rewards_are_those_of_the_completions():
    opo = get_advantage("opo")(REWARDS, 4, "none", lengths=LENGTHS)
    np.testing.assert_array_equal(estimated("opo"), opo)
    remax = remax_advantage(REWARDS, greedy_rewards=np.array([0.5, 1.0]), num_generations=4)
    np.testing.assert_array_equal(estimated("remax"), remax)


def test_over_time_the_reward_stands_at_the_last_token():
    estimates = estimated("reinforce_plus_plus", gamma=0.5)
    kept = np.asarray(MASK)
    assert (estimates[~kept] == 0).all()
    exponent = LENGTHS[:, None] - 1 - np.arange(4)[None, :]
    returns = np.where(kept, REWARDS[:, None] * 0.5 ** np.maximum(exponent, 0), 0)
    mean, std = returns[kept].mean(), returns[kept].std(ddof=1)
    np.testing.assert_allclose(estimates[kept], ((returns - mean) / std)[kept], rtol=1e-5)


def test_options_are_passed_on():
    assert (estimated("grpo") == estimated("grpo", epsilon=5.0)).all()  # not divided by anything
    assert (estimated("pass_at_k", k=1) != estimated("pass_at_k", k=2)).any()


class Halved(Advantage):
    """One of a user's own."""

    def __call__(self, rewards, num_generations=1, scale="group", *, where=None, lengths, **other):
        return jnp.asarray(rewards) / jnp.asarray(lengths, jnp.float32)


def test_one_of_ones_own_gets_what_it_names():
    ESTIMATORS["halved"] = Halved
    try:
        np.testing.assert_allclose(estimated("halved"), REWARDS / LENGTHS)
    finally:
        del ESTIMATORS["halved"]


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: make_estimator("grop", {}), ValueError, "advantage"),
        (lambda: make_estimator("gae", {}), ValueError, "advantage"),
        (lambda: make_estimator("pass_at_k", {}), TypeError, "options of advantage pass_at_k"),
        (lambda: make_estimator("rloo", {"k": 3}), TypeError, "options of advantage rloo"),
        (lambda: make_estimator("opo", {"lengths": 3}), TypeError, "options of advantage opo"),
        (
            lambda: make_estimator("reinforce_plus_plus", {"k": 3}),
            TypeError,
            "options of advantage reinforce_plus_plus",
        ),
        (lambda: make_optimizer("adanw"), ValueError, "optimizer"),
        (lambda: make_optimizer("fromage"), ValueError, "optimizer"),
        (lambda: make_optimizer("schedule_free_adamw"), ValueError, "optimizer"),
        (lambda: make_optimizer("lbfgs"), ValueError, "optimizer"),
        (lambda: make_optimizer("adamw", b3=0.9), TypeError, "options of optimizer adamw"),
        (lambda: make_optimizer("adamw", b1=[{"x": 1}]), TypeError, "options of optimizer adamw"),
        (
            lambda: make_optimizer("adafactor", weight_decay_rate=0.1),
            TypeError,
            "options of optimizer adafactor",
        ),
    ],
)
def test_what_is_missing_or_unknown_is_named(make, error, name):
    with pytest.raises(error, match=f"^{name} must"):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["remax", "reinforce_plus_plus"])
def test_a_rollout_brings_what_its_estimator_needs(name):
    policy = small_policy(0)
    prompts = PromptBatch(ArithmeticTask(6, size=3)[:] + ArithmeticTask(1, size=1)[:])
    config = TrainConfig(
        rollout=RolloutConfig(prompts=4, num_samples=4, max_new_tokens=6, max_prompt_tokens=64),
        update=UpdateConfig(advantage=name, scale="none"),
    )
    recipe = make_recipe(config, policy, FunctionReward(lambda text, truth: float(len(text))))
    drawn, _ = collect(recipe, policy.params, lambda: prompts, jax.random.key(0))
    advantages = np.asarray(drawn.batch.advantages)
    kept = np.asarray(drawn.batch.labels) != -100
    if name == "remax":  # the same greedy answer for all of a prompt
        baseline = (drawn.rewards - drawn.advantages).reshape(4, 4)
        np.testing.assert_array_equal(baseline, baseline[:, :1].repeat(4, axis=1))
        assert (baseline == np.round(baseline)).all()
    else:
        assert abs(advantages[kept].mean()) < 1e-5
        assert advantages[kept].std(ddof=1) == pytest.approx(1, rel=1e-3)
        assert (advantages[~kept] == 0).all()


def test_estimators_without_options_share_none_that_can_be_changed():
    with pytest.raises(TypeError, match="item assignment"):
        Estimator(get_advantage("grpo")).options["k"] = 2
    assert Estimator(get_advantage("grpo")).options == {}


@pytest.mark.slow
def test_muon_orthogonalizes_each_layers_matrices_and_leaves_the_rest_to_adam():
    rng = np.random.default_rng(0)
    shapes = {
        "embed_tokens": {"embedding": (6, 4)},
        "embed_tokens_per_layer": {"embedding": (6, 8)},
        "layers": {
            "0": {
                "q_proj": {"kernel": (2, 4, 8)},
                "norm": {"scale": (2, 4)},
                "experts": {"gate_up_proj": {"kernel": (2, 3, 4, 8)}},
            }
        },
        "lm_head": {"kernel": (4, 6)},
        "projection": {"kernel": (4, 8)},
    }
    params = jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    optimizer = make_optimizer("muon")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, _ = optimizer.update(params, optimizer.init(params), params)
    orthogonal = set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        if np.ptp(np.abs(update)) > 1e-3 * np.abs(update).max():  # Adam's first step is a sign
            values = np.linalg.svd(np.asarray(update), compute_uv=False)
            assert values.min() > 0.5 * values.max()
            orthogonal.add(jax.tree_util.keystr(path, simple=True, separator="."))
    assert orthogonal == {
        "layers.0.q_proj.kernel",
        "layers.0.experts.gate_up_proj.kernel",
        "projection.kernel",
    }


def accepted_optimizers():
    """All optimizers of Optax that are not refused, and need no options."""
    names = []
    for module in (optax, optax.contrib):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            if "learning_rate" in inspect.signature(make).parameters:
                with contextlib.suppress(ValueError, TypeError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    make_optimizer(name)
                    names.append(name)
    return sorted(names, key=lambda name: (name not in ("adafactor", "lamb"), name))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", each(accepted_optimizers(), default=2))
def test_an_optimizer_does_what_it_does_in_optax(name):
    """It is made with the rate 1, and its updates are multiplied by the rate."""
    make = getattr(optax, name, None) or getattr(optax.contrib, name)
    rng = np.random.default_rng(0)
    kernel, *gradients = jnp.asarray(rng.standard_normal((6, 2, 4, 6), dtype=np.float32))

    def trained(optimizer, rate):
        params = {"layers": {"0": {"q_proj": {"kernel": kernel}}}}
        state, tree = optimizer.init(params), jax.tree.structure(params)
        for gradient in gradients:
            updates, state = optimizer.update(tree.unflatten([gradient]), state, params)
            params = jax.tree.map(lambda x, u: x + rate * u, params, updates)
        return jax.tree.leaves(params)[0] - kernel

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        axes = {"muon_weight_dimension_numbers": muon_dimensions} if name == "muon" else {}
        assert_close(trained(make_optimizer(name), 0.01), trained(make(0.01, **axes), 1.0), 1e-3)


DECAYED = {"embed_tokens": {"embedding": True}, "layers": {"0": {"up_proj": {"kernel": True}}}}
KEPT = {
    "norm": {"scale": False},
    "layers": {
        "0": {
            "q_proj": {"bias": False},
            "input_layernorm": {"scale": False},
            "self_attn": {"q_norm": {"scale": False}},
        }
    },
}


@pytest.mark.parametrize("expected", [DECAYED, KEPT])
def test_norms_and_biases_do_not_decay(expected):
    assert decayed(expected) == expected
    params = jax.tree.map(lambda _: jnp.ones(2), expected)
    optimizer = make_optimizer("adamw", weight_decay=0.5)
    with jax.numpy_dtype_promotion("standard"):
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    moved = jax.tree.map(lambda u: bool((u != 0).all()), updates)
    assert moved == expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "middle"), [("linear", 0.75), ("cosine", (2 + 2**0.5) / 4)])
def test_a_falling_schedule_ends_after_the_last_step(name, middle):
    rate = make_schedule(name, steps=4, peak=1.0)
    rates = [rate(step) for step in (0, 1, 2, 4)]
    assert rates == pytest.approx([1.0, middle, 0.5, 0.0], abs=1e-6)


@pytest.mark.parametrize(("name", "middle"), [("linear", 0.75), ("cosine", (2 + 2**0.5) / 4)])
def test_a_falling_schedule_rises_first_and_ends_at_a_rate(name, middle):
    rate = make_schedule(name, steps=6, peak=0.5, warmup_steps=2, end_value=0.25)
    expected = [0.0, 0.25, 0.5, 0.25 + 0.25 * middle, 0.375, 0.25, 0.25]
    assert [rate(step) for step in (0, 1, 2, 3, 4, 6, 9)] == pytest.approx(expected)
    longer = make_schedule(name, steps=1, peak=0.5, warmup_steps=2)
    assert [longer(step) for step in (1, 2, 3)] == [0.25, 0.5, 0.0]
    with pytest.raises(TypeError, match="warmup_steps"):
        make_schedule("constant", steps=6, peak=0.5, warmup_steps=2)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # From 0 to the peak, 0.5, in 2 steps.
        (
            "warmup_constant_schedule",
            {"warmup_steps": 2},
            [0.0, 0.25, 0.5, 0.5, 0.5],
        ),
        # Up from 0.5 / 25 in 0.3 of the steps.
        (
            "linear_onecycle_schedule",
            {"transition_steps": 10, "pct_start": 0.4},
            [0.02, 0.14, 0.26, 0.38, 0.5],
        ),
        # Keys are strings in JSON; each factor applies from its step on.
        (
            "piecewise_constant_schedule",
            {"boundaries_and_scales": {"1": 0.5, "3": 0.5}},
            [0.5, 0.25, 0.25, 0.125, 0.125],
        ),
    ],
)
def test_schedules_of_optax(name, options, expected):
    schedule = make_schedule(name, steps=5, peak=0.5, **options)
    with jax.numpy_dtype_promotion("standard"):
        rates = [schedule(step) for step in range(5)]
    assert rates == pytest.approx(expected, rel=1e-6)
