"""Laws of every function of one number per token: the rows of `FUNCTIONS`."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.loss.cases import FUNCTIONS, GARBAGE, random_batch, same_bits
from twinkle_jax.loss import Mask

every_function = pytest.mark.parametrize("name", FUNCTIONS)
BOOLEAN = {
    n for n, f in FUNCTIONS.items() if inspect.signature(f.function).return_annotation is Mask
}


@jax.jit
def every_result(settings, mask, arrays):
    """Results of all functions, and gradients of their sums in every array.

    They are compiled together, which takes less time; settings are traced.
    """

    def one(case, options):
        def total(*arrays):
            results = case.function(*arrays, mask, **options)
            return jnp.sum(results, dtype=jnp.float32), results

        chosen = [arrays[array] for array in case.arrays.split()]
        gradients, results = jax.grad(total, tuple(range(len(chosen))), has_aux=True)(*chosen)
        return results, dict(zip(case.arrays.split(), gradients, strict=True))

    return {name: one(case, settings[name]) for name, case in FUNCTIONS.items()}


SETTINGS = {name: case.settings for name, case in FUNCTIONS.items()}


def arrays_of(batch):
    names = {array for case in FUNCTIONS.values() for array in case.arrays.split()}
    return {array: getattr(batch, array) for array in names}


def results(name, batch):
    return every_result(SETTINGS, batch.mask, arrays_of(batch))[name]


def assert_matches_reference(name, actual, batch):
    case = FUNCTIONS[name]
    desired = case.oracle(*case.arguments(batch), batch.mask, **case.settings)
    if name in BOOLEAN:
        assert actual.dtype == bool
        np.testing.assert_array_equal(actual, np.array(desired, bool))
    else:
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


@every_function
@given(seed=st.integers(0, 10**6), per_token=st.booleans())
def test_matches_reference(name, seed, per_token):
    batch = random_batch(seed, per_token=per_token, spread=0.4 + seed % 2)
    assert_matches_reference(name, results(name, batch)[0], batch)


@pytest.mark.slow
@every_function
@pytest.mark.parametrize("shape", [(1, 1), (5, 2)])
def test_other_shapes_match_reference(name, shape):
    batch, case = random_batch(8, *shape, spread=1.0), FUNCTIONS[name]
    assert_matches_reference(name, case(*case.arguments(batch), batch.mask), batch)


@pytest.mark.parametrize("name", [n for n, case in FUNCTIONS.items() if case.gradients])
def test_gradients(name):
    case, batch = FUNCTIONS[name], random_batch(10, spread=0.5)
    _, gradients = results(name, batch)
    for array, gradient in gradients.items():
        flows = array in case.gradients.split()
        assert bool(gradient.any()) == flows
        assert gradient.shape[1:] != batch.mask.shape[1:] or not gradient[~batch.mask].any()
    if case.held:
        return
    with jax.enable_x64(True):
        arguments = [x.astype(float) for x in case.arguments(batch)]
        place = case.arrays.split().index(case.gradients)

        def of_one(x):
            return case(*arguments[:place], x, *arguments[place + 1 :], batch.mask)

        check_grads(jax.jit(of_one), (arguments[place],), order=1, modes=["rev"])


@pytest.mark.parametrize("name", [n for n, case in FUNCTIONS.items() if not case.gradients])
def test_no_gradient(name):
    _, gradients = results(name, random_batch(11))
    assert not any(gradient.any() for gradient in gradients.values())


@every_function
def test_garbage_under_the_mask(name):
    batch = random_batch(14, per_token=True)
    clean = results(name, batch)
    assert not clean[0][~batch.mask].any()
    for garbage in GARBAGE:
        arrays = {k: np.where(batch.mask, x, garbage) for k, x in arrays_of(batch).items()}
        dirty = every_result(SETTINGS, batch.mask, arrays)[name]
        assert all(map(same_bits, jax.tree.leaves(clean), jax.tree.leaves(dirty)))


@every_function
def test_padding_changes_nothing(name):
    batch = random_batch(68, per_token=True)
    padded = {k: np.pad(x, ((0, 2), (0, 3))) for k, x in arrays_of(batch).items()}
    mask = np.pad(batch.mask, ((0, 2), (0, 3)))
    longer, _ = every_result(SETTINGS, mask, padded)[name]
    np.testing.assert_allclose(longer[:4, :6], results(name, batch)[0], rtol=1e-6)
    assert not longer[4:].any() and not longer[:, 6:].any()


@jax.jit
def every_row(mask, arrays):
    """Results of all functions, mapped over the rows and row by row."""

    def one(case):
        arguments = *(arrays[array] for array in case.arrays.split()), mask
        rows = [case(*row) for row in zip(*arguments, strict=True)]
        return jax.vmap(case)(*arguments), jnp.stack(rows)

    return {name: one(case) for name, case in FUNCTIONS.items()}


@every_function
def test_vmap_is_a_loop(name):
    batch = random_batch(15)
    mapped, rows = every_row(batch.mask, arrays_of(batch))[name]
    np.testing.assert_allclose(mapped, rows, rtol=1e-6)
    if name != "top_entropy":  # whose threshold is of the batch
        np.testing.assert_allclose(results(name, batch)[0], rows, rtol=1e-6)


@every_function
@pytest.mark.parametrize("distance", [-200, 200])
@pytest.mark.parametrize("sign", [-1, 1])
def test_far_apart_is_finite(name, distance, sign):
    batch = random_batch(67)
    batch = batch._replace(
        old=batch.logprobs - distance,
        ref=batch.logprobs - distance,
        advantages=sign * np.abs(batch.advantages),
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results(name, batch)))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "top_entropy"])
def test_nan_is_not_hidden(name):
    mask = np.repeat(np.arange(6)[None] == 0, 4, axis=0)  # rows of one token
    arrays = {array: np.full((4, 6), -1, np.float32) for array in arrays_of(random_batch(0))}
    for place in FUNCTIONS[name].arrays.split():
        broken = np.where(np.arange(4)[:, None] == 0, np.float32(np.nan), arrays[place])
        result, _ = every_result(SETTINGS, mask, arrays | {place: broken})[name]
        if name in BOOLEAN:  # the token is kept, and its loss is NaN
            assert result[0, 0]
        else:
            np.testing.assert_array_equal(np.isnan(result[:, 0]), [True, False, False, False])


@pytest.mark.slow
@every_function
def test_types(name):
    batch, case = random_batch(7), FUNCTIONS[name]
    half = case(*(jnp.asarray(x, jnp.bfloat16) for x in case.arguments(batch)), batch.mask)
    assert half.dtype == (bool if name in BOOLEAN else jnp.float32)
    with jax.enable_x64(True):
        first, *others = case.arguments(batch)
        double = case(first.astype(float), *others, batch.mask)
        assert double.dtype == (bool if name in BOOLEAN else jnp.float64)


@every_function
def test_errors_name_the_argument(name):
    case, mask = FUNCTIONS[name], jnp.ones((2, 3), bool)
    parameters = list(inspect.signature(case.function).parameters)[: len(case.arrays.split())]

    def refuses(error, argument, mask=mask, **changes):
        arguments = [changes.get(p, jnp.zeros((2, 3))) for p in parameters]
        with pytest.raises(error, match=f"^{argument}"):
            jax.eval_shape(case, *arguments, mask)

    for parameter in parameters:
        for shape in [(2, 4), (3, 3), (2, 3, 1), (3,), ()]:
            refuses(ValueError, parameter, **{parameter: jnp.zeros(shape)})
        refuses(TypeError, parameter, **{parameter: mask})
    if "advantages" in parameters:
        integers = jnp.zeros(2, int)  # whole numbers are numbers
        arguments = [integers if p == "advantages" else jnp.zeros((2, 3)) for p in parameters]
        assert jax.eval_shape(case, *arguments, mask).shape == (2, 3)
    refuses(ValueError, parameters[0], mask=mask[0])
    refuses(TypeError, "mask", mask=jnp.ones((2, 3), int))
    refuses(ValueError, "mask", mask=jnp.array(True), **dict.fromkeys(parameters, jnp.zeros(())))
