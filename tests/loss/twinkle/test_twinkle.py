"""Twinkle's names: recorded numbers of the real Twinkle, its arguments and defaults."""

import functools
import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import twinkle_jax.loss as losses
from tests.loss.cases import random_batch
from twinkle_jax.loss import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DRGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PPOLoss,
    SAPOLoss,
)

GOLDEN = json.loads((pathlib.Path(__file__).parents[2] / "golden" / "loss_cases.json").read_text())
CASES = {
    f"{index}-{case['loss']}-{'-'.join(map(str, case['kwargs'].values()))}": case
    for index, case in enumerate(GOLDEN["cases"])
}
FLOATS = ("logps", "entropies", "old_logps", "ref_logps", "advantages")
CLASSES = [GRPOLoss, GSPOLoss, SAPOLoss, CISPOLoss, BNPOLoss, DRGRPOLoss, PPOLoss, DAPOLoss]


@functools.cache
def golden_results(first):
    """Value and gradient of all eleven settings on one batch, compiled together."""
    settings = GOLDEN["cases"][first : first + 11]
    case = settings[0]
    arrays = {name: np.asarray(case[name], np.float32) for name in FLOATS}
    assert all(other[name] == case[name] for other in settings for name in (*FLOATS, "labels"))

    def one(case, logps, labels, entropies, **kwargs):
        loss_fn = getattr(losses, case["loss"])(**case["kwargs"])

        def loss(logps):
            outputs = {"logps": logps, "entropies": entropies}
            return loss_fn({"labels": labels}, outputs, **kwargs)["loss"]

        return jax.value_and_grad(loss)(logps)

    run = jax.jit(lambda **kwargs: [one(case, **kwargs) for case in settings])
    return run(labels=np.asarray(case["labels"]), **arrays)


def test_the_golden_file_is_whole():
    assert len(CASES) == 66
    assert {case["loss"] for case in CASES.values()} == {
        c.__name__ for c in CLASSES if c is not DAPOLoss
    }


@pytest.mark.parametrize(
    "name",
    [
        name if index < 22 else pytest.param(name, marks=pytest.mark.exhaustive)
        for index, name in enumerate(CASES)
    ],
)
def test_golden(name):
    """All settings on two batches all day, on all six where CI looks."""
    case, index = CASES[name], int(name.split("-")[0])
    value, gradient = golden_results(index - index % 11)[index % 11]
    np.testing.assert_allclose(value, case["value"], **GOLDEN["tolerance"])
    np.testing.assert_allclose(gradient, case["grad_logps"], **GOLDEN["tolerance"])


@pytest.mark.parametrize("name", [n for n in CASES if int(n.split("-")[0]) < 11])
def test_golden_from_lists_of_response_tokens(name):
    case = CASES[name]

    def chosen(key):
        rows = zip(case[key], case["labels"], strict=True)
        return [[x for x, k in zip(*row, strict=True) if k != -100] for row in rows]

    output = getattr(losses, case["loss"])(**case["kwargs"])(
        {"labels": case["labels"]},
        {"logps": jnp.array(case["logps"]), "entropies": jnp.array(case["entropies"])},
        old_logps=chosen("old_logps"),
        ref_logps=chosen("ref_logps"),
        advantages=case["advantages"],
    )
    np.testing.assert_allclose(output.loss, case["value"], **GOLDEN["tolerance"])


def test_defaults_are_twinkles():
    for cls in CLASSES:
        loss_fn = cls()
        high = 0.28 if cls is DAPOLoss else None
        assert (loss_fn.epsilon, loss_fn.epsilon_high) == (0.2, high)
        assert (loss_fn.beta, loss_fn.entropy_coef, loss_fn.ignore_index) == (0, 0, -100)
    assert (SAPOLoss().tau_pos, SAPOLoss().tau_neg) == (1, 1)
    assert DRGRPOLoss().max_completion_length == 1024
    assert PPOLoss().loss_agg_mode == "token-mean"


@pytest.mark.parametrize(
    ("cls", "order"),
    [
        (GRPOLoss, ["epsilon", "epsilon_high", "beta", "entropy_coef", "ignore_index"]),
        (GSPOLoss, ["epsilon", "epsilon_high", "beta", "entropy_coef", "ignore_index"]),
        (CISPOLoss, ["epsilon", "epsilon_high", "beta", "entropy_coef", "ignore_index"]),
        (BNPOLoss, ["epsilon", "epsilon_high", "beta", "entropy_coef", "ignore_index"]),
        (DAPOLoss, ["epsilon", "epsilon_high", "beta", "entropy_coef", "ignore_index"]),
        (SAPOLoss, ["epsilon", "beta", "tau_pos", "tau_neg", "ignore_index"]),
        (DRGRPOLoss, ["epsilon", "beta", "max_completion_length", "ignore_index"]),
        (PPOLoss, ["loss_agg_mode"]),
    ],
)
def test_positional_arguments_are_in_twinkles_order(cls, order):
    parameters = inspect.signature(cls).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == order
    assert {"epsilon", "epsilon_high", "beta", "entropy_coef", "ignore_index"} <= {
        p.name for p in parameters
    }


@pytest.mark.parametrize("cls", CLASSES)
def test_equal_hashable_and_immutable(cls):
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    assert cls() != cls(epsilon=0.1)
    assert len({c() for c in CLASSES}) == len(CLASSES)
    with pytest.raises(AttributeError):
        cls().epsilon = 0.3
    with pytest.raises(TypeError, match="clip_range"):
        cls(clip_range=0.2)
    assert repr(cls()).startswith(f"{cls.__name__}(")


def test_unknown_reduction():
    message = "loss_agg_mode must be one of 'token-mean', 'seq-mean-token-mean', got 'mean'"
    with pytest.raises(ValueError, match=message):
        PPOLoss("mean")


def test_dapo_is_bnpo_with_a_higher_ceiling():
    batch = random_batch(80, spread=1.0)
    batch_inputs = {"labels": np.where(batch.mask, 7, -100)}
    outputs = {"logps": batch.logprobs}
    kwargs = {"old_logps": batch.old, "advantages": batch.advantages}
    dapo = DAPOLoss()(batch_inputs, outputs, **kwargs).loss
    assert dapo == BNPOLoss(epsilon_high=0.28)(batch_inputs, outputs, **kwargs).loss
    assert dapo != BNPOLoss()(batch_inputs, outputs, **kwargs).loss


def test_cispo_knows_its_bound_and_twinkles_denominator():
    batch_inputs, outputs = {"labels": [[1, 2]]}, {"logps": jnp.array([[-1.0, -2.0]])}
    kwargs = {"old_logps": [[-9.0, -1.0]], "advantages": [1.0]}
    # Weights min(e^8, 1.25) and e^-1; losses 1.25 and 2/e; the first weight is clipped.
    total = 1.25 + 2 / np.e
    output = CISPOLoss(0.25)(batch_inputs, outputs, **kwargs)
    np.testing.assert_allclose(output.loss, total / 2, rtol=1e-6)
    for advantage in (1.0, -1.0):  # a weight is clipped whatever the sign, and never from below
        kwargs["advantages"] = [advantage]
        metrics = CISPOLoss(0.25)(batch_inputs, outputs, **kwargs).metrics
        assert (metrics.clip_fraction_low, metrics.clip_fraction_high) == (0, 0.5)
    kwargs["advantages"] = [1.0]
    for known in ({"num_items_in_batch": 8}, {"denominator": 8}):
        value = CISPOLoss(0.25)(batch_inputs, outputs, **kwargs, **known).loss
        np.testing.assert_allclose(value, total / 8, rtol=1e-6)
    higher = CISPOLoss(0.25, epsilon_high=0.5)(batch_inputs, outputs, **kwargs)
    np.testing.assert_allclose(higher.loss, (1.5 + 2 / np.e) / 2, rtol=1e-6)


def test_sapo_reports_no_clips():
    output = SAPOLoss()(
        {"labels": [[1, 2]]},
        {"logps": jnp.array([[-1.0, -9.0]])},
        old_logps=[[-9.0, -1.0]],
        advantages=[[1.0, -1.0]],
    )
    assert output.metrics.clip_fraction_low == output.metrics.clip_fraction_high == 0
    assert output.metrics.ratio_max > 1000
