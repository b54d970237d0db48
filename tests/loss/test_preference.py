"""Losses of pairs: values worked by hand, gradients, far margins, errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from tests.loss.cases import DATA, LABELS, LOGITS, LOGPS, MASK, REFERENCE, value_and_gradient
from twinkle_jax.loss import (
    CPOLoss,
    DPOLoss,
    ORPOLoss,
    SimPOLoss,
    bradley_terry_loss,
    cpo_preference,
    hinge_preference,
    ipo_preference,
    kto_pair_preference,
    orpo_preference,
    preference_metrics,
    sigmoid_preference,
    simpo_preference,
)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > -30 else x


def orpo(chosen, rejected, *, beta=None):
    """ORPO of arbitrary numbers: it takes logarithms of probabilities, and has no `beta`."""
    return orpo_preference(-jnp.abs(chosen), -jnp.abs(rejected))


def bradley_terry(chosen, rejected, *, beta=None):
    """It has no `beta`, and two terms more."""
    return bradley_terry_loss(chosen, rejected, margin=0.75, center_coefficient=0.01)


def log_odds(x):
    return -abs(x) - math.log(-math.expm1(-abs(x)))


ORACLES = {
    "sigmoid": (sigmoid_preference, lambda w, r, b: -log_sigmoid(b * (w - r))),
    "smoothed": (
        functools.partial(sigmoid_preference, label_smoothing=0.25),
        lambda w, r, b: -0.75 * log_sigmoid(b * (w - r)) - 0.25 * log_sigmoid(b * (r - w)),
    ),
    "hinge": (hinge_preference, lambda w, r, b: max(0.0, 1 - b * (w - r))),
    "ipo": (ipo_preference, lambda w, r, b: (b * (w - r) - 1 / (2 * b)) ** 2),
    "kto_pair": (
        kto_pair_preference,
        lambda w, r, b: 1 - math.exp(log_sigmoid(b * w)) + math.exp(log_sigmoid(b * r)),
    ),
    "simpo": (simpo_preference, lambda w, r, b: -log_sigmoid(b * (w - r) - 0.5)),
    "cpo": (cpo_preference, lambda w, r, b: -log_sigmoid(b * (w - r))),
    "orpo": (orpo, lambda w, r, b: -log_sigmoid(log_odds(w) - log_odds(r))),
    "bradley_terry": (
        bradley_terry,
        lambda w, r, b: -log_sigmoid(w - r - 0.75) + 0.01 * (w + r) ** 2,
    ),
}
every_loss = pytest.mark.parametrize("name", ORACLES)
RNG = np.random.default_rng(0)
CHOSEN, REJECTED = RNG.normal(0, 4, (2, 50))


@every_loss
def test_matches_reference_and_gradient(name):
    function, oracle = ORACLES[name]
    desired = [oracle(w, r, 0.3) for w, r in zip(CHOSEN, REJECTED, strict=True)]
    chosen, rejected = CHOSEN.astype(np.float32), REJECTED.astype(np.float32)
    actual = jax.jit(functools.partial(function, beta=0.3))(chosen, rejected)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(function, beta=0.3))
        assert jax.eval_shape(run, CHOSEN, REJECTED).dtype == jnp.float64
        check_grads(run, (CHOSEN, REJECTED), order=1, modes=["rev"])


@every_loss
@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_far_margins_are_finite(name, margin):
    function, _ = ORACLES[name]
    run = jax.jit(jax.value_and_grad(lambda w: function(w, jnp.float32(0))))
    value, gradient = run(jnp.float32(margin))
    assert np.isfinite(value)
    assert np.isfinite(gradient)


def test_without_a_reference_worked_by_hand():
    # SimPO: 4 (log 1/4 - log 1/8) - log 16 = 0. CPO: log 2, whose sigmoid is 2/3.
    # ORPO: odds of 3 and 1/3, so 9 to 1.
    chosen, rejected = jnp.log(jnp.float32(1 / 4)), jnp.log(jnp.float32(1 / 8))
    loss = simpo_preference(chosen, rejected, beta=4.0, gamma=math.log(16))
    np.testing.assert_allclose(loss, math.log(2), rtol=1e-6)
    loss = cpo_preference(chosen, rejected, beta=1.0)
    np.testing.assert_allclose(jnp.exp(-loss), 2 / 3, rtol=1e-6)
    loss = orpo_preference(jnp.log(jnp.float32(0.75)), jnp.log(jnp.float32(0.25)))
    np.testing.assert_allclose(jnp.exp(-loss), 0.9, rtol=1e-6)


def test_certain_sequences_have_finite_odds():
    for chosen, rejected in [(0.0, -1.0), (-1.0, 0.0), (-1e-9, -1e-9), (-200.0, 0.0)]:
        run = jax.jit(jax.value_and_grad(orpo_preference, (0, 1)))
        value, gradients = run(jnp.float32(chosen), jnp.float32(rejected))
        assert np.isfinite(value) and np.isfinite(gradients).all()


def test_nothing_to_learn_beyond_the_hinge():
    gradient = jax.grad(lambda w: hinge_preference(w, jnp.float32(0), beta=0.5))
    assert gradient(jnp.float32(1.0)) == -0.5
    assert gradient(jnp.float32(3.0)) == 0


@every_loss
def test_errors(name):
    function, _ = ORACLES[name]
    with pytest.raises(ValueError, match="rejected"):
        jax.eval_shape(function, jnp.zeros(2), jnp.zeros(3))
    with pytest.raises(TypeError, match="chosen"):
        jax.eval_shape(function, jnp.zeros(2, int), jnp.zeros(2))


def test_forms_of_the_reference():
    value = DPOLoss()({"labels": LABELS}, {"logps": LOGPS}, **REFERENCE).loss
    rows = [row[keep].tolist() for row, keep in zip(DATA["ref_logps"], MASK, strict=True)]
    sums = np.where(MASK, DATA["ref_logps"], 0).sum(axis=1)
    for reference in (
        {"ref_logps": rows},
        {"ref_logps": DATA["ref_logps"].tolist()},
        {"ref_outputs": {"logps": DATA["ref_logps"]}},
        {"ref_outputs": {"logps": DATA["ref_logps"].tolist()}},
        {"ref_chosen_logps": sums[0::2], "ref_rejected_logps": sums[1::2]},
    ):
        other = DPOLoss()({"labels": LABELS}, {"logps": LOGPS}, **reference).loss
        np.testing.assert_allclose(other, value, rtol=1e-6)
    value, gradient = value_and_gradient(DPOLoss(), "logps")
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("loss_fn", [DPOLoss(), SimPOLoss(), CPOLoss(), ORPOLoss()])
def test_preferred_tokens_rise(loss_fn):
    reference = REFERENCE if isinstance(loss_fn, DPOLoss) else {}
    _, gradient = value_and_gradient(loss_fn, "logps", **reference)
    assert (np.asarray(gradient)[0::2][MASK[0::2]] < 0).all()
    assert (np.asarray(gradient)[1::2][MASK[1::2]] > 0).all()


@pytest.mark.parametrize("of", ["logps", "logits"])
def test_losses_without_reference_match_float64(of):
    logps = LOGPS.astype(float)
    if of == "logits":
        z = LOGITS.astype(float)
        z -= np.log(np.exp(z).sum(-1, keepdims=True))
        logps = np.take_along_axis(z, np.maximum(LABELS, 0)[..., None], -1)[..., 0]
    sums, counts = np.where(MASK, logps, 0).sum(1), MASK.sum(1)
    means = sums / counts

    def log_sigmoid(x):
        return -np.log1p(np.exp(-x))

    def log_odds(x):
        return np.log(np.exp(x) / (1 - np.exp(x)))

    nll = -sums[0::2].sum() / counts[0::2].sum()
    margins = {name: x[0::2] - x[1::2] for name, x in {"sum": sums, "mean": means}.items()}
    odds = log_odds(means[0::2]) - log_odds(means[1::2])
    for loss_fn, desired in [
        (SimPOLoss(2.0, 1.0), -log_sigmoid(2 * margins["mean"] - 1).mean()),
        (CPOLoss(0.3, 0.5), -log_sigmoid(0.3 * margins["sum"]).mean() + 0.5 * nll),
        (ORPOLoss(0.25), nll - 0.25 * log_sigmoid(odds).mean()),
    ]:
        value = loss_fn({"labels": LABELS}, {of: DATA[of]}).loss
        np.testing.assert_allclose(value, desired, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_fn",
    [CPOLoss(bc_coef=0.5), ORPOLoss(), DPOLoss(sft_weight=0.5), DPOLoss(), SimPOLoss()],
)
def test_pairs_that_fill_up_a_batch_change_nothing(loss_fn):
    """A batch is filled up to a bucket; the cross entropy weighed more, by as many pairs."""
    reference = {"ref_logps": DATA["ref_logps"]} if isinstance(loss_fn, DPOLoss) else {}
    fill = [(0, 4), (0, 0)]  # two pairs
    filled = {name: np.pad(x, fill) for name, x in reference.items()}
    labels = np.pad(LABELS, fill, constant_values=-100)

    def value(labels, logps, **inputs):
        return loss_fn({"labels": labels}, {"logps": logps}, denominator=pairs, **inputs).loss

    pairs = len(LABELS) / 2
    expected = jax.value_and_grad(lambda x: value(LABELS, x, **reference))(LOGPS)
    actual = jax.value_and_grad(lambda x: value(labels, jnp.pad(x, fill), **filled))(LOGPS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), actual, expected)
    mean = loss_fn({"labels": LABELS}, {"logps": LOGPS}, **reference).loss
    np.testing.assert_allclose(expected[0], mean, rtol=1e-6)


def test_pairs_spread_over_an_explicit_mesh():
    """Every second row is no slice that JAX takes of rows on several devices."""
    labels = jnp.where(jnp.arange(5)[None] < jnp.arange(8)[:, None] % 5, 3, -100)
    logprobs = -jnp.linspace(0.1, 2.0, 40).reshape(8, 5)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,))
    spread = jax.device_put((logprobs, labels), NamedSharding(mesh, PartitionSpec("data")))
    loss_fn = DPOLoss(sft_weight=0.5, reference_free=True)

    def loss(logprobs, labels):
        return loss_fn({"labels": labels}, {"logps": logprobs}).loss

    value, gradient = jax.jit(jax.value_and_grad(loss))(logprobs, labels)
    with jax.set_mesh(mesh):
        sharded, sharded_gradient = jax.jit(jax.value_and_grad(loss))(*spread)
    np.testing.assert_allclose(sharded, value, rtol=1e-6)
    np.testing.assert_allclose(sharded_gradient, gradient, rtol=1e-5, atol=1e-8)


def test_errors_of_objects():
    for loss_fn in (DPOLoss(), SimPOLoss(), CPOLoss(), ORPOLoss()):
        with pytest.raises(ValueError, match="labels"):
            loss_fn({"labels": LABELS[:3]}, {"logps": LOGPS[:3]})
    sums = {"ref_chosen_logps": LOGPS[:, 0], "ref_rejected_logps": LOGPS[:2, 0]}
    with pytest.raises(ValueError, match=r"^ref_chosen_logps"):
        DPOLoss()({"labels": LABELS}, {"logps": LOGPS}, **sums)


def test_half_a_reference_is_refused():
    """Without any reference the loss is 0: nobody would notice."""
    data = {"labels": LABELS}, {"logps": LOGPS}
    with pytest.raises(TypeError, match=r"^ref_rejected_logps"):
        DPOLoss()(*data, ref_chosen_logps=LOGPS[:, 0])
    with pytest.raises(TypeError, match=r"^ref_chosen_logps"):
        DPOLoss()(*data, ref_rejected_logps=LOGPS[:, 0])
    with pytest.raises(ValueError, match=r"^ref_outputs must hold 'logps', got .'logits'"):
        DPOLoss()(*data, ref_outputs={"logits": DATA["ref_logps"]})


def test_metrics_by_hand():
    # Margins of 2, −1 and 0: the second and third pair do not count as right.
    chosen, rejected = jnp.array([1.0, -2.0, 4.0]), jnp.array([-1.0, -1.0, 4.0])
    metrics = jax.jit(preference_metrics)(chosen, rejected, beta=0.5)
    np.testing.assert_allclose(metrics, [0.5, 1 / 3, 1 / 6, 1 / 3], rtol=1e-6)
    assert [float(x) for x in preference_metrics(chosen[:0], rejected[:0])] == [0.0] * 4


def test_metrics_match_float64_and_have_no_gradient():
    chosen, rejected = CHOSEN.astype(np.float32), REJECTED.astype(np.float32)
    metrics = preference_metrics(chosen, rejected, beta=0.3)
    margins = 0.3 * (CHOSEN - REJECTED)
    expected = [0.3 * CHOSEN.mean(), 0.3 * REJECTED.mean(), margins.mean(), (margins > 0).mean()]
    np.testing.assert_allclose(metrics, expected, rtol=1e-5)
    gradient = jax.grad(lambda x: sum(preference_metrics(x, rejected)))(jnp.asarray(chosen))
    assert not gradient.any()
    with pytest.raises(ValueError, match="rejected"):
        jax.eval_shape(preference_metrics, chosen, rejected[1:])
    with pytest.raises(TypeError, match="chosen"):
        jax.eval_shape(preference_metrics, np.ones(3, int), rejected[:3])


# The loss of a reward model.


MARGINS = np.abs(RNG.normal(0, 2, 50)).astype(np.float32)
SCORES = CHOSEN.astype(np.float32), REJECTED.astype(np.float32)


def test_scores_worked_by_hand():
    # The sigmoid of log 3 is 3/4; with a margin of log 3 it is 1/2. (2 + log 3)^2 / 4 is added.
    chosen, rejected = jnp.float32(1 + math.log(3)), jnp.float32(1)
    np.testing.assert_allclose(jnp.exp(-bradley_terry_loss(chosen, rejected)), 0.75, rtol=1e-6)
    value = bradley_terry_loss(chosen, rejected, margin=math.log(3))
    np.testing.assert_allclose(value, math.log(2), rtol=1e-6)
    value = bradley_terry_loss(chosen, rejected, center_coefficient=0.25) - math.log(4 / 3)
    np.testing.assert_allclose(value, (2 + math.log(3)) ** 2 / 4, rtol=1e-6)


@pytest.mark.parametrize("margin", [None, 0.5, MARGINS])
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_a_reward_models_loss_and_gradient_are_those_of_pytorch(margin, center):
    """As TRL's RewardTrainer writes them, whose mean over pairs comes last."""
    torch = pytest.importorskip("torch", reason="pip install 'twinkle-jax[oracle]'")
    chosen, rejected = (torch.tensor(x, requires_grad=True) for x in SCORES)
    wanted = 0.0 if margin is None else torch.as_tensor(margin)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - wanted).mean()
    loss = loss + center * torch.mean((chosen + rejected) ** 2)
    loss.backward()

    def mean(chosen, rejected):
        losses = bradley_terry_loss(chosen, rejected, margin=margin, center_coefficient=center)
        return jnp.mean(losses)

    value, gradients = jax.jit(jax.value_and_grad(mean, (0, 1)))(*map(jnp.asarray, SCORES))
    np.testing.assert_allclose(value, loss.item(), rtol=1e-6)
    for actual, desired in zip(gradients, (chosen.grad, rejected.grad), strict=True):
        np.testing.assert_allclose(actual, desired.numpy(), rtol=1e-5, atol=1e-8)


def test_laws_of_a_reward_models_loss():
    chosen, rejected = map(jnp.asarray, SCORES)
    losses = bradley_terry_loss(chosen, rejected)
    np.testing.assert_array_equal(losses, cpo_preference(chosen, rejected, beta=1.0))
    np.testing.assert_allclose(bradley_terry_loss(chosen + 8, rejected + 8), losses, rtol=2e-5)
    swapped = bradley_terry_loss(rejected, chosen)  # log σ(x) - log σ(-x) = x
    np.testing.assert_allclose(swapped - losses, chosen - rejected, rtol=1e-5, atol=1e-5)
    margin = bradley_terry_loss(chosen, rejected, margin=MARGINS)
    np.testing.assert_allclose(margin, bradley_terry_loss(chosen - MARGINS, rejected), rtol=1e-6)
    centred = bradley_terry_loss(chosen, rejected, center_coefficient=0.5)
    square = jnp.square(chosen + rejected)
    np.testing.assert_allclose(centred - losses, 0.5 * square, rtol=1e-4, atol=1e-5)
    huge = jnp.float32(1e30)  # whose square is infinite
    assert bradley_terry_loss(huge, huge) == losses.dtype.type(np.log(2))
    assert bradley_terry_loss(huge, -huge) == 0 and bradley_terry_loss(-huge, huge) == 2 * huge


def test_a_margin_is_data_without_gradient():
    def total(margin, center):
        losses = bradley_terry_loss(*SCORES, margin=margin, center_coefficient=center)
        return jnp.sum(losses)

    gradients = jax.jit(jax.grad(total, (0, 1)))(jnp.asarray(MARGINS), jnp.float32(0.01))
    assert not gradients[0].any() and gradients[1] > 0  # both may be traced
    ratings = np.arange(50) % 4  # whole numbers are numbers
    np.testing.assert_array_equal(
        bradley_terry_loss(*SCORES, margin=ratings),
        bradley_terry_loss(*SCORES, margin=ratings.astype(np.float32)),
    )
    for margin in (MARGINS[:7], MARGINS[:, None], MARGINS[:1]):
        with pytest.raises(ValueError, match=r"^margin .*\(50,\)"):
            jax.eval_shape(functools.partial(bradley_terry_loss, margin=margin), *SCORES)
    for margin in (MARGINS > 1, MARGINS * 1j):
        with pytest.raises(TypeError, match=r"^margin"):
            jax.eval_shape(functools.partial(bradley_terry_loss, margin=margin), *SCORES)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_scores_are_computed_in_float32(dtype):
    half = [jnp.asarray(x, dtype) for x in SCORES]
    options = {"margin": jnp.asarray(MARGINS, dtype), "center_coefficient": 0.01}
    losses = bradley_terry_loss(*half, **options)
    assert losses.dtype == jnp.float32
    single = [x.astype(jnp.float32) for x in half]
    options["margin"] = options["margin"].astype(jnp.float32)
    np.testing.assert_array_equal(losses, bradley_terry_loss(*single, **options))


def test_scores_of_any_shape_and_on_an_explicit_mesh():
    chosen, rejected = (jnp.asarray(x[:48].reshape(8, 6)) for x in SCORES)
    margin = jnp.asarray(MARGINS[:48].reshape(8, 6))

    def losses(chosen, rejected, margin):
        return bradley_terry_loss(chosen, rejected, margin=margin, center_coefficient=0.01)

    expected = losses(chosen, rejected, margin)
    np.testing.assert_array_equal(jax.vmap(losses)(chosen, rejected, margin), expected)
    one = [losses(*scores) for scores in zip(chosen[0], rejected[0], margin[0], strict=True)]
    np.testing.assert_allclose(one, expected[0], rtol=1e-6)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        spread = jax.jit(losses)(*jax.device_put((chosen, rejected, margin), rows))
        alone = jax.jit(losses)(*jax.device_put((chosen, rejected), rows), 0.5)
    np.testing.assert_allclose(spread, expected, rtol=1e-6)
    np.testing.assert_allclose(alone, losses(chosen, rejected, 0.5), rtol=1e-6)
