"""Completions of prompts: a few compiled programs, called until all rows have ended."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from twinkle_jax.data import bucket_size
from twinkle_jax.data.batch import cast_integers, pad_tokens, read_integers
from twinkle_jax.model import AttentionImplementation, DecoderConfig, Params, merge_params
from twinkle_jax.model.decoder.parameters import check_decoder
from twinkle_jax.model.decoder.sharding import row_shards
from twinkle_jax.sampler import sizes
from twinkle_jax.sampler import slots as device
from twinkle_jax.sampler.sampling import (
    Sampling,
    TracedSampling,
    row_keys,
    threefry_keys,
    traced_sampling,
)
from twinkle_jax.sampler.slots import Completions

_DEFAULT = Sampling()


def generate(
    params: Params,
    config: DecoderConfig,
    prompts: Int[Array | np.ndarray, "prompts time"],
    prompt_mask: Bool[Array | np.ndarray, "prompts time"] | None,
    key: jax.Array,
    sampling: Sampling = _DEFAULT,
    *,
    num_samples: int = 1,
    max_new_tokens: int,
    max_tokens: int | Int[Array | np.ndarray, "*rows"] | None = None,
    slots: int | None = None,
    refill: int | None = None,
    frozen: Params | None = None,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    mesh: Mesh | None = None,
    keep_routing: bool = False,
) -> Completions:
    r"""Draw completions of prompts from a policy, with the log-probability of every token.

    $$a_t \sim f\!\left(\pi_\theta(\cdot \mid x, a_{<t})\right)$$

    where $f$ applies temperature, penalty and filters of `sampling`. Each prompt is read once.
    Its cache is copied to `num_samples` rows; where rows are in pages, they share the full ones.

    Time and memory follow the tokens that are drawn, not `max_new_tokens`. Caches start small and
    are doubled when the longest running row has filled its own; each time half of the rows have
    ended, only the other half is computed further. Sizes come from a small set, and each
    combination is compiled when it is first needed. With fewer `slots` than rows, a row that ends
    gives its slot to the next one.

    A completion depends on its prompt, its key and `sampling`, not on the rest of the batch: the
    token at position t is drawn with one uniform number, derived from the key and t.

    Args:
        params: a decoder's parameters, or adapters.
        config: the decoder.
        prompts: token ids, padded on either side.
        prompt_mask: True for tokens. None: everything is a token.
        key: one key, from which row i draws with `jax.random.fold_in(key, i)`, or one key for each
            row, `prompts * num_samples` of them.
        sampling: temperature, filters and stop tokens; traced.
        num_samples: completions of each prompt; static.
        max_new_tokens: maximum number of tokens of a completion; static, so use few values.
        max_tokens: a smaller maximum, traced: one for all, one for each prompt or one for each row.
            None: `max_new_tokens`.
        slots: rows that are sampled at a time, which bounds memory. None: all.
        refill: free slots at which waiting rows get them: more leave slots idle, fewer take more
            calls. None: a sixteenth of the slots.
        frozen: parameters that are not trained; `params` are merged over them.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: of the prefill; likewise.
        mesh: of the parameters, which are laid out for decoding once: in the compute type, gathered
            along fsdp and split along tensor. Rows are spread over data and fsdp, and each device
            reads the prompts of its rows.
        keep_routing: whether to return the experts that each token went through; static.

    Returns:
        The completions, on the device. An empty prompt or one with ids outside the vocabulary gets
        log-probabilities of NaN, if its values were on the device.

        Inside `jax.jit` or `jax.vmap` all rows are computed until the last has ended, in one
        program.

    Raises:
        ValueError: if shapes do not fit, a prompt known on the host has no tokens or ids outside
            the vocabulary, a number known on the host is out of its range, or `slots` is not a
            multiple of the devices that rows are spread over, or given inside `jax.jit`; or if
            `keep_routing` is set for a decoder without experts.
        TypeError: if something has the wrong type.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from twinkle_jax.model import init_params, parse_config
        >>> from twinkle_jax.sampler import Sampling, generate
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> prompts = jnp.array([[1, 2, 3], [0, 0, 4]])
        >>> drawn = generate(
        ...     params, config, prompts, prompts > 0, jax.random.key(1), Sampling(0.7, top_k=20),
        ...     num_samples=2, max_new_tokens=4,
        ... )
        >>> drawn.tokens.shape, drawn.lengths.tolist()
        ((4, 4), [4, 4, 4, 4])
    """
    check_decoder(params, config)
    prompts, mask = _checked_prompts(prompts, prompt_mask, config.vocab_size)
    sizes.check_count("num_samples", num_samples)
    sizes.check_count("max_new_tokens", max_new_tokens)
    limits = _checked_limits(max_tokens, len(prompts), num_samples, max_new_tokens)
    keys = _row_keys(key, len(limits))
    at_once, refill = _checked_slots(slots, refill, len(limits), row_shards(mesh))
    setup = sizes.Setup(
        config=config,
        num_samples=num_samples,
        new=max_new_tokens,
        refill=refill,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        mesh=mesh,
        keep_routing=keep_routing,
    )
    arrays = traced_sampling(sampling)
    inputs = (merge_params(frozen, params), prompts, mask, keys, limits, arrays)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs)):
        if slots is not None:
            raise ValueError(f"slots must be None inside jax.jit, got {slots}")
        return _generate_in_one_program(*inputs, setup=setup)
    return _generate(*inputs, setup=setup, slots=at_once)


def generate_many(
    params: Params,
    config: DecoderConfig,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    sampling: Sampling = _DEFAULT,
    *,
    slots: int = 64,
    **options: Any,
) -> Completions:
    """Draw completions of prompts of any number and length, in a fixed number of slots.

    Pads the prompts to a bucket of lengths, and calls [`generate`][twinkle_jax.sampler.generate]
    with `slots`.

    Args:
        params: a decoder's parameters, or adapters.
        config: the decoder.
        prompts: token ids of each prompt.
        key: one key, or one for each row, as `generate` takes them.
        sampling: temperature, filters and stop tokens.
        slots: rows that are sampled at a time.
        options: as for `generate`.

    Returns:
        The completions, rows ordered by prompt, then by sample.

    Raises:
        ValueError: for what `generate` refuses.
        TypeError: if something has the wrong type.

    Example:
        >>> import jax
        >>> from twinkle_jax.model import init_params, parse_config
        >>> from twinkle_jax.sampler import generate_many
        >>> config = parse_config({
        ...     "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32,
        ...     "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        ... })
        >>> params = init_params(jax.random.key(0), config)
        >>> drawn = generate_many(
        ...     params, config, [[1, 2, 3], [4], [5, 6]], jax.random.key(1),
        ...     max_new_tokens=4, max_tokens=[4, 1, 2], slots=2,
        ... )
        >>> drawn.lengths.tolist()
        [4, 1, 2]
    """
    check_decoder(params, config)
    rows = [np.asarray(prompt) for prompt in prompts]
    for i, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise TypeError(f"prompts[{i}] must be a list of token ids, got {row!r:.80}")
        cast_integers(f"prompts[{i}]", row, 0, config.vocab_size - 1)
    if not rows:
        raise ValueError("prompts must not be empty, got none")
    time = bucket_size(max(map(len, rows)), smallest=16)
    tokens, mask = pad_tokens(rows, length=time)
    return generate(params, config, tokens, mask, key, sampling, slots=slots, **options)


_lay_out = jax.jit(device.lay_out_weights, static_argnums=(1, 2))
_SIZES = ("setup", "slots", "capacity", "prompt_pages")
_begin = jax.jit(device.begin, static_argnames=_SIZES)
_fill = jax.jit(device.fill, static_argnames=("setup", "capacity"), donate_argnames="state")
_resize = jax.jit(device.resize, static_argnames=_SIZES)
_run = jax.jit(device.run, static_argnames=("setup", "capacity", "full"), donate_argnames="state")
_collect = jax.jit(device.collect, static_argnames="setup", donate_argnames="state")


def _generate(
    params: Params,
    prompts: Array | np.ndarray,
    mask: Array | np.ndarray,
    keys: jax.Array,
    limits: Array | np.ndarray,
    sampling: TracedSampling,
    *,
    setup: sizes.Setup,
    slots: int,
) -> Completions:
    """Call the compiled programs until all rows have ended; `slots` are per device."""
    rows = len(limits)
    weights = _lay_out(params, setup.compute_dtype, setup.mesh)
    keys, limits = _fill_up(keys, limits, setup.shards)
    longest = prompts.shape[1] - 1
    full = longest + setup.new
    setup = setup.in_pages(full)
    capacity = sizes.first_capacity(setup, slots, longest, full)
    prompt_pages = sizes.first_prompt_pages(setup, slots, len(limits) // setup.shards)
    state = _begin(
        weights, prompts, mask, keys, limits,
        setup=setup, slots=slots, capacity=capacity, prompt_pages=prompt_pages,
    )  # fmt: skip
    while True:
        state, status = _run(weights, state, sampling, setup=setup, capacity=capacity, full=full)
        status = sizes.Status(*map(int, jax.device_get(status)))
        if not status.running and not status.waiting:
            return _first(_collect(state, setup=setup).results, rows)
        kept = slots if status.waiting else sizes.slots_for(status.running, slots)
        needed = sizes.next_capacity(setup, status, kept, capacity, longest, full)
        shared = sizes.next_prompt_pages(setup, status, kept, prompt_pages)
        if (kept, needed, shared) != (slots, capacity, prompt_pages):
            slots, capacity, prompt_pages = kept, needed, shared
            state = _resize(
                state, setup=setup, slots=slots, capacity=capacity, prompt_pages=prompt_pages
            )
        if status.fillable:
            state = _fill(weights, state, prompts, mask, setup=setup, capacity=capacity)


def generate_memory(
    params: Any,
    config: DecoderConfig,
    *,
    prompts: int,
    prompt_tokens: int,
    num_samples: int,
    max_new_tokens: int,
    sampling: Sampling = _DEFAULT,
    slots: int | None = None,
    frozen: Any = None,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    mesh: Mesh | None = None,
    keep_routing: bool = False,
) -> int:
    """Compute the peak memory of `generate` on a device; compiles its programs, runs nothing.

    Args:
        params: as for `generate`, or their shapes and shardings (`jax.ShapeDtypeStruct`).
        config: the decoder.
        prompts: how many prompts.
        prompt_tokens: length that they are padded to.
        num_samples: completions of each prompt.
        max_new_tokens: maximum number of tokens of a completion.
        sampling: filters and a penalty that are in use take memory.
        slots: rows that are sampled at a time.
        frozen: as for `generate`, or their shapes.
        compute_dtype: type of activations.
        attention: of the prefill.
        mesh: of the parameters.
        keep_routing: whether the experts of each token are returned.

    Returns:
        Bytes in addition to `params` and `frozen`: the parameters laid out for decoding, the cache
        at its full size, and temporary memory of the programs.
    """
    rows, shards = prompts * num_samples, row_shards(mesh)
    at_once, refill = _checked_slots(slots, None, rows, shards)
    setup = sizes.Setup(
        config=config,
        num_samples=num_samples,
        new=max_new_tokens,
        refill=refill,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        mesh=mesh,
        keep_routing=keep_routing,
    )
    full, padded = prompt_tokens - 1 + max_new_tokens, rows + -rows % shards
    setup = setup.in_pages(full)
    page = setup.page
    capacity = full if page is None else setup.most_pages(at_once, full)
    tokens = jax.ShapeDtypeStruct((prompts, prompt_tokens), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(threefry_keys(jax.random.key(0)), padded))
    limits = jax.ShapeDtypeStruct((padded,), jnp.int32)
    weights, _ = compile_shapes(
        _lay_out.lower(merge_params(frozen, params), setup.compute_dtype, mesh)
    )
    state, begin = compile_shapes(
        _begin.lower(
            weights, tokens, tokens.update(dtype=bool), keys, limits,
            setup=setup, slots=at_once, capacity=capacity,
            prompt_pages=setup.most_prompt_pages(at_once),
        )
    )  # fmt: skip
    arrays = traced_sampling(sampling)
    _, run = compile_shapes(
        _run.lower(weights, state, arrays, setup=setup, capacity=capacity, full=full)
    )
    # While a cache grows, the old one still exists: half the size, or fewer pages.
    before = device_bytes(state.slots.cache) * (1 / 2 if page is None else 4 / 5)
    growing = device_bytes(weights) + device_bytes(state) + int(before)
    return max(begin, run, growing)


def compile_shapes(lowered: Any) -> tuple[Any, int]:
    """Compile; return shapes and shardings of the results, and the peak bytes per device."""
    compiled = lowered.compile()
    results = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        lowered.out_info,
        compiled.output_shardings,
    )
    return results, peak_bytes(compiled)


def peak_bytes(compiled: Any) -> int:
    """Bytes per device while a compiled program runs: arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)


def device_bytes(tree: Any) -> int:
    """Bytes per device of arrays with these shapes and shardings."""

    def size(x: jax.ShapeDtypeStruct) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _generate_in_one_program(
    params: Params,
    prompts: Array | np.ndarray,
    mask: Array | np.ndarray,
    keys: jax.Array,
    limits: Array | np.ndarray,
    sampling: TracedSampling,
    *,
    setup: sizes.Setup,
) -> Completions:
    """Do the same inside a traced function: one loop for each capacity, without the host."""
    rows = len(limits)
    weights = device.lay_out_weights(params, setup.compute_dtype, setup.mesh)
    keys, limits = _fill_up(keys, limits, setup.shards)
    prompts, mask, limits = (jnp.asarray(x) for x in (prompts, mask, limits))
    slots, full = len(limits) // setup.shards, prompts.shape[1] - 1 + setup.new
    capacity = sizes.capacity_for(prompts.shape[1] - 1, full)
    state = device.begin(
        weights, prompts, mask, keys, limits, setup=setup, slots=slots, capacity=capacity
    )
    while True:
        state, _ = device.run(
            weights, state, sampling, setup=setup, capacity=capacity, full=full, shrink=False
        )
        if capacity == full:
            return _first(device.collect(state, setup).results, rows)
        capacity = sizes.capacity_for(capacity, full)
        state = device.resize(state, setup=setup, slots=slots, capacity=capacity)


def _first(results: Completions, rows: int) -> Completions:
    return results if len(results.tokens) == rows else jax.tree.map(lambda x: x[:rows], results)


def _fill_up(keys: jax.Array, limits: Any, shards: int) -> tuple[jax.Array, Any]:
    """Add padding rows, so that every device has the same number."""
    more = -len(limits) % shards
    if not more:
        return keys, limits
    arrays = np if isinstance(limits, np.ndarray) else jnp
    keys = keys[np.minimum(np.arange(len(limits) + more), len(limits) - 1)]
    return jax.random.clone(keys), arrays.concatenate([limits, arrays.zeros(more, np.int32)])


def _checked_slots(slots: Any, refill: Any, rows: int, shards: int) -> tuple[int, int]:
    """Return the slots per device, and how many of them are refilled together."""
    share = -(-rows // shards)
    for name, count in (("slots", slots), ("refill", refill)):
        if count is not None:
            sizes.check_count(name, count)
    if slots is not None and slots % shards:
        raise ValueError(f"slots must be a positive multiple of {shards} devices, got {slots}")
    count = share if slots is None else min(slots // shards, share)
    most = rows if slots is None else slots
    if refill is not None and refill > most:
        raise ValueError(f"refill must be in [1, {most}], the slots, got {refill}")
    return count, max(1, count // 16 if refill is None else min(refill // shards, count))


def _checked_prompts(
    prompts: Any, mask: Any, vocab: int
) -> tuple[Int[Array | np.ndarray, "prompts time"], Bool[Array | np.ndarray, "prompts time"]]:
    """Check types and shapes, and values that are on the host, where they stay."""
    tokens = prompts if isinstance(prompts, jax.Array) else read_integers("prompts", prompts)
    if tokens.size and not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"prompts must be integers, got {tokens.dtype}")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"prompts must be [prompts, time], neither 0, got {tokens.shape}")
    kept = np.ones(tokens.shape, bool) if mask is None else _array(mask)
    if kept.dtype != jnp.bool_:
        raise TypeError(f"prompt_mask must be bool, got {kept.dtype}")
    if kept.shape != tokens.shape:
        raise ValueError(
            f"prompt_mask must have the shape of prompts, {tokens.shape}, got {kept.shape}"
        )
    if not isinstance(kept, jax.Array):
        empty = np.flatnonzero(~kept.any(axis=1))
        if empty.size:
            raise ValueError(f"prompts must have a token in each row, got none in row {empty[0]}")
        if not isinstance(tokens, jax.Array):
            beyond = np.argwhere(kept & ((tokens < 0) | (tokens >= vocab)))
            if beyond.size:
                row, column = beyond[0]
                raise ValueError(
                    f"prompts must lie in [0, {vocab}), the vocabulary, got "
                    f"{tokens[row, column]} in row {row}"
                )
    return tokens.astype(np.int32), kept


def _checked_limits(
    limits: Any, prompts: int, samples: int, most: int
) -> Int[Array | np.ndarray, " rows"]:
    """Return the maximum number of tokens of each row."""
    array = _array(most if limits is None else limits)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"max_tokens must be integers, got {array.dtype}")
    shapes = ((), (prompts,), (prompts * samples,))
    if array.shape not in shapes:
        raise ValueError(f"max_tokens must have one of the shapes {shapes}, got {array.shape}")
    if isinstance(array, np.ndarray):
        wrong = np.flatnonzero((array < 1) | (array > most))
        if wrong.size:
            place = f" for row {wrong[0]}" if array.ndim else ""
            raise ValueError(
                f"max_tokens must be at least 1 and at most max_new_tokens, {most}, "
                f"got {array.reshape(-1)[wrong[0]]}{place}"
            )
    arrays = np if isinstance(array, np.ndarray) else jnp  # what is on the host stays there
    wide = arrays.repeat(array, samples) if array.shape == (prompts,) else array
    wide = arrays.clip(arrays.broadcast_to(wide, (prompts * samples,)), 1, most)
    return wide.astype(np.int32)


def _row_keys(key: Any, rows: int) -> jax.Array:
    """Return the key of each row."""
    check_key_type("key", key)
    if key.shape not in ((), (rows,)):
        raise ValueError(f"key must be one key or one for each of {rows} rows, got {key.shape}")
    return threefry_keys(key) if key.shape else row_keys(key, rows)


def check_key_type(name: str, key: Any) -> None:
    """Refuse what is no typed key."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(f"{name} must be made with jax.random.key, got {key!r}")


def _array(values: Any) -> jax.Array | np.ndarray:
    return values if isinstance(values, jax.Array) else np.asarray(values)
