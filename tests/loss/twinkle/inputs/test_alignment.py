"""Ragged rows of response tokens find their labelled positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.loss import GRPOLoss, PPOValueLoss

LABELS = np.array([[-100, 3, 5, -100], [0, -100, -100, -100], [1, 2, 3, 4]])
MASK = LABELS != -100
OLD = np.arange(1, 13, dtype=np.float32).reshape(3, 4) / -8
ROWS = [OLD[0, 1:3].tolist(), [float(OLD[1, 0])], OLD[2].tolist()]
LOGPS = jnp.asarray(OLD) + jnp.linspace(-0.1, 0.1, 12, dtype=jnp.float32).reshape(3, 4)
ADVANTAGES = np.array([1.0, -2.0, 0.5], np.float32)


def loss(old_logps=OLD, labels=LABELS, advantages=ADVANTAGES, **kwargs):
    outputs = {"logps": LOGPS}
    return GRPOLoss(beta=0.5)(
        {"labels": labels}, outputs, old_logps=old_logps, advantages=advantages, **kwargs
    ).loss


FORMS = {
    "array": OLD,
    "device": jnp.asarray(OLD),
    "double": OLD.astype(float),
    "lists": ROWS,
    "tuples": tuple(map(tuple, ROWS)),
    "arrays": [np.asarray(row, np.float32) for row in ROWS],
    "device_rows": [jnp.asarray(row) for row in ROWS],
    "whole_lists": OLD.tolist(),
    "mixed": [OLD[0].tolist(), ROWS[1], jnp.asarray(ROWS[2])],
}


QUICKLY = ("lists", "mixed", "device")


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=[pytest.mark.exhaustive] * (f not in QUICKLY)) for f in FORMS],
)
def test_every_form_is_the_same(form):
    assert loss(FORMS[form]) == loss()
    assert loss(ref_logps=FORMS[form]) == loss(ref_logps=OLD)
    # Traced labels hide the number of tokens, and numbers that are arguments of jit are traced.
    assert jax.jit(lambda labels: loss(FORMS[form], labels))(LABELS) == jax.jit(loss)(OLD)
    assert jax.jit(loss)(FORMS[form]) == jax.jit(loss)(OLD)


def test_advantages_in_every_form():
    expected = loss()
    per_token = np.repeat(ADVANTAGES[:, None], 4, axis=1)
    ragged = [[1.0, 1.0], [-2.0], [0.5] * 4]
    for advantages in [
        ADVANTAGES.tolist(),
        [1, -2, 0.5],
        jnp.asarray(ADVANTAGES),
        list(jnp.asarray(ADVANTAGES)),
        ADVANTAGES[:, None],
        [[1.0], [-2.0], [0.5]],
        per_token,
        per_token.tolist(),
        ragged,
    ]:
        assert loss(advantages=advantages) == expected


@pytest.mark.exhaustive
def test_types():
    rows = [[-1, -2], jnp.array([-1.5]), OLD[2]]
    with jax.enable_x64(True):
        assert loss(rows).dtype == jnp.float32  # the type of the log-probabilities
    assert loss(rows) == loss([[-1.0, -2.0], [-1.5], OLD[2]])


def test_one_number_per_token_and_position():
    # Each token has a value of its own, so that a shift by one position would show.
    tokens = [[0.25, -0.5], [1.0], [2.0, -1.0, 0.5, 4.0]]
    whole = np.zeros((3, 4), np.float32)
    whole[MASK] = np.concatenate(tokens)
    assert loss(advantages=tokens) == loss(advantages=whole)
    assert loss(advantages=tokens) != loss(advantages=[row[::-1] for row in tokens])


def test_rectangular_array_of_response_tokens():
    labels = np.array([[-100, 3, 5], [1, 2, -100]])
    outputs, inputs = {"logps": LOGPS[:2, :3]}, {"labels": labels}
    old = np.array([[-0.25, -0.5], [-0.75, -1.0]], np.float32)
    whole = np.array([[0, -0.25, -0.5], [-0.75, -1.0, 0]], np.float32)
    one = GRPOLoss()(inputs, outputs, old_logps=old, advantages=[1.0, -1.0]).loss
    other = GRPOLoss()(inputs, outputs, old_logps=whole, advantages=[1.0, -1.0]).loss
    assert one == other


def test_a_row_without_tokens_is_empty():
    labels = np.array([[-100, -100], [1, 2]])
    value = GRPOLoss()(
        {"labels": labels},
        {"logps": jnp.zeros((2, 2))},
        old_logps=[[], [0.0, 0.0]],
        advantages=[jnp.nan, 1.0],
    ).loss
    assert value == -0.5


def test_values_of_a_critic_in_every_form():
    outputs = {"values": LOGPS}
    whole = PPOValueLoss()({"labels": LABELS}, outputs, old_values=OLD, returns=OLD + 1).loss
    rows = [[x + 1 for x in row] for row in ROWS]
    assert PPOValueLoss()({"labels": LABELS}, outputs, old_values=ROWS, returns=rows).loss == whole
    scalars = PPOValueLoss()({"labels": LABELS}, outputs, old_values=ROWS, returns=[0, 1, 2]).loss
    spread = np.repeat(np.arange(3.0, dtype=np.float32)[:, None], 4, axis=1)
    other = PPOValueLoss()({"labels": LABELS}, outputs, old_values=OLD, returns=spread).loss
    assert scalars == other


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([-1.0], r"old_logps\[0\] must have 2 numbers .* or 4 numbers .*, got 1"),
        ([-1.0] * 3, r"old_logps\[0\] must have 2 numbers .* or 4 numbers .*, got 3"),
        ([-1.0] * 5, r"old_logps\[0\] must have 2 numbers .* or 4 numbers .*, got 5"),
        ([], r"old_logps\[0\] must have 2 numbers .* or 4 numbers .*, got 0"),
    ],
)
def test_rows_of_the_wrong_length(row, message):
    with pytest.raises(ValueError, match=message):
        loss([row, *ROWS[1:]])
    with pytest.raises(ValueError, match=message.replace("old_logps", "ref_logps")):
        loss(ref_logps=[row, *ROWS[1:]])
    with pytest.raises(ValueError, match=message):  # in a jitted step with labels from outside
        jax.jit(lambda x: loss([row, *ROWS[1:]]) + x)(0.0)


def test_rows_of_the_wrong_length_behind_traced_labels():
    run = jax.jit(lambda labels, old: loss(old, labels))
    assert not jnp.isnan(run(LABELS, ROWS))
    assert jnp.isnan(run(LABELS, [[-1.0], *ROWS[1:]]))
    assert jnp.isnan(run(LABELS, [[-1.0] * 3, *ROWS[1:]]))
    with pytest.raises(
        ValueError, match=r"old_logps\[2\] must have 4 numbers \(one per position\), got 5"
    ):
        run(LABELS, [*ROWS[:2], [-1.0] * 5])


def test_errors():
    with pytest.raises(ValueError, match="old_logps must have one row for each of 3 sequences, go"):
        loss(ROWS[:2])
    with pytest.raises(ValueError, match="advantages must have one row for each of 3 sequences, "):
        loss(advantages=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"old_logps\[0\] must be a row of numbers, got shape"):
        loss([-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match=r"old_logps must have a row for each .* \(3, 4, 1\)"):
        loss(OLD[..., None])
    with pytest.raises(ValueError, match=r"old_logps must have a row for each .* \(3,\)"):
        loss(OLD[:, 0])
    with pytest.raises(ValueError, match=r"old_logps\[2\] must have 4 numbers .*, got 3"):
        loss([OLD[0, :2], OLD[1, :1], OLD[2, :3]])
    with pytest.raises(
        ValueError, match=r"old_logps\[0\] must have 2 numbers .* or 4 numbers .*, got 3"
    ):
        loss(OLD[:, :3])
    with pytest.raises(ValueError, match=r"advantages\[1\] must be a row of numbers"):
        loss(advantages=[[1.0, 2.0], 3.0, [1.0] * 4])
    with pytest.raises(TypeError, match="old_logps must be an array or a list of rows, got float"):
        loss(-1.0)
    with pytest.raises(TypeError, match="advantages must be an array or a list of rows, got "):
        loss(advantages=jnp.float32(1.0))
    with pytest.raises(TypeError, match="old_logps must be real numbers, got complex64"):
        loss(OLD.astype(np.complex64))
    with pytest.raises(TypeError, match=r"advantages must be real numbers, got bool"):
        loss(advantages=MASK)
    with pytest.raises(TypeError, match=r"advantages\[1\] must be real numbers, got bool"):
        loss(advantages=[[1.0] * 2, OLD[1] > 0, [1.0] * 4])
