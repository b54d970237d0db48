"""Many prompts through a few slots: a row that ends makes room for the next one at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from twinkle_jax.data.batch import bucket_size
from twinkle_jax.model.decoder.attention_choice import AttentionImplementation
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.parameters import Params, merge_params
from twinkle_jax.sampler.completions import Completions
from twinkle_jax.sampler.decoding.checked_prompts import checked_limits, checked_prompts, row_keys
from twinkle_jax.sampler.decoding.decoding_layout import decoding_layout
from twinkle_jax.sampler.decoding.rows import Rows
from twinkle_jax.sampler.decoding.slots import empty_slots, fill_slots, run_slots
from twinkle_jax.sampler.drawing.sampling import Sampling, traced_sampling

_DEFAULT = Sampling()


class _Waiting(NamedTuple):
    """Rows that have no slot yet: which, and what they begin with."""

    order: list[int]
    prompts: list[np.ndarray]
    keys: jax.Array
    limits: np.ndarray
    samples: int
    time: int


def generate_many(
    params: Params,
    config: DecoderConfig,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    sampling: Sampling = _DEFAULT,
    *,
    num_samples: int = 1,
    max_new_tokens: int,
    max_tokens: int | Int[Array | np.ndarray, "*rows"] | None = None,
    slots: int = 64,
    refill: int | None = None,
    frozen: Params | None = None,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    mesh: Mesh | None = None,
) -> Completions:
    """Draw completions of any number of prompts, with a fixed number of rows on the device.

    Where completions differ much in length, a batch waits for its longest. Here a row that has
    ended gives its slot to the next one. Each row gets what
    [`generate`][twinkle_jax.sampler.generate] would give it. Rows that may become longest go first,
    so that none of them is left alone at the end.

    Args:
        params: a decoder's parameters, or adapters.
        config: the decoder.
        prompts: token ids of each prompt, as long as they are.
        key: one key, or one for each row, as `generate` takes them.
        sampling: temperature, filters and stop tokens.
        num_samples: completions of each prompt.
        max_new_tokens: room for the tokens of a completion.
        max_tokens: the most tokens of a completion, as `generate` takes it.
        slots: rows at a time.
        refill: how many slots have to be free before they are filled: more cost idle slots, fewer
            cost calls. None: a sixteenth of them.
        frozen: parameters over which `params` are laid.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: how prompts are read; likewise.
        mesh: what the parameters live on; it must divide the slots.

    Returns:
        The completions, rows ordered by prompt, then by sample, as NumPy arrays.

    Raises:
        ValueError: for what `generate` refuses, and numbers of slots out of range.
        TypeError: if something has the wrong type.
    """
    host = [np.asarray(prompt) for prompt in prompts]
    tokens, mask = _rectangle(host)
    checked_prompts(tokens, mask, config.vocab_size)
    limits = np.asarray(checked_limits(max_tokens, len(host), num_samples, max_new_tokens))
    refill = max(1, slots // 16) if refill is None else refill
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    if slots < 1 or slots % shards or not 1 <= refill <= slots:
        raise ValueError(
            f"slots must be a positive multiple of {shards} devices and refill at most as many, "
            f"got slots={slots}, refill={refill}"
        )
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    time = bucket_size(max(map(len, host)), smallest=16)
    run = {"config": config, "compute_dtype": dtype, "mesh": mesh}
    fill = {**run, "attention": attention, "max_length": time - 1 + max_new_tokens}
    lay_out = jax.jit(decoding_layout, static_argnums=(1, 2))
    weights = lay_out(merge_params(frozen, params), dtype, mesh)
    keys = row_keys(key, len(limits))
    order = sorted(range(len(limits)), key=lambda row: -limits[row])
    waiting = _Waiting(order, host, keys, limits, num_samples, time)
    rows = empty_slots(
        weights, jax.random.clone(keys[0]), slots=slots, time=time, new=max_new_tokens, **fill
    )
    arrays, held = traced_sampling(sampling), np.full(slots, -1)
    results = _results(len(limits), max_new_tokens)
    while waiting.order or np.any(held >= 0):
        while waiting.order and np.any(held < 0):
            rows = fill_slots(weights, rows, *_next_rows(waiting, held, refill), **fill)
        enough = refill if waiting.order else slots
        rows = run_slots(weights, rows, arrays, jnp.int32(enough), **run)
        _collect(rows, held, results)
    return results


def _rectangle(prompts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    for i, prompt in enumerate(prompts):
        if prompt.ndim != 1 or (prompt.size and not np.issubdtype(prompt.dtype, np.integer)):
            raise TypeError(f"prompts[{i}] must be a list of token ids, got {prompt!r:.80}")
    if not prompts:
        raise ValueError("prompts must not be empty, got none")
    time = max(1, *(len(prompt) for prompt in prompts))
    tokens, mask = np.zeros((len(prompts), time), np.int32), np.zeros((len(prompts), time), bool)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)], mask[i, : len(prompt)] = prompt, True
    return tokens, mask


def _next_rows(waiting: _Waiting, held: np.ndarray, most: int) -> tuple[Any, ...]:
    """Take the next rows into free slots; note which row a slot holds."""
    free = np.flatnonzero(held < 0)[:most]
    rows = [waiting.order.pop(0) for _ in range(min(len(free), len(waiting.order)))]
    free = free[: len(rows)]
    held[free] = rows
    chosen = sorted({row // waiting.samples for row in rows})
    count = bucket_size(len(chosen))
    tokens, mask = np.zeros((count, waiting.time), np.int32), np.zeros((count, waiting.time), bool)
    mask[:, 0] = True
    for i, prompt in enumerate(chosen):
        ids = waiting.prompts[prompt]
        tokens[i, : len(ids)], mask[i, : len(ids)] = ids, True
    rest = most - len(rows)
    source = np.array([chosen.index(row // waiting.samples) for row in rows] + [0] * rest, np.int32)
    slot = np.array([*free, *[len(held)] * rest], np.int32)
    padded = np.array(rows + rows[:1] * rest)
    keys = jax.random.clone(waiting.keys[padded])  # what fills up repeats a key, and draws nothing
    return tokens, mask, source, slot, keys, waiting.limits[padded]


def _results(rows: int, new: int) -> Completions:
    return Completions(
        tokens=np.zeros((rows, new), np.int32),  # type: ignore[arg-type]
        mask=np.zeros((rows, new), bool),  # type: ignore[arg-type]
        logprobs=np.zeros((rows, new), np.float32),  # type: ignore[arg-type]
        sampling_logprobs=np.zeros((rows, new), np.float32),  # type: ignore[arg-type]
        finish_reasons=np.zeros(rows, np.int32),  # type: ignore[arg-type]
        lengths=np.zeros(rows, np.int32),  # type: ignore[arg-type]
    )


def _collect(rows: Rows, held: np.ndarray, results: Any) -> None:
    """Copy what has ended into the results, and free its slots."""
    reasons = np.array(rows.reasons)
    done = np.flatnonzero((held >= 0) & (reasons > 0))
    to = held[done]
    results.lengths[to] = np.array(rows.lengths)[done]
    results.finish_reasons[to] = reasons[done]
    results.mask[to] = np.arange(results.mask.shape[1]) < results.lengths[to, None]
    results.tokens[to] = np.where(results.mask[to], np.array(rows.tokens)[done], 0)
    results.logprobs[to] = np.array(rows.logprobs)[done]
    results.sampling_logprobs[to] = np.array(rows.sampling_logprobs)[done]
    held[done] = -1
