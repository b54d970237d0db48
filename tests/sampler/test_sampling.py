"""Filters keep what sorting keeps and what transformers keeps; every token is drawn at its rate."""

import re
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiled.costs import costs
from tests.model.families import each
from twinkle_jax.model import make_mesh
from twinkle_jax.sampler import Sampling
from twinkle_jax.sampler.sampling import (
    _heaviest,
    block_size,
    block_weights,
    draw,
    draw_kept,
    next_token,
    penalise,
    random_bits,
    traced_sampling,
)

LOGITS = np.random.default_rng(0).normal(size=(20, 67)).astype(np.float32) * 3
CASES = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 66},
    {"top_k": 100},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 10, "top_p": 0.8},
    {"top_k": 7, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 7, "top_p": 0.95, "min_p": 0.02},
    {"top_k": -1, "top_p": 1.0, "min_p": 0.0},
]


@jax.jit
def kept(logits, sampling):
    maximum = jnp.max(logits, axis=1)
    total = jnp.sum(jnp.exp(logits - maximum[:, None]), axis=1)
    bits = jnp.zeros((len(logits), 4), jnp.uint32)
    _, _, least = draw_kept(logits, maximum, total, sampling, bits)
    return jnp.exp(logits - maximum[:, None]) >= least[:, None]


def by_sorting(logits, top_k=0, top_p=1.0, min_p=0.0):
    keep = np.zeros(logits.shape, bool)
    for row, out in zip(logits.astype(np.float64), keep, strict=True):
        order = np.argsort(-row)
        order = order[:top_k] if top_k > 0 else order
        p = np.exp(row[order] - row[order[0]])
        p /= p.sum()
        order = order[np.concatenate([[0], np.cumsum(p)[:-1]]) < top_p]
        order = order[np.exp(row[order] - row[order[0]]) >= min_p]
        out[order] = True
    return keep


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_threshold_keeps_what_sorting_keeps(case):
    actual = kept(jnp.asarray(LOGITS), traced_sampling(Sampling(**case)))
    np.testing.assert_array_equal(actual, by_sorting(LOGITS, **case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_filters_equal_those_of_transformers(case):
    torch = pytest.importorskip("torch", reason="pip install 'twinkle-jax[test,oracle]'")
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    seen = np.random.default_rng(1).integers(0, 67, (20, 9))
    steps = [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7)]
    if case.get("top_k", 0) > 0:
        steps.append(TopKLogitsWarper(case["top_k"]))
    steps += [TopPLogitsWarper(case.get("top_p", 1.0)), MinPLogitsWarper(case.get("min_p", 0.0))]
    expected = LogitsProcessorList(steps)(torch.tensor(seen), torch.tensor(LOGITS)).numpy()
    padded = np.concatenate([np.full((20, 2), 67), seen], axis=1)
    logits = penalise(jnp.asarray(LOGITS / np.float32(0.7)), jnp.asarray(padded), jnp.float32(1.3))
    keep = np.asarray(kept(logits, traced_sampling(Sampling(**case))))
    np.testing.assert_array_equal(keep, np.isfinite(expected))
    np.testing.assert_allclose(np.asarray(logits)[keep], expected[keep], rtol=1e-6)


def test_ties_at_the_threshold_are_all_kept():
    logits = jnp.array([[3.0, 1.0, 1.0, 1.0, 0.0]])
    actual = kept(logits, traced_sampling(Sampling(top_k=2)))
    np.testing.assert_array_equal(actual, [[True, True, True, True, False]])


def test_a_threshold_is_exact_to_the_last_bit():
    logits = jnp.array([[1.0, np.nextafter(np.float32(1), np.float32(0)), 0.0]], jnp.float32)
    for case in ({"top_k": 1}, {"top_p": 0.1}):
        actual = kept(logits, traced_sampling(Sampling(**case)))
        np.testing.assert_array_equal(actual, [[True, False, False]])


def test_rows_are_filtered_by_themselves():
    together = kept(jnp.asarray(LOGITS), traced_sampling(Sampling(top_p=0.7, top_k=9)))
    alone = kept(jnp.asarray(LOGITS[4:5]), traced_sampling(Sampling(top_p=0.7, top_k=9)))
    np.testing.assert_array_equal(together[4], alone[0])


def wide(rows, vocab=5003):
    """Rows of a vocabulary that is searched in part, from all but flat to peaked."""
    rng = np.random.default_rng(3)
    spread = np.linspace(0.01, 6, rows)[:, None]
    logits = (rng.normal(size=(rows, vocab)) * spread).astype(np.float32)
    logits[1, 100:] -= 30  # less than k that are worth anything
    logits[2] = np.round(logits[2])  # ties
    return logits


@pytest.mark.parametrize(
    "case",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 200},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"top_p": 0.1},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 2000, "top_p": 0.5, "min_p": 0.01},
    ],
    ids=str,
)
def test_a_large_vocabulary_keeps_what_sorting_keeps(case):
    """Also in rows whose threshold is not among the heaviest columns, beside rows where it is."""
    logits = wide(19)
    actual = np.asarray(kept(jnp.asarray(logits), traced_sampling(Sampling(**case))))
    expected = by_sorting(logits, **case)
    # What ties with the last token is kept too, and sums differ by rounding.
    last = np.where(expected, logits, np.inf).min(axis=1, keepdims=True)
    tied = np.exp(logits - last) > 1 - 1e-4 if "top_p" in case else logits >= last
    assert np.all(actual[expected & ~(np.exp(logits - last) < 1 + 1e-4)])
    assert not np.any(actual & ~tied)
    for row in (0, 2, 9, 18):
        alone = kept(jnp.asarray(logits[row : row + 1]), traced_sampling(Sampling(**case)))
        np.testing.assert_array_equal(alone[0], actual[row])


def test_the_heaviest_columns_of_a_row_are_those_with_the_largest_maxima():
    """Also in rows with ties, with few finite tokens, and with all but no differences."""
    logits = wide(8)
    logits[3, 60:] = -np.inf
    logits[4] = np.where(np.arange(logits.shape[1]) % 3, -1e30, 0)
    logits[5] = 0
    logits[6, ::5] = np.inf
    some, places, bound = map(np.asarray, jax.jit(_heaviest)(jnp.asarray(logits)))
    width = places[0, 1] - places[0, 0]
    padded = np.pad(logits, ((0, 0), (0, -logits.shape[1] % width)), constant_values=-np.inf)
    maxima = padded.reshape(8, -1, width).max(axis=1)
    order = np.argsort(-maxima, axis=1, kind="stable")
    np.testing.assert_array_equal(places[:, :: len(places[0]) // 64] % width, order[:, :64])
    np.testing.assert_array_equal(bound, np.take_along_axis(maxima, order, axis=1)[:, 64])
    np.testing.assert_array_equal(some, padded[np.arange(8)[:, None], places])


@jax.jit
def drawn_of_kept(logits, sampling, bits):
    maximum = jnp.max(logits, axis=1)
    total = jnp.sum(jnp.exp(logits - maximum[:, None]), axis=1)
    return draw_kept(logits, maximum, total, sampling, bits)


@pytest.mark.parametrize(
    "case", [{"top_k": 50, "top_p": 0.9}, {"top_p": 0.6, "min_p": 0.01}], ids=str
)
def test_of_a_large_vocabulary_what_is_kept_is_drawn(case):
    """Also in rows that look at all of it: with their log-probability, whatever other rows do."""
    logits, sampling = wide(19), traced_sampling(Sampling(**case))
    bits = np.random.default_rng(5).integers(0, 2**32, (19, 4), dtype=np.uint32)
    tokens, logprobs, least = map(np.asarray, drawn_of_kept(logits, sampling, bits))
    weights = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64))
    left = np.where(weights >= least[:, None] * (1 - 1e-6), weights, 0)
    expected = np.log(left[np.arange(19), tokens] / left.sum(axis=1))
    np.testing.assert_allclose(logprobs, expected, atol=3e-5)
    for row in (0, 9, 18):
        alone = drawn_of_kept(logits[row : row + 1], sampling, bits[row : row + 1])
        assert alone[0][0] == tokens[row]


def test_of_a_large_vocabulary_each_kept_token_has_its_share():
    logits = np.zeros(5003, np.float32)
    places = np.array([5002, 7, 4000, 320, 2501, 4999])
    logits[places] = np.log([1000, 500, 250, 125, 60, 30])
    bits = np.random.default_rng(6).integers(0, 2**32, (2000, 4), dtype=np.uint32)
    sampling = traced_sampling(Sampling(top_k=4))
    tokens, _, _ = drawn_of_kept(np.tile(logits, (2000, 1)), sampling, bits)
    rate = np.mean(np.asarray(tokens)[:, None] == places, axis=0)
    np.testing.assert_allclose(rate[:4], np.array([8, 4, 2, 1]) / 15, atol=0.04)
    assert rate[:4].sum() == 1


def test_a_penalty_takes_from_both_signs_and_leaves_the_rest():
    logits = jnp.array([[2.0, -2.0, 0.5, 4.0]])
    actual = penalise(logits, jnp.array([[0, 1, 0, 4, 9]]), jnp.float32(2))
    np.testing.assert_array_equal(actual, [[1.0, -4.0, 0.5, 4.0]])


# The draw.


def split(u):
    """Two words for a number in [0, 1): 30 bits, and the 32 that follow."""
    scaled = np.asarray(u, object) * 2**62
    integers = [int(x) for x in np.ravel(scaled)]
    words = [((x >> 32) << 2, x & 0xFFFFFFFF) for x in integers]
    return np.array(words, np.uint32)


@jax.jit
def drawn(logits, bits):
    maximum = jnp.max(logits, axis=1)
    return draw(bits, logits, maximum, block_weights(logits, maximum))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [16_512, 16_384, 9_001])
def test_the_weight_of_a_block_is_the_sum_of_its_tokens(vocab):
    """Also where tiles of a TPU's memory are summed first, and the last block is half full."""
    logits = np.random.default_rng(0).normal(size=(20, vocab)).astype(np.float32)
    for rows, least in ((20, None), (8, 0.01), (3, None)):
        some = logits[:rows]
        weights = np.exp(some - some.max(axis=1, keepdims=True))
        threshold = None if least is None else jnp.full(rows, least, jnp.float32)
        actual = block_weights(jnp.asarray(some), jnp.asarray(some.max(axis=1)), threshold)
        weights[weights < (least or 0)] = 0
        starts = np.arange(0, vocab, block_size(vocab))
        np.testing.assert_allclose(actual, np.add.reduceat(weights, starts, axis=1), rtol=1e-4)


@pytest.mark.parametrize("vocab", each([1, 17, 48, 2, 15, 16, 300, 1000], default=3))
def test_every_token_has_the_share_of_u_that_it_should_have(vocab):
    """For a grid of u that is uniform over both choices, each token comes up as often as p says."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=vocab).astype(np.float32) * 2
    p = np.exp(logits - logits.max()).astype(np.float64)
    p /= p.sum()
    points = 256
    blocks, inside = np.meshgrid(*[(np.arange(points) + 0.5) / points] * 2)
    bits = np.concatenate([split(blocks), split(inside)], axis=1)
    tokens = drawn(jnp.asarray(np.tile(logits, (len(bits), 1))), jnp.asarray(bits))
    rate = np.bincount(tokens, minlength=vocab) / len(bits)
    np.testing.assert_allclose(rate, p, atol=1.5 / points)


@pytest.mark.parametrize("chance", each([1e-11, 1e-5, 1e-8, 1e-13]))
@pytest.mark.parametrize("place", ["block", "inside"])
def test_rare_tokens_are_drawn_at_their_rate(chance, place):
    """u is moved in small steps over where a rare token should be: it is there, and as wide."""
    size = block_size(1000)
    rare = 5 * size if place == "block" else 3 * size + 7
    logits = np.full(1000, -np.inf)
    logits[3 * size + np.arange(0, 7)] = np.log([0.1, 0.15, 0.05, 0.1, 0.2, 0.02, 0.03])
    logits[3 * size + 8] = logits[8 * size] = np.log(0.175)
    logits[rare] = np.log(chance)
    logits = logits.astype(np.float32)
    weights = np.exp((logits - logits.max()).astype(np.float32)).astype(np.float64)
    if place == "block":
        others = weights.reshape(-1)[: 4 * size].sum()
        start, share = others / weights.sum(), weights[rare] / weights.sum()
    else:
        block = weights[3 * size : 4 * size]
        start, share = block[:7].sum() / block.sum(), block[7] / block.sum()
    steps = 4000
    moved = (np.arange(steps) / steps * 8 - 3.5) * share
    # Rounding of the weights themselves shifts the place by far more than it is wide.
    edge = find_edge(logits, start, place, rare)
    u = [edge + Fraction(m) for m in moved]
    other = np.full((steps, 2), 2**31, np.uint32)
    words = split(u)
    bits = np.concatenate([words, other] if place == "block" else [block_u(steps), words], axis=1)
    tokens = np.asarray(drawn(jnp.asarray(np.tile(logits, (steps, 1))), jnp.asarray(bits)))
    hits = np.mean(tokens == rare) * 8
    assert hits == pytest.approx(1, rel=0.02)


def block_u(steps):
    return split(np.full(steps, 0.2))


def find_edge(logits, guess, place, rare):
    """Find, by halving, the largest u that still gives a token before the rare one."""
    low, high = Fraction(guess) - Fraction(1, 10**4), Fraction(guess) + Fraction(1, 10**4)
    for _ in range(60):
        middle = (low + high) / 2
        words = split([middle])
        other = np.full((1, 2), 2**31, np.uint32)
        bits = np.concatenate([words, other] if place == "block" else [block_u(1), words], axis=1)
        token = int(drawn(jnp.asarray(logits[None]), jnp.asarray(bits))[0])
        low, high = (middle, high) if token < rare else (low, middle)
    return low


def test_what_has_no_weight_is_never_drawn():
    rng = np.random.default_rng(0)
    logits = np.full((4096, 200), -np.inf, np.float32)
    allowed = rng.integers(0, 200, 4096)
    logits[np.arange(4096), allowed] = rng.normal(size=4096)
    bits = rng.integers(0, 2**32, (4096, 4), dtype=np.uint32)
    bits[:4] = [
        [0] * 4,
        [2**32 - 1] * 4,
        [0, 0, 2**32 - 1, 2**32 - 1],
        [2**32 - 1, 2**32 - 1, 0, 0],
    ]
    np.testing.assert_array_equal(drawn(jnp.asarray(logits), jnp.asarray(bits)), allowed)


@pytest.mark.parametrize("calls", each([2, 32]))
def test_many_draws_have_the_distribution(calls):
    """Chi-square over up to two million draws from 48 tokens, some of them of 1e-6."""
    rng = np.random.default_rng(1)
    logits = np.concatenate([rng.normal(size=28) * 2, np.full(20, -11.0)]).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    rows = 2**16

    @jax.jit
    def count(seed):
        keys = jax.random.split(jax.random.key(seed), rows)
        tokens = drawn(
            jnp.broadcast_to(jnp.asarray(logits), (rows, 48)),
            random_bits(keys, jnp.full(rows, 3, jnp.int32)),
        )
        return jnp.bincount(tokens, length=48)

    seen = sum(np.asarray(count(seed), np.int64) for seed in range(calls))
    expected = p * seen.sum()
    chi = np.sum((seen - expected) ** 2 / expected)
    assert chi < 47 + 4 * np.sqrt(2 * 47)


def test_bits_depend_on_the_key_and_the_position_of_the_row_alone():
    keys = jax.random.split(jax.random.key(0), 4)
    positions = jnp.array([0, 1, 2, 3], jnp.int32)
    together = random_bits(keys, positions)
    assert len(np.unique(np.asarray(together))) == 16
    for i in range(4):
        alone = random_bits(keys[i : i + 1], positions[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])
    assert np.all(np.asarray(random_bits(keys, positions + 1)) != np.asarray(together))


@partial(jax.jit, static_argnames="mesh")
def chosen(logits, sampling, keys, seen, mesh):
    return next_token(logits, sampling, keys, jnp.arange(len(logits)), (seen,), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", each([9504, 1000, 4800], default=1))
@pytest.mark.parametrize(
    "axes", each([{"fsdp": 2, "tensor": 4}, {"data": 2, "tensor": 2}, {"data": 8}], default=1)
)
def test_devices_that_split_the_vocabulary_choose_what_one_does(vocab, axes):
    """9504 columns are 74.25 blocks of 128, so that blocks lie on two devices of four."""
    rng = np.random.default_rng(0)
    rows = 40
    logits = (rng.normal(size=(rows, vocab)) * 4).astype(np.float32)
    logits[:, ::7] = -np.inf
    logits[3] = np.nan
    keys = jax.random.split(jax.random.key(0), rows)
    seen = jnp.asarray(rng.integers(0, vocab + 1, (rows, 9)), jnp.int32)
    mesh = make_mesh(**axes)
    settings = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}]
    for case in [*settings, {"repetition_penalty": 1.3}, {"top_k": 7, "repetition_penalty": 0.7}]:
        sampling = traced_sampling(Sampling(**case))
        one, many = (chosen(logits, sampling, keys, seen, where) for where in (None, mesh))
        np.testing.assert_array_equal(np.delete(one.token, 3), np.delete(many.token, 3), str(case))
        assert ((many.token >= 0) & (many.token < vocab)).all()
        for name in ("logprob", "sampling_logprob"):
            expected, got = getattr(one, name), getattr(many, name)
            np.testing.assert_allclose(got, expected, atol=2e-6, err_msg=f"{case} {name}")
            assert np.isnan(got[3]) and np.isfinite(np.delete(got, 3)).all()


NONE = ("top_k", "top_p", "min_p", "repetition_penalty")


@pytest.mark.parametrize(
    ("case", "unused"),
    [
        ({}, NONE),
        ({"top_k": -1, "temperature": 0, "stop_tokens": [3]}, NONE),
        ({"top_k": 5}, NONE[3:]),
        ({"top_p": 0.9}, NONE[3:]),
        ({"min_p": 0.1}, NONE[3:]),
        ({"repetition_penalty": 1.1}, NONE[:3]),
        ({"min_p": jnp.float32(0)}, NONE[3:]),
        ({"repetition_penalty": jnp.float32(1)}, NONE[:3]),
    ],
)
def test_what_is_not_in_use_is_none(case, unused):
    """A value on a device is not looked at."""
    sampling = traced_sampling(Sampling(**case))
    assert tuple(name for name in sampling._fields if getattr(sampling, name) is None) == unused


def test_only_what_is_in_use_is_compiled():
    logits, keys = jnp.zeros((3, 9504)), jax.random.split(jax.random.key(0), 3)
    seen = jnp.zeros((3, 1), jnp.int32)

    def lines(**case):
        sampling = traced_sampling(Sampling(**case))
        return chosen.lower(logits, sampling, keys, seen, None).as_text().count("\n")

    free, penalised, filtered = lines(), lines(repetition_penalty=1.1), lines(top_p=0.9)
    assert free < penalised < filtered < lines(repetition_penalty=1.1, min_p=0.1)
    assert filtered > 1.5 * free


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_filters_that_keep_all_and_a_penalty_of_one_change_nothing(temperature):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(40, 300)) * 3, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 40)
    seen = jnp.asarray(rng.integers(0, 301, (40, 9)), jnp.int32)
    expected = chosen(logits, traced_sampling(Sampling(temperature)), keys, seen, None)
    off = {"top_k": jnp.int32(0), "repetition_penalty": jnp.float32(1)}
    for case in (off, {"top_k": 300}, {"top_k": jnp.int32(-1)}, {"min_p": jnp.float32(0)}):
        actual = chosen(logits, traced_sampling(Sampling(temperature, **case)), keys, seen, None)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def compiled_choice(axes, rows=16, vocab=9504, **case):
    mesh = make_mesh(**axes)
    where = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), "tensor"))
    logits = jax.device_put(jnp.zeros((rows, vocab)), where)
    keys, seen = jax.random.split(jax.random.key(0), rows), jnp.zeros((rows, 1), jnp.int32)
    return chosen.lower(logits, traced_sampling(Sampling(**case)), keys, seen, mesh).compile()


def test_an_unfiltered_draw_gathers_no_logits():
    measured = costs(compiled_choice({"fsdp": 2, "tensor": 4}, rows=16, vocab=9504), 8)
    all_logits = 8 * 9504 * 4 * 3 / 4  # bytes that a device sends to gather the logits of its rows
    assert 0 < measured.wire < 0.3 * all_logits, measured


@pytest.mark.parametrize("case", [{}, {"top_p": 0.9}], ids=str)
def test_rows_are_filtered_where_they_are(case):
    text = compiled_choice({"data": 2, "fsdp": 4}, **case).as_text()
    assert "conditional(" in text
    assert not re.search(r" (all-gather|all-reduce|all-to-all|collective-permute)(-start)?\(", text)
