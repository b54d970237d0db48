"""Kernels for GPUs, interpreted: attention to pages, against float64 row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import config_of, each, params_of
from twinkle_jax.model.decoder import attention
from twinkle_jax.model.decoder.cache import PromptPages
from twinkle_jax.model.decoder.gpu_kernels import attend_to_pages, pages_of_rows
from twinkle_jax.sampler import generate, sizes

SIZE = 16


def in_pages(lengths, groups, width, layers=2, free=3, seed=0):
    """Keys and values of rows of these lengths, in pages in any order, some of them free."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(lengths)), [-(-n // SIZE) for n in lengths])
    start = np.concatenate([np.arange(0, n, SIZE) for n in lengths])
    owner, start = np.pad(owner, (0, free), constant_values=len(lengths)), np.pad(start, (0, free))
    order = rng.permutation(len(owner))
    lines = (layers, len(owner), groups)
    keys = rng.normal(size=(*lines, width, SIZE))
    values = rng.normal(size=(*lines, SIZE, width))
    return keys, values, owner[order].astype(np.int32), start[order].astype(np.int32)


def by_row(query, keys, values, owner, start, first, last, scale, cap=None, sinks=None):
    """Attention of each row to its tokens, in float64."""
    out = np.zeros(query.shape)
    for row, (groups, begin, end) in enumerate(zip(query, first, last, strict=True)):
        pages = np.flatnonzero(owner == row)
        pages = pages[np.argsort(start[pages])]
        positions = (start[pages][:, None] + np.arange(SIZE)).ravel()
        seen = (positions >= begin) & (positions <= end)
        for group, heads in enumerate(groups):
            key = np.concatenate(list(keys[pages, group]), axis=1)[:, seen]
            value = np.concatenate(list(values[pages, group]), axis=0)[seen]
            logits = heads @ key * scale
            logits = logits if cap is None else cap * np.tanh(logits / cap)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            total = weights.sum(axis=1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks[group][:, None] - logits.max(axis=1, keepdims=True))
            out[row, group] = weights @ value / total
    return out


def attend(query, keys, values, owner, start, first, last, dtype="float32", **options):
    arrays = (jnp.asarray(x, dtype) for x in (query, keys, values))
    integers = (jnp.asarray(x, jnp.int32) for x in (owner, start, first, last))
    return attend_to_pages(*arrays, jnp.int32(1), *integers, scale=0.3, interpret=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 7, 17])
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_rows_attend_to_their_tokens(dtype, close, queries):
    """More pages than are added up at once; windows that leave whole pages out."""
    lengths = [1, 16, 17, 33 * SIZE, 70]
    last = np.array(lengths) - 1
    first = np.array([0, 3, 0, 2 * SIZE + 1, 40])
    keys, values, owner, start = in_pages(lengths, 2, 32)
    query = np.random.default_rng(1).normal(size=(5, 2, queries, 32))
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in (query, keys, values)]
    pages = owner, start, first, last
    drawn = np.random.default_rng(2).normal(size=(2, queries)).astype(np.float32)
    for cap, sinks in ((None, None), (1.5, None), (None, drawn)):
        expected = by_row(rounded[0], *(x[1] for x in rounded[1:]), *pages, 0.3, cap, sinks)
        options = {"soft_cap": cap, "sinks": None if sinks is None else jnp.asarray(sinks)}
        actual = attend(query, keys, values, *pages, dtype, **options)
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected, rtol=close, atol=close)


@pytest.mark.slow
def test_rows_of_a_group_read_the_pages_of_their_prompt_together():
    """Seven rows of three prompts, of which one fills no page, in blocks of three and two."""
    prompts, of_row = [3 * SIZE, SIZE, 0], np.array([1, 0, 0, 2, 0, 1, 0])
    lengths = np.array(prompts)[of_row] + [5, 16, 33, 7, 1, 20, 2]
    first = np.array([0, 0, 20, 0, 40, 3, 0])
    keys, values, owner, start = in_pages(lengths, 2, 16)
    query = np.random.default_rng(1).normal(size=(7, 2, 20, 16))
    leader = {number: int(np.flatnonzero(of_row == number)[0]) for number in (0, 1)}
    is_prompt = np.array(
        [o < 7 and s + SIZE <= prompts[of_row[o]] for o, s in zip(owner, start, strict=True)]
    )
    shared = np.flatnonzero(is_prompt & np.isin(owner, list(leader.values())))
    for page in np.flatnonzero(is_prompt):  # all members have the leader's prompt
        same = (owner == leader[of_row[owner[page]]]) & (start == start[page])
        keys[:, page], values[:, page] = keys[:, same][:, 0], values[:, same][:, 0]
    expected = by_row(query, keys[1], values[1], owner, start, first, lengths - 1, 0.3)
    members = np.full((len(shared) + 1, 5), 7, np.int32)  # one page is free
    for i, page in enumerate(shared):
        group = np.flatnonzero(of_row == of_row[owner[page]])
        members[i, : len(group)] = group[::-1]
    order = np.concatenate([shared, [shared[0]], np.flatnonzero(~is_prompt)])
    own = order[len(members) :]
    pages = PromptPages(
        *map(jnp.asarray, (members[:, 0] * 0, np.pad(start[shared], (0, 1)))),
        jnp.asarray(members),
        jnp.asarray(of_row),
    )
    arrays = query, keys[:, order], values[:, order], owner[own], start[own], first, lengths - 1
    actual = attend(*arrays, prompts=pages)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_where_pages_lie_changes_no_digit():
    lengths = [40, 100, 7]
    first, last = np.zeros(3, int), np.array(lengths) - 1
    keys, values, owner, start = in_pages(lengths, 2, 16)
    query = np.random.default_rng(1).normal(size=(3, 2, 3, 16))
    order = np.random.default_rng(2).permutation(len(owner))
    one = attend(query, keys, values, owner, start, first, last)
    other = attend(query, keys[:, order], values[:, order], owner[order], start[order], first, last)
    np.testing.assert_array_equal(one, other)


def test_nan_stays_in_its_row_and_free_pages_are_not_read():
    lengths = [40, 100, 7]
    first, last = np.zeros(4, int), np.array([*lengths, 3]) - 1
    keys, values, owner, start = in_pages(lengths, 2, 16)
    owner[owner == 3] = 4  # the fourth row has no page
    query = np.random.default_rng(1).normal(size=(4, 2, 3, 16))
    clean = np.asarray(attend(query, keys, values, owner, start, first, last))
    assert not clean[3].any()
    keys[:, owner == 4], values[:, owner == 4] = np.nan, np.inf
    keys[1, np.flatnonzero(owner == 1)[0], 0, 5, 2] = np.nan
    actual = np.array(attend(query, keys, values, owner, start, first, last))
    assert np.isnan(actual[1, 0]).all()
    actual[1, 0] = clean[1, 0]
    np.testing.assert_array_equal(actual, clean)


def test_pages_are_listed_row_by_row():
    owner, start = jnp.array([2, 0, 3, 2, 0, 2]), jnp.array([48, 0, 0, 16, 16, 32])
    page, begin, count = pages_of_rows(owner, start, 16, 3)
    assert (begin.tolist(), count.tolist()) == ([0, 2, 2], [2, 0, 3])
    assert page[:5].tolist() == [1, 4, 3, 5, 0]  # a window has left the first page of row 2


@pytest.mark.slow
@pytest.mark.parametrize("name", each(["gemma2", "gpt_oss", "qwen2", "gemma3_text"]))
def test_completions_are_those_without_the_kernel(name, monkeypatch):
    """The same tokens through pages of 16, which XLA and the interpreted kernels attend to."""
    config, params = config_of(name), params_of(name)
    monkeypatch.setattr(sizes, "_PAGE", {"cpu": 16})
    monkeypatch.setattr(sizes, "_SHORT", 16)
    prompts = jax.random.randint(jax.random.key(0), (3, 12), 0, config.vocab_size)
    calls = []
    attend_in_kernel = attention._attend_to_pages_in_kernel

    def draw(fits):
        jax.clear_caches()
        monkeypatch.setattr(attention, "_page_kernel_fits", lambda *_: fits)
        key = jax.random.key(1)
        return generate(params, config, prompts, None, key, num_samples=2, max_new_tokens=40)

    def counted(*args, **options):
        calls.append(options)
        return attend_in_kernel(*args, **options)

    monkeypatch.setattr(attention, "_attend_to_pages_in_kernel", counted)
    try:
        by_xla = draw(fits=False)
        assert not calls
        by_kernel = draw(fits=True)
        assert calls
        np.testing.assert_array_equal(by_kernel.tokens, by_xla.tokens)
        np.testing.assert_allclose(by_kernel.logprobs, by_xla.logprobs, atol=1e-5)
    finally:
        jax.clear_caches()
