"""Twinkle's face: what the objects take, what they give, and what they refuse."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import twinkle_jax
from twinkle_jax import grpo_advantage, rloo_advantage
from twinkle_jax.advantage import Advantage, GRPOAdvantage, RLOOAdvantage

REWARDS = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
BOTH = [(GRPOAdvantage, grpo_advantage), (RLOOAdvantage, rloo_advantage)]


@pytest.mark.parametrize(("kind", "function"), BOTH)
@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, np.float16, jnp.asarray, lambda r: [np.float32(v) for v in r],
     lambda r: [jnp.float32(v) for v in r], lambda r: [int(v) for v in r],
     lambda r: [bool(v) for v in r], lambda r: [r[0], True, *map(int, r[2:])]],
)  # fmt: skip
def test_what_rewards_may_come_in(kind, function, make):
    result = kind()(make(REWARDS), num_generations=4)
    assert isinstance(result, jax.Array)
    assert result.tolist() == function(REWARDS, 4).tolist()


@pytest.mark.parametrize(("kind", "function"), BOTH)
def test_lists_of_tracers(kind, function):
    run = jax.jit(lambda a, b: kind()([a, b, 0.0, 1.0], num_generations=2, scale="none"))
    assert run(1.0, 3.0).tolist() == function([1.0, 3.0, 0.0, 1.0], 2, "none").tolist()


class _Holder:
    """A container of a JAX array, such as an NNX variable."""

    def __jax_array__(self):
        return jnp.asarray(REWARDS)


def test_containers_of_arrays():
    assert GRPOAdvantage()(_Holder(), 4).tolist() == grpo_advantage(REWARDS, 4).tolist()


def test_settings_pass_through():
    where = [True, True, False, True] * 2
    for given in (where, np.array(where), jnp.array(where), tuple(where)):
        result = GRPOAdvantage()(REWARDS, num_generations=4, where=given, epsilon=1.0)
        expected = grpo_advantage(REWARDS, 4, where=where, epsilon=1.0)
        assert result.tolist() == expected.tolist()
    pair = [[r, 2 * r] for r in REWARDS]
    result = RLOOAdvantage()(pair, 4, "none", reward_weights=[1.0, 0.5])
    assert result.tolist() == rloo_advantage(pair, 4, "none", reward_weights=[1.0, 0.5]).tolist()
    mapped = jax.vmap(lambda r: GRPOAdvantage()(r, 2, "batch", axis_name="b"), axis_name="b")
    result = mapped(jnp.asarray(REWARDS).reshape(2, 4))
    np.testing.assert_allclose(result.ravel(), grpo_advantage(REWARDS, 2, "batch"), rtol=1e-6)


def test_none_in_a_list_means_missing():
    rewards, where = [0.0, None, 2.0, 1.0, 3.0, None], [True, False, True, True, True, False]
    filled = [0.0, 9.0, 2.0, 1.0, 3.0, 9.0]
    for kind, function in BOTH:
        for scale in ("group", "batch", "none"):
            result = kind()(rewards, num_generations=3, scale=scale)
            assert result.tolist() == function(filled, 3, scale, where=where).tolist()
    also = GRPOAdvantage()(rewards, 3, "none", where=[True] * 3 + [False] + [True] * 2)
    assert also.tolist() == [-1, 0, 1, 0, 0, 0]
    assert GRPOAdvantage()([None] * 4, 2).tolist() == [0] * 4
    assert GRPOAdvantage()((None, 1, 2, True), 2, "none").tolist() == [0, 0, 0.5, -0.5]


def test_none_among_components():
    rewards = [[1.0, None], [2.0, 3.0], None, [4.0, 1.0]]
    expected = grpo_advantage(
        [[1.0, 0.0], [2.0, 3.0], [0.0, 0.0], [4.0, 1.0]],
        4,
        "none",
        where=[[True, False], [True, True], [False, False], [True, True]],
    )
    assert GRPOAdvantage()(rewards, 4, "none").tolist() == expected.tolist()
    fewer = GRPOAdvantage()(rewards, 4, "none", where=[False, True, True, True])
    assert fewer.tolist() == [0, 0, 0, 0]  # 5, missing, 5
    cells = [[True, True], [True, False], [True, True], [True, True]]
    assert GRPOAdvantage()(rewards, 2, "none", where=cells).tolist() == [-0.5, 0.5, 0, 0]


def test_none_is_for_wrappers():
    with pytest.raises(TypeError, match=r"rewards must hold numbers.*where="):
        grpo_advantage([1.0, None], 2)


@pytest.mark.parametrize("kind", [GRPOAdvantage, RLOOAdvantage])
@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("mask", "where="),
        ("masks", "where="),
        ("values", "GAEAdvantage"),
        ("segment_ids", "segment_"),
        ("eps", "epsilon="),
        ("reward_weight", "reward_weights="),
        ("num_generation", "num_generations="),
        ("wher", "where="),
        ("xyz", "it takes where"),
    ],
)
def test_unknown_names_and_data_are_refused(kind, name, suggestion):
    with pytest.raises(TypeError, match=rf"{kind.__name__} .*'{name}'.*{suggestion}"):
        kind()(REWARDS, num_generations=4, **{name: [True] * 8})


def test_the_base_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Advantage()

    class Own(Advantage):
        def __call__(self, rewards, num_generations=1, scale="group", **kwargs):
            return 2 * grpo_advantage(rewards, num_generations, scale)

    assert Own()([0.0, 1.0], 2, "none").tolist() == [-1, 1]
    assert isinstance(GRPOAdvantage(), Advantage)


def test_pytorch_tensors():
    torch = pytest.importorskip("torch", reason="pip install 'twinkle-jax[test,oracle]'")
    expected = grpo_advantage(REWARDS, 4).tolist()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        tensor = torch.tensor(REWARDS).to(dtype)
        for function in (GRPOAdvantage(), grpo_advantage):
            assert function(tensor, num_generations=4).tolist() == expected
    needs_gradient = torch.tensor(REWARDS, requires_grad=True)
    assert GRPOAdvantage()(needs_gradient, num_generations=4).tolist() == expected
    assert GRPOAdvantage()(list(needs_gradient), num_generations=4).tolist() == expected
    assert GRPOAdvantage()(needs_gradient > 0, num_generations=4).tolist() == expected
    strided = torch.tensor([REWARDS, REWARDS]).T[:, 0]
    assert GRPOAdvantage()(strided, num_generations=4).tolist() == expected
    where = torch.tensor([True] * 7 + [False])
    masked = grpo_advantage(REWARDS, 4, where=where.tolist()).tolist()
    assert GRPOAdvantage()(torch.tensor(REWARDS), 4, where=where).tolist() == masked
    for function in (GRPOAdvantage(), grpo_advantage):
        with pytest.raises(ValueError, match="index 1"):
            function(torch.tensor([0.0, float("nan")]), 2)
    with pytest.raises(TypeError, match="complex"):
        grpo_advantage(torch.tensor([1j, 0]), 2)


def test_importing_is_light():
    heavy = "flax optax chex torch transformers matplotlib rich safetensors orbax scipy"
    code = (
        "import sys, twinkle_jax; from twinkle_jax.advantage import *; "
        "from twinkle_jax import GRPOAdvantage; GRPOAdvantage()([1.0, 2.0], num_generations=2); "
        f"print([m for m in '{heavy}'.split() if m in sys.modules])"
    )
    code_before = (
        f"import sys, jax.numpy; print([m for m in '{heavy}'.split() if m in sys.modules])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=True
        ).stdout.strip()
        for text in (code_before, code)
    ]
    # jax itself may import some (scipy); we add none
    assert outputs[1] == outputs[0]


def test_public_names():
    assert set(twinkle_jax.__all__) == {
        "GRPOAdvantage", "RLOOAdvantage", "__version__", "grpo_advantage", "rloo_advantage",
    }  # fmt: skip
    assert twinkle_jax.GRPOAdvantage is GRPOAdvantage
