"""Rows that are gone on with: what is drawn is what reading them anew draws."""

import jax
import numpy as np
import pytest

from tests.model.families import config_of, each, params_of
from twinkle_jax.model import make_mesh, shard_like_params
from twinkle_jax.rollout import LocalEngine, RolloutConfig
from twinkle_jax.sampler import Conversations, Sampling, conversations, sizes

VOCAB, ROOM, NEW = 48, 200, 6
FAMILIES = each(["qwen3_5_text", "qwen3", "gemma3_text", "gemma4_text small", "youtu"])
FILTERED = Sampling(0.7, top_k=9, repetition_penalty=1.3, stop_tokens=[3, 9])


LAYOUTS = ["pages", "whole rows"]


@pytest.fixture(params=each(LAYOUTS))
def laid_out(request, monkeypatch):
    """Whole rows, as on a CPU, or pages, as on GPUs and TPUs."""
    if request.param == "pages":
        monkeypatch.setattr(sizes, "_PAGE", {"cpu": 16})
        monkeypatch.setattr(sizes, "_SHORT", 0)


def make(name, rows, sampling=FILTERED, *, mesh=None, length=ROOM, new=NEW):
    config, params = config_of(name), params_of(name)
    if mesh is not None:
        params = jax.device_put(params, shard_like_params(params, mesh))
    return Conversations(
        params, config, rows, sampling, max_length=length, max_new_tokens=new, mesh=mesh
    )


class ReadAnew:
    """The same interface, with nothing kept: rows are more than slots, and whole."""

    def __init__(self, name, rows, sampling=FILTERED, new=NEW):
        values = sampling._asdict()
        engine = LocalEngine(config_of(name), None, stop_tokens=values.pop("stop_tokens"))
        settings = RolloutConfig(max_new_tokens=new, slots=1, max_episode_tokens=ROOM, **values)
        self._rows = engine.converse(params_of(name), rows, settings)

    def go_on(self, *args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sizes, "_PAGE", {})
            patch.setattr(sizes, "_SMALLEST_CACHE", 256)  # one size: each is compiled once more
            return self._rows.go_on(*args)


def play(engine, turns, rows, *, called=lambda row, turn: True, new=NEW, longest=9, seed=0):
    """Go on with rows turn by turn, with made-up observations in between.

    Returns:
        What was drawn, the tokens of each row, and how many of them were shown to the policy.
    """
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, VOCAB, rng.integers(1, longest)).tolist() for _ in range(rows)]
    drawn, shown, before = [], 0, [0] * rows
    for turn in range(turns):
        limits = {i: int(rng.integers(1, new + 1)) for i in range(rows) if called(i, turn)}
        keys = jax.random.split(jax.random.key(turn), rows)
        result = engine.go_on({i: tokens[i] for i in limits}, keys, limits)
        for i in range(rows):
            length, observation = (
                result.lengths[i],
                rng.integers(0, VOCAB, rng.integers(1, longest)),
            )
            assert (0 < length <= limits[i]) if i in limits else length == 0
            new_tokens = result.tokens[i, :length].tolist()
            drawn.append((turn, i, new_tokens, result.finish_reasons[i] if length else 0))
            drawn[-1] += (result.logprobs[i, :length], result.sampling_logprobs[i, :length])
            if i in limits:
                shown += len(tokens[i]) - before[i]
                before[i] = len(tokens[i]) + length
                tokens[i] = [*tokens[i], *new_tokens, *observation.tolist()]
    return drawn, tokens, shown


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one[:4] == other[:4]
        for logprobs in zip(one[4:], other[4:], strict=True):
            np.testing.assert_allclose(*logprobs, atol=1e-4)


def two_of_three(row, turn):
    return bool((row + turn) % 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("laid_out")
def test_turns_are_those_of_rows_that_are_read_anew(name):
    # Seeds 0, 4 and 5 have a token that float32 computes ten times less exactly than the others.
    options = {"called": two_of_three, "longest": 24, "seed": 2}
    actual, tokens, _ = play(make(name, 11), 5, 11, **options)
    expected, *_ = play(ReadAnew(name, 11), 5, 11, **options)
    assert_same(actual, expected)
    assert max(map(len, tokens)) > 64  # the caches have grown


def test_rows_of_a_call_that_failed_are_read_again():
    """It had replaced their tokens on the device."""
    made, expected = (make("qwen3", 1) for _ in range(2))
    keys, used = jax.random.split(jax.random.key(0), 1), jax.random.split(jax.random.key(1), 1)
    start = [5, 6, 7]
    made.go_on({0: [*start, *range(10, 20)]}, keys)
    used.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        made.go_on({0: [*start, *range(30, 40)]}, used)
    row = [*start, *range(10, 20), 8]
    actual, anew = made.go_on({0: row}, keys), expected.go_on({0: row}, keys)
    np.testing.assert_allclose(actual.logprobs, anew.logprobs, atol=1e-4)


def test_keys_of_other_kinds_give_every_row_noise_of_its_own():
    """Under `vmap` rbg's draw by the key of the first row, which stays the same once it ends."""
    flat = jax.tree.map(np.zeros_like, params_of("qwen3"))
    engine = Conversations(
        flat, config_of("qwen3"), 8, Sampling(), max_length=ROOM, max_new_tokens=NEW
    )
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 8)
    limits = {0: 1} | dict.fromkeys(range(1, 8), NEW)
    drawn = engine.go_on({i: [i] for i in range(8)}, keys, limits)
    tokens = np.asarray(drawn.tokens)[1:]
    assert np.mean(tokens[:, 1:] == tokens[:, :-1]) < 0.2


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8}])
@pytest.mark.usefixtures("laid_out")
def test_a_mesh_draws_the_same(shape):
    mesh = make_mesh(**shape)
    alone, *_ = play(make("qwen3_5_text", 21), 3, 21, called=two_of_three)
    spread, *_ = play(make("qwen3_5_text", 21, mesh=mesh), 3, 21, called=two_of_three)
    assert_same(spread, alone)


@pytest.mark.slow
def test_experts_on_a_mesh_draw_the_same(monkeypatch):
    """`extend` must be told of the mesh: on TPUs XLA cannot split the kernel of experts."""
    read, meshes = conversations.extend, []

    def extend(*args, **options):
        meshes.append(options["mesh"])
        return read(*args, **options)

    monkeypatch.setattr(conversations, "extend", extend)
    mesh = make_mesh(data=2, tensor=2)
    alone, *_ = play(make("qwen3_moe", 4), 2, 4)
    spread, *_ = play(make("qwen3_moe", 4, mesh=mesh), 2, 4)
    assert_same(spread, alone)
    assert {None, mesh} == set(meshes)


def test_each_token_is_read_once():
    kept = make("qwen3", 5)
    _, _, shown = play(kept, 6, 5)
    # The last token before a turn is not read ahead, but to draw the first one; the last token
    # that a turn drew is read with what follows it.
    assert kept.tokens_read == shown - 5


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mesh", each([None, {"data": 2, "fsdp": 2}]))
@pytest.mark.usefixtures("laid_out")
def test_a_group_reads_its_prompt_once(name, mesh):
    kept = make(name, 18, mesh=None if mesh is None else make_mesh(**mesh))
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7, 8], [11]]
    rows = {i: prompts[i // 6] for i in range(18) if i not in (1, 7)}
    keys = jax.random.split(jax.random.key(0), 18)
    limits = dict.fromkeys(rows, 4)
    actual = kept.go_on(rows, keys, limits)
    expected = ReadAnew(name, 18).go_on(rows, keys, limits)
    np.testing.assert_array_equal(actual.tokens[list(rows)], expected.tokens[list(rows)])
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=1e-4)
    # On four devices of five rows, either prompt lies on two.
    assert kept.tokens_read == (4 + 3) * (1 if mesh is None else 2)


@pytest.mark.slow
@pytest.mark.usefixtures("laid_out")
def test_rows_that_are_rewritten_are_read_from_there():
    """A chat template may render earlier turns in another way."""
    for name, count in (("qwen3", 4), ("qwen3_5_text", 8)):
        kept, again = make(name, 2), ReadAnew(name, 2)
        rows = {0: [1, 2, 3, 4, 5, 6, 7], 1: [8, 9]}
        keys, limits = jax.random.split(jax.random.key(0), 2), {0: 4, 1: 4}
        kept.go_on(rows, keys, limits)
        before = kept.tokens_read
        rewritten = {0: [1, 2, 3, 4, 11, 12, 13, 14, 15]}
        actual = kept.go_on(rewritten, keys, {0: 6})
        expected = again.go_on(rewritten, keys, {0: 6})
        assert kept.tokens_read - before == count  # all but the last, behind the common ones
        np.testing.assert_array_equal(actual.tokens[0], expected.tokens[0])
        np.testing.assert_allclose(actual.logprobs[0], expected.logprobs[0], atol=1e-4)
        # The other row holds what it held.
        assert kept.go_on({1: [8, 9, 10]}, keys, {1: 1}).lengths.tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("laid_out")
def test_rows_that_end_early_keep_what_they_hold():
    """Slots are given up as rows end, and caches cut to what the others need."""
    limits = {i: 60 if i == 0 else 1 + i % 3 for i in range(16)}
    rows = {i: [i + 1] * (130 if i == 1 else 2) for i in range(16)}
    keys = jax.random.split(jax.random.key(0), 16)
    kept = make("qwen3_5_text", 16, Sampling(), new=60)
    again = ReadAnew("qwen3_5_text", 16, Sampling(), new=60)
    for _ in range(2):
        actual, expected = (engine.go_on(rows, keys, limits) for engine in (kept, again))
        np.testing.assert_array_equal(actual.tokens, expected.tokens)
        np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=1e-4)
        for i, row in rows.items():
            rows[i] = [*row, *actual.tokens[i, : actual.lengths[i]].tolist(), 7, 8]


@pytest.mark.slow
@pytest.mark.parametrize("laid_out", ["pages"], indirect=True)
@pytest.mark.usefixtures("laid_out")
@pytest.mark.parametrize("mesh", each([None, {"data": 2, "fsdp": 2}]))
def test_memory_follows_tokens(mesh):
    """One long row of 16: whole rows would take 16 times its pages."""
    kept = make("qwen3", 16, Sampling(), mesh=None if mesh is None else make_mesh(**mesh))
    rows = {i: [i + 1] * (150 if i == 5 else 3) for i in range(16)}
    keys, limits = jax.random.split(jax.random.key(0), 16), dict.fromkeys(range(16), 6)
    kept.go_on(rows, keys, limits)
    shards = 1 if mesh is None else 4
    owner = np.asarray(kept._cache.pages.owner).reshape(shards, -1)
    rows_of_device = 16 // shards
    pages = [np.bincount(part, minlength=rows_of_device + 1)[:-1] for part in owner]
    expected = np.ones(16, int)
    expected[5] = 10  # of 16 tokens, for 150 and five that were drawn: the last is not read
    np.testing.assert_array_equal(np.concatenate(pages), expected)
    most = max(part.sum() for part in expected.reshape(shards, -1))
    assert most < owner.shape[1] <= 1.5 * most + 1
    # Rows that begin anew give their pages back, and others take them.
    kept.go_on({i: [9] for i in rows}, keys, limits)
    kept.go_on({6: [8] * 150}, keys, {6: 6})
    owner = np.asarray(kept._cache.pages.owner).reshape(shards, -1)
    assert sum(np.sum(part < rows_of_device) for part in owner) == expected.sum()


@pytest.mark.exhaustive
@pytest.mark.parametrize("laid_out", ["pages"], indirect=True)
@pytest.mark.usefixtures("laid_out")
def test_pages_of_rows_that_wait_are_not_taken():
    """A turn of one row needs more pages than those that were made for what is read."""
    kept, again = (make_it("qwen3", 4, Sampling(), new=100) for make_it in (make, ReadAnew))
    keys = jax.random.split(jax.random.key(0), 4)
    waiting = {i: [i + 1] * 60 for i in range(3)}
    kept.go_on(waiting, keys, dict.fromkeys(waiting, 1))
    turns = [{3: [9]}, {i: [*row, 7, 8] for i, row in waiting.items()}]
    for rows, limit in zip(turns, (100, 3), strict=True):
        limits = dict.fromkeys(rows, limit)
        actual, expected = (engine.go_on(rows, keys, limits) for engine in (kept, again))
        np.testing.assert_array_equal(actual.tokens, expected.tokens)
    owner = np.asarray(kept._cache.pages.owner)
    assert np.bincount(owner, minlength=5)[:4].tolist() == [4, 4, 4, 7]


@pytest.mark.slow
@pytest.mark.usefixtures("laid_out")
def test_a_row_may_fill_its_room():
    kept = make("qwen3", 1, Sampling(), length=12)
    drawn = kept.go_on({0: [1, 2, 3, 4, 5, 6, 7]}, jax.random.split(jax.random.key(0), 1))
    assert drawn.lengths.tolist() == [5]
    assert np.isfinite(drawn.logprobs).all()


@pytest.mark.slow
@pytest.mark.usefixtures("laid_out")
def test_all_rows_may_fill_their_room():
    """Each of all pages is full, and one row has ended: the others still get their last tokens."""
    kept = make("qwen3", 8, Sampling(), length=33)
    rows, keys = {i: [i + 1] * 28 for i in range(8)}, jax.random.split(jax.random.key(0), 8)
    drawn = kept.go_on(rows, keys, {i: 5 if i else 1 for i in rows})
    assert drawn.lengths.tolist() == [1, *[5] * 7]
    again = ReadAnew("qwen3", 8, Sampling()).go_on(rows, keys, {i: 5 if i else 1 for i in rows})
    np.testing.assert_array_equal(drawn.tokens[:, :5], again.tokens[:, :5])


@pytest.mark.slow
@pytest.mark.usefixtures("laid_out")
def test_after_warm_up_nothing_compiles():
    play(make("qwen3", 8), 5, 8, called=two_of_three)
    programs = (
        "_start",
        "_take",
        "_extend",
        "_put",
        "_run",
        "_resize",
        "_keep",
        "_collect",
        "_empty",
        "_lay_out",
    )
    counts = [getattr(conversations, name)._cache_size() for name in programs]
    play(make("qwen3", 8), 5, 8, called=two_of_three)
    assert [getattr(conversations, name)._cache_size() for name in programs] == counts


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("rows", ({},)),
        ("rows", ({2: [1]},)),
        ("rows", ({0: []},)),
        ("rows", ({0: [VOCAB]},)),
        ("rows", ({0: [1] * 20},)),
        ("limits", ({0: [1]}, {0: 0})),
        ("limits", ({0: [1] * 18}, {0: 3})),
        ("limits", ({0: [1]}, {1: 3})),
    ],
)
def test_bad_rows(match, arguments):
    rows, *limits = arguments
    with pytest.raises(ValueError, match=match):
        make("qwen3", 2, length=20).go_on(rows, jax.random.split(jax.random.key(0), 2), *limits)


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("rows", ([[1]],)),
        ("rows", ({0: [1.5]},)),
        ("rows .*'0'", ({"0": [1]},)),
        ("rows .*True", ({True: [1]},)),
        ("limits", ({0: [1]}, {0: 2.5})),
    ],
)
def test_rows_of_other_types(match, arguments):
    rows, *limits = arguments
    with pytest.raises(TypeError, match=match):
        make("qwen3", 2, length=20).go_on(rows, jax.random.split(jax.random.key(0), 2), *limits)


def test_bad_numbers():
    with pytest.raises(TypeError, match="keys"):
        make("qwen3", 2).go_on({0: [1]}, 0)
    with pytest.raises(TypeError, match="max_length"):
        make("qwen3", 2, length=20.5)
    with pytest.raises(ValueError, match="keys"):
        make("qwen3", 2).go_on({0: [1]}, jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ValueError, match="max_length"):
        make("qwen3", 2, length=1)
