"""Packing: each token has one place, lines are full, and updates are what they are unpacked."""

import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.families import NAMES, config_of, each, nudged, params_of
from twinkle_jax.data import Batch
from twinkle_jax.loss import CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss
from twinkle_jax.model import LoraConfig, make_mesh, shard_like_params, with_adapter
from twinkle_jax.model.decoder.lora import init_adapter
from twinkle_jax.training import begin_training, grad_step, score_batch, train_state
from twinkle_jax.training.gradient import dropout_keys
from twinkle_jax.training.packing import assign_lines, pack, plan, unpack

LENGTHS = np.array([5, 17, 3, 9, 1, 20, 12, 6], np.int32)
TIME = 24
BUDGETS = {  # two devices take all lines at once
    "all at once": {"tokens": 4096, "shards": 2},
    "a line at a time": {"tokens": 64},
}


INSIDE = np.arange(TIME) < LENGTHS[:, None]


def random_batch(config):
    """Rows that begin in column 0, the first tokens of which are a prompt."""
    rng = np.random.default_rng(0)
    shape = (len(LENGTHS), TIME)
    labelled = INSIDE & (np.arange(TIME) >= LENGTHS[:, None] // 3)
    tokens, labels = rng.integers(1, config.vocab_size, (2, *shape))
    return Batch(
        tokens=jnp.asarray(np.where(INSIDE, tokens, 0), jnp.int32),
        labels=jnp.asarray(np.where(labelled, labels, -100), jnp.int32),
        advantages=jnp.asarray(rng.normal(size=shape), jnp.float32),
        old_logps=jnp.asarray(rng.normal(size=shape) - 4, jnp.float32),
        ref_logps=jnp.asarray(rng.normal(size=shape) - 4, jnp.float32),
    )


QWEN3 = config_of("qwen3")
BATCH = random_batch(QWEN3)


def parts(batch, **options):
    for members, packing in plan(LENGTHS, TIME, **options):
        labels = jnp.where(members[:, None], batch.labels, -100)
        yield batch._replace(labels=labels, rows=jnp.asarray(members)), packing


def first_line_with_room(lengths, width):
    lines = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fits = (x for x in lines if sum(lengths[i] for i in x) + lengths[row] <= width)
        line = next(fits, None)
        if line is None:
            lines.append([row])
        else:
            line.append(row)
    return lines


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n)))))
def test_a_row_goes_to_the_first_line_with_room(case):
    width, lengths = case
    lines = assign_lines(np.asarray(lengths, np.int32), width)
    assert lines == first_line_with_room(lengths, width)


def test_a_data_set_is_dealt_in_seconds():
    """All its rows at once, as `pack_features` does; it took two minutes."""
    lengths = np.random.default_rng(0).integers(100, 2000, 100_000).astype(np.int32)
    began = time.process_time()
    lines = assign_lines(lengths, 2048)
    assert time.process_time() - began < 20
    assert sorted(row for line in lines for row in line) == list(range(len(lengths)))


@given(
    st.lists(st.integers(1, 90), min_size=2, max_size=40).map(lambda x: x[: len(x) // 2 * 2]),
    st.integers(1, 4),
    st.integers(1, 400),
    st.booleans(),
)
def test_rows_of_a_pair_share_a_micro_batch(lengths, shards, tokens, several):
    """In one line, or in two lines of a micro-batch that is no larger than it has to be."""
    lengths = np.asarray(lengths, np.int32)
    together = {"tokens": tokens, "shards": shards, "several": several, "together": 2}
    seen, rows_of_lines = np.zeros(len(lengths), int), []
    for members, packing in plan(lengths, int(lengths.max()), **together):
        np.testing.assert_array_equal(members[::2], members[1::2])
        seen += members
        lines, width = packing.sources.shape
        for row in np.flatnonzero(members):
            places = packing.places[row, : lengths[row]]
            assert len(set(places // width)) == 1
        assert (packing.sources >= 0).sum() == lengths[members].sum()
        assert lines % shards == 0
        smallest = width if several else 2 * width
        assert lines * width <= max(tokens, smallest) * shards
        for line in packing.sources:
            rows_of_lines.append(len(set(line[line >= 0] // int(lengths.max()))))
    assert (seen == 1).all()
    if not several:
        assert max(rows_of_lines) == 1


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 400)
)
def test_each_token_has_one_place_of_its_own(lengths, shards, tokens):
    lengths = np.asarray(lengths, np.int32)
    time = int(lengths.max())
    seen = np.zeros(len(lengths), int)
    for members, packing in plan(lengths, time, tokens=tokens, shards=shards):
        seen += members
        assert len(packing.sources) % shards == 0
        assert packing.sources.size <= max(tokens, packing.sources.shape[1]) * shards
        for row in np.flatnonzero(members):
            places = packing.places[row, : lengths[row]]
            expected = row * time + np.arange(lengths[row])
            np.testing.assert_array_equal(packing.sources.reshape(-1)[places], expected)
            line = np.unique(places // packing.sources.shape[1])
            assert len(line) == 1
            segment = np.unique(packing.segment_ids.reshape(-1)[places])
            assert len(segment) == 1 and segment[0] > 0
            positions = packing.positions.reshape(-1)[places]
            np.testing.assert_array_equal(positions, np.arange(lengths[row]))
        assert (packing.places[~members] == -1).all()
        assert (packing.sources >= 0).sum() == lengths[members].sum()
    assert (seen == 1).all()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_lines_are_nearly_full(lengths):
    """First fit of the longest first takes at most 11/9 of the best, and one line more."""
    lengths = np.asarray(lengths, np.int32)
    lines = assign_lines(lengths, 64)
    assert sorted(row for line in lines for row in line) == list(range(len(lengths)))
    assert all(lengths[line].sum() <= 64 for line in lines)
    # No two lines could be one: so all but one are more than half full.
    fill = sorted(int(lengths[line].sum()) for line in lines)
    assert len(fill) < 2 or fill[0] + fill[1] > 64


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=200), st.integers(1, 4), st.integers(1, 2000)
)
def test_micro_batches_have_one_shape_and_few_empty_lines(lengths, shards, tokens):
    """Fewer than eight of them if the budget allows, or on several devices as few as it allows."""
    lengths = np.asarray(lengths, np.int32)
    packings = [p for _, p in plan(lengths, int(lengths.max()), tokens=tokens, shards=shards)]
    lines, width = packings[0].sources.shape
    assert {p.sources.shape for p in packings} == {(lines, width)}
    used = sum(int((p.sources >= 0).any(1).sum()) for p in packings)
    most = max(tokens // width, 1) * shards
    needed = -(-used // most)
    assert len(packings) == needed or (shards == 1 and len(packings) < max(8, needed + 1))
    # A bucket is at most a quarter more than its share, and a multiple of the devices.
    unevenly_full = most if used >= 4 * most else len(packings) * shards
    assert lines * len(packings) <= max(used * 5 / 4, used + unevenly_full)


@pytest.mark.parametrize(
    ("rows", "budget", "devices", "shapes"),
    [
        (16, 64, 1, [4] * 4),
        (31, 64, 1, [4] * 8),  # the largest power of two of which there are at least four
        (32, 64, 1, [8] * 4),
        (3, 64, 1, [1] * 3),
        (16, 2, 1, [2] * 8),  # the budget is what memory holds
        (49, 12, 1, [12] * 5),
        (17, 8, 2, [10, 10]),  # not twice the budget: 9 each, rounded up to a bucket
        (9, 5, 2, [10]),
        (33, 32, 2, [40]),  # four buckets for each doubling: not 48
        (80, 8, 2, [16] * 5),
    ],
)
def test_lines_of_micro_batches_worked_by_hand(rows, budget, devices, shapes):
    lengths = np.full(rows, 64, np.int32)
    packings = [packing for _, packing in plan(lengths, 64, tokens=64 * budget, shards=devices)]
    assert [packing.sources.shape for packing in packings] == [(lines, 64) for lines in shapes]


@pytest.mark.parametrize(("mean", "room", "most"), [(32, 256, 7), (128, 1024, 8), (1024, 8192, 8)])
def test_shapes_of_a_run_are_few(mean, room, most):
    """A hundred steps of 64 completions of geometric length; each shape is compiled."""
    rng = np.random.default_rng(0)
    shapes, places, tokens = set(), 0, 0
    for _ in range(100):
        lengths = (15 + np.minimum(rng.geometric(1 / mean, 64), room)).astype(np.int32)
        packings = [packing for _, packing in plan(lengths, int(lengths.max()), tokens=16_384)]
        shapes |= {packing.sources.shape for packing in packings}
        places += sum(packing.sources.size for packing in packings)
        tokens += lengths.sum()
    assert len(shapes) <= most
    assert places < 1.15 * tokens


def test_narrow_lines_are_a_multiple_too():
    """Of the devices that share a line: the bucket of 33 is 40."""
    packings = [p for _, p in plan(np.full(6, 33, np.int32), 33, tokens=16_384, multiple=16)]
    assert {packing.sources.shape for packing in packings} == {(1, 48)}


@pytest.mark.parametrize(
    ("length", "width"), [(33, 40), (48, 48), (49, 56), (100, 112), (600, 640)]
)
def test_rows_that_share_no_line_have_narrow_ones(length, width):
    """Completions that all run to the limit: a line of 64 or 768 places would be half empty."""
    lengths = np.full(6, length, np.int32)
    packings = [packing for _, packing in plan(lengths, length, tokens=16_384)]
    assert {packing.sources.shape for packing in packings} == {(1, width)}


def test_lines_are_no_wider_than_the_budget():
    """Which is what memory holds; rows of 33 and 30 tokens would share a line of 64."""
    packings = [packing for _, packing in plan(np.array([33, 30], np.int32), 33, tokens=40)]
    assert [packing.sources.shape for packing in packings] == [(1, 40)] * 2


def test_without_packing_rows_of_similar_lengths_share_a_micro_batch():
    packings = [packing for _, packing in plan(LENGTHS, TIME, tokens=48, several=False)]
    widths = [packing.sources.shape[1] for packing in packings]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 16 < widths[0] == 24
    assert all(packing.segment_ids is None for packing in packings)


def test_what_is_packed_comes_back():
    places, back = 0, np.zeros(BATCH.tokens.shape)
    for _, packing in plan(LENGTHS, TIME, tokens=4096):
        lines = pack(BATCH, packing)
        places += lines.tokens.size
        back += unpack(lines.tokens.astype(jnp.float32), packing)
    np.testing.assert_array_equal(back, np.where(INSIDE, BATCH.tokens, 0))
    assert places < BATCH.tokens.size * 3 / 4


def tolerance(expected, moved, scale=1.0):
    """Return 1e-5, or four times what one rounding of the embeddings changes, if that is more.

    Linear attention normalises what a head reads, which is nearly nothing where query and key are
    nearly orthogonal.
    """
    changes = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), expected, moved)
    return max(1e-5 * scale, *(4 * change for change in jax.tree.leaves(changes)))


@pytest.mark.parametrize("name", each(NAMES))
@pytest.mark.parametrize("budget", BUDGETS)
def test_scores_are_what_they_are_unpacked(name, budget):
    config, params = config_of(name), params_of(name)
    batch = random_batch(config)
    expected = score_batch(params, batch, config, with_entropy=True)
    moved = score_batch(nudged(params), batch, config, with_entropy=True)
    logps, entropies = jnp.zeros((8, TIME)), jnp.zeros((8, TIME))
    for part, packing in parts(batch, **BUDGETS[budget]):
        scores = score_batch(params, part, config, with_entropy=True, packing=packing)
        logps, entropies = logps + scores.logps, entropies + scores.entropies
    most = tolerance((expected.logps, expected.entropies), (moved.logps, moved.entropies))
    np.testing.assert_allclose(logps, expected.logps, rtol=2e-6, atol=most)
    np.testing.assert_allclose(entropies, expected.entropies, rtol=2e-6, atol=most)


LOSSES = {
    "tokens": GRPOLoss(beta=0.1),
    "sequences": GSPOLoss(),
    "constant": DRGRPOLoss(max_completion_length=9),
    "detached": CISPOLoss(),
}


@pytest.mark.parametrize("name", each(NAMES))
@pytest.mark.parametrize(
    "loss",
    [x if x == "sequences" else pytest.param(x, marks=pytest.mark.exhaustive) for x in LOSSES],
)
def test_gradients_sums_and_metrics_are_what_they_are_unpacked(name, loss):
    config, params = config_of(name), params_of(name)
    batch = random_batch(config)._replace(rows=jnp.ones(8, bool))
    fresh, moved, state = (
        train_state(jax.tree.map(jnp.copy, x)) for x in (params, nudged(params), params)
    )
    expected, summary = grad_step(fresh, batch, config, LOSSES[loss])
    moved, moved_summary = grad_step(moved, batch, config, LOSSES[loss])
    total = 0.0
    for part, packing in parts(batch, **BUDGETS["a line at a time"]):
        state, part_summary = grad_step(state, part, config, LOSSES[loss], packing=packing)
        total += float(part_summary.loss_sum)
    whole = summary.loss_sum
    most = tolerance(whole, moved_summary.loss_sum, 10 * abs(float(whole)))
    assert total == pytest.approx(float(whole), rel=0, abs=most)
    assert (state.denominator, state.tokens) == (expected.denominator, expected.tokens)
    wanted = expected.gradient_sum
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(wanted))
    most = tolerance(wanted, moved.gradient_sum, max(largest, 1.0))
    chex.assert_trees_all_close(state.gradient_sum, wanted, atol=most)


@pytest.mark.exhaustive
def test_a_mesh_changes_nothing():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    states = []
    for devices, shards in ((None, 1), (mesh, 4)):
        params = jax.tree.map(jnp.copy, params_of("qwen3"))
        state = begin_training(params, optax.sgd(1.0), devices)
        for part, packing in parts(BATCH, tokens=64, shards=shards, multiple=2):
            state, _ = grad_step(
                state, part, QWEN3, LOSSES["tokens"], packing=packing, mesh=devices
            )
        states.append(jax.device_get(state.gradient_sum))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5), *states)


# Dropout of adapters: a token's mask depends on its row and its place in the row.

LORA = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)
ROW_KEYS = jax.random.split(jax.random.key(3), len(LENGTHS))


def keys_of(key, seen=0, packing=None, padding=None):
    lines = BATCH if packing is None else pack(BATCH, packing)
    rows = jnp.arange(len(LENGTHS)) != (-1 if padding is None else padding)
    keys = dropout_keys(key, jnp.int32(seen), rows, lines, packing)
    return np.asarray(jax.random.key_data(keys)).reshape(-1, 2)


@pytest.mark.parametrize(
    "key",
    [ROW_KEYS, jax.random.key(3), jax.random.key(3, impl="rbg")],
    ids=["of rows", "root", "rbg"],
)
def test_each_token_has_a_dropout_key_of_its_own_and_keeps_it_in_lines(key):
    expected = keys_of(key)
    assert len({tuple(x) for x in expected}) == BATCH.tokens.size
    for _, packing in plan(LENGTHS, TIME, tokens=64):
        sources = packing.sources.reshape(-1)
        keys = keys_of(key, packing=packing)
        np.testing.assert_array_equal(keys[sources >= 0], expected[sources[sources >= 0]])


def test_dropout_keys_go_on_with_the_rows_that_were_seen():
    first, later = (keys_of(jax.random.key(3), seen) for seen in (0, 3))
    np.testing.assert_array_equal(first[3 * TIME :], later[: -3 * TIME])
    padded = keys_of(jax.random.key(3), padding=2)  # which is no row of the run
    np.testing.assert_array_equal(padded[3 * TIME :], first[2 * TIME : -TIME])


def adapter_gradient(batches, mesh=None, key=ROW_KEYS, **options):
    adapter = init_adapter(jax.random.key(1), QWEN3, LORA)
    # B is 0 at the start, so that A would have no gradient.
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)
    frozen = with_adapter(params_of("qwen3"), QWEN3, LORA)
    if mesh is not None:
        frozen = jax.device_put(frozen, shard_like_params(frozen, mesh))
    state = begin_training(adapter, None, mesh)
    for batch, packing in batches:
        state, _ = grad_step(
            state, batch, QWEN3, GSPOLoss(), frozen=frozen, key=key, packing=packing, mesh=mesh,
            **options,
        )  # fmt: skip
    return jax.device_get(state.gradient_sum)


def assert_same_gradient(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.fixture(scope="module")
def unpacked_gradient():
    return adapter_gradient([(BATCH, None)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    each([BUDGETS["a line at a time"], BUDGETS["all at once"], {"tokens": 48, "several": False}]),
    ids=str,
)
def test_dropout_is_what_it_is_unpacked(unpacked_gradient, cut):
    assert_same_gradient(adapter_gradient(parts(BATCH, **cut)), unpacked_gradient)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("tensor", each([2, 1]))
def test_dropout_is_the_same_on_a_mesh(unpacked_gradient, tensor, packed):
    batches = parts(BATCH, tokens=64, shards=4, multiple=2) if packed else [(BATCH, None)]
    mesh, transfers = make_mesh(data=2, fsdp=2, tensor=tensor), "once" if tensor == 1 else "layers"
    got = adapter_gradient(batches, mesh, transfers=transfers)
    assert_same_gradient(got, unpacked_gradient)


@pytest.mark.exhaustive
def test_dropout_is_the_same_with_padding_in_front(unpacked_gradient):
    order = (np.arange(TIME)[None] + LENGTHS[:, None]) % TIME  # padding, then the tokens
    names = ("tokens", "labels", "advantages", "old_logps", "ref_logps")
    moved = {x: jnp.take_along_axis(getattr(BATCH, x), order, axis=1) for x in names}
    batch = BATCH._replace(mask=jnp.asarray(order < LENGTHS[:, None]), **moved)
    assert_same_gradient(adapter_gradient([(batch, None)]), unpacked_gradient)


@pytest.mark.slow
def test_rows_of_the_next_call_drop_other_inputs():
    key = jax.random.key(3)
    once, twice = (adapter_gradient([(BATCH, None)] * calls, key=key) for calls in (1, 2))
    for one, both in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        assert np.abs(both - 2 * one).max() > 0.01 * np.abs(one).max()
