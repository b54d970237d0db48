"""Optimizers, schedules, accumulation and metrics by Twinkle's names."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.families import NAMES, config_of, each
from tests.twinkle.rows import INPUTS, SIDE, assert_equal, assert_same, gradient
from twinkle_jax.model import parameter_shapes
from twinkle_jax.training.by_name import decayed
from twinkle_jax.twinkle.model.optimizer import choose_optimizer, choose_schedule


def test_twinkles_defaults(model):
    model.set_optimizer("AdamW")
    assert model.learning_rate == 1e-5
    model.set_optimizer("SGD")
    assert model.learning_rate == 1e-5
    model.set_optimizer(optax.sgd(0.1))
    assert model.learning_rate == 1.0


@pytest.mark.parametrize("name", each(NAMES))
def test_norms_and_biases_do_not_decay(name):
    flat = jax.tree_util.tree_leaves_with_path(decayed(parameter_shapes(config_of(name))))
    without = {".".join(key.key for key in path) for path, applies in flat if not applies}
    for path, _ in flat:
        full = ".".join(key.key for key in path)
        assert (full in without) == ("norm" in full or "bias" in full)
    assert without and len(without) < len(flat)


def test_adamw_by_hand():
    params = {"norm": {"scale": jnp.ones(1)}, "lm_head": {"kernel": jnp.ones((1, 1))}}
    optimizer = choose_optimizer("AdamW", {"weight_decay": 0.5, "betas": [0.5, 0.5]})
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(
            jax.tree.map(lambda x: 2 * x, params), optimizer.init(params), params
        )
    # The first step is the sign of the gradient; 0.5 times the parameter decays.
    np.testing.assert_allclose(updates["norm"]["scale"], -1, rtol=1e-6)
    np.testing.assert_allclose(updates["lm_head"]["kernel"], -1.5, rtol=1e-6)
    plain = choose_optimizer("AdamW", {})
    # PyTorch's kernels, which change no result.
    assert choose_optimizer("AdamW", {"foreach": False, "fused": True}) is plain


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CosineAnnealingLR", {"T_max": 6, "eta_min": 0.1}),  # it swings back after T_max
        ("ConstantLR", {}),
        ("ConstantLR", {"factor": 0.5, "total_iters": 2}),
    ],
)
def test_schedules_are_pytorchs_by_name_and_by_class(name, options):
    """`ConstantLR` was the base rate in all steps, and a class was taken for a function."""
    get = "pip install 'twinkle-jax[test,oracle]'"
    torch = pytest.importorskip("torch", reason=get)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    kind = getattr(torch.optim.lr_scheduler, name)
    theirs, ours = kind(optimizer, **options), choose_schedule(name, options)
    assert choose_schedule(kind, options)(3, 0.5) == ours(3, 0.5)
    for step in range(15):
        assert math.isclose(ours(step, 0.5), theirs.get_last_lr()[0], rel_tol=1e-6)
        optimizer.step()
        theirs.step()


def test_a_linear_schedule_ends_at_0_after_a_warmup_as_long_as_the_training():
    options = {"num_warmup_steps": 2, "num_training_steps": 2}
    ours = choose_schedule("LinearWarmupScheduler", options)
    assert [ours(step, 1.0) for step in range(4)] == [0, 0.5, 0, 0]


@pytest.mark.parametrize(("cycles", "after"), [(1, [1, 0.5, 0, 0.5, 1, 1]), (0.25, [1, 0.5])])
def test_cycles_of_a_cosine_after_its_warmup(cycles, after):
    steps = 5 if cycles == 1 else 2
    options = {"num_warmup_steps": 1, "num_training_steps": steps, "num_cycles": cycles}
    ours = choose_schedule("CosineWarmupScheduler", options)
    assert [ours(step, 1.0) for step in range(len(after) + 1)] == pytest.approx([0, *after])
    with pytest.raises(ValueError, match=r"^num_cycles"):
        choose_schedule("CosineWarmupScheduler", {"num_training_steps": 3, "num_cycles": 0})
    fast = choose_schedule("CosineWarmupScheduler", {"num_training_steps": 3, "num_cycles": 2})
    assert [fast(step, 1.0) for step in range(4)] == pytest.approx([1, 0.25, 0.25, 1])
    short = choose_schedule("CosineWarmupScheduler", options | {"num_training_steps": 1})
    assert short(1, 1.0) == 1


@pytest.mark.exhaustive
def test_accumulation_takes_every_second_call(model):
    model.set_lr_scheduler("CosineAnnealingLR", T_max=10)
    first, second = INPUTS[:1], INPUTS[1:]
    side = [{key: x[:1] for key, x in SIDE.items()}, {key: x[1:] for key, x in SIDE.items()}]
    model.forward_backward(inputs=first, gradient_accumulation_steps=2, **side[0])
    assert model.clip_grad_norm() is model.step() is model.clip_grad_and_step() is None
    model.zero_grad()
    model.lr_step()
    assert model.learning_rate == 0.5 and model.state.step == 0
    model.forward_backward(inputs=second, **side[1])
    parts = gradient(model)
    assert model.clip_grad_and_step().applied
    assert model.learning_rate < 0.5 and model.cur_step == 2
    again = type(model)(model.model_id)
    again.set_loss("grpo", epsilon=0.2)
    again.set_optimizer("SGD", lr=0.5)
    again.forward_backward(inputs=INPUTS, **SIDE)
    assert_same(gradient(again), parts)
    again.clip_grad_and_step()
    assert_same(again.get_state_dict().values(), model.get_state_dict().values())


@pytest.mark.exhaustive
def test_a_batch_without_labels_changes_nothing(model):
    model.set_optimizer("AdamW", lr=0.5, weight_decay=0.5)
    model.forward_backward(inputs=INPUTS, **SIDE)
    model.clip_grad_and_step()
    before = jax.tree.map(np.array, (model.state.params, model.state.optimizer_state))
    silent = [{**x, "labels": [-100] * len(x["labels"])} for x in INPUTS]
    model.forward_backward(inputs=silent, advantages=SIDE["advantages"])
    assert not model.clip_grad_and_step().applied
    after = (model.state.params, model.state.optimizer_state)
    assert_equal(after, before)
    assert model.calculate_metric()["skipped_updates"] == 1 and model.state.step == 1


def test_functions_are_losses(model):
    def likelihood(inputs, outputs, denominator):
        labelled = inputs["labels"] != -100
        return -jnp.sum(jnp.where(labelled, outputs["logps"], 0)) / denominator

    model.set_loss(likelihood)
    loss = model.forward_backward(inputs=INPUTS, micro_batch_size=3)["loss"]
    logps = model.forward_only(inputs=INPUTS)["logps"]
    np.testing.assert_allclose(loss, -logps.sum() / np.count_nonzero(logps), rtol=1e-5)


class Count:
    """A metric of Twinkle's kind."""

    def __init__(self, name="seen"):
        self.name, self.seen = name, []

    def accumulate(self, inputs, outputs, **facts):
        self.seen.append((len(inputs), sorted(outputs), sorted(facts)))

    def calculate(self):
        seen, self.seen = self.seen, []
        return {self.name: seen}


def test_metrics_of_ones_own(model):
    model.add_metric(Count())
    model.add_metric(Count, is_training=False, name="evaluated")
    model.forward_only(inputs=INPUTS)
    model.forward_backward(inputs=INPUTS, **SIDE)
    facts = ["advantages", "grad_norm", "gradient_accumulation_steps", "lr", "old_logps", "step"]
    scored, trained = (3, ["logps"], []), (3, ["logps", "loss"], facts)
    assert model.calculate_metric(is_training=False) == {
        "seen": [scored, trained],
        "evaluated": [scored],
    }
    numbers = model.calculate_metric(is_training=True)
    assert numbers["seen"] == [] and numbers["tokens"] == 9
    assert model.calculate_metric(is_training=False) == {"seen": [], "evaluated": []}
    assert "tokens" not in model.calculate_metric()


def test_mixed_precision_is_the_compute_dtype(checkpoint, model):
    make = type(model)
    assert make(checkpoint, mixed_precision="bf16").dtype == jnp.bfloat16
    assert make(checkpoint, mixed_precision="no").dtype == make(checkpoint).dtype == jnp.float32
    with pytest.raises(ValueError, match="mixed_precision"):
        make(checkpoint, mixed_precision="fp16")
    with pytest.raises(ValueError, match="dtype"):
        make(checkpoint, mixed_precision="bf16", dtype="float32")
    for options in ({}, {"mixed_precision": "bf16"}):
        with pytest.raises(ValueError, match=r"^dtype .*'bf16'"):
            make(checkpoint, dtype="bf16", **options)
