"""Policy losses under Twinkle's names: recorded numbers of the real ones, and laws of all."""

import functools
import inspect
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from jax.test_util import check_grads

from tests.loss.cases import (
    GARBAGE,
    POLICY_LOSSES,
    call,
    expected,
    gradients,
    random_batch,
    same_bits,
)
from tests.model.families import each
from twinkle_jax import loss as losses
from twinkle_jax.loss import (
    LOSSES,
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DPPOLoss,
    DRGRPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    LUSPOLoss,
    PolicyLoss,
    PPOLoss,
    SAPOLoss,
    VESPOLoss,
    constant_length,
    policy_gradient,
    policy_metrics,
    token_log_ratio,
)

every_loss = pytest.mark.parametrize("name", POLICY_LOSSES)
OURS = (DAPOLoss, DPPOLoss, GMPOLoss, LUSPOLoss, VESPOLoss)  # that Twinkle does not have
CLASSES = [x for x in LOSSES.values() if issubclass(x, PolicyLoss) and x not in OURS]
GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "loss_cases.json").read_text())
CASES = {
    f"{index}-{case['loss']}-{'-'.join(map(str, case['kwargs'].values()))}": case
    for index, case in enumerate(GOLDEN["cases"])
}
FLOATS = ("logps", "entropies", "old_logps", "ref_logps", "advantages")


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
    assert {case["loss"] for case in CASES.values()} == {c.__name__ for c in CLASSES}


@pytest.mark.parametrize("name", each(list(CASES), 22))
def test_golden(name):
    """All settings on two batches in the default run, on all six in the exhaustive one."""
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


@every_loss
@given(seed=st.integers(0, 10**6), per_token=st.booleans())
def test_matches_reference(name, seed, per_token):
    batch = random_batch(seed, per_token=per_token, spread=0.6)
    value, metrics, _ = gradients(name, batch)
    np.testing.assert_allclose(value, expected(name, batch), rtol=1e-5, atol=1e-6)
    assert 0 <= metrics.clip_fraction_low <= 1
    assert 0 <= metrics.clip_fraction_high <= 1
    assert metrics.approximate_kl >= -1e-6
    assert metrics.ratio_min <= metrics.ratio_max


@pytest.mark.exhaustive
def test_gradient():
    batch = random_batch(60, spread=0.5)
    with jax.enable_x64(True):
        new, old, ref, entropies, advantages = (x.astype(float) for x in batch[:5])

        @jax.jit
        def every_loss(new, entropies):
            # The weights of CISPO and VESPO carry no gradient: keep those of CISPO at 1 + epsilon.
            others = [name for name in POLICY_LOSSES if name != "vespo"]
            return {
                name: call(
                    POLICY_LOSSES[name],
                    new,
                    old - 9 if name == "cispo" else old,
                    ref,
                    entropies,
                    advantages,
                    batch.mask,
                ).loss
                for name in others
            }

        check_grads(every_loss, (new, entropies), order=1, modes=["rev"])


@every_loss
def test_micro_batches_add_up(name):
    """Each micro-batch has some of the rows, and masks the others."""
    batch = random_batch(63)
    value, _, gradient = gradients(name, batch)
    first_rows = np.arange(4)[:, None] < 2
    halves = [batch._replace(mask=batch.mask & rows) for rows in (first_rows, ~first_rows)]
    pieces = [gradients(name, half, batch.denominators) for half in halves]
    np.testing.assert_allclose(sum(p[0] for p in pieces), value, rtol=1e-5, atol=1e-7)
    for index in (0, 3):  # log-probabilities and entropies
        together = sum(p[2][index] for p in pieces)
        np.testing.assert_allclose(together, gradient[index], rtol=1e-5, atol=1e-8)


@every_loss
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask(name, garbage):
    batch = random_batch(64, per_token=True)
    dirty = [np.where(batch.mask, x, garbage) for x in batch[:5]]
    clean, result = gradients(name, batch), gradients(name, [*dirty, batch.mask])
    for one, other in zip(jax.tree.leaves(clean), jax.tree.leaves(result), strict=True):
        assert same_bits(one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "cispo"])
def test_no_nan_on_the_way(name):
    # Operation by operation: a NaN that a later mask covers up would trip jax_debug_nans.
    batch = random_batch(64, per_token=True)
    dirty = [np.where(batch.mask, x, np.float32(np.inf)) for x in batch[1:5]]
    with jax.debug_nans(True):
        gradient = jax.grad(lambda x: call(POLICY_LOSSES[name], x, *dirty, batch.mask).loss)(
            np.where(batch.mask, batch.logprobs, np.float32(np.inf))
        )
    assert np.isfinite(gradient).all()


@every_loss
def test_gradients_where_none_belong_are_zero(name):
    batch = random_batch(65)
    _, _, (new, old, ref, entropies, advantages) = gradients(name, batch)
    assert new[batch.mask].any()
    assert not new[~batch.mask].any()
    assert not entropies[~batch.mask].any()
    assert not old.any()
    assert not ref.any()
    assert not advantages.any()


@every_loss
def test_nothing_kept_is_zero(name):
    batch = random_batch(66, per_token=True)
    nan = [np.full_like(x, np.nan) for x in batch[:5]]
    value, metrics, gradient = gradients(name, [*nan, np.zeros_like(batch.mask)])
    assert value == 0
    assert not any(x.any() for x in gradient)
    assert np.isfinite(metrics).all()


@every_loss
@pytest.mark.parametrize("distance", [-200, 200])
@pytest.mark.parametrize("sign", [-1, 1])
def test_far_apart_is_finite(name, distance, sign):
    batch = random_batch(67)
    old, ref = batch.logprobs - distance, batch.logprobs + distance
    advantages = sign * np.abs(batch.advantages)
    value, metrics, gradient = gradients(
        name, [batch.logprobs, old, ref, batch.entropies, advantages, batch.mask]
    )
    assert np.isfinite(value)
    assert np.isfinite(metrics).all()
    assert all(np.isfinite(x).all() for x in gradient)


@every_loss
def test_the_order_of_rows_does_not_matter(name):
    batch = random_batch(68)
    value, _, gradient = gradients(name, batch)
    order = np.array([2, 0, 3, 1])
    moved, _, moved_gradient = gradients(name, [x[order] for x in batch])
    np.testing.assert_allclose(moved, value, rtol=1e-6)
    np.testing.assert_allclose(moved_gradient[0], gradient[0][order], rtol=1e-6, atol=1e-9)


@pytest.mark.exhaustive
@every_loss
def test_padding_changes_nothing(name):
    batch = random_batch(68)
    value, _, gradient = gradients(name, batch)
    padded = [np.pad(x, ((0, 4), (0, 3))[: x.ndim]) for x in batch]
    longer, _, longer_gradient = gradients(name, padded, batch.denominators)
    np.testing.assert_allclose(longer, value, rtol=1e-6)
    np.testing.assert_allclose(longer_gradient[0][:4, :6], gradient[0], rtol=1e-6, atol=1e-9)
    assert not longer_gradient[0][4:].any()
    assert not longer_gradient[0][:, 6:].any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_is_unsharded(axis_type):
    batch = random_batch(69, rows=8)
    mesh = jax.make_mesh((8,), ("data",), (getattr(jax.sharding.AxisType, axis_type),))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    spread = [jax.device_put(x, rows) for x in batch]
    for name in POLICY_LOSSES:
        value, _, gradient = gradients(name, batch)
        sharded, _, sharded_gradient = gradients(name, spread)
        np.testing.assert_allclose(sharded, value, rtol=1e-6)
        np.testing.assert_allclose(sharded_gradient[0], gradient[0], rtol=1e-6, atol=1e-9)


@pytest.mark.exhaustive
@every_loss
def test_half_precision_is_computed_in_single(name):
    batch = random_batch(70)
    half = [jnp.asarray(x, jnp.bfloat16) for x in batch[:5]]
    rounded = [np.asarray(x, np.float32) for x in half]
    value, _, gradient = gradients(name, [*half, batch.mask])
    assert value.dtype == jnp.float32
    assert gradient[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(value, gradients(name, [*rounded, batch.mask])[0], rtol=1e-6)


def test_on_policy():
    batch = random_batch(71)

    def loss(logprobs, name, old):
        output = call(POLICY_LOSSES[name], logprobs, old, *batch[2:])
        return output.loss, output.metrics

    @jax.jit
    def run(logprobs):
        step = jax.value_and_grad(loss, has_aux=True)
        return {name: step(logprobs, name, None) for name in POLICY_LOSSES}

    for name, ((value, metrics), gradient) in run(batch.logprobs).items():
        same, _, (same_gradient, *_) = gradients(name, batch._replace(old=batch.logprobs))
        np.testing.assert_allclose(value, same, rtol=1e-6)
        np.testing.assert_allclose(gradient, same_gradient, rtol=1e-6)
        assert metrics.ratio_min == metrics.ratio_max == 1
        assert metrics.approximate_kl == 0


@pytest.mark.parametrize("name", each(list(POLICY_LOSSES)))
def test_without_advantages_there_is_no_loss(name):
    batch = random_batch(72)

    def loss(x):
        output = call(
            POLICY_LOSSES[name], x, batch.old, batch.ref, batch.entropies, None, batch.mask
        )
        return output.loss, output.metrics

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(batch.logprobs)
    assert value == 0
    assert not gradient.any()
    assert metrics.ratio_max > 1


def test_without_a_reference_beta_has_no_effect():
    batch = random_batch(73)
    arguments = batch.logprobs, batch.old, None, batch.entropies, batch.advantages, batch.mask
    assert call(GRPOLoss(beta=0.5), *arguments).loss == call(GRPOLoss(), *arguments).loss


def test_metrics_of_a_step():
    batch = random_batch(74, spread=1.0)
    metrics = call(GRPOLoss(epsilon=0.1, epsilon_high=0.3), *batch).metrics
    ratio = token_log_ratio(batch.logprobs, batch.old, batch.mask)
    np.testing.assert_array_equal(
        metrics,
        policy_metrics(
            ratio,
            batch.advantages,
            batch.mask,
            epsilon=0.1,
            epsilon_high=0.3,
            entropies=batch.entropies,
        ),
    )
    assert metrics.clip_fraction_low > 0
    assert metrics.clip_fraction_high > 0


def test_coefficients_may_be_traced():
    batch = random_batch(75)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def loss(epsilon, beta, entropy_coef):
        settings = {"epsilon": epsilon, "beta": beta, "entropy_coef": entropy_coef}
        return call(GRPOLoss(**settings), *batch).loss

    np.testing.assert_allclose(loss(0.2, 0.0, 0.0), call(GRPOLoss(), *batch).loss, rtol=1e-6)
    settings = {"epsilon": 0.1, "beta": 0.04, "entropy_coef": 0.01}
    np.testing.assert_allclose(
        loss(0.1, 0.04, 0.01), call(GRPOLoss(**settings), *batch).loss, rtol=1e-6
    )


def test_user_defined_loss():
    class ReinforceLoss(PolicyLoss):
        epsilon, epsilon_high, beta, entropy_coef, ignore_index = 0.2, None, 0.0, 0.0, -100

        def per_token(self, log_ratio, logprobs, advantages, mask):
            return policy_gradient(logprobs, advantages, mask)

        def reduce(self, losses, mask, denominator):
            return constant_length(losses, mask, length=8, denominator=denominator)

        divides_by = "sequences"

    batch = random_batch(77)
    losses = policy_gradient(batch.logprobs, batch.advantages, batch.mask)
    assert call(ReinforceLoss(), *batch).loss == constant_length(losses, batch.mask, length=8)

    with pytest.raises(TypeError, match="divides_by"):

        class Summed(PolicyLoss):
            def reduce(self, losses, mask, denominator):
                return losses.sum()


def test_defaults_are_twinkles():
    for cls in CLASSES:
        loss_fn = cls()
        assert (loss_fn.epsilon, loss_fn.epsilon_high) == (0.2, None)
        assert (loss_fn.beta, loss_fn.entropy_coef, loss_fn.ignore_index) == (0, 0, -100)
    assert (DAPOLoss().epsilon, DAPOLoss().epsilon_high) == (0.2, 0.28)
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


def test_unknown_reduction():
    with pytest.raises(ValueError, match="loss_agg_mode"):
        PPOLoss("mean")


def test_dapo_is_bnpo_with_a_higher_ceiling():
    batch = random_batch(80, spread=1.0)
    batch_inputs = {"labels": np.where(batch.mask, 7, -100)}
    outputs = {"logps": batch.logprobs}
    kwargs = {"old_logps": batch.old, "advantages": batch.advantages}
    dapo = DAPOLoss()(batch_inputs, outputs, **kwargs).loss
    assert dapo == BNPOLoss(epsilon_high=0.28)(batch_inputs, outputs, **kwargs).loss
    assert dapo != BNPOLoss()(batch_inputs, outputs, **kwargs).loss


@pytest.mark.parametrize("cls", [GRPOLoss, GSPOLoss, DRGRPOLoss, PPOLoss])
def test_dual_clip_bounds_the_loss_of_a_negative_advantage(cls):
    labels, kept = np.array([[7], [7]]), np.log([[8.0], [8.0]])
    rows = {"old_logps": np.zeros((2, 1)), "advantages": [-1.0, 1.0]}

    def gradients(**options):
        def loss(logps):
            return jnp.sum(cls(**options)({"labels": labels}, {"logps": logps}, **rows).loss)

        return jax.jit(jax.grad(loss))(jnp.asarray(kept, jnp.float32))

    free, bounded = gradients(), gradients(dual_clip=3.0)
    assert free[0, 0] > 0 and bounded[0, 0] == 0  # 8 times as probable; the other is clipped
    np.testing.assert_array_equal(gradients(dual_clip=9.0), free)
    loss = of_one_sequence(cls(dual_clip=3.0), kept[0].tolist(), [0.0], -1.0).loss
    divisor = getattr(cls(), "max_completion_length", 1)
    assert float(loss) == pytest.approx(3 / divisor)


@pytest.mark.parametrize(
    "cls",
    [
        x if x is GRPOLoss else pytest.param(x, marks=pytest.mark.slow)
        for x in LOSSES.values()
        if issubclass(x, PolicyLoss)
    ],
)
@pytest.mark.parametrize("of_sampler", [False, True])
def test_sequences_that_the_policy_has_left_have_no_advantage(cls, of_sampler):
    """If theirs is negative; but they count where the loss divides."""
    batch = random_batch(7, rows=12, spread=0.6)
    inputs, drawn = {"labels": np.where(batch.mask, 7, -100)}, batch.old
    rows = {"old_logps": batch.old, "ref_logps": batch.ref}
    if of_sampler:  # whose log-probabilities decide, not the trainer's
        drawn = batch.old + np.float32(0.5) * np.sign(batch.ref - batch.old)
        rows["sampler_logps"] = drawn
    length = np.maximum(batch.mask.sum(axis=1), 1)
    distance = np.where(batch.mask, drawn - batch.logprobs, 0).sum(axis=1) / length
    delta = float(np.median(distance))
    left = (batch.advantages < 0) & (distance > delta)
    assert 0 < left.sum() < len(left)

    def value_and_gradient(advantages, **options):
        def loss(logps):
            outputs = {"logps": logps}
            return cls(beta=0.1, **options)(inputs, outputs, advantages=advantages, **rows).loss

        return jax.jit(jax.value_and_grad(loss))(batch.logprobs)

    found = value_and_gradient(batch.advantages, off_policy_delta=delta)
    expected = value_and_gradient(np.where(left, 0, batch.advantages))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    free = value_and_gradient(batch.advantages)[1]
    assert np.abs(found[1] - free).max() > 0.01 * np.abs(free).max()


def test_cispo_has_no_second_bound():
    with pytest.raises(ValueError, match=r"^dual_clip must"):
        CISPOLoss(dual_clip=3.0)


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


def of_one_sequence(loss_fn, logps, old_logps, advantage):
    inputs, rows = {"labels": [[1] * len(logps)]}, {"old_logps": [old_logps]}
    run = jax.jit(lambda x: loss_fn(inputs, {"logps": x}, advantages=[advantage], **rows))
    return run(jnp.array([logps]))


def test_luspo_weighs_a_sequence_by_its_tokens():
    logps, old_logps = [-1.0, -2.0, -0.5], [-1.1, -1.9, -0.7]
    one, other = (of_one_sequence(x, logps, old_logps, 2.0) for x in (LUSPOLoss(), GSPOLoss()))
    assert one.loss == pytest.approx(3 * float(other.loss), rel=1e-6)


def test_vespo_weighs_a_sequence_as_a_whole():
    """1 on policy, largest at k / lambda, and 0 far from it, on either side."""
    logps = [-1.0, -2.0]

    def weight(log_ratio, advantage=1.0):
        old_logps = [logps[0] - log_ratio - 0.5, logps[1] + 0.5]  # of both tokens together
        output = of_one_sequence(VESPOLoss(), logps, old_logps, advantage)
        return float(output.loss) / 1.5 / advantage

    assert weight(0.0) == pytest.approx(1, rel=1e-6)
    peak = np.log(2 / 3)
    assert weight(peak) == pytest.approx((2 / 3) ** 2 * np.exp(3 * (1 - 2 / 3)), rel=1e-5)
    assert weight(peak) > max(weight(peak - 0.1), weight(peak + 0.1))
    assert weight(np.log(0.5), -1.0) == pytest.approx(0.5**3 * np.exp(2 * 0.5), rel=1e-5)
    for far in (15.0, -300.0):
        assert weight(far) == pytest.approx(0, abs=1e-12)


def test_gmpo_bounds_logarithms_and_counts_them():
    logps, old_logps = [-1.0, -1.0, -1.0, -1.0], [-2.0, -1.3, -0.5, -1.0]  # 1, 0.3, -0.5, 0
    rising = of_one_sequence(GMPOLoss(epsilon_high=0.2), logps, old_logps, 2.0)
    assert rising.loss == pytest.approx(-2 * np.exp((0.2 + 0.2 - 0.5) / 4), rel=1e-6)
    assert (rising.metrics.clip_fraction_low, rising.metrics.clip_fraction_high) == (0, 0.5)
    falling = of_one_sequence(GMPOLoss(), logps, old_logps, -2.0)
    assert falling.loss == pytest.approx(2 * np.exp((1 + 0.3 - 0.4) / 4), rel=1e-6)
    assert (falling.metrics.clip_fraction_low, falling.metrics.clip_fraction_high) == (0.25, 0)
    with pytest.raises(ValueError, match=r"^dual_clip must be None for GMPO"):
        GMPOLoss(dual_clip=3.0)


def test_dppo_lets_rare_tokens_move_and_holds_frequent_ones():
    logps, old_logps = np.log([0.03, 0.8, 0.5]).tolist(), np.log([0.01, 0.6, 0.5]).tolist()
    output = of_one_sequence(DPPOLoss(), logps, old_logps, 1.0)
    assert output.loss == pytest.approx(-(3 + 0 + 1) / 3, rel=1e-6)  # the second rose by 0.2
    output = of_one_sequence(DPPOLoss(delta_high=0.25), logps, old_logps, 1.0)
    assert output.loss == pytest.approx(-(3 + 0.8 / 0.6 + 1) / 3, rel=1e-6)
    assert output.metrics.clip_fraction_high == 0
    with pytest.raises(ValueError, match=r"^divergence must be one of 'tv', 'kl', got 'js'"):
        DPPOLoss(divergence="js")
