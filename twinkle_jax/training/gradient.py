"""One micro-batch: the gradient of its loss, added to the accumulated gradients."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from twinkle_jax.data import IGNORE, Batch
from twinkle_jax.data.batch import check_batch, without_labels_of_padding
from twinkle_jax.loss import Coefficient, LossOutput, PolicyMetrics, PreferenceMetrics
from twinkle_jax.model import AttentionImplementation, DecoderConfig, Params, Remat
from twinkle_jax.model.decoder.layers import map_logits
from twinkle_jax.model.decoder.parameters import check_decoder
from twinkle_jax.model.decoder.sharding import constrain, find_mesh, spread_batch
from twinkle_jax.sampler.sampling import threefry_keys
from twinkle_jax.training.packing import Packing, pack
from twinkle_jax.training.score import (
    Transfers,
    check_transfers,
    positive_scalar,
    score_lines,
    unpack_scores,
)
from twinkle_jax.training.state import TrainState


class StepSummary(NamedTuple):
    """Sums and metrics of a micro-batch.

    Attributes:
        loss_sum: the loss before it is divided.
        denominator: what to divide it by.
        tokens: positions with a label.
        metrics: means over these tokens, or over pairs; None where the loss has none.
        logps: log-probabilities of the labels, [batch, time], as the loss saw them; None for the
            sum of several micro-batches.
    """

    loss_sum: Float[Array, ""]
    denominator: Float[Array, ""]
    tokens: Float[Array, ""]
    metrics: PolicyMetrics | PreferenceMetrics | None
    logps: Float[Array, "batch time"] | None = None

    @property
    def loss(self) -> Float[Array, ""]:
        """The loss; 0 if the denominator is 0."""
        return divided(self.loss_sum, self.denominator)


@jax.jit
def divided(total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """Divide; 0 / 0 is 0."""
    return total / jnp.where(count == 0, 1, count)


def add_summaries(a: StepSummary, b: StepSummary) -> StepSummary:
    """Add up two micro-batches; means are weighted by their tokens, or pairs."""
    # Without log-probabilities: each of their shapes would compile again.
    return _add_summaries(a._replace(logps=None), b._replace(logps=None))


@jax.jit
def _add_summaries(a: StepSummary, b: StepSummary) -> StepSummary:
    metrics: PolicyMetrics | PreferenceMetrics | None = None

    def means(count_a: Float[Array, ""], count_b: Float[Array, ""]) -> Any:
        def mean(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
            return divided(x * count_a + y * count_b, count_a + count_b)

        return jax.tree.map(mean, a.metrics, b.metrics)

    if isinstance(a.metrics, PreferenceMetrics):
        metrics = means(a.denominator, b.denominator)
    elif a.metrics is not None and isinstance(b.metrics, PolicyMetrics):

        def extreme(pick: Callable[..., Array], x: Array, y: Array) -> Array:
            """The extreme over both, ignoring the placeholder 1 of a batch without tokens."""
            return jnp.where(a.tokens == 0, y, jnp.where(b.tokens == 0, x, pick(x, y)))

        metrics = means(a.tokens, b.tokens)._replace(
            ratio_min=extreme(jnp.minimum, a.metrics.ratio_min, b.metrics.ratio_min),
            ratio_max=extreme(jnp.maximum, a.metrics.ratio_max, b.metrics.ratio_max),
        )
    return StepSummary(
        a.loss_sum + b.loss_sum, a.denominator + b.denominator, a.tokens + b.tokens, metrics
    )


Static = tuple[Any, ...]
UNIT_SEQUENCES = {"sequences": 1, "pairs": 2, "batches": None}  # a batch counts as one


def split_loss(loss_fn: Any) -> tuple[Static, dict[str, Any]]:
    """Split a loss into its hashable fields and the coefficients to trace."""
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise TypeError(f"loss_fn must be a loss such as {name}(), got the class {name}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a loss of twinkle_jax.loss, got {loss_fn!r}")
    if not hasattr(loss_fn, "divides_by"):  # a mean would be divided once more
        name = getattr(loss_fn, "__name__", repr(loss_fn))
        raise TypeError(
            f"loss_fn must say what it divides_by, got {name}: get_loss makes a loss of a function"
        )
    if not dataclasses.is_dataclass(loss_fn):
        return (loss_fn,), {}
    fields = {f.name: getattr(loss_fn, f.name) for f in dataclasses.fields(loss_fn) if f.init}
    traced = {name: value for name, value in fields.items() if _is_coefficient(value)}
    static = tuple((name, value) for name, value in fields.items() if name not in traced)
    return (type(loss_fn), static), {
        name: np.float32(value) if isinstance(value, float | np.floating) else value
        for name, value in traced.items()
    }


def join_loss(static: Static, traced: dict[str, Any]) -> Callable[..., Any]:
    """Rebuild the loss from the result of `split_loss`."""
    if len(static) == 1:
        return static[0]
    kind, fields = static
    return kind(**dict(fields), **traced)


def _is_coefficient(value: Any) -> bool:
    if isinstance(value, jax.Array | np.ndarray):
        return True
    return isinstance(value, float | np.floating) and value != 0


def loss_denominator(
    loss_fn: Callable[..., Any], labelled: Bool[Array, "batch time"], rows: Bool[Array, " batch"]
) -> Float[Array, ""]:
    """Count what the loss `divides_by`: tokens (the default), sequences, pairs, or batches."""
    unit = getattr(loss_fn, "divides_by", "tokens")
    if unit == "tokens":
        return jnp.sum(labelled, dtype=jnp.float32)
    if unit not in UNIT_SEQUENCES:
        known = ", ".join(map(repr, ("tokens", *UNIT_SEQUENCES)))
        raise ValueError(f"divides_by must be one of {known}, got {unit!r}")
    size = UNIT_SEQUENCES[unit]
    return jnp.float32(1) if size is None else jnp.sum(rows, dtype=jnp.float32) / size


def grad_step(
    state: TrainState,
    batch: Batch,
    config: DecoderConfig,
    loss_fn: Callable[..., LossOutput],
    *,
    frozen: Params | None = None,
    temperature: Coefficient = 1.0,
    key: Key[Array, "*rows"] | None = None,
    compute_dtype: DTypeLike | None = None,
    attention: AttentionImplementation | None = None,
    remat: Remat = True,
    mesh: Mesh | None = None,
    transfers: Transfers = "layers",
    packing: Packing | None = None,
) -> tuple[TrainState, StepSummary]:
    r"""Add the gradient of a micro-batch to the state; compiled, and the state is donated.

    $$G \leftarrow G + \nabla_\theta \sum \ell, \qquad N \leftarrow N + n$$

    with the losses' sum before any division, and $n$ the tokens or the sequences that this loss
    divides by. [`apply_gradients`][twinkle_jax.training.apply_gradients] divides once, so how a
    batch is cut into micro-batches changes nothing. Logits are never held: log-probabilities are
    computed in chunks, at labelled positions.

    Args:
        state: what is trained; donated: do not use it after the call.
        batch: a micro-batch.
        config: the decoder.
        loss_fn: a loss of `twinkle_jax.loss`, or one that subclasses its `Loss`;
            [`get_loss`][twinkle_jax.loss.get_loss] makes one of a function. Fields of a dataclass
            that are floats or arrays are traced: a change of them compiles nothing, unless from or
            to 0. All else is compiled in, so pass a new object instead of changing one.
        frozen: parameters that are not trained; the state's are merged over them.
        temperature: above 0, at which log-probabilities are taken, as the sampler did.
        key: root key of adapters' dropout, from which each row derives a key by its number, counted
            on from the rows that the state has seen; or the keys of the rows, so that those of a
            batch keep theirs in whatever micro-batch they are. None: no dropout.
        compute_dtype: as for [`hidden_states`][twinkle_jax.model.hidden_states].
        attention: likewise. Use the same for `score_batch`: then the ratio of a policy to itself is
            1.
        remat: as for `hidden_states`.
        mesh: of the state. None: that of its arrays, or one device. Traced arrays do not have it:
            inside a compiled function of yours, pass it.
        transfers: `layers` gathers the parameters of a layer when it runs, forwards and backwards,
            and sums its gradients there, which takes least memory. `once` gathers all parameters
            before and sums all gradients after: few large transfers, and room on each device for
            all parameters and their gradients in the compute type. Not on a mesh with tensor.
        packing: how rows are packed into the lines that the decoder runs over; the loss sees rows.
            None: rows are lines.

    Returns:
        The state with added gradients, and the sums of the micro-batch.

    Raises:
        ValueError: if shapes differ, a token on the host is outside the vocabulary, the mesh does
            not divide the rows or the key-value heads, the temperature is not one number above 0,
            the loss's `ignore_index` is a token, or `packing` is given with a teacher's tokens.
        TypeError: if tokens or labels are not integers, `loss_fn` is no loss, `key` is not a
            typed key, or `state` or `config` is something else.
    """
    _check_state(state)
    check_decoder(state.params, config)
    check_transfers(transfers)
    batch = check_batch(batch, config.vocab_size)
    if packing is not None and batch.teacher_tokens is not None:
        raise ValueError("packing must be None with teacher_tokens, got a packing")
    static, traced = split_loss(loss_fn)
    ignored = getattr(loss_fn, "ignore_index", IGNORE)
    if 0 <= ignored < config.vocab_size:  # labels with this token would count, and have no loss
        raise ValueError(
            "ignore_index of loss_fn must be no token of the vocabulary, "
            f"[0, {config.vocab_size}), got {ignored}: a batch has {IGNORE} where there is no loss"
        )
    kind = getattr(key, "dtype", np.dtype(object))
    if key is not None and not jnp.issubdtype(kind, jax.dtypes.prng_key):
        raise TypeError(f"key must be a typed key such as jax.random.key(0), got {key!r}")
    if key is not None and key.shape not in ((), batch.tokens.shape[:1]):
        raise ValueError(
            f"key must be one key, or one for each of the {len(batch.tokens)} rows, got keys of "
            f"the shape {key.shape}"
        )
    return _grad_step(
        state,
        batch,
        frozen=frozen,
        traced=traced,
        temperature=positive_scalar("temperature", temperature),
        key=key,
        config=config,
        loss=static,
        compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
        attention=attention,
        remat=remat,
        mesh=find_mesh(mesh, state.params),
        transfers=transfers,
        packing=packing,
    )


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        kind = type(state).__name__
        raise TypeError(f"state must be a TrainState, which train_state makes, got {kind}")


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "loss",
        "compute_dtype",
        "attention",
        "remat",
        "mesh",
        "transfers",
    ),
    donate_argnums=0,
)
def _grad_step(
    state: TrainState,
    batch: Batch,
    frozen: Params | None,
    traced: dict[str, Any],
    temperature: Float[Array, ""],
    key: Key[Array, "*rows"] | None,
    packing: Packing | None,
    *,
    config: DecoderConfig,
    loss: Static,
    mesh: Mesh | None,
    **options: Any,
) -> tuple[TrainState, StepSummary]:
    loss_fn = join_loss(loss, traced)
    batch = without_labels_of_padding(batch)
    if packing is None:
        lines = batch = spread_batch(batch, config, mesh)
    else:
        lines = spread_batch(pack(batch, packing), config, mesh)
    labelled = batch.labels != IGNORE
    rows = jnp.ones(len(labelled), bool) if batch.rows is None else batch.rows
    dropout = None if key is None else dropout_keys(key, state.rows, rows, lines, packing)

    def loss_sum(params: Params) -> tuple[Float[Array, ""], tuple[Any, Array]]:
        scores = score_lines(
            params,
            frozen,
            config,
            lines,
            temperature=temperature,
            with_entropy=getattr(loss_fn, "require_entropy", False),
            dropout=dropout,
            logits=partial(_teacher_logits, config) if batch.teacher_tokens is not None else None,
            mesh=mesh,
            **options,
        )
        if packing is not None:
            scores = unpack_scores(scores, packing, mesh)
        outputs = {"logps": scores.logps}
        if scores.entropies is not None:
            outputs["entropies"] = scores.entropies
        if scores.logits is not None:
            outputs["teacher_token_logits"] = scores.logits
        output = _call(loss_fn, batch, outputs)
        return output.loss.astype(jnp.float32), (output.metrics, scores.logps)

    (total, (metrics, logps)), gradient = jax.value_and_grad(loss_sum, has_aux=True)(state.params)
    denominator = loss_denominator(loss_fn, labelled, rows)
    tokens = jnp.sum(labelled, dtype=jnp.float32)
    state = state._replace(
        gradient_sum=jax.tree.map(
            lambda total, g: total + g.astype(total.dtype), state.gradient_sum, gradient
        ),
        denominator=state.denominator + denominator,
        tokens=state.tokens + tokens,
        rows=state.rows + _count(rows)[-1],
    )
    return constrain(state, mesh), StepSummary(
        total, denominator, tokens, metrics, jax.lax.stop_gradient(logps)
    )


def _teacher_logits(config: DecoderConfig, weights: Params, hidden: Array, lines: Batch) -> Array:
    """Return the logits of the teacher's tokens at each position; the others are discarded."""
    assert lines.teacher_tokens is not None

    def gather(logits: Array, tokens: Array) -> Array:
        return jnp.take_along_axis(logits, tokens, axis=-1)

    return map_logits(gather, weights, config, hidden, lines.teacher_tokens)


def _call(
    loss_fn: Callable[..., LossOutput], batch: Batch, outputs: dict[str, Array]
) -> LossOutput:
    """Compute the loss as a sum, with the ignore index of this loss."""
    ignore = getattr(loss_fn, "ignore_index", IGNORE)
    teacher = {}
    if batch.teacher_tokens is not None:
        teacher = {
            "teacher_topk_logprobs": batch.teacher_logprobs,
            "teacher_topk_indices": batch.teacher_tokens,
        }
    return loss_fn(
        {"labels": jnp.where(batch.labels == IGNORE, ignore, batch.labels)},
        outputs,
        advantages=batch.advantages,
        old_logps=batch.old_logps,
        ref_logps=batch.ref_logps,
        **({} if batch.sampler_logps is None else {"sampler_logps": batch.sampler_logps}),
        **teacher,
        denominator=1.0,
    )


def dropout_keys(
    key: Key[Array, "*rows"],
    seen: Int[Array, ""],
    rows: Bool[Array, " batch"],
    lines: Batch,
    packing: Packing | None,
) -> Key[Array, "lines width"]:
    """Derive the dropout key of each place from its row and its place in the row."""
    key = threefry_keys(key)
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, seen + _count(rows) - 1)
    shape = lines.tokens.shape
    if packing is None:  # the decoder moves the tokens of a row to its front
        key = jnp.broadcast_to(key[:, None], shape)
        columns = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    else:
        key = key[packing.sources // packing.places.shape[1]]
        columns = jnp.asarray(packing.positions)
    return jax.vmap(jax.vmap(jax.random.fold_in))(key, columns)


def _count(rows: Bool[Array, " batch"]) -> Int[Array, " batch"]:
    """Number the rows from 1, skipping padding rows."""
    return jnp.cumsum(rows, dtype=jnp.int32)
