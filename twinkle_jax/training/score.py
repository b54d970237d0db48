"""Log-probabilities of given tokens, in a pass without gradients and inside a train step."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from twinkle_jax.data import IGNORE, Batch
from twinkle_jax.data.batch import check_batch, without_labels_of_padding
from twinkle_jax.loss import Coefficient, PerToken, token_logprobs
from twinkle_jax.model import (
    AttentionImplementation,
    DecoderConfig,
    Params,
    merge_params,
    output_logits,
    output_matrix,
    partition_rules,
)
from twinkle_jax.model.decoder.forward import run_rows
from twinkle_jax.model.decoder.lora import with_dropout
from twinkle_jax.model.decoder.parameters import check_decoder
from twinkle_jax.model.decoder.sharding import (
    AXES,
    ROWS,
    copy_to_devices,
    find_mesh,
    gather_in_steps,
    spread_batch,
    steps_of,
)
from twinkle_jax.training.packing import Packing, pack, unpack

Transfers = Literal["layers", "once"]


def traced_scalar(name: str, value: Any) -> Any:
    """Make a number a float32 scalar, so that all values share one compilation.

    Raises:
        TypeError: if it is no number, such as a schedule that was not called.
        ValueError: if it is several numbers, which would broadcast over some other axis.
    """
    kinds = int | float | np.number | np.ndarray | jax.Array
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if np.shape(value) != ():
        raise ValueError(f"{name} must be one number, got shape {np.shape(value)}")
    return value if isinstance(value, jax.Array) else np.float32(value)


def check_transfers(transfers: str) -> None:
    """Refuse what is not one of `Transfers`: it would count as the other one."""
    if transfers not in get_args(Transfers):
        raise ValueError(f"transfers must be 'layers' or 'once', got {transfers!r}")


def positive_scalar(name: str, value: Any) -> Any:
    """Like `traced_scalar`, for a number above 0; values on a device are not checked."""
    value = traced_scalar(name, value)
    if not isinstance(value, jax.Array) and not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return value


def label_scores(
    params: Params,
    config: DecoderConfig,
    hidden: Float[Array, "batch time width"],
    labels: Int[Array, "batch time"],
    *,
    temperature: float | Float[Array, ""],
    with_entropy: bool,
    mesh: Mesh | None,
) -> tuple[PerToken, ...]:
    """Score labels, optionally with entropies; 0 where the label is −100.

    On a mesh, positions are spread over all devices, and each scores its own against the whole
    head: the rows over data and fsdp, the time over tensor. The head is gathered once, in the type
    of the hidden states, and its gradient is summed and scattered.
    """

    def score(hidden: Array, head: Array, labels: Array, temperature: Any) -> tuple[PerToken, ...]:
        for dimension, axis in enumerate(spread_head):
            if mesh is not None and axis is not None:
                head = gather_in_steps(head, axis, dimension, steps_of(mesh.shape[axis]))
        flat = labels.reshape(-1)
        scores = token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            flat,
            mask=flat != IGNORE,
            temperature=temperature,
            soft_cap=config.logits_soft_cap,
            with_entropy=with_entropy,
        )
        several: tuple[Any, ...] = scores if isinstance(scores, tuple) else (scores,)
        return tuple(x.reshape(labels.shape) for x in several)

    head, spread_head = output_matrix(params).astype(hidden.dtype), PartitionSpec()
    if mesh is None:
        return score(hidden, head, labels, temperature)
    spread_head = partition_rules(mesh)("lm_head/kernel", head.shape)
    spread, replicated = PartitionSpec(ROWS, "tensor"), PartitionSpec()
    return jax.shard_map(
        score, mesh=mesh, in_specs=(spread, spread_head, spread, replicated), out_specs=spread
    )(hidden, head, labels, temperature)


class Scores(NamedTuple):
    """Scores of labels under the policy; 0 where the label is −100.

    Attributes:
        logps: log-probability of each label.
        entropies: entropy of the policy at each label, in nats; None unless asked for.
        logits: over the whole vocabulary, at every position; None unless asked for.
        routing: the experts that each token went through, as `hidden_states` returns them; None
            unless asked for.
    """

    logps: Float[Array, "batch time"]
    entropies: Float[Array, "batch time"] | None = None
    logits: Float[Array, "batch time vocab"] | None = None
    routing: Int[Array, "batch time layers chosen"] | None = None


def score_lines(
    params: Params,
    frozen: Params | None,
    config: DecoderConfig,
    lines: Batch,
    *,
    temperature: float | Float[Array, ""],
    with_entropy: bool,
    mesh: Mesh | None,
    transfers: Transfers,
    dropout: Key[Array, "lines width"] | None = None,
    logits: Callable[[Params, Array, Batch], Array] | None = None,
    with_routing: bool = False,
    **options: Any,
) -> Scores:
    """Run the decoder over lines and score their labels; options are those of `hidden_states`.

    Transfers by `layers` gather the parameters of a layer when it runs; `once` gathers all of them
    before, and each device then runs its lines as if it were alone. `dropout` has the key of each
    place, for adapters; `logits` computes those to return from weights, hidden states and lines.
    """

    def score(
        params: Params,
        frozen: Params | None,
        lines: Batch,
        temperature: Any,
        dropout: Any,
        mesh: Mesh | None = None,
    ) -> Scores:
        weights = merge_params(frozen, params)
        if dropout is not None:
            weights = with_dropout(weights, dropout)
        hidden, chosen = run_rows(
            weights,
            config,
            lines.tokens,
            lines.mask,
            positions=lines.positions,
            segment_ids=lines.segment_ids,
            routing=lines.routing,
            keep_routing=with_routing,
            mesh=mesh,
            **options,
        )
        scores = label_scores(
            weights,
            config,
            hidden,
            lines.labels,
            temperature=temperature,
            with_entropy=with_entropy,
            mesh=mesh,
        )
        returned = None if logits is None else logits(weights, hidden, lines)
        return Scores(scores[0], scores[1] if with_entropy else None, returned, chosen)

    if mesh is None or transfers == "layers":
        return score(params, frozen, lines, temperature, dropout, mesh)
    if mesh.shape["tensor"] > 1:
        raise ValueError(
            f"transfers must be 'layers' on a mesh with a tensor axis of {mesh.shape['tensor']}, "
            "got 'once'"
        )

    def score_on_device(params: Params, frozen: Params | None, *others: Any) -> Scores:
        params, frozen = jax.tree.map(lambda x: x[0], (params, frozen))
        return score(params, frozen, *others)

    dtype = options.get("compute_dtype")
    copies, rows, replicated = PartitionSpec(AXES), PartitionSpec(ROWS), PartitionSpec()
    return jax.shard_map(
        score_on_device,
        mesh=mesh,
        in_specs=(copies, copies, rows, replicated, rows),
        out_specs=rows,
        check_vma=False,  # the decoder is written for one device, and begins loops with constants
    )(
        copy_to_devices(params, dtype, mesh),
        None if frozen is None else copy_to_devices(frozen, dtype, mesh),
        lines,
        temperature,
        dropout,
    )


def unpack_scores(scores: Scores, packing: Packing, mesh: Mesh | None) -> Scores:
    """Move scores from places of lines back to rows."""
    if mesh is not None:
        # A row may take from any line; left to itself, a compiler adds up what each device has.
        on_all = NamedSharding(mesh, PartitionSpec())
        scores = jax.lax.with_sharding_constraint(scores, on_all)
    return jax.tree.map(lambda values: unpack(values, packing), scores)


def score_batch(
    params: Params,
    batch: Batch,
    config: DecoderConfig,
    *,
    frozen: Params | None = None,
    temperature: Coefficient = 1.0,
    with_entropy: bool = False,
    with_logits: bool = False,
    with_routing: bool = False,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    mesh: Mesh | None = None,
    transfers: Transfers = "layers",
    packing: Packing | None = None,
) -> Scores:
    """Score the labels of a batch; compiled, nothing is donated.

    Args:
        params: a decoder's, or adapters'.
        batch: tokens and labels, and how they are masked, placed and routed; other fields are not
            read.
        config: the decoder.
        frozen: parameters that `params` are merged over.
        temperature: of log-probabilities and entropies; logits are not scaled.
        with_entropy: whether to compute entropies.
        with_logits: whether to compute all logits, [batch, time, vocabulary] in float32.
        with_routing: whether to return the experts that each token went through.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: as for `hidden_states`.
        mesh: of the parameters. None: that of their arrays, or one device. Traced arrays do not
            have it: inside a compiled function of yours, pass it.
        transfers: as for [`grad_step`][twinkle_jax.training.grad_step].
        packing: as for `grad_step`; not with `with_logits`.

    Returns:
        The scores, at every position with a label.

    Raises:
        ValueError: if shapes differ, a token on the host is outside the vocabulary, the temperature
            is not one number above 0, `packing` is given with `with_logits`, or `with_routing` for
            a decoder without experts.
        TypeError: if tokens or labels are not integers, or parameters or `config` something else.
    """
    check_decoder(params, config)
    check_transfers(transfers)
    batch = check_batch(batch, config.vocab_size)
    if packing is not None and with_logits:
        raise ValueError("with_logits must be False with a packing, got True")
    if with_routing and config.experts is None:
        raise ValueError("with_routing must be False for a decoder without experts, got True")
    return _score_batch(
        params,
        frozen,
        Batch(
            batch.tokens,
            batch.labels,
            mask=batch.mask,
            positions=batch.positions,
            segment_ids=batch.segment_ids,
            routing=batch.routing,
        ),
        positive_scalar("temperature", temperature),
        config=config,
        with_entropy=with_entropy,
        with_logits=with_logits,
        with_routing=with_routing,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        mesh=find_mesh(mesh, params),
        transfers=transfers,
        packing=packing,
    )


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "with_entropy",
        "with_logits",
        "with_routing",
        "compute_dtype",
        "attention",
        "mesh",
        "transfers",
    ),
)
def _score_batch(
    params: Params,
    frozen: Params | None,
    batch: Batch,
    temperature: Float[Array, ""],
    packing: Packing | None,
    *,
    config: DecoderConfig,
    with_entropy: bool,
    with_logits: bool,
    mesh: Mesh | None,
    **options: Any,
) -> Scores:
    batch = without_labels_of_padding(batch)
    lines = spread_batch(batch if packing is None else pack(batch, packing), config, mesh)
    scores = score_lines(
        params,
        frozen,
        config,
        lines,
        temperature=temperature,
        with_entropy=with_entropy,
        logits=(lambda weights, hidden, _: output_logits(weights, config, hidden))
        if with_logits
        else None,
        mesh=mesh,
        remat=False,
        **options,
    )
    return scores if packing is None else unpack_scores(scores, packing, mesh)
