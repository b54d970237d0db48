"""What `token_logprobs` refuses, by its message, and what it cannot see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.loss import token_logprobs


def call(**changes):
    """Call with arrays that are right, but for the changes."""
    arguments = {
        "hidden": np.zeros((4, 3), np.float32),
        "head": np.zeros((3, 5), np.float32),
        "tokens": np.zeros(4, np.int32),
    } | changes
    positional = [arguments.pop(name) for name in ("hidden", "head", "tokens")]
    return token_logprobs(*positional, **arguments)


WRONG_ARRAYS = [
    (
        ValueError,
        {"head": np.zeros((5, 3))},
        r"of hidden, \(4, 3\) \(a tied .*, got \(5, 3\)",
    ),
    (ValueError, {"head": np.zeros((3, 0))}, r"of hidden, \(4, 3\) .*, got \(3, 0\)"),
    (
        ValueError,
        {"hidden": np.zeros((2, 2, 3))},
        r"hidden must be a matrix \(flatten .* got \(2, 2, 3\)",
    ),
    (ValueError, {"head": np.zeros(3)}, r"head must be a matrix .* got \(3,\)"),
    (ValueError, {"tokens": np.zeros(3, int)}, r"tokens must have shape \(4,\).*got \(3,\)"),
    (ValueError, {"tokens": np.zeros((4, 1), int)}, r"tokens .*got \(4, 1\)"),
    (ValueError, {"mask": np.ones(3, bool)}, r"mask must have shape \(4,\).*got \(3,\)"),
    (ValueError, {"mask": np.bool_(True)}, r"mask must have shape \(4,\).*got \(\)"),
    (ValueError, {"temperature": np.ones(3)}, r"temperature must .* \(\) or \(4,\), got \(3,\)"),
    (TypeError, {"hidden": np.zeros((4, 3), int)}, "hidden must be floating point, got int32"),
    (TypeError, {"head": np.zeros((3, 5), complex)}, "head must be floating .* got complex64"),
    (TypeError, {"tokens": np.zeros(4)}, "tokens must be integers, got float32"),
    (TypeError, {"tokens": np.zeros(4, bool)}, "tokens must be integers, got bool"),
    (TypeError, {"mask": np.ones(4, int)}, "mask must be boolean .* got int32; try mask != 0"),
    (TypeError, {"temperature": np.ones(4, int)}, "temperature must be floating .* got int32"),
    (TypeError, {"temperature": np.bool_(True)}, "temperature must be floating .* got bool"),
]


@pytest.mark.parametrize(("error", "changes", "message"), WRONG_ARRAYS)
def test_wrong_arrays_are_refused_while_tracing(error, changes, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(call, **changes)
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("error", "chunk_size", "message"),
    [
        (ValueError, 0, "chunk_size must be at least 1, got 0"),
        (ValueError, np.int64(-3), "chunk_size must be at least 1, got -3"),
        (TypeError, 2.0, "chunk_size must be an int or None, got 2.0"),
        (TypeError, True, "chunk_size must be an int or None, got True"),
    ],
)
def test_wrong_chunk_sizes(error, chunk_size, message):
    with pytest.raises(error, match=message):
        call(chunk_size=chunk_size)
    assert call(chunk_size=np.int64(3)).shape == (4,)


@pytest.mark.parametrize("convert", [np.array, list])
def test_unknown_tokens_are_refused_where_they_can_be_seen(convert):
    keep = np.array([True, True, False, True])
    with pytest.raises(ValueError, match=r"tokens must lie in \[0, 5\).*got 5 at 1; leave out"):
        call(tokens=convert([0, 5, 1, -1]))
    tokens = convert([0, 4, 9, -1])
    with pytest.raises(ValueError, match="got -1 at 3"):
        jax.jit(lambda hidden: call(hidden=hidden, tokens=tokens, mask=keep))(np.zeros((4, 3)))
    assert call(tokens=convert([0, 4, -100, 1]), mask=keep).shape == (4,)
    traced = jax.jit(lambda mask: call(tokens=convert([0, 4, 9, 1]), mask=mask))
    assert np.isfinite(traced(keep)).all()
    on_device = jnp.array([0, 5, 1, -1])  # not read back: it shows as NaN
    with jax.transfer_guard_device_to_host("disallow"):
        scores = call(tokens=on_device)
    assert np.isnan(scores).tolist() == [False, True, False, True]
