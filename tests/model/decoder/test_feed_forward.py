"""Experts: both ways to apply them, and devices that hold a part of them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import assert_close, config_of, fill, hidden, params_of, step
from twinkle_jax.model import LoraConfig, make_mesh
from twinkle_jax.model.decoder import feed_forward as ff
from twinkle_jax.model.decoder.lora import adapted_kernels

CONFIG = config_of("qwen3_moe")
E = CONFIG.experts
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(10, 24)), jnp.float32)
GATE_UP = jnp.asarray(RNG.normal(size=(E.number, 24, 2 * E.width)), jnp.float32)
DOWN = jnp.asarray(RNG.normal(size=(E.number, E.width, 24)), jnp.float32)
ROUTER = jnp.asarray(RNG.normal(size=(24, E.number)), jnp.float32)


@partial(jax.jit, static_argnums=(0, 5))
def mixed(add_up, x, router, gate_up, down, experts=E):
    matrices = ff._Experts(gate_up[None], down[None], jnp.int32(0))
    return add_up(CONFIG, x, ff._route(x, {"kernel": router}, experts), matrices)


def by_hand(x, experts):
    """Row by row, in float64."""
    out = np.zeros((len(x), 24))
    for t, row in enumerate(np.asarray(x, np.float64)):
        logits = row @ np.asarray(ROUTER, np.float64)
        share = np.exp(logits) / np.exp(logits).sum()
        best = sorted(range(E.number), key=lambda e: -share[e])[: experts.chosen]
        total = sum(share[e] for e in best) if experts.normalised else 1
        for e in best:
            gate, up = np.split(row @ np.asarray(GATE_UP[e], np.float64), 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            out[t] += share[e] / total * hidden @ np.asarray(DOWN[e], np.float64)
    return out


@pytest.mark.parametrize("add_up", [ff._in_blocks, ff._in_groups])
@pytest.mark.parametrize("changes", [{}, {"chosen": 1}, {"chosen": 6}, {"normalised": False}])
def test_each_token_goes_through_its_likeliest_experts(add_up, changes):
    experts = dataclasses.replace(E, **changes)
    actual = mixed(add_up, X, ROUTER, GATE_UP, DOWN, experts)
    assert_close(actual, by_hand(X, experts), 1e-5)


@partial(jax.jit, static_argnums=4)
def all_experts(x, router, gate_up, down, experts=E):
    """Every expert for every token, most with the weight 0."""
    share, chosen = ff._route(x, {"kernel": router}, experts)
    weights = jnp.sum(jax.nn.one_hot(chosen, len(down)) * share[..., None], axis=1)
    gate, up = jnp.split(jnp.einsum("tw,ewi->tei", x, gate_up), 2, axis=-1)
    y = jnp.einsum("tei,eiw->tew", jax.nn.silu(gate) * up, down)
    return jnp.einsum("tew,te->tw", y, weights)


@partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(mix, experts, *arrays):
    """The results, and gradients of their sum with weights of their own."""

    def total(*arrays):
        y = mix(*arrays, experts)
        target = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y * target), y

    gradients, y = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)
    return y, gradients


IN_BLOCKS = partial(mixed, ff._in_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("add_up", [ff._in_blocks, ff._in_groups])
@jax.numpy_dtype_promotion("standard")  # the kernel mixes types in its gradient
def test_gradients_are_those_of_all_experts(add_up):
    arrays = E, X, ROUTER, GATE_UP, DOWN
    _, gradients = values_and_gradients(partial(mixed, add_up), *arrays)
    for here, there in zip(gradients, values_and_gradients(all_experts, *arrays)[1], strict=True):
        assert_close(here, there, 1e-5)


def test_experts_in_64_bits():
    """Indices of blocks are of one type, where Python's integers have 64 bits."""

    @jax.jit
    @jax.value_and_grad
    def total(params):
        return jnp.sum(jnp.sin(hidden(params, CONFIG, jnp.array([[5, 6, 7]]))))

    value, gradient = total(params_of("qwen3_moe"))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), params_of("qwen3_moe"))
        same, exact = total(wide)
        assert same.dtype == jnp.float64
    assert_close(value, same, 1e-4)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-3), gradient, exact)


def test_products_of_the_gradient_are_as_exact_as_those_of_the_value():
    """JAX traces a gradient rule outside the function, where another precision may be set."""

    def loss(*arrays):
        with jax.default_matmul_precision("highest"):
            return jnp.sum(mixed.__wrapped__(ff._in_blocks, *arrays))

    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    text = str(jax.make_jaxpr(gradient)(X, ROUTER, GATE_UP, DOWN))
    products, exact = (
        text.count(" dot_general["),
        text.count("Precision.HIGHEST, Precision.HIGHEST"),
    )
    assert products == exact >= 8


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 3, 37, 700])
@pytest.mark.parametrize("skew", [0.0, 8.0])
@pytest.mark.parametrize("chosen", [1, 2])
def test_any_number_of_tokens_fits_into_blocks(tokens, skew, chosen):
    """Several blocks an expert, and experts that most tokens or none are sent to."""
    experts = dataclasses.replace(E, chosen=chosen, normalised=chosen > 1)
    x = np.random.default_rng(tokens).normal(size=(tokens, 24)).astype(np.float32)
    x[:, -1] = 1
    router = ROUTER.at[-1, 2].add(skew)
    arrays = experts, x, router, GATE_UP, DOWN
    (y, gradients), expected = (values_and_gradients(f, *arrays) for f in (IN_BLOCKS, all_experts))
    assert_close(y, expected[0], 1e-5)
    for here, there in zip(gradients, expected[1], strict=True):
        assert_close(here, there, 2e-5)


@pytest.mark.parametrize("rows", [1, 8, 64, 100, 1024, 20_000, 131_072])
@pytest.mark.parametrize("number", [1, 6, 128])
def test_every_row_is_in_one_block_of_its_expert(rows, number):
    size = ff._block_size(rows, number)
    chosen = np.random.default_rng(rows).integers(-1, number + 1, (rows, 1))
    sort = jax.jit(ff._sort_into_blocks, static_argnums=(1, 2))
    blocks, places = sort(jnp.asarray(chosen, jnp.int32), number, size)
    blocks, places = jax.device_get((blocks, places))
    here = (chosen[:, 0] >= 0) & (chosen[:, 0] < number)
    taken = np.asarray(blocks.tokens).reshape(-1)
    assert sorted(taken[taken < rows]) == np.flatnonzero(here).tolist()
    np.testing.assert_array_equal(taken[places[here, 0]], np.flatnonzero(here))
    assert (places[~here] >= taken.size).all()
    np.testing.assert_array_equal(blocks.expert[places[here, 0] // size], chosen[here, 0])
    changes = np.flatnonzero(np.diff(blocks.expert, prepend=-1))
    np.testing.assert_array_equal(np.flatnonzero(blocks.is_first), changes)
    assert len(blocks.expert) <= min(rows, 5 * number + rows // 128)


@pytest.mark.parametrize("add_up", [ff._in_blocks, ff._in_groups])
def test_parts_of_the_experts_add_up(add_up):
    """What a device computes with its experts; of the others' rows nothing is left, NaN neither.

    The parts lie in one array, as layers do.
    """
    share, chosen = ff._route(X, {"kernel": ROUTER}, E)
    gate_up, down = (x.reshape(3, 2, *x.shape[1:]) for x in (GATE_UP, DOWN))

    @jax.jit
    def part(first, layer):
        routed = ff._Routed(share, chosen - first)
        return add_up(CONFIG, X, routed, ff._Experts(gate_up, down, layer))

    parts = [part(2 * layer, layer) for layer in range(3)]
    assert_close(sum(parts), by_hand(X, E), 1e-5)
    np.testing.assert_array_equal(part(-E.number, 1), 0)


LOGITS = jnp.log(jnp.array([[1.0, 3.0, 1 / 3, 4.0]]))  # of the scores 1/2, 3/4, 1/4, 4/5
CORRECTED = dataclasses.replace(E, number=4, chosen=2, corrected=True, normalised=False)


@pytest.mark.parametrize(
    ("changes", "correction", "chosen", "share"),
    [
        ({}, [0.0] * 4, [3, 1], [4 / 5, 3 / 4]),
        # 1/2 + 1/2, 3/4, 1/4 + 5/8 and 4/5 - 1/2
        ({}, [0.5, 0.0, 0.625, -0.5], [0, 2], [1 / 2, 1 / 4]),
        ({"normalised": True}, [0.5, 0.0, 0.625, -0.5], [0, 2], [2 / 3, 1 / 3]),
        ({"normalised": True, "scaling": 1.5}, [0.5, 0.0, 0.625, -0.5], [0, 2], [1, 1 / 2]),
        ({"scaling": 1.5}, [0.5, 0.0, 0.625, -0.5], [0, 2], [3 / 4, 3 / 8]),
    ],
)
def test_corrections_choose_and_do_not_weigh(changes, correction, chosen, share):
    experts = dataclasses.replace(CORRECTED, **changes)
    routed = ff._choose(LOGITS, experts, None, jnp.array(correction))
    assert routed.chosen.tolist() == [chosen]
    np.testing.assert_allclose(routed.share[0], share, rtol=1e-6)
    named = ff._choose(LOGITS, experts, jnp.array([chosen]), jnp.array([9.0, -9.0, 0.0, 3.0]))
    np.testing.assert_array_equal(named.share, routed.share)


def test_scores_of_0_are_normalised():
    logits, experts = jnp.full((1, 4), -200.0), dataclasses.replace(CORRECTED, normalised=True)
    routed = ff._choose(logits, experts, None, jnp.array([0.0, 2.0, 0.0, 1.0]))
    assert routed.chosen.tolist() == [[1, 3]] and routed.share.tolist() == [[0, 0]]


def test_a_router_with_corrections_computes_in_float32():
    """Of two logits that differ by 2⁻¹⁰, which bfloat16 does not tell apart, the larger one."""
    kernel = jnp.array([[1.0, 1.0, 0.0, 0.0], [0.0, 2.0**-10, 0.0, 0.0]])
    router = {"kernel": kernel, "e_score_correction_bias": jnp.zeros(4)}
    experts = dataclasses.replace(CORRECTED, chosen=1)
    routed = ff._route(jnp.ones((1, 2), jnp.bfloat16), router, experts)
    assert routed.chosen.tolist() == [[1]] and routed.share.dtype == jnp.bfloat16
    # The kernel is rounded, as that of a sampler is: trainer and sampler choose the same.
    finer = {**router, "kernel": kernel.at[0, 0].add(2.0**-9)}
    assert ff._route(jnp.ones((1, 2), jnp.bfloat16), finer, experts).chosen.tolist() == [[1]]
    assert ff._route(jnp.ones((1, 2)), finer, experts).chosen.tolist() == [[0]]
    router["e_score_correction_bias"] = jnp.array([2.0**-10, 0.0, 0.0, 0.0])
    assert ff._route(jnp.ones((1, 2)), router, experts).chosen.tolist() == [[0]]


OSS = config_of("gpt_oss")
_MLP = params_of("gpt_oss")["layers"]["0"]["mlp"]
OSS_ROUTER = jax.tree.map(lambda x: x[1], _MLP["router"])
_UP, _DOWN = (_MLP["experts"][name] for name in ("gate_up_proj", "down_proj"))
OSS_ARRAYS = _UP["kernel"], _DOWN["kernel"], _UP["bias"], _DOWN["bias"]  # of three layers


def oss_mixed(add_up, x, gate_up, down, *biases, first=0):
    routed = ff._route(x, OSS_ROUTER, OSS.experts)
    routed = routed._replace(chosen=routed.chosen - first)
    return add_up(OSS, x, routed, ff._Experts(gate_up, down, jnp.int32(1), biases))


def all_clamped(x, gate_up, down, up_bias, down_bias):
    """Every expert for every token, most with the weight 0."""
    share, chosen = ff._route(x, OSS_ROUTER, OSS.experts)
    weights = jnp.sum(jax.nn.one_hot(chosen, 6) * share[..., None], axis=1)
    y = jnp.einsum("tw,ewi->tei", x, gate_up[1]) + up_bias[1]
    gate, up = y[..., 0::2], y[..., 1::2]
    limit = OSS.experts.swiglu_limit
    gate, up = jnp.where(gate > limit, limit, gate), jnp.clip(up, -limit, limit)
    y = jnp.einsum("tei,eiw->tew", (up + 1) * gate / (1 + jnp.exp(-1.702 * gate)), down[1])
    return jnp.einsum("tew,te->tw", y + down_bias[1], weights)


@pytest.mark.parametrize("add_up", [ff._in_blocks, ff._in_groups])
@pytest.mark.parametrize("tokens", [10, pytest.param(300, marks=pytest.mark.exhaustive)])
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_experts_with_biases_and_a_bound(add_up, tokens):
    """Values and gradients of all arrays, of one layer of three."""
    x = jnp.asarray(np.random.default_rng(tokens).normal(size=(tokens, 24)), jnp.float32)

    def loss(mix, *arrays):
        y = mix(*arrays)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)), y

    run = jax.jit(jax.grad(loss, (1, 2, 3, 4, 5), has_aux=True), static_argnums=0)
    gradients, y = run(partial(oss_mixed, add_up), x, *OSS_ARRAYS)
    expected_gradients, expected = run(all_clamped, x, *OSS_ARRAYS)
    assert_close(y, expected, 1e-5)
    for here, there in zip(gradients, expected_gradients, strict=True):
        assert_close(here, there, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("add_up", [ff._in_blocks, ff._in_groups])
def test_biases_of_other_devices_experts_are_left_to_them(add_up):
    parts = [
        oss_mixed(add_up, X, *(x[:, part] for x in OSS_ARRAYS), first=part.start)
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert_close(sum(parts), oss_mixed(ff._in_blocks, X, *OSS_ARRAYS), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("add_up", [ff._in_blocks, ff._in_groups])
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 4), (4, 1, 1)])
@jax.numpy_dtype_promotion("standard")
def test_devices_that_hold_a_part_of_the_experts(add_up, shape):
    """Also experts that the axis does not divide, and rows that the devices do not divide."""
    mesh = make_mesh(**dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))

    def spread(config, *arrays):
        return ff._on_devices(lambda *x: add_up(config, *x), E, mesh)(*arrays)

    def loss(add_up, *arrays):
        y = mixed(add_up, *arrays)
        return jnp.sum(y**2), y

    def run(add_up):
        function = jax.value_and_grad(lambda *x: loss(add_up, *x), (0, 1, 2, 3), has_aux=True)
        return jax.jit(function)(X, ROUTER, GATE_UP, DOWN)

    (_, y), gradients = run(spread)
    (_, expected), expected_gradients = run(ff._in_blocks)
    assert_close(y, expected, 1e-5)
    for here, there in zip(gradients, expected_gradients, strict=True):
        assert_close(here, there, 1e-5)


def test_decoding_applies_the_experts_of_each_layer():
    """They are taken from the stack of all layers."""
    params = params_of("qwen3_moe")
    tokens = jnp.array([[5, 6, 7, 8]])
    last, cache = fill(params, CONFIG, tokens[:, :3], max_length=8)
    decoded, _ = step(params, CONFIG, tokens[:, 3], cache)
    at_once = hidden(params, CONFIG, tokens)
    assert_close(last, at_once[:, 2])
    assert_close(decoded, at_once[:, 3])


def test_a_router_and_its_experts_have_no_adapters():
    names = {path[-1] for path in adapted_kernels(CONFIG, LoraConfig(target_modules="all-linear"))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    shared = adapted_kernels(config_of("qwen3_5_moe_text"), LoraConfig(target_modules="up_proj"))
    assert {path[-2] for path in shared} == {"shared_expert"}
    glm = adapted_kernels(config_of("glm4_moe"), LoraConfig(target_modules="up_proj"))
    paths = [("layers", "0", "mlp", "up_proj"), ("layers", "1", "mlp", "shared_experts", "up_proj")]
    assert glm == dict(zip(paths, [(24, 40), (24, 32)], strict=True))
