"""The start of a run: what a configuration says is what a step does, every setting arrives."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import family, random_params
from tests.rollout import games
from tests.training import small_run
from twinkle_jax.advantage import PKPOAdvantage
from twinkle_jax.data import ArithmeticTask, small_tokenizer
from twinkle_jax.loss import DAPOLoss
from twinkle_jax.model import Decoder, LoraConfig, make_mesh, parse_config, save_pretrained
from twinkle_jax.sampler import Sampling
from twinkle_jax.training import (
    Estimator,
    LoraSettings,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    WarmStart,
    apply_gradients,
    make_recipe,
    small_policy,
    train_state,
    warm_start,
)
from twinkle_jax.training.config import with_setting
from twinkle_jax.training.display import Display
from twinkle_jax.training.examples import example_rows
from twinkle_jax.training.policy import add_adapter
from twinkle_jax.training.start import begin, read_policy, with_adapter, with_config, with_dtype
from twinkle_jax.training.step import RECOMPUTED
from twinkle_jax.training.task import make_task
from twinkle_jax.training.tracking import MetricsLog

POLICY = small_policy(0)
BETAS, WEIGHT_DECAY, RATE = (0.6, 0.8), 0.3, 0.01
ROLLOUT = RolloutConfig(128, 4, 5, 77, 0.7, 6, 0.9, 0.01, 1.3)
OPTIMIZER = OptimizerConfig(
    options={"b1": BETAS[0], "b2": BETAS[1], "weight_decay": WEIGHT_DECAY}, max_grad_norm=0.2
)


def reward(trajectories, truths):
    return [0.0] * len(trajectories)


def make(**changes):
    return make_recipe(TrainConfig(**changes), POLICY, reward)


def test_the_small_policy_is_as_large_as_it_says():
    assert round(sum(x.size for x in jax.tree.leaves(POLICY.params)), -3) == 114_000


def test_what_is_made_of_settings_gets_them():
    update = UpdateConfig(
        advantage="pkpo",
        advantage_options={"k": 2},
        loss="dapo",
        epsilon=0.1,
        epsilon_high=0.4,
        kl_beta=0.3,
        mask_truncated=True,
    )
    made = make(rollout=ROLLOUT, update=update, dtype="bfloat16", reward_timeout=7.0)
    source, engine = made.source, made.source.engine
    stops = POLICY.tokenizer.stop_token_ids
    assert source.settings == made.config.rollout == ROLLOUT.resolved()
    sampling = Sampling(0.7, 6, 0.9, 0.01, 1.3, stop_tokens=stops)
    assert engine.sampling(source.settings) == sampling
    assert (source.mask_truncated, source.reward_timeout) == (True, 7.0)
    assert engine.compute_dtype == "bfloat16"
    assert made.estimator == Estimator(PKPOAdvantage(), {"k": 2})
    assert made.loss == DAPOLoss(epsilon=0.1, epsilon_high=0.4, beta=0.3)
    jax.tree.map(np.testing.assert_array_equal, made.reference, POLICY.params)
    assert make().reference is None


def test_the_reference_is_the_initial_policy_whatever_it_is():
    """An adapter that is trained on is part of it; a new one changes nothing."""
    adapted = add_adapter(POLICY, LoraConfig(r=2), base="base")
    adapted = adapted._replace(params=jax.tree.map(lambda x: x + 0.1, adapted.params))
    update = UpdateConfig(kl_beta=0.1)
    read = make_recipe(TrainConfig(update=update), adapted, reward)
    jax.tree.map(np.testing.assert_array_equal, read.reference, adapted.params)
    new = make_recipe(TrainConfig(update=update, lora=LoraSettings(rank=2)), adapted, reward)
    assert new.reference == {}


def test_rows_are_as_wide_as_the_mesh_divides():
    made = make_recipe(TrainConfig(), POLICY, reward, mesh=make_mesh(tensor=2))
    assert (made.source.width_multiple, make().source.width_multiple) == (2, 1)


def test_examples_of_a_warm_start_are_prompts_with_their_answers():
    """Each row has labels on its answer and on the token that ends it."""
    examples = ArithmeticTask(2, size=3)[:]
    batch, _ = example_rows(POLICY.template, examples)
    for example, labels in zip(examples, batch.labels, strict=True):
        answer = POLICY.tokenizer.encode(dict(example["user_data"])["ground_truth"])
        assert labels[labels != -100].tolist() == [*answer, POLICY.tokenizer.eos_token_id]


@pytest.mark.slow
def test_a_warm_start_ends_with_its_examples():
    """It raised that max() has no argument."""
    steps, settings = [], WarmStart(steps=3, rows=4, check_every=1)
    examples = ArithmeticTask(1, size=4)[:]
    warm_start(small_policy(0), examples, lambda p: 0.0, settings, lambda n, _: steps.append(n))
    assert steps == [1]
    with pytest.raises(ValueError, match=r"^examples must not be empty"):
        warm_start(small_policy(0), [], lambda p: 0.0, settings)


def test_an_adapter_gets_no_adapters(tmp_path):
    adapted = add_adapter(POLICY, LoraConfig(r=2), base="base")
    config = TrainConfig(model="adapter", task="x.jsonl", lora=LoraSettings(rank=2))
    with pytest.raises(ValueError, match=r"^lora\.rank must be 0"):
        with_adapter(config, adapted, tmp_path, None, None)


def test_targets_of_adapters_that_the_decoder_lacks_are_refused(tmp_path):
    config = TrainConfig(lora=LoraSettings(rank=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match=r"^lora\.target_modules must be among \['down_proj', "):
        with_adapter(config, POLICY, tmp_path, None, None)
    assert not list(tmp_path.iterdir())


def test_rows_longer_than_the_rotary_scaling_goes_are_refused(tmp_path):
    tokenizer = small_tokenizer()
    decoder = parse_config(family("phi3", vocab_size=max(48, len(tokenizer))))
    save_pretrained(Decoder(decoder, random_params(decoder)), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lengths = RolloutConfig(max_prompt_tokens=100, max_new_tokens=28)
    config = TrainConfig(model=str(tmp_path), task="x.jsonl", rollout=lengths)
    assert read_policy(config).config == decoder
    longer = with_setting(config, "rollout.max_new_tokens", 29)
    with pytest.raises(ValueError, match=r"max_new_tokens must be at most 128, .* got 129"):
        read_policy(longer)


def test_a_source_of_episodes_gets_its_settings_and_later_choices():
    update = UpdateConfig(mask_truncated=True, discount=0.5)
    config = TrainConfig(environment="x.py:X", rollout=ROLLOUT, update=update, reward_timeout=7.0)
    made = make_recipe(config, POLICY, reward, environment=games.Guess)
    source = made.source
    assert (source.environment, source.reward, source.settings) == (
        games.Guess,
        reward,
        config.rollout,
    )
    assert (source.mask_truncated, source.reward_timeout, source.discount) == (True, 7.0, 0.5)
    fewer = with_setting(config, "rollout.slots", 4)
    changed = with_config(made, fewer)
    assert (changed.config, changed.source.settings) == (fewer, fewer.rollout)
    with pytest.raises(ValueError, match="reward"):
        make_recipe(TrainConfig(), POLICY, None)


def test_the_optimizer_is_adamw_which_leaves_norms_alone():
    """Against the paper's equations in float64, for two updates."""
    optimizer = make(optimizer=OPTIMIZER).optimizer
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 2)), "norm": {"scale": rng.normal(size=2)}}
    gradients = [jax.tree.map(lambda x: rng.normal(size=x.shape), params) for _ in range(2)]
    state = train_state(jax.tree.map(jnp.float32, params), optimizer)
    first = second = jax.tree.map(np.zeros_like, params)
    (b1, b2), decay = BETAS, {"kernel": WEIGHT_DECAY, "norm": {"scale": 0.0}}
    for t, gradient in enumerate(gradients, 1):
        counts = {"denominator": jnp.float32(1), "tokens": jnp.float32(1)}
        state = state._replace(gradient_sum=jax.tree.map(jnp.float32, gradient), **counts)
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


def test_the_seed_decides_the_order_of_prompts_and_the_noise(folder, tmp_path):
    def begun(seed, name):
        config = small_run.config(folder, tmp_path / name, seed=seed)
        task = make_task(config)._replace(reward=reward)
        (tmp_path / name).mkdir()
        with MetricsLog(tmp_path / name) as log, Display(4, quiet=True) as display:
            run, progress = begin(config, tmp_path / name, task, log, display, None)
        prompts = [str(prompt["messages"]) for _ in range(3) for prompt in next(run.loader)]
        return prompts, jax.random.key_data(progress.key).tolist()

    first, again, other = begun(0, "first"), begun(0, "again"), begun(1, "other")
    assert first == again
    assert first[0] != other[0] and sorted(first[0]) == sorted(other[0])
    assert first[1] != other[1]


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "largest"),
    [
        ("cpu", None, "float32", 1e-3),
        ("tpu", None, "bfloat16", 0.2),
        ("gpu", "9.0", "bfloat16", 0.2),
        ("gpu", "8.0", "bfloat16", 0.2),
        ("gpu", "7.5", "float32", 1e-3),
        ("gpu", "gfx942", "float32", 1e-3),
    ],
)
def test_a_checkpoint_is_trained_in_the_type_that_the_devices_are_fast_in(
    platform, capability, dtype, largest
):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    mesh = SimpleNamespace(devices=np.array([device]))
    large = TrainConfig(model="somewhere", task="x.jsonl")
    chosen = with_dtype(large, mesh)
    assert (chosen.dtype, chosen.update.max_logp_diff) == (dtype, largest)
    for dtype in ("float32", "bfloat16"):  # the user's choice
        config = dataclasses.replace(large, dtype=dtype)
        assert with_dtype(config, mesh) == config
    assert with_dtype(TrainConfig(), mesh).dtype == "float32"  # the built-in policy


def test_a_recipe_has_a_type_and_its_bound():
    """Where it is made without a run: of a checkpoint's configuration, which has neither."""
    config = make(model="somewhere", task="x.jsonl").config
    assert (config.dtype, config.update.max_logp_diff) == ("float32", 1e-3)


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("layers", True),
        ("elementwise", jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        ("nothing", False),
    ],
)
def test_what_is_recomputed_has_a_name(name, remat):
    assert RECOMPUTED[make(update=UpdateConfig(recompute=name)).config.update.recompute] is remat
