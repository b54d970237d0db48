r"""The next token of each row: temperature, penalty, filters, and the draw.

Nothing is sorted. Every filter keeps the tokens whose weight, $w = e^{z - \max z}$, is at least
some threshold, so that tokens that tie with the last one kept are kept too. The draw takes one
uniform number for a row: it picks a block of the vocabulary, then a token inside it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from twinkle_jax.data.batch import LARGEST, cast_integers
from twinkle_jax.data.settings import Range, at_least, share, share_above_zero
from twinkle_jax.loss.token_logprobs import soft_capped
from twinkle_jax.model import DecoderConfig, Params, output_matrix
from twinkle_jax.model.decoder.precision import exact_product
from twinkle_jax.model.decoder.sharding import ROWS

RealScalar = float | np.floating[Any] | Float[Array, ""]
IntScalar = int | np.integer[Any] | Int[Array, ""]
PerRow = Float[Array, " rows"]
Logits = Float[Array, "rows vocab"]

_STOP_SLOTS = 8  # stop tokens are padded to a multiple of this, so that their number is traced
_ONE = 2**30  # probability 1 as an integer
_COLUMNS = 64  # of the table of all tokens, in which filters look for the heaviest
_SMALL = 4096  # a vocabulary of at most so many tokens is searched as a whole
_LANES = 128  # columns of a tile of a TPU's memory
_ROWS = 8  # of the vocabulary, searched as a whole at a time: a TPU's registers hold 8
_THREEFRY = "threefry2x32"


@dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn, as options of the command; the defaults keep all.

    Attributes:
        top_k: how many of the most probable tokens may be drawn; 0 for all.
        top_p: the fewest of the most probable tokens with this total probability may be drawn.
        min_p: tokens with at least this share of the most probable one's probability may be drawn.
    """

    top_k: int = at_least(-1, default=0)
    top_p: float = share_above_zero(default=1.0)
    min_p: float = share(default=0.0)


class Sampling(NamedTuple):
    """How the next token is chosen.

    Values are traced: changing them compiles nothing. Only turning filters or the penalty on or off
    does: what is not in use is not compiled.

    The penalty comes first, then the temperature, then top-k, top-p and min-p, each applied
    to what the previous ones kept, as in `transformers`; vLLM applies min-p before the other two.
    Tokens that tie with the last one kept are all kept.

    Attributes:
        temperature: what logits are divided by; 0 takes the most probable token.
        top_k: how many of the most probable tokens to keep; 0 or -1 keeps all.
        top_p: the fewest of the most probable tokens that together have this probability are
            kept; in (0, 1].
        min_p: tokens less probable than this times the most probable one are dropped; in [0, 1].
        repetition_penalty: positive logits of tokens that occur in the prompt or the completion are
            divided by it, negative ones multiplied.
        stop_tokens: a row ends with the first of these that it draws, which is part of it.
    """

    temperature: RealScalar = 1.0
    top_k: IntScalar = Filters.top_k
    top_p: RealScalar = Filters.top_p
    min_p: RealScalar = Filters.min_p
    repetition_penalty: RealScalar = 1.0
    stop_tokens: Sequence[int] | np.ndarray | Int[Array, " stops"] = ()


class TracedSampling(NamedTuple):
    """`Sampling` as arrays. What is certainly not in use is None, and no code for it is compiled.

    Attributes:
        temperature: as in `Sampling`.
        stop_tokens: as in `Sampling`, padded with -1.
        top_k: as in `Sampling`; the three filters are all None or all arrays.
        top_p: as in `Sampling`.
        min_p: as in `Sampling`.
        repetition_penalty: as in `Sampling`.
    """

    temperature: Float[Array | np.ndarray, ""]
    stop_tokens: Int[Array | np.ndarray, " stops"]
    top_k: Int[Array | np.ndarray, ""] | None
    top_p: Float[Array | np.ndarray, ""] | None
    min_p: Float[Array | np.ndarray, ""] | None
    repetition_penalty: Float[Array | np.ndarray, ""] | None


class NextToken(NamedTuple):
    """One token per row; its log-probability before and after penalty and filters."""

    token: Int[Array, " rows"]
    logprob: PerRow
    sampling_logprob: PerRow


def traced_sampling(sampling: Sampling) -> TracedSampling:
    """Check values on the host, and convert them to arrays of fixed type and shape.

    Values on the host stay there as NumPy arrays: the compiled call takes them along. Those of a
    device are not looked at, and count as in use.
    """
    ranges = {
        "temperature": Range(lambda x: 0 <= x < math.inf, "finite and at least 0"),
        **{setting.name: setting.metadata["range"] for setting in fields(Filters)},
        "repetition_penalty": Range(lambda x: 0 < x < math.inf, "finite and above 0"),
    }
    arrays: dict[str, Any] = {}
    for name, valid in ranges.items():
        value = getattr(sampling, name)
        integer = isinstance(Sampling._field_defaults[name], int)
        array = np.asarray(value) if not isinstance(value, jax.Array) else value
        if array.shape != () or not jnp.issubdtype(
            array.dtype, jnp.integer if integer else jnp.number
        ):
            kind = "one integer" if integer else "one number"
            raise TypeError(f"{name} must be {kind}, got {value!r}")
        if not isinstance(value, jax.Array) and not valid.contains(value):
            raise ValueError(f"{name} must be {valid.description}, got {value!r}")
        if integer and not isinstance(value, jax.Array):
            array = np.asarray(min(int(array), LARGEST))
        arrays[name] = array.astype(np.int32 if integer else np.float32)
    for names in (("top_k", "top_p", "min_p"), ("repetition_penalty",)):
        if not any(_in_use(name, arrays[name]) for name in names):
            arrays |= dict.fromkeys(names)
    return TracedSampling(**arrays, stop_tokens=_padded_stops(sampling.stop_tokens))


def _in_use(name: str, value: Array | np.ndarray) -> bool:
    if isinstance(value, jax.Array):
        return True
    return bool(value > 0 if name == "top_k" else value != Sampling._field_defaults[name])


def _padded_stops(stop_tokens: Any) -> np.ndarray | Int[Array, " slots"]:
    host = not isinstance(stop_tokens, jax.Array)
    if not hasattr(stop_tokens, "__len__"):
        raise TypeError(f"stop_tokens must be a list of token ids, got {stop_tokens!r}")
    stops = np.asarray(stop_tokens, None if len(stop_tokens) else np.int32) if host else stop_tokens
    if stops.ndim != 1 or not jnp.issubdtype(stops.dtype, jnp.integer):
        raise TypeError(f"stop_tokens must be a list of token ids, got {stop_tokens!r}")
    if host:
        stops = cast_integers("stop_tokens", stops, 0)
    room = -len(stops) % _STOP_SLOTS if len(stops) else _STOP_SLOTS
    if host:  # padded there, so that no number of them compiles anything
        return np.pad(stops, (0, room), constant_values=-1)
    return jnp.pad(stops.astype(jnp.int32), (0, room), constant_values=-1)


def scaled_logits(
    params: Params,
    config: DecoderConfig,
    hidden: Float[Array, "rows width"],
    temperature: Float[Array, ""],
) -> Logits:
    """Compute logits over the temperature, with the rounding of the trainer's log-probabilities."""
    scale = 1 / jnp.where(temperature > 0, temperature, 1)
    head = output_matrix(params).astype(hidden.dtype)
    if config.logits_soft_cap is not None:
        return soft_capped(exact_product(hidden, head), config.logits_soft_cap) * scale
    if hidden.dtype == jnp.float32:
        return exact_product(hidden * scale, head)
    return exact_product(hidden, head) * scale


def next_token(
    logits: Logits,
    sampling: TracedSampling,
    keys: jax.Array,
    positions: Int[Array, " rows"],
    seen: tuple[Int[Array, "rows time"], ...],
    mesh: Mesh | None = None,
) -> NextToken:
    """Choose a token in each row.

    On a mesh each device chooses for its own rows. Where the axis tensor divides the vocabulary,
    logits stay split: sums of blocks and the logits of one block are exchanged, or all logits if a
    filter needs them.

    Args:
        logits: already divided by the temperature.
        sampling: as arrays.
        keys: one per row.
        positions: how many tokens the completion of each row has.
        seen: tokens that occur in each row; ids outside the vocabulary are padding.
        mesh: where the rows are; None for one device.

    Returns:
        The tokens. At temperature 0 they are certain, so `sampling_logprob` is 0, and `logprob` is
        taken at temperature 1.
    """
    if mesh is None:
        return _next_token(logits, sampling, keys, positions, seen)
    split = mesh.shape["tensor"] > 1 and logits.shape[1] % mesh.shape["tensor"] == 0
    axis = "tensor" if split else None
    rows = PartitionSpec(ROWS)
    # Left to itself, a compiler for GPUs gathers all logits for the search behind a filter.
    chosen: NextToken = jax.shard_map(
        functools.partial(_next_token, axis=axis),
        mesh=mesh,
        in_specs=(PartitionSpec(ROWS, axis), PartitionSpec(), rows, rows, rows),
        out_specs=rows,
        check_vma=False,  # what is gathered counts as different along tensor
    )(logits, sampling, keys, positions, seen)
    return chosen


def _next_token(
    logits: Logits,
    sampling: TracedSampling,
    keys: jax.Array,
    positions: Int[Array, " rows"],
    seen: tuple[Int[Array, "rows time"], ...],
    axis: str | None = None,
) -> NextToken:
    """Choose a token in each row; with an axis, each device along it has some of the columns."""
    t = jnp.asarray(sampling.temperature)
    vocab = logits.shape[1] if axis is None else logits.shape[1] * jax.lax.axis_size(axis)
    bits = random_bits(keys, positions)
    maximum = jnp.max(logits, axis=1)
    maximum = maximum if axis is None else jax.lax.pmax(maximum, axis)
    blocks = block_weights(logits, maximum, axis=axis)
    total = jnp.sum(blocks, axis=1)
    log_total = maximum + jnp.log(total)

    has_filters, has_penalty = sampling.top_k is not None, sampling.repetition_penalty is not None

    def from_all() -> tuple[Array, Array, Array]:
        token = draw(bits, logits, maximum, blocks, axis=axis)
        logit = _at(logits, token, axis)
        return token, logit, logit - log_total

    def greedy_or_restricted() -> tuple[Array, Array, Array]:
        gathered = logits if axis is None else jax.lax.all_gather(logits, axis, axis=1, tiled=True)
        penalised, largest, sums = gathered, maximum, total
        if has_penalty:
            factor = jnp.asarray(sampling.repetition_penalty)
            penalised = penalise(gathered, jnp.concatenate(seen, axis=1), factor)
            largest = jnp.max(penalised, axis=1)
            sums = jnp.sum(block_weights(penalised, largest), axis=1)

        def greedy() -> tuple[Array, Array]:
            token = jnp.argmax(penalised, axis=1).astype(jnp.int32)
            return token, _at(penalised, token) * 0  # NaN stays NaN

        def restricted() -> tuple[Array, Array]:
            return draw_kept(penalised, largest, sums, sampling, bits)[:2]

        if has_filters or has_penalty:
            token, logprob = jax.lax.cond(t > 0, restricted, greedy)
        else:
            token, logprob = greedy()
        return token, _at(gathered, token), logprob

    keeps_all = t > 0
    if has_filters:
        k, p = jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p)
        keeps_all &= ((k <= 0) | (k >= vocab)) & (p >= 1) & (jnp.asarray(sampling.min_p) <= 0)
    if has_penalty:
        keeps_all &= jnp.asarray(sampling.repetition_penalty) == 1
    token, logit, sampling_logprob = jax.lax.cond(keeps_all, from_all, greedy_or_restricted)
    return NextToken(token, logit - log_total, sampling_logprob)


def _at(logits: Logits, token: Int[Array, " rows"], axis: str | None = None) -> PerRow:
    return _columns(logits, token[:, None], axis)[:, 0]


def _columns(
    logits: Logits, columns: Int[Array, "rows some"], axis: str | None
) -> Float[Array, "rows some"]:
    """Take columns of the vocabulary; beyond it, minus infinity."""
    if axis is not None:  # columns of other devices are beyond those that are here
        columns = columns - jax.lax.axis_index(axis) * logits.shape[1]
        columns = jnp.where(columns < 0, logits.shape[1], columns)
    taken = jnp.take_along_axis(logits, columns, axis=1, mode="fill", fill_value=-jnp.inf)
    return taken if axis is None else jax.lax.pmax(taken, axis)


# The penalty, and the filters.


def penalise(logits: Logits, tokens: Int[Array, "rows time"], penalty: Float[Array, ""]) -> Logits:
    """Apply the repetition penalty to tokens of a row; ids outside the vocabulary are padding."""

    def row(logits: Float[Array, " vocab"], tokens: Int[Array, " time"]) -> Array:
        seen = logits.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        seen = jnp.where(seen < 0, seen * penalty, seen / penalty)
        # A token that occurs twice is written twice with the same value: penalised once.
        return logits.at[tokens].set(seen, mode="drop", wrap_negative_indices=False)

    return jax.vmap(row)(logits, tokens)


def draw_kept(
    logits: Logits,
    maximum: PerRow,
    total: PerRow,
    sampling: TracedSampling,
    bits: UInt32[Array, "rows 4"],
) -> tuple[Int[Array, " rows"], PerRow, PerRow]:
    """Draw a token among those that top-k, top-p and min-p, in this order, keep in each row.

    A search reads its weights some sixty times. So top-k and top-p search a part of the vocabulary
    that has all of the heaviest tokens, and draw from it. Only rows whose threshold is lower look
    at the whole vocabulary. Which of the two a row does depends on nothing but the row.

    Args:
        logits: of the tokens.
        maximum: the largest logit of each row.
        total: sum of the weights of each row.
        sampling: as arrays; the temperature is above 0.
        bits: a uniform number in each row.

    Returns:
        The tokens, their log-probabilities among those kept, and the smallest weights kept.
    """
    min_p = jnp.asarray(0.0 if sampling.min_p is None else sampling.min_p, jnp.float32)

    def from_all(
        logits: Array, maximum: Array, total: Array, bits: Array, search: bool = True
    ) -> tuple[Array, Array, Array]:
        threshold = jnp.broadcast_to(min_p, maximum.shape)
        if search:
            weights = jnp.exp(logits - maximum[:, None])
            threshold = jnp.maximum(threshold, _search(weights, total, k, p)[0])
        blocks = block_weights(logits, maximum, threshold)
        token = draw(bits, logits, maximum, blocks, threshold)
        logprob = _at(logits, token) - maximum - jnp.log(jnp.sum(blocks, axis=1))
        return token, logprob, threshold

    if sampling.top_k is None or sampling.top_p is None:  # there are no filters
        return from_all(logits, maximum, total, bits, search=False)
    k, p = jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p)
    k = jnp.where(k < logits.shape[1], k, 0)

    def from_heaviest() -> tuple[Array, Array, Array]:
        if logits.shape[1] <= _SMALL:
            return from_all(logits, maximum, total, bits)
        heaviest, columns, bound = _heaviest(logits)
        weights = jnp.exp(heaviest - maximum[:, None])
        threshold, lowest = _search(weights, total, k, p)
        decided = ~(lowest <= jnp.exp(bound - maximum))  # NaN counts as decided
        threshold = jnp.maximum(threshold, min_p)
        blocks = block_weights(heaviest, maximum, threshold)
        index = draw(bits, heaviest, maximum, blocks, threshold)
        token = jnp.take_along_axis(columns, index[:, None], axis=1)[:, 0]
        token = jnp.minimum(token, logits.shape[1] - 1)  # a row of NaN may point anywhere
        logprob = _at(heaviest, index) - maximum - jnp.log(jnp.sum(blocks, axis=1))

        def look_at_all(state: tuple[Array, ...]) -> tuple[Array, ...]:
            *_, decided = state
            # Consecutive rows from the first undecided one on: a slice is copied as a block, while
            # arbitrary rows would be gathered element by element.
            size = min(_ROWS, len(decided))
            start = jnp.minimum(jnp.argmin(decided), len(decided) - size)
            *before, was_decided, some_logits, largest, sums, some_bits = (
                jax.lax.dynamic_slice_in_dim(x, start, size)
                for x in (*state, logits, maximum, total, bits)
            )
            results = from_all(some_logits, largest, sums, some_bits)
            after = [jnp.where(was_decided, x, y) for x, y in zip(before, results, strict=True)]
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(x, y, start, 0)
                for x, y in zip(state, [*after, jnp.ones_like(was_decided)], strict=True)
            )

        state: tuple[Array, ...] = (token, logprob, threshold, decided)
        state = jax.lax.while_loop(lambda state: ~jnp.all(state[-1]), look_at_all, state)
        return state[0], state[1], state[2]

    def by_min_p() -> tuple[Array, Array, Array]:
        return from_all(logits, maximum, total, bits, search=False)

    return jax.lax.cond((k <= 0) & (p >= 1), by_min_p, from_heaviest)


def _heaviest(
    logits: Logits,
) -> tuple[Float[Array, "rows some"], Int[Array, "rows some"], PerRow]:
    """Return part of the logits, which includes all above a bound, their columns, and that bound.

    The vocabulary is viewed as a row-major table, [lines, columns]. Returned are the columns with
    the largest maxima, and as the bound the largest maximum of the other columns.
    """
    vocab = logits.shape[1]
    # More lines: fewer columns to choose from, but more tokens to search in those chosen.
    count = 2 ** round(math.log2(vocab / 512) / 2)
    width = -(-vocab // count)
    lines = [logits[:, start : start + width] for start in range(0, vocab, width)]
    fill = width - lines[-1].shape[1]
    lines[-1] = jnp.pad(lines[-1], ((0, 0), (0, fill)), constant_values=-jnp.inf)
    maxima = functools.reduce(jnp.maximum, lines)
    maxima = jnp.where(maxima < _lower_bound(maxima)[:, None], -jnp.inf, maxima)
    # Without barriers a slice of the result is merged into it, and a CPU sorts all columns. One for
    # both results crashes the compiler of jaxlib 0.10.2 inside shard_map.
    largest, columns = map(jax.lax.optimization_barrier, jax.lax.top_k(maxima, _COLUMNS + 1))
    chosen = columns[:, :-1, None] + width * jnp.arange(count, dtype=jnp.int32)[None, None]
    chosen = chosen.reshape(len(logits), -1)
    heaviest = jnp.take_along_axis(logits, chosen, axis=1, mode="fill", fill_value=-jnp.inf)
    return heaviest, chosen, largest[:, -1]


def _lower_bound(maxima: Float[Array, "rows columns"]) -> PerRow:
    """Bound what `_heaviest` chooses from below, because a CPU's top-k is faster without the rest.

    If enough groups of columns have a maximum above the bound, enough columns do.
    """
    groups, size = 2 * _COLUMNS, maxima.shape[1] // (2 * _COLUMNS)
    maxima = maxima[:, : groups * size].reshape(-1, size, groups).max(axis=1)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) / 2  # NaN, which is above nothing, if one is infinite
        enough = jnp.sum(maxima >= middle[:, None], axis=1, dtype=jnp.float32) > _COLUMNS
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    return jax.lax.fori_loop(0, 8, halve, (maxima.min(axis=1), maxima.max(axis=1)))[0]


def _search(
    weights: Logits, total: PerRow, k: Int[Array, ""], p: Float[Array, ""]
) -> tuple[PerRow, PerRow]:
    """Find the thresholds of top-k and top-p among weights.

    Args:
        weights: the largest of a vocabulary, or all.
        total: sum of all.
        k: as in `Sampling`.
        p: as in `Sampling`.

    Returns:
        The threshold, and that of top-k alone if it is in use. Both are those of the whole
        vocabulary if `weights` includes all weights of at least the second.
    """

    def mass(threshold: PerRow) -> PerRow:
        return jnp.sum(jnp.where(weights >= threshold[:, None], weights, 0), axis=1)

    def by_k() -> tuple[PerRow, PerRow]:
        def enough(threshold: PerRow) -> Array:
            # In floats, exact below 2^24: a CPU counts integers at half the speed.
            number = jnp.sum(weights >= threshold[:, None], axis=1, dtype=jnp.float32)
            return number >= k.astype(jnp.float32)

        threshold = _largest_threshold(enough, jnp.zeros_like(total))
        return threshold, mass(threshold)

    has_k = k > 0
    least, total = jax.lax.cond(has_k, by_k, lambda: (jnp.zeros_like(total), total))
    threshold = jax.lax.cond(
        p < 1,
        lambda: _largest_threshold(lambda threshold: mass(threshold) >= p * total, least),
        lambda: least,
    )
    return threshold, jnp.where(has_k, least, threshold)


def _largest_threshold(holds: Callable[[PerRow], Array], least: PerRow) -> PerRow:
    """Find the largest threshold in [least, 1] at which a condition holds that holds at `least`.

    Floats that are not negative are ordered as their bits are, so thirty halvings of an interval of
    integers find it exactly.
    """

    def bits(x: PerRow) -> Int[Array, " rows"]:
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        yes = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle - 1)

    bounds = bits(least), bits(jnp.ones_like(least))
    low, _ = jax.lax.fori_loop(0, 30, halve, bounds)  # 1.0 is less than 2^30 bits above 0.0
    return jax.lax.bitcast_convert_type(low, jnp.float32)


# Random keys: a row draws the same alone and beside others.


def threefry_keys(keys: Key[Array, "*rows"]) -> Key[Array, "*rows"]:
    """Turn keys of another implementation into threefry keys; those stay as they are.

    Under `vmap`, `rbg` and `unsafe_rbg` draw for all rows by the key of the first one. What a row
    draws would depend on the others, and once the first row has ended and its key stays the same,
    all others would draw the same noise for every token.
    """
    if jax.random.key_impl(keys) == _THREEFRY:
        return keys
    return _from_words(keys)


@jax.jit
def _from_words(keys: Key[Array, "*rows"]) -> Key[Array, "*rows"]:
    words = jax.random.key_data(keys)
    words = words.reshape(-1, words.shape[-1])
    result = jax.random.wrap_key_data(words[:, :2], impl=_THREEFRY)
    for word in range(2, words.shape[1]):
        result = jax.vmap(jax.random.fold_in)(result, words[:, word])
    return result.reshape(keys.shape)


@functools.partial(jax.jit, static_argnums=1)
def row_keys(key: Key[Array, ""], rows: int) -> Key[Array, " rows"]:
    """Derive the threefry key of each row from `jax.random.fold_in(key, row)`."""
    numbers = jnp.arange(rows, dtype=jnp.int32)
    if jax.random.key_impl(key) == _THREEFRY:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    # One by one: `unsafe_rbg` folds other numbers in under `vmap`.
    return threefry_keys(jax.lax.map(functools.partial(jax.random.fold_in, key), numbers))


# The draw. The inverse of a running sum in float32 is wrong for rare tokens: beside 0.5, an
# increment of 1e-9 is lost, and of 1e-7 mangled. Here a running sum is kept in two parts, whole
# multiples of 2^-30 as integers and the rest in float32, and the uniform number has 62 bits for
# each of the two choices, so that rare tokens are drawn as often as they should be.


def random_bits(keys: jax.Array, positions: Int[Array, " rows"]) -> UInt32[Array, "rows 4"]:
    """Derive a row's uniform number for a position from its key and the position alone."""

    def one(key: jax.Array, position: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(key, position), (4,), jnp.uint32)

    return jax.vmap(one)(keys, positions)


def block_size(vocab: int) -> int:
    """Choose the tokens of a block: a power of two near the square root of the vocabulary."""
    return max(16, 1 << ((vocab - 1).bit_length() + 1) // 2)


def block_weights(
    logits: Logits, maximum: PerRow, threshold: PerRow | None = None, *, axis: str | None = None
) -> Float[Array, "rows blocks"]:
    """Sum the weights, exp(logit - maximum), of each block, without those below the threshold."""
    rows, vocab = logits.shape
    size = block_size(vocab if axis is None else vocab * jax.lax.axis_size(axis))
    part = math.gcd(vocab, size, _LANES)
    if axis is not None or part == _LANES:
        # Parts of blocks are summed first: a block may lie on two devices, and a TPU reads whole
        # tiles of 8 rows and 128 columns. Of any other view it would make two copies.
        tile = math.gcd(rows, 8)
        weights = _weights(logits, maximum, threshold).reshape(rows // tile, tile, -1, part)
        parts = jnp.sum(weights.swapaxes(1, 2), axis=3).swapaxes(1, 2).reshape(rows, -1)
        parts = parts if axis is None else jax.lax.all_gather(parts, axis, axis=1, tiled=True)
        parts = jnp.pad(parts, ((0, 0), (0, -parts.shape[1] % (size // part))))
        return jnp.sum(parts.reshape(rows, -1, size // part), axis=2)
    count, rest = divmod(vocab, size)
    weights = _weights(logits[:, : vocab - rest], maximum, threshold)
    blocks = jnp.sum(weights.reshape(rows, count, size), axis=2)
    if not rest:
        return blocks
    # A last block that is not full is summed separately: padding would copy all logits.
    weights = _weights(logits[:, vocab - rest :], maximum, threshold)
    return jnp.concatenate([blocks, jnp.sum(weights, axis=1, keepdims=True)], axis=1)


def draw(
    bits: UInt32[Array, "rows 4"],
    logits: Logits,
    maximum: PerRow,
    blocks: Float[Array, "rows blocks"],
    threshold: PerRow | None = None,
    *,
    axis: str | None = None,
) -> Int[Array, " rows"]:
    """Draw a token in proportion to its weight.

    Args:
        bits: a uniform number of 124 bits in each row.
        logits: of the tokens.
        maximum: the largest logit of each row.
        blocks: `block_weights` of the same logits and threshold.
        threshold: the smallest weight that may be drawn; None for all.
        axis: of a mesh, along which each device has some columns; None: all are here.

    Returns:
        The tokens, each with a weight above zero if any token of its row has one.
    """
    vocab = logits.shape[1] if axis is None else logits.shape[1] * jax.lax.axis_size(axis)
    size = block_size(vocab)
    start = _pick(blocks, bits[:, :2]) * size
    columns = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    inside = _columns(logits, columns, axis)
    chosen = start + _pick(_weights(inside, maximum, threshold), bits[:, 2:])
    return jnp.minimum(chosen, vocab - 1)  # a row of NaN may point anywhere


def _weights(logits: Logits, maximum: PerRow, threshold: PerRow | None) -> Logits:
    weights = jnp.exp(logits - maximum[:, None])
    return weights if threshold is None else jnp.where(weights >= threshold[:, None], weights, 0)


def _pick(
    weights: Float[Array, "rows items"], bits: UInt32[Array, "rows 2"]
) -> Int[Array, " rows"]:
    r"""Find the first item at which the running sum passes $u$ times the total."""
    shares = weights / jnp.sum(weights, axis=1, keepdims=True) * _ONE
    floors = jnp.floor(shares)
    units = jnp.cumsum(floors.astype(jnp.int32), axis=1)
    rest = jnp.cumsum(shares - floors, axis=1)
    u_units = (bits[:, :1] >> 2).astype(jnp.int32)
    u_rest = bits[:, 1:].astype(jnp.float32) * 2.0**-32
    # Rounding makes the total a little more or less than one, and u is stretched to it.
    excess = (units[:, -1:] - _ONE).astype(jnp.float32) + rest[:, -1:]
    u_rest = u_rest + excess * (u_units.astype(jnp.float32) / _ONE)
    passed: Bool[Array, "rows items"] = (units - u_units).astype(jnp.float32) + (rest - u_rest) > 0
    passed = passed & (weights > 0)
    fallback = jnp.argmax(weights, axis=1)  # where rounding leaves nothing beyond u
    index = jnp.where(jnp.any(passed, axis=1), jnp.argmax(passed, axis=1), fallback)
    return index.astype(jnp.int32)
