"""The state of training and its update.

The state holds parameters, optimizer state and accumulated gradients. The update divides gradients
once, clips them, and applies them if they are finite.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.loss import Coefficient
from twinkle_jax.model import Params, make_mesh, shard_like_params
from twinkle_jax.model.decoder.parameters import CORRECTION, LAYER_SCALAR
from twinkle_jax.model.decoder.sharding import (
    constrain,
    find_mesh,
    place_params,
    sum_over_leaves,
)
from twinkle_jax.training.score import positive_scalar, traced_scalar


class TrainState(NamedTuple):
    """Everything that the next step depends on.

    Attributes:
        params: trained parameters: a whole decoder, or adapters alone.
        optimizer_state: of the Optax transformation, in float32; None without one.
        step: updates applied so far.
        gradient_sum: gradients, summed over micro-batches and not yet divided; float32.
        denominator: of the sum: tokens or sequences, as the loss counts.
        tokens: number of labels in the sum; with 0 there is no update to apply.
        rows: total rows that `grad_step` has seen, which seed the noise of dropout.
    """

    params: Any
    optimizer_state: Any
    step: Int[Array, ""]
    gradient_sum: Any
    denominator: Float[Array, ""]
    tokens: Float[Array, ""]
    rows: Int[Array, ""]


def train_state(
    params: Params, optimizer: optax.GradientTransformation | None = None
) -> TrainState:
    """Make a train state.

    Args:
        params: what to train: a tree of arrays, in float32. They keep their type, and in bfloat16
            an update of less than about 0.2 % of a parameter is lost: load a checkpoint with
            `dtype="float32"`, and pass `compute_dtype="bfloat16"` to `grad_step` instead.
            [`grad_step`][twinkle_jax.training.grad_step] donates the state, so do not use these
            arrays afterwards; copy what is needed elsewhere.
        optimizer: an Optax transformation of gradients, state and parameters; None for a state that
            is not updated. `apply_gradients` multiplies its updates by a learning rate, so give it
            the learning rate 1 and pass yours there, where it is traced. One that needs its rate
            before its last factor (`schedule_free_adamw`, `madgrad`, `fromage`) keeps its own.

    Returns:
        A state without gradients. On a mesh, call it under `jax.jit`, with the shardings of
        [`shard_like_params`][twinkle_jax.model.shard_like_params].

    Raises:
        TypeError: if the optimizer is no Optax transformation, or `params` an object with a tree.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> state = train_state({"scale": jnp.ones(3)}, optax.sgd(1.0))
        >>> print(state.step, state.gradient_sum["scale"])
        0 [0. 0. 0.]
    """
    if hasattr(params, "params"):  # such as a decoder, which JAX takes for a tree as well
        kind = type(params).__name__
        raise TypeError(f"params must be a tree of arrays, got {kind}: pass its .params")
    optimizer_state = None
    if optimizer is not None:
        optimizer_state = _without_aliases(init_optimizer(optimizer, params), params)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    zero = jnp.float32(0)
    return TrainState(
        params, optimizer_state, jnp.int32(0), zeros, zero, jnp.float32(0), jnp.int32(0)
    )


def _without_aliases(optimizer_state: Any, params: Params) -> Any:
    """Copy arrays that the optimizer's state shares with the parameters, or has twice.

    All are donated, and no array may be donated twice. Prodigy's state begins with the parameters.
    """
    seen = {id(x) for x in jax.tree.leaves(params)}

    def own(x: Array) -> Array:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, optimizer_state)


def begin_training(
    params: Params, optimizer: optax.GradientTransformation | None, mesh: Mesh | None
) -> TrainState:
    """Make a train state around parameters: moments and gradients are sharded as they are.

    Args:
        params: moved to their places on the mesh if necessary.
        optimizer: as for [`train_state`][twinkle_jax.training.train_state].
        mesh: devices; None for one.

    Returns:
        A state whose arrays are all committed to their devices: with uncommitted arrays among
        them, the second step would compile again.
    """
    shardings = None
    if mesh is not None:
        params = place_params(params, mesh)
        begin = partial(_without_params, optimizer=optimizer)
        shardings = shard_like_params(jax.eval_shape(begin, params), mesh)
    start = jax.jit(_without_params, static_argnums=1, out_shardings=shardings)
    state: TrainState = start(params, optimizer)._replace(params=params)
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def _without_params(params: Params, optimizer: optax.GradientTransformation | None) -> TrainState:
    return train_state(params, optimizer)._replace(params=None)


def init_optimizer(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """Initialize an optimizer's state in float32, whatever the dtype of the parameters."""
    if not isinstance(optimizer, optax.GradientTransformation):
        wrapped = hasattr(optimizer, "gradient_transformation")  # such as optax.MultiSteps
        hint = ": pass its .gradient_transformation()" if wrapped else ""
        raise TypeError(f"optimizer must be an Optax transformation, got {optimizer!r}{hint}")
    with jax.numpy_dtype_promotion("standard"):
        return optimizer.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))


def shapes_of(tree: Any) -> Any:
    """Shapes and shardings of arrays: to compile a program without them, or to read others."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
        tree,
    )


def find_devices(data: int, fsdp: int, tensor: int) -> Mesh | None:
    """Make the mesh of a run; None for one device.

    Raises:
        ValueError: if there are fewer devices; with several processes, also if there are more.
    """
    wanted, available, processes = data * fsdp * tensor, jax.device_count(), jax.process_count()
    if wanted > available or (wanted < available and processes > 1):
        which = "at most the" if processes == 1 else "all"
        of_all = "available" if processes == 1 else f"of the {processes} processes"
        raise ValueError(
            f"mesh must take {which} {available} devices {of_all}, "
            f"got data={data}, fsdp={fsdp}, tensor={tensor}"
        )
    return None if wanted == 1 else make_mesh(data=data, fsdp=fsdp, tensor=tensor)


class UpdateInfo(NamedTuple):
    """Gradient norm, and whether the update was applied.

    Attributes:
        gradient_norm: global norm of the gradients, before clipping.
        applied: False if there was no labelled token, if `when` or `skip_zero` skipped the update,
            or if the norm, the learning rate or an updated parameter was not finite: then
            parameters, optimizer state and step are unchanged.
    """

    gradient_norm: Float[Array, ""]
    applied: Bool[Array, ""]


def apply_gradients(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: Coefficient = 1.0,
    max_grad_norm: Coefficient | None = None,
    when: Bool[Array, ""] | None = None,
    skip_zero: bool = False,
    mesh: Mesh | None = None,
) -> tuple[TrainState, UpdateInfo]:
    r"""Update parameters with the accumulated gradients; compiled, and the state is donated.

    $$g = G / N, \qquad g \leftarrow g \min(1, c / \|g\|), \qquad
      \theta \leftarrow \theta + \eta\, u(g)$$

    Args:
        state: with gradients from [`grad_step`][twinkle_jax.training.grad_step]; donated.
        optimizer: the Optax transformation $u$ that the state was made with.
        learning_rate: $\eta$, which multiplies the updates; traced. Leave it at 1 for a
            transformation that has its own.
        max_grad_norm: $c$, above 0 and traced; None clips nothing.
        when: False skips the update; may be a device array, which is not waited for. None: always.
        skip_zero: True also skips the update if every entry of the gradient is exactly 0: the
            optimizer's moments would still move the parameters.
        mesh: of the state. None: that of its arrays, or one device. Traced arrays do not have it:
            inside a compiled function of yours, pass it.

    Returns:
        The state without gradients, and their norm. The update is skipped where there was no
        labelled token, where `when` or `skip_zero` says so, and where the norm, the learning rate
        or a parameter after the update is NaN or infinite: parameters, optimizer state and step
        stay as they were.

    Raises:
        ValueError: if the state was made without an optimizer or with another one, or
            `max_grad_norm` is not above 0, or one of both is several numbers.
        TypeError: if the learning rate or the limit is not a number.
    """
    if state.optimizer_state is None:
        raise ValueError(
            "state must have an optimizer, got one without: make it with train_state(params, …)"
        )
    limit = np.inf if max_grad_norm is None else max_grad_norm
    return _apply(
        state,
        traced_scalar("learning_rate", learning_rate),
        positive_scalar("max_grad_norm", limit),
        when,
        optimizer=optimizer,
        skip_zero=skip_zero,
        mesh=find_mesh(mesh, state.params),
    )


@partial(jax.jit, static_argnames=("optimizer", "skip_zero", "mesh"), donate_argnums=0)
def _apply(
    state: TrainState,
    learning_rate: Float[Array, ""],
    max_grad_norm: Float[Array, ""],
    when: Bool[Array, ""] | None,
    *,
    optimizer: optax.GradientTransformation,
    skip_zero: bool,
    mesh: Mesh | None,
) -> tuple[TrainState, UpdateInfo]:
    _check_fit(optimizer, state)
    norm, not_zero = _norm_and_count(state, mesh)
    usable = jnp.isfinite(norm) & jnp.isfinite(learning_rate) & (max_grad_norm > 0)
    usable &= (state.denominator > 0) & (state.tokens > 0)
    usable = usable if when is None else usable & when
    usable = usable & (not_zero > 0) if skip_zero else usable
    factor = _clip_factor(norm, max_grad_norm) / jnp.maximum(state.denominator, 1)
    gradients = jax.tree.map(lambda g: jnp.where(usable, g * factor, 0), state.gradient_sum)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), state.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, wide)
        wide = jax.tree_util.tree_map_with_path(
            lambda path, x, u: x if _is_constant(path) else x + learning_rate * u, wide, updates
        )
    params = jax.tree.map(lambda x, old: x.astype(old.dtype), wide, state.params)
    applied = usable & _all_finite(params, mesh)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(applied, new.astype(old.dtype), old)

    new_state = _without_gradients(state)._replace(
        params=jax.tree.map(choose, params, state.params),
        optimizer_state=jax.tree.map(choose, optimizer_state, state.optimizer_state),
        step=state.step + applied.astype(state.step.dtype),
    )
    return constrain(new_state, mesh), UpdateInfo(norm, applied)


def _is_constant(path: Any) -> bool:
    """Whether a parameter is never updated, not even by weight decay."""
    return jax.tree_util.keystr(path[-1:], simple=True) in (LAYER_SCALAR, CORRECTION)


def _check_fit(optimizer: optax.GradientTransformation, state: TrainState) -> None:
    """Raise while tracing if the state was made with another optimizer."""

    def signature(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(x.shape, x.dtype) for x in leaves]

    expected = jax.eval_shape(partial(init_optimizer, optimizer), state.params)
    if signature(expected) != signature(state.optimizer_state):
        raise ValueError(
            "optimizer must be the one that the state was made with, "
            f"got one whose state is {jax.tree.structure(expected)}"
        )


def _all_finite(params: Any, mesh: Mesh | None) -> Bool[Array, ""]:
    def not_finite(x: Array) -> Float[Array, ""]:
        return jnp.sum(~jnp.isfinite(x), dtype=jnp.float32)

    return sum_over_leaves(not_finite, params, mesh) == 0


def clip_gradients(
    state: TrainState, max_grad_norm: Coefficient
) -> tuple[TrainState, Float[Array, ""]]:
    """Clip the accumulated gradients by their global norm, without applying them.

    Args:
        state: with gradients; donated.
        max_grad_norm: the largest norm of the gradients once they are divided, above 0; traced.

    Returns:
        The state, and the norm before clipping. Gradients that are not finite stay so, and the
        update that follows is skipped.

    Raises:
        ValueError: if `max_grad_norm` is not above 0.
    """
    return _clip(state, positive_scalar("max_grad_norm", max_grad_norm))


@partial(jax.jit, donate_argnums=0)
def _clip(
    state: TrainState, max_grad_norm: Float[Array, ""]
) -> tuple[TrainState, Float[Array, ""]]:
    norm, _ = _norm_and_count(state, None)
    usable = jnp.isfinite(norm) & (max_grad_norm > 0)
    factor = jnp.where(usable, _clip_factor(norm, max_grad_norm), jnp.nan)
    clipped = jax.tree.map(lambda g: g * factor, state.gradient_sum)
    return state._replace(gradient_sum=clipped), norm


@partial(jax.jit, donate_argnums=0, keep_unused=True)  # the old sums are the new zeros' memory
def zero_gradients(state: TrainState) -> TrainState:
    """Reset the accumulated gradients; donates the state."""
    return _without_gradients(state)


def _without_gradients(state: TrainState) -> TrainState:
    return state._replace(
        gradient_sum=jax.tree.map(jnp.zeros_like, state.gradient_sum),
        denominator=jnp.zeros_like(state.denominator),
        tokens=jnp.zeros_like(state.tokens),
    )


def _norm_and_count(
    state: TrainState, mesh: Mesh | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Norm of the gradients as divided, and how many of their entries are not 0 (NaN counts)."""

    def sums(g: Array) -> Float[Array, "2"]:
        # Entries are counted too: squares of the smallest are 0.
        return jnp.stack([jnp.sum(jnp.square(g)), jnp.sum(g != 0, dtype=jnp.float32)])

    squares, count = sum_over_leaves(sums, state.gradient_sum, mesh)
    return jnp.sqrt(squares) / jnp.maximum(state.denominator, 1), count


def _clip_factor(norm: Float[Array, ""], limit: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(norm > limit, limit / norm, 1)
