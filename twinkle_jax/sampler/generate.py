"""Completions of prompts, in one compiled call."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from twinkle_jax.model.decoder.attention_choice import AttentionImplementation
from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.parameters import Params, merge_params
from twinkle_jax.sampler.completions import Completions
from twinkle_jax.sampler.decoding.checked_prompts import checked_limits, checked_prompts, row_keys
from twinkle_jax.sampler.decoding.decoding_layout import decoding_layout, spread_rows
from twinkle_jax.sampler.decoding.rows import Rows, advance, for_many_steps, read_prompts
from twinkle_jax.sampler.drawing.sampling import Sampling, traced_sampling

_DEFAULT = Sampling()
_STEPS_ON_MESH = 8  # asking all devices whether they are done costs as much as part of a step


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
    frozen: Params | None = None,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    mesh: Mesh | None = None,
) -> Completions:
    r"""Draw completions of prompts from a policy, with the log-probability of every token.

    $$a_t \sim f\!\left(\pi_\theta(\cdot \mid x, a_{<t})\right)$$

    where $f$ applies what `sampling` says. Each prompt is read once, and its cache is copied to
    `num_samples` rows. All of it is one compiled call, which ends as soon as every row has ended.

    What a row gets depends on its prompt, its key and `sampling`, not on the rest of the batch:
    its token at position t is drawn with one uniform number, from its key and t.

    Args:
        params: a decoder's parameters, or adapters.
        config: the decoder.
        prompts: token ids, padded on either side.
        prompt_mask: True for tokens. None: everything is a token.
        key: one key, from which row i draws with `jax.random.fold_in(key, i)`, or one key for each
            row, `prompts * num_samples` of them.
        sampling: temperature, filters and stop tokens; traced.
        num_samples: completions of each prompt; static.
        max_new_tokens: room for the tokens of a completion; static, so take few different values.
        max_tokens: the most tokens of a completion, at most the room; one for all, one for each
            prompt or one for each row; traced. None: as many as there is room for.
        frozen: parameters over which `params` are laid.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: how prompts are read; likewise.
        mesh: what the parameters live on. They are then laid out for decoding once: in the compute
            type, whole along fsdp and split along tensor; rows are spread over data and fsdp.

    Returns:
        The completions, on the device. A prompt without tokens or with ids outside the vocabulary
        gets log-probabilities of NaN, where its values were not known before the call.

    Raises:
        ValueError: if shapes do not fit, a prompt known on the host has no tokens or ids outside
            the vocabulary, a number known on the host is out of its range, or a mesh does not
            divide the rows.
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
    prompts, mask = checked_prompts(prompts, prompt_mask, config.vocab_size)
    counts = {"num_samples": num_samples, "max_new_tokens": max_new_tokens}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    limits = checked_limits(max_tokens, len(prompts), num_samples, max_new_tokens)
    if mesh is not None and len(limits) % (shards := mesh.shape["data"] * mesh.shape["fsdp"]):
        raise ValueError(
            f"prompts times num_samples must be a multiple of the {shards} devices that rows are "
            f"spread over, got {len(prompts)} times {num_samples}"
        )
    return _generate(
        params,
        frozen,
        prompts,
        mask,
        row_keys(key, len(limits)),
        limits,
        traced_sampling(sampling),
        config=config,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        mesh=mesh,
    )


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "num_samples",
        "max_new_tokens",
        "compute_dtype",
        "attention",
        "mesh",
    ),
)
def _generate(
    params: Params,
    frozen: Params | None,
    prompts: Int[Array, "prompts time"],
    mask: Bool[Array, "prompts time"],
    keys: jax.Array,
    limits: Int[Array, " rows"],
    sampling: Sampling,
    *,
    config: DecoderConfig,
    num_samples: int,
    max_new_tokens: int,
    compute_dtype: DTypeLike | None,
    attention: AttentionImplementation | None,
    mesh: Mesh | None,
) -> Completions:
    weights = decoding_layout(merge_params(frozen, params), compute_dtype, mesh)
    rows = read_prompts(
        weights,
        config,
        prompts,
        mask,
        jnp.repeat(jnp.arange(len(prompts), dtype=jnp.int32), num_samples),
        keys,
        limits,
        max_length=prompts.shape[1] - 1 + max_new_tokens,
        new=max_new_tokens,
        compute_dtype=compute_dtype,
        attention=attention,
        mesh=mesh,
    )

    weights = for_many_steps(weights, mesh)

    def step(_: Array | int, rows: Rows) -> Rows:
        return spread_rows(advance(weights, config, rows, sampling, compute_dtype, mesh), mesh)

    steps = 1 if mesh is None else _STEPS_ON_MESH
    rows = jax.lax.while_loop(
        lambda rows: jnp.any(rows.running),
        lambda rows: jax.lax.fori_loop(0, steps, step, rows),
        spread_rows(rows, mesh),
    )
    return completions(rows)


def completions(rows: Rows) -> Completions:
    """Hand over what rows have drawn."""
    columns = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
    mask = columns < rows.lengths[:, None]
    return Completions(
        tokens=jnp.where(mask, rows.tokens, 0),
        mask=mask,
        logprobs=rows.logprobs,
        sampling_logprobs=rows.sampling_logprobs,
        finish_reasons=rows.reasons,
        lengths=rows.lengths,
    )
