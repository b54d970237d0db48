"""Slots that are filled again: the same completions, row by row, as without them."""

import dataclasses
import functools
import sys
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import NAMES, batch, config_of, each, fill, params_of
from tests.sampler.completions import PROMPTS
from twinkle_jax.model import Cache, Pages, make_mesh, unstack_layers
from twinkle_jax.model.decoder import attention
from twinkle_jax.model.decoder.pages import (
    empty_pages,
    finite_values,
    keep_rows,
    put_in_pages,
    release,
    release_prompts,
)
from twinkle_jax.sampler import Sampling, generate, generate_many
from twinkle_jax.sampler import sizes as sampler_sizes
from twinkle_jax.sampler import slots as sampler_slots

generate_module = sys.modules["twinkle_jax.sampler.generate"]  # the function hides it
ROOM = 16  # that prompts are padded to; the first has as many tokens, so that its row gets full


def both(name, *, sampling=None, limits=None, params=None, last=range(3), **options):
    sampling = Sampling() if sampling is None else sampling
    prompts = [[*prompt, i] for i in last for prompt in PROMPTS]
    prompts[0] = [*range(20, 20 + ROOM - len(prompts[0])), *prompts[0]]
    shared = {"num_samples": 2, "max_new_tokens": 12, "max_tokens": limits}
    config, params = config_of(name), params_of(name) if params is None else params
    tokens = batch(prompts, ROOM, "right")
    one_batch = generate(params, config, *tokens, jax.random.key(0), sampling, **shared)
    by_slots = generate_many(
        params, config, prompts, jax.random.key(0), sampling, **shared, **options
    )
    return one_batch, by_slots


def assert_same(one_batch, by_slots):
    for name in ("tokens", "mask", "lengths", "finish_reasons"):
        np.testing.assert_array_equal(
            getattr(by_slots, name), getattr(one_batch, name), err_msg=name
        )
    for name in ("logprobs", "sampling_logprobs"):
        np.testing.assert_allclose(getattr(by_slots, name), getattr(one_batch, name), atol=1e-4)


@pytest.mark.parametrize("name", each(NAMES))
def test_slots_give_what_one_batch_gives(name):
    limits = np.random.default_rng(0).integers(1, 13, 24)
    limits[:2] = 12
    sampling = Sampling(0.9, top_p=0.95, repetition_penalty=1.1, stop_tokens=[3, 9])
    one_batch, by_slots = both(name, sampling=sampling, limits=limits, slots=5, refill=2)
    assert_same(one_batch, by_slots)
    # The first rows of these meet a stop token earlier.
    if name not in ("qwen3_5_text", "gemma4_text", "ministral3", "deepseek_v3"):
        assert 12 in one_batch.lengths[:2]


def lengthy(how, **options):
    """32 rows of 1 to 100 tokens."""
    prompts = [[*prompt, i] for i in range(4) for prompt in PROMPTS]
    return how(
        params_of("qwen3"),
        config_of("qwen3"),
        *batch(prompts, 16, "right"),
        jax.random.key(0),
        Sampling(0.9, stop_tokens=[3, 9]),
        num_samples=2,
        max_new_tokens=100,
        **options,
    )


def in_one_program(params, *args, **options):
    return jax.jit(lambda params: generate(params, *args, **options))(params)


@pytest.fixture
def sizes(monkeypatch):
    """Records slots and capacity of each run of the loop."""
    seen, run = [], generate_module._run

    def recorded(weights, state, *args, capacity, **options):
        seen.append((len(state.slots.row), capacity))
        layers = [x for layer in state.slots.cache.layers for x in layer.values()]
        assert {x.keys.shape[-1] for x in layers} == {capacity}
        return run(weights, state, *args, capacity=capacity, **options)

    monkeypatch.setattr(generate_module, "_run", recorded)
    return seen


@pytest.mark.slow
def test_rows_that_go_on_leave_the_others_behind_and_caches_grow(sizes, compilations):
    alone = lengthy(generate)
    lengths = np.sort(alone.lengths)
    assert lengths[-1] == 100 and lengths[0] < 5
    rows, capacities = zip(*sizes, strict=True)
    assert sizes[0] == (32, 64) and capacities[-1] == 115  # all of prompt and room
    assert set(rows) == {32, 16, 8} and set(capacities) == {64, 115}
    assert list(rows) == sorted(rows, reverse=True) and list(capacities) == sorted(capacities)
    assert_same(lengthy(in_one_program), alone)
    sizes.clear()
    assert_same(alone, lengthy(generate, slots=16, refill=4))
    assert set(sizes) <= {(n, c) for n in (16, 8) for c in (64, 115)} and len(sizes) > 5
    compilations.clear()
    lengthy(generate, slots=16, refill=4, max_tokens=90)
    assert not compilations  # for other lengths within the same sizes


@pytest.mark.slow
@pytest.mark.parametrize("axes", each([{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]), ids=str)
def test_eight_devices_exchange_rows_by_themselves(axes, sizes):
    alone, mesh = lengthy(generate), make_mesh(**axes)
    sizes.clear()
    assert_same(alone, lengthy(generate, mesh=mesh, slots=16, refill=8))
    assert set(sizes) == {(16, 64), (16, 115)} and len(sizes) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_a_long_prompt_that_waits_for_short_rows_is_read_whole(name):
    """Caches are cut to what running rows need, but not below what waits."""
    prompts = [[i + 1] * (130 if i % 5 == 1 else 2) for i in range(12)]
    limits = [1 + i % 3 for i in range(12)]
    arguments = (params_of(name), config_of(name), *batch(prompts, 131, "right"), jax.random.key(0))
    shared = {"max_new_tokens": 60, "max_tokens": np.asarray(limits)}
    one_batch = generate(*arguments, **shared)
    for slots in (1, 2):
        assert_same(one_batch, generate(*arguments, **shared, slots=slots))


@pytest.fixture
def prefilled(monkeypatch):
    """Counts the prompts of each prefill that runs, over all devices."""
    counts, prefill = [], sampler_slots.prefill

    def counted(weights, config, tokens, *args, **options):
        count = len(tokens)
        jax.debug.callback(lambda: counts.append(count))
        return prefill(weights, config, tokens, *args, **options)

    jax.clear_caches()
    monkeypatch.setattr(sampler_slots, "prefill", counted)
    yield counts
    monkeypatch.undo()
    jax.clear_caches()


def groups(count, samples, limits, **options):
    """Completions of `count` prompts of different lengths; limits of each prompt or row."""
    return generate(
        params_of("qwen3"),
        config_of("qwen3"),
        *batch([[i + 1] * (1 + i % 7) for i in range(count)], 8, "right"),
        jax.random.key(0),
        Sampling(0.9),
        num_samples=samples,
        max_new_tokens=12,
        max_tokens=np.asarray(limits),
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "refill", "shards", "most"),
    [
        (8, 1, 1, 16),
        pytest.param(10, 3, 1, 16, marks=pytest.mark.exhaustive),
        pytest.param(16, 8, 8, 24, marks=pytest.mark.exhaustive),
    ],
)
def test_the_prompt_of_a_group_is_read_once(slots, refill, shards, most, prefilled):
    """On one device exactly; of eight, which read together, some read a little for nothing."""
    mesh = make_mesh(fsdp=shards) if shards > 1 else None
    limits = np.random.default_rng(0).integers(1, 13, 64)
    by_slots = groups(16, 4, limits, slots=slots, refill=refill, mesh=mesh)
    jax.effects_barrier()
    assert 16 <= sum(prefilled) <= most
    assert_same(groups(16, 4, limits), by_slots)


@pytest.mark.slow
def test_a_device_that_reads_ahead_keeps_the_prompts_that_it_needs():
    """The rows of the first device end at once; its prompts make the second read ahead."""
    limits = [1] * 8 + [12] * 8
    options = {"slots": 8, "refill": 1, "mesh": make_mesh(fsdp=2)}
    assert_same(groups(16, 4, limits), groups(16, 4, limits, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "samples", "limits", "slots", "refill", "shards"),
    [
        # The second device has rows 5 to 9: one of prompt 1 and one of prompt 3, which come first.
        (6, 3, [7, 12, 8, 11, 7, 7], 12, 3, 4),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                # A padding row, whose prompt is the longest, is no obstacle.
                (5, 1, [1, 1, 1, 1, 5], 2, 2, 2),
                # A short group in between: six rows have three prompts.
                (9, 3, [7] * 4 + [10, 12, 11, 9, 8], 10, 6, 2),
            ]
        ),
    ],
)
def test_groups_that_do_not_end_with_their_device(count, samples, limits, slots, refill, shards):
    options = {"slots": slots, "refill": refill, "mesh": make_mesh(fsdp=shards)}
    assert_same(groups(count, samples, limits), groups(count, samples, limits, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("slots", [1, 24, 40])
def test_any_number_of_slots_will_do(slots):
    assert_same(*both("qwen2", slots=slots))


@pytest.mark.exhaustive
def test_a_row_of_linear_layers_fills_its_slot_too():
    one_batch, by_slots = both("qwen3_5_text", slots=5)  # without stop tokens
    assert_same(one_batch, by_slots)
    assert 12 in one_batch.lengths[:2]


@pytest.mark.exhaustive
def test_slots_are_spread_over_eight_devices():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    assert_same(*both("qwen3", slots=8, limits=np.arange(24) % 12 + 1, mesh=mesh))


# Rows in pages.


class Seen(NamedTuple):
    """Of a call of `run`: slots, pages of rows and of prompts, and how many of both are needed."""

    rows: int
    capacity: int
    prompt_pages: int
    needed: int
    prompts_needed: int


@pytest.fixture
def pages(monkeypatch):
    """Pages of 16 tokens; records what is seen in each run."""
    seen, run = [], generate_module._run

    def recorded(weights, state, *args, capacity, setup, **options):
        rows, owner = len(state.slots.row), state.slots.cache.pages.owner
        window_pages = state.slots.cache.window_pages
        assert setup == setup.in_pages(options["full"])
        assert (window_pages is None) == (setup.window_pages is None)
        if window_pages is not None:
            share = rows // setup.shards
            bound = setup.pages_of_sliding(share, capacity)
            assert len(window_pages.owner) == bound * setup.shards
            counts = np.bincount(window_pages.owner, minlength=share + 1)[:share]
            assert setup.shards > 1 or counts.max() <= setup.window_pages
        assert len(owner) == capacity * setup.shards
        shared = state.slots.cache.prompt_pages
        prompt_pages = 0 if shared is None else len(shared.prompt) // setup.shards
        state, status = run(weights, state, *args, capacity=capacity, setup=setup, **options)
        needed = int(status.pages), int(status.prompt_pages)
        seen.append(Seen(rows, capacity, prompt_pages, *needed))
        assert needed[1] <= prompt_pages
        return state, status

    monkeypatch.setattr(sampler_sizes, "_PAGE", {"cpu": 16, "gpu": 16})
    monkeypatch.setattr(sampler_sizes, "_SHORT", 0)
    monkeypatch.setattr(generate_module, "_run", recorded)
    return seen


@functools.cache
def of_whole_rows(draw, *arguments, **options):
    """What is drawn without pages, which several tests compare with."""
    return jax.device_get(draw(*arguments, **options))


def rows_of_different_lengths(name="qwen3", config=None, **options):
    """24 rows of 1 to 40 tokens behind prompts of 1 to 20; one is as long as it can get."""
    prompts = [[i + 1] * (1 + 19 * i // 11) for i in range(12)]
    limits = np.random.default_rng(0).geometric(1 / 8, 24).clip(1, 40)
    limits[-1] = 40
    return generate(
        params_of(name),
        config_of(name) if config is None else config,
        *batch(prompts, 20, "right"),
        jax.random.key(0),
        Sampling(0.9),
        num_samples=2,
        max_new_tokens=40,
        max_tokens=limits,
        **options,
    )


@pytest.fixture
def in_a_stack(monkeypatch):
    """Layers lie in one stack, as on a TPU; what is compiled meanwhile is forgotten."""
    unstack = mock.Mock(side_effect=unstack_layers)
    monkeypatch.setattr(sampler_slots, "backend_of", lambda mesh: "tpu")
    monkeypatch.setattr(sampler_slots, "unstack_layers", unstack)
    jax.clear_caches()
    yield
    jax.clear_caches()
    unstack.assert_not_called()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_pages_of_a_gpu_get_the_same(name, request, monkeypatch):
    """A GPU sums up a page in one pass."""
    expected = of_whole_rows(rows_of_different_lengths, name)
    pages = request.getfixturevalue("pages")
    monkeypatch.setattr(attention, "backend_of", lambda mesh: "gpu")
    jax.clear_caches()
    assert_same(expected, rows_of_different_lengths(name, slots=5, refill=2))
    jax.clear_caches()
    assert pages


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_pages_get_the_same_where_layers_lie_in_a_stack(name, request):
    expected = of_whole_rows(rows_of_different_lengths, name)
    pages = request.getfixturevalue("pages")
    request.getfixturevalue("in_a_stack")
    assert_same(expected, rows_of_different_lengths(name, slots=5, refill=2))
    assert pages


@pytest.mark.slow
@pytest.mark.parametrize("name", each(NAMES, 2))
def test_rows_in_pages_get_what_whole_rows_get(name, request, compilations):
    expected = of_whole_rows(rows_of_different_lengths, name)
    pages = request.getfixturevalue("pages")
    assert_same(expected, rows_of_different_lengths(name, slots=5, refill=2))
    if name != "qwen3":
        return
    most = max(run.needed for run in pages)  # of 59 tokens, most rows have fewer than 20
    assert most < 5 * 4 * 3 / 4
    assert max(run.capacity + run.prompt_pages for run in pages) <= 20  # what all rows begin with
    compilations.clear()
    rows_of_different_lengths(name, slots=5, refill=2)
    assert not compilations
    pages.clear()
    assert_same(expected, rows_of_different_lengths(name))
    assert {run.rows for run in pages} == {24, 12}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen3", {"fsdp": 8}),
        *(
            pytest.param(name, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.exhaustive)
            for name in ("qwen3", "gpt_oss", "youtu")
        ),
    ],
    ids=str,
)
def test_each_device_has_pages_of_its_own(name, axes, request):
    expected = of_whole_rows(rows_of_different_lengths, name)
    pages = request.getfixturevalue("pages")
    assert_same(expected, rows_of_different_lengths(name, mesh=make_mesh(**axes), slots=8))
    assert len(pages) > 3


def test_rows_need_no_pages_for_tokens_behind_their_limit(pages, monkeypatch):
    """On a mesh the host looks every eight tokens; a row with fewer to come needs less room."""
    run = generate_module._run

    def counted(*args, **options):
        assert len(pages) < 10  # there was never enough room, and no end
        return run(*args, **options)

    monkeypatch.setattr(generate_module, "_run", counted)
    # Two pages each: 15 tokens of a prompt behind its full page, and 17 new ones.
    drawn = generate(
        params_of("qwen3"),
        config_of("qwen3"),
        *batch([[1] * 32, [2] * 48], 48, "right"),
        jax.random.key(0),
        num_samples=2,
        max_new_tokens=17,
        mesh=make_mesh(data=2),
    )
    assert drawn.lengths.tolist() == [17] * 4
    assert max(seen.capacity for seen in pages) == 2 * 2


def long_groups(name="qwen3", config=None, samples=4, **options):
    """Groups of prompts of 0 to 3 full pages and completions of 1 to 40 tokens."""
    lengths = [33, 17, 49, 5, 16, 34, 48]
    limits = np.random.default_rng(1).geometric(1 / 10, 7 * samples).clip(1, 40)
    return generate(
        params_of(name),
        config_of(name) if config is None else config,
        *batch([[i + 1] * length for i, length in enumerate(lengths)], 49, "right"),
        jax.random.key(0),
        Sampling(0.9),
        num_samples=samples,
        max_new_tokens=40,
        max_tokens=limits,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "refill"),
    [
        (10, 3),
        # The pages of a prompt are free before its next row comes; one group in all slots.
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [(1, 1), (3, 1)]),
    ],
)
def test_rows_of_a_group_share_the_pages_of_their_prompt(slots, refill, request):
    expected = of_whole_rows(long_groups)
    pages = request.getfixturevalue("pages")
    assert_same(expected, long_groups(slots=slots, refill=refill))
    # Ten rows have up to 3 full pages in their prompts: of at most 10 rows, in 4 groups or so.
    assert max(run.prompts_needed for run in pages) <= (14 if slots == 10 else 3 * slots)
    assert max(run.needed for run in pages) <= slots * 3 + 1  # the others: 40 tokens and a part


@pytest.mark.slow
def test_all_rows_of_all_groups_begin_with_the_pages_of_each_prompt_once(request):
    expected = of_whole_rows(long_groups)
    pages = request.getfixturevalue("pages")
    assert_same(expected, long_groups())
    assert pages[0].prompt_pages == 24  # for 7 prompts of 3 full pages
    assert 6 < pages[0].prompts_needed <= 2 + 1 + 3 + 1 + 2 + 3
    assert {run.rows for run in pages} == {28, 14}
    assert pages[-1].prompt_pages < pages[0].prompt_pages
    assert pages[-1].prompts_needed < pages[0].prompts_needed  # ended groups give theirs back


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "axes", "samples"),
    [
        ("qwen3", {"fsdp": 2}, 3),  # whose groups do not end with the devices
        ("qwen3", {"data": 2, "fsdp": 2, "tensor": 2}, 4),
        ("qwen2", {}, 4),
        ("qwen3_5_text", {}, 4),
        ("gemma3_text", {"fsdp": 2}, 4),
    ],
    ids=str,
)
def test_groups_on_meshes_share_pages_too(name, axes, samples, request):
    expected = long_groups(name, samples=samples)
    pages = request.getfixturevalue("pages")
    mesh = make_mesh(**axes) if axes else None
    assert_same(expected, long_groups(name, samples=samples, mesh=mesh, slots=12, refill=4))
    assert any(run.prompts_needed for run in pages)


@pytest.mark.exhaustive
def test_slots_wait_where_too_many_prompts_have_pages(request, monkeypatch):
    """Rows get no slots while the pages of their prompts would be beyond the bound."""
    expected = of_whole_rows(long_groups)
    pages = request.getfixturevalue("pages")
    assert_same(expected, long_groups(slots=4, refill=1))
    assert max(run.prompts_needed for run in pages) > 3
    monkeypatch.setattr(sampler_sizes, "_MOST_GROUPS", 0)  # beyond what the next rows need
    pages.clear()
    jax.clear_caches()
    assert_same(expected, long_groups(slots=4, refill=1))
    assert max(run.prompts_needed for run in pages) <= 3


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_pages_are_kept_free_for_the_prompts_of_the_next_rows(samples):
    group = np.repeat(range(9), [samples, 1, 1, *[samples] * 6])[samples - 1 :]
    for refill in range(1, 10):
        setup = sampler_sizes.Setup(None, samples, 40, refill, None, None, None, prompt_pages=5)
        assert setup.new_prompt_pages == 5 * len(set(group[:refill]))
        assert setup.new_prompt_pages <= setup.most_prompt_pages(refill)


PROMPT_PAGES = 6
put, free = jax.jit(put_in_pages, static_argnums=5), jax.jit(release_prompts)


def put_groups():
    """Four rows of three prompts in six slots, and one row that gets no slot."""
    config = config_of("qwen3")
    tokens = batch([[i] * n for i, n in ((1, 33), (2, 8), (3, 16))], 40, "right")
    _, prompts = fill(params_of("qwen3"), config, *tokens, max_length=40)
    sizes = {"rows": 6, "size": 16, "pages": 8, "prompt_pages": PROMPT_PAGES, "members": 3}
    sizes["max_length"] = 64
    source, slots = jnp.array([0, 0, 1, 2, 2]), jnp.array([4, 1, 0, 2, 6])
    cache = put(empty_pages(prompts, config, **sizes), prompts, source, slots, source + 7, config)
    return prompts, cache, config


def members(pages):
    return [sorted(row) for row in pages.members.tolist()]


def test_where_the_pages_of_groups_lie():
    prompts, cache, config = put_groups()
    shared = cache.prompt_pages
    assert shared.prompt.tolist() == [7, 7, 9, -1, -1, -1]
    assert shared.start[:3].tolist() == [0, 16, 0]
    assert shared.of_row.tolist() == [8, 7, 9, -1, 7, -1]
    assert members(shared) == [[1, 4, 6], [1, 4, 6], [2, 6, 6], *[[6, 6, 6]] * 3]
    pages = sorted(zip(cache.pages.owner.tolist(), cache.pages.start.tolist(), strict=True))
    assert pages[:4] == [(0, 0), (1, 32), (4, 32), (6, 0)]
    keys, held = prompts.layers["0"].keys, cache.layers["0"].keys
    np.testing.assert_array_equal(held[:, 1], keys[:, 0, ..., 16:32])
    np.testing.assert_array_equal(held[:, 2], keys[:, 2, ..., :16])
    for row, source in ((0, 1), (1, 0), (4, 0)):
        own = PROMPT_PAGES + cache.pages.owner.tolist().index(row)
        start = 32 if source == 0 else 0
        np.testing.assert_array_equal(held[:, own, ..., 0], keys[:, source, ..., start])
    # Of later rows one joins its group, one has a prompt that gets pages, and one has no slot.
    arrays = map(jnp.array, ([2, 0, 2], [3, 5, 6], [9, 5, 9]))
    more = put(cache, prompts, *arrays, config).prompt_pages
    assert more.prompt.tolist() == [7, 7, 9, 5, 5, -1]
    assert members(more)[2:5] == [[2, 3, 6], [5, 6, 6], [5, 6, 6]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_kernel", [True, False])
def test_rows_of_a_prompt_without_enough_pages_get_nan(in_kernel, request, monkeypatch):
    """The sizes that are chosen do not lead to it: prompts that need ten pages get four."""
    jax.clear_caches()
    expected = of_whole_rows(long_groups)
    request.getfixturevalue("pages")
    monkeypatch.setattr(attention, "_page_kernel_fits", lambda *_: in_kernel)
    monkeypatch.setattr(sampler_sizes, "first_prompt_pages", lambda *_: 4)
    monkeypatch.setattr(sampler_sizes, "next_prompt_pages", lambda *_: 4)
    drawn = long_groups(slots=28)
    is_lost = np.isnan(drawn.logprobs[:, 0])
    assert is_lost.any() and not is_lost.all()
    np.testing.assert_array_equal(drawn.tokens[~is_lost], expected.tokens[~is_lost])
    jax.clear_caches()


def test_the_pages_of_a_prompt_are_free_when_all_its_rows_have_ended():
    _, cache, _ = put_groups()
    pages = free(cache.prompt_pages, jnp.array([True, True, False, True, False, True]))
    assert pages.prompt.tolist() == [7, 7, -1, -1, -1, -1]
    assert pages.of_row.tolist() == [8, 7, -1, -1, -1, -1]
    assert members(pages)[0] == [1, 6, 6]
    pages = free(pages, jnp.zeros(6, bool))
    assert set(pages.prompt.tolist()) == {-1}


def test_rows_that_are_kept_keep_the_pages_of_their_prompt():
    """Pages of prompts in use lie behind free ones before."""
    _, cache, _ = put_groups()
    pages = free(cache.prompt_pages, jnp.array([True, True, False, True, True, True]))
    pages = pages._replace(prompt=pages.prompt[::-1], start=pages.start[::-1])
    values = cache.layers["0"].values
    layers = jax.tree.map(
        lambda x: jnp.concatenate([x[:, PROMPT_PAGES - 1 :: -1], x[:, PROMPT_PAGES:]], axis=1),
        cache.layers,
    )
    moved = cache._replace(layers=layers, prompt_pages=pages)
    keep = jax.jit(keep_rows, static_argnums=2, static_argnames="prompt_pages")
    kept = keep(moved, jnp.array([4, 0, 1]), 12, prompt_pages=3)
    shared, held = kept.prompt_pages, kept.layers["0"].values
    assert shared.prompt.tolist() == [7, 7, -1] and shared.start[:2].tolist() == [16, 0]
    assert members(shared)[:2] == [[0, 2, 3]] * 2
    np.testing.assert_array_equal(held[:, :2], values[:, 1::-1])
    assert held.shape[1] == 3 + 12 and kept.length.tolist() == [33, 8, 33]
    line, before = kept.pages.owner.tolist().index(1), cache.pages.owner.tolist().index(0)
    np.testing.assert_array_equal(held[:, 3 + line], values[:, PROMPT_PAGES + before])


def gemma(window, *kinds):
    """Layers of these kinds, sliding ones with this window."""
    config = config_of("gemma3_text")
    attention = dataclasses.replace(
        config.attention, window=dataclasses.replace(config.attention.window, size=window)
    )
    names = {"s": "sliding_attention", "f": "full_attention"}
    kinds = tuple(names[kind] for kind in kinds)
    return dataclasses.replace(config, attention=attention, layer_kinds=kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "kinds"),
    [
        (20, "sfs"),
        # Of one token only; a window that ends with a page; stacks of one kind.
        *(
            pytest.param(window, kinds, marks=pytest.mark.exhaustive)
            for window, kinds in [(1, "fss"), (16, "sff"), (17, "ssf"), (18, "sss"), (33, "fsf")]
        ),
    ],
)
@pytest.mark.parametrize("laid", each(["in a stack", "one by one"]))
def test_sliding_layers_keep_the_pages_of_their_window(window, kinds, laid, request):
    config = gemma(window, *kinds)
    expected = rows_of_different_lengths("gemma3_text", config)
    pages = request.getfixturevalue("pages")
    if laid == "in a stack":
        request.getfixturevalue("in_a_stack")
    by_slots = rows_of_different_lengths("gemma3_text", config, slots=5, refill=2)
    assert_same(expected, by_slots)
    assert_same(expected, rows_of_different_lengths("gemma3_text", config))
    assert pages


def test_of_a_prompt_sliding_layers_get_the_pages_of_the_window():
    """The next token of 47 sees token 31, which page 16 ends with; that of 48 does not."""
    config, tokens = gemma(17, *"sfs"), batch([[1] * n for n in (47, 48, 3)], 48, "right")
    _, rows = fill(params_of("gemma3_text"), config, *tokens, max_length=48)
    empty = empty_pages(rows, config, rows=3, size=16, pages=9, window_pages=6, max_length=64)
    cache = put(empty, rows, jnp.arange(3), jnp.array([2, 0, 1]), jnp.arange(3), config)

    def held(pages):
        return sorted((int(o), int(s)) for o, s in zip(*pages, strict=True) if o < 3)

    window = [(0, 32), (1, 0), (2, 16), (2, 32)]
    assert held(cache.window_pages) == window
    assert held(cache.pages) == sorted([*window, (0, 0), (0, 16), (2, 0)])
    layers = cache.layers["0"]
    assert layers.full.keys.shape[:2] == (1, 9) and layers.sliding.keys.shape[:2] == (2, 6)


def test_a_page_is_free_when_its_last_token_is_out_of_sight():
    pages = Pages(jnp.array([0, 0, 1, 2, 3]), jnp.array([0, 8, 0, 0, 0]))
    active = jnp.array([True, True, False])
    first = jnp.array([8, 7, 0])
    assert release(pages, active, first, size=8).owner.tolist() == [3, 0, 1, 3, 3]
    assert release(pages, active).owner.tolist() == [0, 0, 1, 3, 3]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes",
    [{"fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=str,
)
def test_sliding_layers_on_several_devices(axes, request):
    config = gemma(20, *"sfs")
    expected = rows_of_different_lengths("gemma3_text", config)
    pages = request.getfixturevalue("pages")
    mesh = make_mesh(**axes)
    assert_same(expected, rows_of_different_lengths("gemma3_text", config, mesh=mesh, slots=8))
    assert pages


def test_windows_as_long_as_the_rows_have_no_pages_of_their_own(pages):
    def setup(window):
        return sampler_sizes.Setup(gemma(window, *"sfs"), 1, 40, 1, None, None, None)

    assert setup(17).in_pages(59).window_pages == 2
    assert setup(18).in_pages(59).window_pages == 3
    assert setup(34).in_pages(59).window_pages is None  # four pages hold a whole row
    assert setup(17).in_pages(59).pages_of_sliding(8, 100) == 16
    assert setup(17).in_pages(59).pages_of_sliding(8, 10) == 10
    # Pages of prompts are no part of the capacity, but sliding layers hold their prompts' windows.
    shared = setup(17)._replace(num_samples=2).in_pages(59)
    assert shared.prompt_pages == 1 and shared.pages_of_sliding(8, 10) == 16


@pytest.mark.parametrize(
    ("needed", "most", "pages"),
    [(1, 99, 1), (7, 99, 7), (8, 99, 8), (9, 99, 10), (15, 99, 16), (17, 99, 20), (33, 36, 36)],
)
def test_pages_come_in_few_numbers(needed, most, pages):
    assert sampler_sizes.pages_for(needed, most) == pages


@pytest.mark.exhaustive
def test_a_row_of_nan_leaves_nothing_in_its_pages(pages):
    test_a_row_of_nan_leaves_nothing_in_its_slot()
    assert pages


@pytest.mark.slow
def test_rows_that_need_a_page_in_the_same_step_get_one(request):
    """32 rows hold the same number of tokens, in a pool that holds no page more."""
    prompts = batch([[1 + i] * 15 for i in range(16)], 15, "right")
    options = {"num_samples": 2, "max_new_tokens": 60}

    def draw():
        key = jax.random.key(0)
        return generate(params_of("qwen3"), config_of("qwen3"), *prompts, key, **options)

    expected = draw()
    request.getfixturevalue("pages")
    assert_same(expected, draw())


def test_values_in_pages_are_finite():
    """Weights of 0 meet values that an earlier row has left: its keys are NaN in their place."""
    keys, values = np.zeros((1, 2, 3)), np.ones((1, 3, 2))
    values[0, 1, 0], values[0, 2, 1] = np.nan, np.inf
    keys, values = finite_values(keys, values)
    np.testing.assert_array_equal(np.isnan(keys[0]), [[False, True, True]] * 2)
    np.testing.assert_array_equal(values[0], [[1, 1], [0, 1], [1, 0]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_layers_in_a_stack_give_the_same(name, request, monkeypatch):
    laid, sampling = [], Sampling(0.9, stop_tokens=[3, 9])

    def unstack(held):
        laid.append(unstack_layers(held))
        return laid[-1]

    with monkeypatch.context() as patch:
        patch.setattr(sampler_slots, "unstack_layers", unstack)
        jax.clear_caches()
        results = both(name, sampling=sampling, slots=5, refill=2)
    assert_same(*results)
    layers = [x.layers if isinstance(x, Cache) else x["layers"] for x in laid]
    assert {type(x) for x in layers} == {tuple}
    assert sum(isinstance(x, Cache) for x in laid) >= 3  # a batch, empty slots, fillings
    assert sum(isinstance(x, dict) for x in laid) >= 2  # a batch, slots
    request.getfixturevalue("in_a_stack")
    assert_same(both(name, sampling=sampling, slots=5, refill=2)[0], results[1])


def test_a_row_of_nan_leaves_nothing_in_its_slot():
    params = params_of("qwen3")
    broken = jax.tree.map(lambda x: x, params)
    embedding = params["embed_tokens"]["embedding"].at[47].set(np.nan)
    broken["embed_tokens"] = {"embedding": embedding}
    sampling = Sampling(stop_tokens=[47])
    options = {"params": broken, "last": (47, 1, 2), "limits": np.full(24, 3)}
    _, by_slots = both("qwen3", sampling=sampling, slots=5, refill=2, **options)
    assert np.all(np.isnan(by_slots.logprobs[:8, 0]))
    assert np.all(np.isfinite(by_slots.logprobs[8:]))


BAD = [
    ("prompts", {"prompts": []}, ValueError),
    ("prompts", {"prompts": [[1], []]}, ValueError),
    (r"prompts\[1\]", {"prompts": [[1], [1.5]]}, TypeError),
    (r"prompts\[1\]", {"prompts": [[1], [2**32 + 5]]}, ValueError),  # int32 would make it 5
    ("slots", {"slots": 0}, ValueError),
    ("refill", {"slots": 4, "refill": 5}, ValueError),
]


@pytest.mark.parametrize(("name", "change", "error"), BAD)
def test_errors_name_the_argument(name, change, error):
    options = {"prompts": [[1, 2]], "max_new_tokens": 4, "key": jax.random.key(0)} | change
    with pytest.raises(error, match=f"{name} must"):
        generate_many(params_of("qwen2"), config_of("qwen2"), **options)
