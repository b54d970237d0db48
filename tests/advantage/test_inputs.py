"""What users may pass, and what bad input raises: an error that names the argument."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.advantage.cases import (
    BY_NAME,
    CASES,
    COUNT,
    DATA,
    IDS,
    INF,
    NAN,
    PROMPTS,
    ROWS,
    SEGMENTS,
    SIZE,
)
from tests.model.families import each
from twinkle_jax import GRPOAdvantage, RLOOAdvantage, grpo_advantage, rloo_advantage
from twinkle_jax.advantage import (
    group_statistics,
    pass_at_k_advantage,
    pkpo_advantage,
    remax_advantage,
    segment_grpo_advantage,
)

REWARDS = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
ZEROS = np.zeros(COUNT, np.float32)
TRACED = jax.ShapeDtypeStruct((COUNT,), jnp.float32)


def raises(kind, argument):
    return pytest.raises(kind, match=rf"\b{argument}\b")


# --- containers and types -------------------------------------------------------------------------


class Holder:
    """A container of a JAX array, such as an NNX variable."""

    def __jax_array__(self):
        return jnp.asarray(REWARDS)


@pytest.mark.parametrize("function", [grpo_advantage, GRPOAdvantage(), RLOOAdvantage()])
@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, np.float16, jnp.asarray, lambda r: [np.float32(v) for v in r],
     lambda r: [jnp.float32(v) for v in r], lambda r: [int(v) for v in r],
     lambda r: [bool(v) for v in r], lambda r: [r[0], True, *map(int, r[2:])], lambda r: Holder()],
)  # fmt: skip
def test_containers_of_rewards(function, make):
    plain = rloo_advantage if isinstance(function, RLOOAdvantage) else grpo_advantage
    result = function(make(REWARDS), num_generations=4)
    assert isinstance(result, jax.Array)
    assert result.tolist() == plain(REWARDS, 4).tolist()


def test_lists_of_tracers():
    run = jax.jit(lambda a, b: GRPOAdvantage()([a, b, 0.0, 1.0], num_generations=2, scale="none"))
    assert run(1.0, 3.0).tolist() == [-1, 1, -0.5, 0.5]


def test_pytorch_tensors():
    torch = pytest.importorskip("torch", reason="pip install 'twinkle-jax[test,oracle]'")
    expected = grpo_advantage(REWARDS, 4).tolist()
    needs_gradient = torch.tensor(REWARDS, requires_grad=True)
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
    strided = torch.tensor([REWARDS, REWARDS]).T[:, 0]
    for function in (GRPOAdvantage(), grpo_advantage):
        for tensor in (
            *(torch.tensor(REWARDS).to(kind) for kind in kinds),
            needs_gradient, list(needs_gradient), needs_gradient > 0, strided,
        ):  # fmt: skip
            assert function(tensor, num_generations=4).tolist() == expected
        where = [True] * 7 + [False]
        masked = function(torch.tensor(REWARDS), num_generations=4, where=torch.tensor(where))
        assert masked.tolist() == grpo_advantage(REWARDS, 4, where=where).tolist()
        with raises(ValueError, "rewards"):
            function(torch.tensor([0.0, NAN]), 2)
    with raises(TypeError, "rewards"):
        grpo_advantage(torch.tensor([1j, 0]), 2)


@pytest.mark.parametrize(
    "dtype",
    each([jnp.bfloat16, np.int64, bool, jnp.float16, np.float32, np.float64, np.int8, np.uint8], 3),
)
def test_types_are_computed_and_returned_in_float32(dtype):
    rewards = np.array(REWARDS).astype(dtype)
    expected = grpo_advantage(rewards.astype(np.float32), 4)
    for array in (rewards, jnp.asarray(rewards)):
        result = grpo_advantage(array, 4)
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(result, expected)
    assert group_statistics(rewards, 4).mean.dtype == jnp.float32
    assert segment_grpo_advantage(rewards, np.repeat([0, 1], 4), 2).dtype == jnp.float32


@pytest.mark.parametrize("name", ["remax", "gdpo", "maxrl"])
def test_narrow_types_of_other_estimators(name):
    rewards = (np.arange(COUNT) % 5 == 0).astype(np.float32)
    for kind in (jnp.bfloat16, jnp.bool_) if name == "maxrl" else (jnp.float16,):
        result = ROWS[name](jnp.asarray(rewards).astype(kind))
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(result, ROWS[name](rewards))


def test_bfloat16_is_widened_before_any_arithmetic():
    # in bfloat16 the mean of these would round to 1; epsilon is 2.6e-6 of the deviation, 2**-8
    rewards = jnp.asarray([1, 1, 1, 1.0078125], jnp.bfloat16)
    np.testing.assert_allclose(grpo_advantage(rewards, 4), [-0.5, -0.5, -0.5, 1.5], rtol=1e-5)
    components = jnp.asarray([[256, 1], [256, 2], [256, 3], [256, 4]], jnp.bfloat16)
    assert grpo_advantage(components, 4, "none").tolist() == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize("integer", [np.int32, np.uint8])
def test_differences_of_integers_do_not_wrap(integer):
    assert grpo_advantage(np.array([0, 200], integer), 2, "none").tolist() == [-100, 100]
    assert rloo_advantage(jnp.asarray([200, 0], integer), 2, "none").tolist() == [200, -200]


@pytest.mark.parametrize("name", ["grpo, batch", "remax", "gdpo", "pkpo, mean", "reinforce++"])
def test_float64_stays_float64(name):
    rewards, where = np.random.default_rng(0).uniform(size=COUNT), np.arange(COUNT) % 5 > 0
    with jax.enable_x64(True):
        result = ROWS[name](rewards, where=where)
        assert result.dtype == jnp.float64
        expected = CASES[name].expected(rewards, IDS, where)
        np.testing.assert_allclose(result, expected, rtol=1e-7, atol=1e-7)  # epsilon is 1e-8
        assert ROWS[name](rewards.tolist(), where=where).dtype == jnp.float64


def test_lengths_may_be_anything_that_counts():
    rewards, lengths = np.random.default_rng(0).uniform(size=COUNT), DATA["lengths"]
    expected = ROWS["opo"](rewards, where=None)
    for counts in (lengths.tolist(), jnp.asarray(lengths), lengths.astype(np.float16)):
        result = ROWS["opo"](rewards, where=None, lengths=counts)
        # another type is another program, which may round in another order
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64])
def test_kinds_of_segment_ids(kind):
    ids = np.asarray([0, 1, 0, 1], kind)
    for segment_ids in (ids, jnp.asarray(ids), ids.tolist()):
        result = segment_grpo_advantage([0.0, 1.0, 2.0, 3.0], segment_ids, 2, "none")
        assert result.tolist() == [-1, -1, 1, 1]


# --- errors, of every estimator -------------------------------------------------------------------

WITH_NONE = [1.0, None]
# Calls of an estimator over rows that must raise, by the argument that the error names.
BAD_ROWS = {
    "num_generations": {
        TypeError: [{"size": wrong} for wrong in (2.0, True, np.bool_(True), "2", None, [2],
                                                  jnp.int32(2), np.array(2))],
        ValueError: [{"size": wrong} for wrong in (0, -2, np.int64(0), 5)],
    },
    "rewards": {
        TypeError: [{"rewards": wrong} for wrong in (
            [1j] * COUNT, np.ones(COUNT, complex), ["1.0", "2.0"], [1.0, "2"], [object(), 1.0],
            "12", b"12", None, {1: 2.0}, {1.0, 2.0}, WITH_NONE, jax.random.key(0)[None],
            np.ma.array([1.0, 2.0], mask=[True, False]))],
        ValueError: [{"rewards": wrong} for wrong in (
            [], (), np.zeros((0, 3)), jnp.zeros((4, 0)), 1.0, np.zeros((4, 3, 2)),
            [[1.0, 2.0], [3.0]], [[1.0, 2.0], 3.0], [10**400] * COUNT, [1e39] * COUNT,
            [NAN if i == 3 else 1.0 for i in range(COUNT)], np.full((COUNT, 2), INF))],
    },
    "where": {
        TypeError: [{"where": np.ones(COUNT)}, {"where": [1] * COUNT}],
        ValueError: [{"where": np.ones(shape, bool)} for shape in (3, (COUNT, 1), (4, 6), ())],
    },
    "reward_weights": {
        TypeError: [{"rewards": np.zeros((COUNT, 2)), "reward_weights": wrong}
                    for wrong in (["a", "b"], [1j, 0])],
        ValueError: [{"reward_weights": [1.0]}, *(
            {"rewards": np.zeros((COUNT, 2)), "reward_weights": wrong}
            for wrong in ([1.0], [[1.0, 2.0]], 1.0, [1.0, NAN]))],
    },
}  # fmt: skip
BAD_SETTINGS = {
    "scale": {TypeError: [None, True, 1, ["group"]], ValueError: ["Group", "std", ""]},
    "epsilon": {
        TypeError: ["small", None, True, [1e-8], 1j, jnp.int32(1)], ValueError: [jnp.ones(2)],
    },
    "threshold": {TypeError: ["half", None], ValueError: [np.ones(2)]},
    "k": {
        TypeError: [2.0, "2", None, True, jnp.float32(2)], ValueError: [0, 7, jnp.ones(2, int)],
    },
    "baseline": {TypeError: [None], ValueError: ["loo"]},
    "lengths": {
        TypeError: [None, "x"],
        ValueError: [np.ones((4, 6)), [1.0], -np.ones(COUNT), np.full(COUNT, NAN), [INF] * COUNT],
    },
    "greedy_rewards": {
        TypeError: [None, ["a"] * PROMPTS], ValueError: [ZEROS, [0.0, NAN, 0.0, 0.0]],
    },
}  # fmt: skip


def check_all(call, argument, bad):
    for kind, calls in bad.items():
        for kwargs in calls:
            with raises(kind, argument):
                call(**kwargs)


@pytest.mark.parametrize("argument", BAD_ROWS)
@pytest.mark.parametrize("name", [case.name for case in BY_NAME.values()])
def test_arguments_of_every_estimator(name, argument):
    """Of the function, which reads its arguments as all others do, and of the object."""
    label = next(label for label, case in CASES.items() if case.name == name)

    def call(rewards=ZEROS, **kwargs):
        ROWS[label](rewards, **{"where": None, **kwargs})

    check_all(call, argument, BAD_ROWS[argument])


@pytest.mark.parametrize("argument", BAD_ROWS)
@pytest.mark.parametrize("function", [group_statistics, GRPOAdvantage()])
def test_arguments_of_statistics_and_objects(function, argument):
    def call(rewards=ZEROS, size=SIZE, **kwargs):
        function(rewards, num_generations=size, **kwargs)

    bad = BAD_ROWS[argument]
    if argument == "rewards" and function == GRPOAdvantage():  # None in a list means "missing"
        bad = {TypeError: [c for c in bad[TypeError] if c["rewards"] is not WITH_NONE]}
    check_all(call, argument, bad)


@pytest.mark.parametrize("label", CASES)
def test_settings_and_data_of_every_estimator(label):
    takes = inspect.signature(CASES[label].function).parameters
    for argument, bad in BAD_SETTINGS.items():
        if argument in takes:
            calls = {kind: [{argument: value} for value in values] for kind, values in bad.items()}
            check_all(functools.partial(ROWS[label], ZEROS), argument, calls)
    for argument, parameter in takes.items():  # what has no default is asked for
        if parameter.default is parameter.empty:
            complete = {**CASES[label].settings, **{n: DATA[n] for n in CASES[label].data}}
            complete |= {"rewards": ZEROS, "num_generations": SIZE}
            del complete[argument]
            with raises(TypeError, argument):
                CASES[label].function(**complete)


@pytest.mark.parametrize("label", CASES)
def test_a_group_needs_two(label):
    call = functools.partial(ROWS[label], ZEROS, size=1, where=None)
    if CASES[label].name in ("grpo", "reinforce"):
        call()
    elif CASES[label].name != "remax":
        with raises(ValueError, "num_generations"):
            call()


@pytest.mark.parametrize("label", SEGMENTS)
def test_segments(label):
    bad = {
        "segment_ids": {
            TypeError: [{"ids": np.zeros(COUNT)}, {"ids": [True] * COUNT}],
            ValueError: [{"ids": jnp.zeros(3, int)}, {"ids": [[0] * COUNT]}],
        },
        "num_segments": {
            TypeError: [{"num_segments": 2.5}, {"num_segments": jnp.int32(4)}],
            ValueError: [{"num_segments": 0}],
        },
        "rewards": {ValueError: [{"rewards": [NAN] * COUNT}, {"rewards": []}]},
        "where": {ValueError: [{"where": [True]}]},
    }
    if "scale" in CASES[label].settings:
        bad["scale"] = {ValueError: [{"scale": "mean"}]}
    if "lengths" in CASES[label].data:
        bad["lengths"] = {ValueError: [{"lengths": np.ones(3)}, {"lengths": -np.ones(COUNT)}]}
    for argument, calls in bad.items():

        def call(rewards=ZEROS, **kwargs):
            SEGMENTS[label](rewards, **kwargs)

        check_all(call, argument, calls)


@pytest.mark.parametrize("label", CASES)
def test_what_a_shape_shows_raises_while_tracing(label):
    call = ROWS[label]
    with raises(TypeError, "num_generations"):
        jax.eval_shape(call, TRACED, jax.ShapeDtypeStruct((), jnp.int32))
    with raises(ValueError, "num_generations"):
        jax.eval_shape(functools.partial(call, size=5), TRACED)
    with raises(ValueError, "where"):
        jax.eval_shape(functools.partial(call, where=np.ones(3, bool)), TRACED)
    with raises(TypeError, "rewards"):
        jax.eval_shape(lambda r: call(jax.lax.complex(r, r)), TRACED)
    with raises(ValueError, "rewards"):
        jax.eval_shape(call, jax.ShapeDtypeStruct((2, 2, 2), jnp.float32))
    if label in SEGMENTS:
        with raises(ValueError, "segment_ids"):
            jax.eval_shape(lambda r: SEGMENTS[label](r, jnp.zeros(3, int)), TRACED)
        with raises(TypeError, "num_segments"):
            jax.jit(SEGMENTS[label])(ZEROS, IDS, 4)


@pytest.mark.parametrize("function", [grpo_advantage, GRPOAdvantage(), group_statistics])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_host_rewards_must_be_finite_where_they_are_kept(function, bad):
    for rewards in ([0.0, 1.0, bad, 0.0], np.array([0.0, 1.0, bad, 0.0], np.float16)):
        with raises(ValueError, "rewards"):
            function(rewards, 2)
        with raises(ValueError, "rewards"):
            function(rewards, 2, where=jnp.asarray([False, True, True, True]))
        function(rewards, 2, where=[True, True, False, True])
    pair = [[0.0, 1.0], [bad, 0.0]]
    for where in (None, [[True, True], [True, False]]):
        with raises(ValueError, "rewards"):
            function(pair, 2, where=where)
    function(pair, 2, where=[[True, True], [False, True]])
    function([[0.0, 1.0], [bad, bad]], 2, where=[True, False])


def test_host_rewards_are_checked_inside_jit_too():
    with raises(ValueError, "rewards"):
        jax.jit(lambda: grpo_advantage([0.0, NAN], 2))()
    # where the mask cannot be seen, what is unmasked shows as NaN
    masked = jax.jit(lambda where: grpo_advantage([0.0, NAN, 2.0], 3, "none", where=where))
    assert masked(jnp.asarray([True, False, True])).tolist() == [-1, 0, 1]
    assert np.isnan(masked(jnp.asarray([True, True, True]))).all()


def test_numbers_beyond_float32_are_not_finite_there():
    with raises(ValueError, "rewards"):
        grpo_advantage(np.array([1e39, 0.0]), 2)
    assert np.isfinite(grpo_advantage([1e30, -1e30], 2, "none")).all()


@pytest.mark.parametrize("name", ["opo", "reinforce++"])
@pytest.mark.parametrize("wrong", [-1, NAN, INF])
def test_lengths_of_masked_samples_may_be_anything(name, wrong):
    lengths = np.ones(COUNT, np.float32)
    lengths[5] = wrong
    for where in (None, np.arange(COUNT) != 4):
        with raises(ValueError, "lengths"):
            ROWS[name](ZEROS, lengths=lengths, where=where)
    ROWS[name](ZEROS, lengths=lengths, where=np.arange(COUNT) != 5)


def test_greedy_rewards_of_components_and_masked_prompts():
    with raises(ValueError, "greedy_rewards"):
        remax_advantage(np.zeros((COUNT, 2)), np.zeros(PROMPTS), SIZE)
    greedy = [0.0, NAN, 0.0, 0.0]
    with raises(ValueError, "greedy_rewards"):
        remax_advantage(ZEROS, greedy, SIZE, where=np.arange(COUNT) < 7)
    remax_advantage(ZEROS, greedy, SIZE, where=np.arange(COUNT) // SIZE != 1)


def test_k_and_its_baseline():
    for function in (pass_at_k_advantage, pkpo_advantage):
        assert function(ZEROS, SIZE, k=np.int64(2)).shape == (COUNT,)
    with raises(ValueError, "k"):
        pkpo_advantage(ZEROS, SIZE, k=1, baseline="leave_one_out_minus_one")
    with raises(ValueError, "k"):
        pkpo_advantage(ZEROS, SIZE, k=SIZE, baseline="leave_one_out")


def test_unbound_axis_name():
    with pytest.raises(NameError):
        grpo_advantage([1.0, 2.0], 2, "batch", axis_name="nowhere")


@pytest.mark.parametrize("size", [np.int64(2), np.int8(2), np.uint16(2)])
def test_numpy_integers_are_welcome(size):
    for function in (grpo_advantage, GRPOAdvantage(), group_statistics):
        function([1.0, 2.0], size)
