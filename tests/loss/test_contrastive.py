"""InfoNCE: by hand, against loops in float64, and the law that garbage under the mask is unseen."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from twinkle_jax.loss import InfonceLoss, contrastive_metrics, info_nce

RNG = np.random.default_rng(5)
ROWS = RNG.normal(size=(9, 4)).astype(np.float32)
LABELS = np.array([0, 1, 0, 0, 0, 1, 0, 0, 0])  # the first row is in no group
GROUPS = [[1, 2, 3, 4], [5, 6, 7, 8]]  # anchor, positive, negatives
RAGGED = np.array([1, 0, 0, 0, 0, 1, 0, 1, 0])
RAGGED_GROUPS = [[0, 1, 2, 3, 4], [5, 6], [7, 8]]


def by_hand(rows, groups, options):
    """Row by row, with plain sums."""
    rows = rows.astype(float)
    if options.hard_negatives is not None:
        groups = [group[: options.hard_negatives + 2] for group in groups]
    losses = []
    for anchor, positive, *negatives in groups:
        best = rows[anchor] @ rows[positive]
        numbers = [best, *(rows[anchor] @ rows[i] for i in negatives)]
        if options.use_batch:
            others = [i for group in groups for i in group[1:] if group[0] != anchor]
            numbers += [rows[anchor] @ rows[i] for i in others]
            if options.include_qq:
                numbers += [rows[anchor] @ rows[g[0]] for g in groups if g[0] != anchor]
            if options.mask_fake_negative:
                numbers = [x for x in numbers if x <= best + options.fake_neg_margin]
            if options.include_dd:
                candidates = [i for group in groups for i in group[1:] if i != positive]
                numbers += [rows[positive] @ rows[i] for i in candidates]
        scaled = np.array(numbers) / options.temperature
        losses.append(np.log(np.exp(scaled - best / options.temperature).sum()))
    return np.mean(losses)


def test_function_by_hand():
    similarities = jnp.log(jnp.array([[2.0, 1.0, 1.0], [1.0, 3.0, 7.0]]))
    mask = jnp.array([[True, True, True], [True, True, False]])
    losses = info_nce(similarities, jnp.array([0, 1]), mask, temperature=1.0)
    np.testing.assert_allclose(losses, np.log([4 / 2, 4 / 3]), rtol=1e-6)
    halved = info_nce(similarities, jnp.array([0, 1]), mask, temperature=0.5)
    np.testing.assert_allclose(halved, np.log([6 / 4, 10 / 9]), rtol=1e-6)


def test_function_does_not_see_what_is_masked():
    mask = jnp.array([[True, True, False]])

    @jax.jit
    @jax.value_and_grad
    def loss(similarities):
        return info_nce(similarities, jnp.array([0]), mask).sum()

    clean = loss(jnp.array([[0.5, 0.25, 0.0]]))
    for garbage in (np.nan, np.inf, -np.inf, 1e30):
        dirty = loss(jnp.array([[0.5, 0.25, garbage]]))
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert jnp.isnan(jax.jit(info_nce)(jnp.zeros((1, 3)), jnp.array([2]), mask)[0])


FLAGS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(
    "flags",
    [FLAGS[0], FLAGS[-1], *(pytest.param(x, marks=pytest.mark.slow) for x in FLAGS[1:-1])],
)
def test_matches_float64(flags):
    names = ("use_batch", "mask_fake_negative", "include_qq", "include_dd")
    for hard, (labels, groups) in itertools.product(
        (None, 1), [(LABELS, GROUPS), (RAGGED, RAGGED_GROUPS)]
    ):
        loss_fn = InfonceLoss(0.5, hard_negatives=hard, **dict(zip(names, flags, strict=True)))
        for key, rows in (("embeddings", ROWS), ("logits", np.stack([ROWS, ROWS + 1], axis=1))):
            value = jax.jit(loss_fn)({"labels": labels}, {key: rows}).loss
            np.testing.assert_allclose(value, by_hand(ROWS, groups, loss_fn), rtol=2e-5)


def test_gradient():
    everything = InfonceLoss(
        0.7, mask_fake_negative=True, fake_neg_margin=1.0, include_qq=True, include_dd=True
    )
    for loss_fn in (InfonceLoss(), everything):

        def loss(rows, loss_fn=loss_fn):
            return loss_fn({"labels": LABELS}, {"embeddings": rows}).loss

        check_grads(jax.jit(loss), (jnp.asarray(ROWS),), order=1, modes="rev", rtol=5e-2, atol=5e-2)
        gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(ROWS)))
        assert not gradient[0].any()  # in no group
        assert gradient[1:].any(axis=1).all()


def test_products_are_float32_on_accelerators(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    loss_fn = InfonceLoss(include_dd=True)

    def loss(rows):
        return loss_fn({"labels": LABELS}, {"embeddings": rows}).loss

    equations = jax.make_jaxpr(loss)(ROWS).jaxpr.eqns
    products = [e.params["precision"] for e in equations if e.primitive.name == "dot_general"]
    assert products == [(jax.lax.Precision.HIGHEST,) * 2] * 2


def test_without_anchors():
    def loss(rows):
        return InfonceLoss()({"labels": 0 * LABELS}, {"embeddings": rows}).loss

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(ROWS))
    assert value == 0
    assert not gradient.any()


def test_errors():
    with pytest.raises(ValueError, match=r"^fake_neg_margin"):
        InfonceLoss(mask_fake_negative=True, fake_neg_margin=0.0)
    with pytest.raises(ValueError, match=r"^hard_negatives"):
        InfonceLoss(hard_negatives=0)
    for labels in ([1, 1, 0], [0, 0, 1]):  # an anchor without a positive
        with pytest.raises(ValueError, match=r"^inputs"):
            InfonceLoss()({"labels": np.array(labels)}, {"embeddings": ROWS[:3]})
        traced = jax.jit(InfonceLoss())({"labels": np.array(labels)}, {"embeddings": ROWS[:3]})
        assert jnp.isnan(traced.loss)
    with pytest.raises(ValueError, match=r"^outputs"):
        InfonceLoss()({"labels": LABELS}, {"embeddings": ROWS[:3]})
    mask = jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"^positives"):
        info_nce(jnp.zeros((2, 3)), jnp.zeros(3, int), mask)
    with pytest.raises(TypeError, match=r"^positives"):
        info_nce(jnp.zeros((2, 3)), jnp.zeros(2), mask)


def test_metrics_by_hand():
    similarities = jnp.array([[3.0, 1.0, 2.0], [5.0, 4.0, np.nan], [1.0, 1.0, 0.5]])
    mask = jnp.array([[True, True, True], [True, True, False], [True, True, True]])
    measure, nearest = jax.jit(contrastive_metrics), jnp.array([0, 1, 1])
    metrics = measure(similarities, nearest, mask)
    # The second query is nearer to the first candidate; the third has a tie.
    others = [1.0, 2.0, 5.0, 1.0, 0.5]
    np.testing.assert_allclose(metrics, [2 / 3, 8 / 3, 1, 4, np.mean(others)], rtol=1e-6)
    alone = measure(similarities[:1, :1], jnp.array([0]), mask[:1, :1])
    assert [float(x) for x in alone] == [1, 3, 3, 3, 0]
    gradient = jax.jit(jax.grad(lambda x: sum(contrastive_metrics(x, nearest, mask))))
    assert not gradient(similarities).any()
    for positives, error in ((jnp.array([0.5]), TypeError), (jnp.array([0, 1]), ValueError)):
        with pytest.raises(error, match="positives"):
            contrastive_metrics(similarities[:1], positives, mask[:1])
