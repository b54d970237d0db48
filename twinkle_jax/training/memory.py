"""Device memory of a run, from its compiled programs, and settings that fit into it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from twinkle_jax.data import Batch, bucket_size
from twinkle_jax.data.batch import batch_width
from twinkle_jax.model import DecoderConfig, RewardModel
from twinkle_jax.rollout import RolloutConfig
from twinkle_jax.sampler import conversations_memory, generate_memory
from twinkle_jax.sampler.generate import device_bytes, peak_bytes
from twinkle_jax.training.config import TrainConfig, automatic_budget, with_setting
from twinkle_jax.training.engine import replayed_routing
from twinkle_jax.training.evaluation import BATCH
from twinkle_jax.training.gradient import grad_step
from twinkle_jax.training.packing import Packing, line_width
from twinkle_jax.training.policy import Policy
from twinkle_jax.training.score import score_batch
from twinkle_jax.training.state import TrainState, apply_gradients, shapes_of
from twinkle_jax.training.step import RECOMPUTED, Recipe, takes_segments

_GIB = 2**30
_USABLE = 0.92  # of the memory that a device reports; the rest is fragmentation and program code


def device_memory(mesh_gib: float | None) -> int | None:
    """Return the bytes of a device that a run may use; None if unknown, as on CPUs without a limit.

    `mesh_gib` is the limit from the settings.
    """
    if mesh_gib is not None:
        return int(mesh_gib * _GIB)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    known = [limit for limit in limits if limit]
    return int(_USABLE * min(known)) if known else None


def update_memory(recipe: Recipe, state: TrainState) -> int:
    """Compute the peak bytes per device of an update, including parameters and optimizer state.

    That is the largest of the programs' arguments, results and temporary arrays: the gradient of a
    micro-batch of rows of maximum length, the teacher's scores of it, and the optimizer update.
    """
    config, mesh = recipe.config, recipe.mesh
    state, frozen = shapes_of(state), shapes_of(recipe.frozen)
    batch, packing = _longest_micro_batch(recipe)

    def gradient(state: TrainState, frozen: Any, batch: Batch, packing: Packing) -> Any:
        return grad_step(
            state,
            batch,
            recipe.decoder,
            recipe.loss,
            frozen=frozen,
            temperature=config.rollout.temperature,
            compute_dtype=config.dtype,
            remat=RECOMPUTED[config.update.recompute],
            mesh=mesh,
            transfers=config.mesh.transfers,
            packing=packing,
        )

    apply = partial(apply_gradients, optimizer=recipe.optimizer, max_grad_norm=1.0, mesh=mesh)
    computing = jax.jit(gradient, donate_argnums=0).lower(state, frozen, batch, packing).compile()
    applying = jax.jit(apply, donate_argnums=0).lower(state).compile()
    peaks = [peak_bytes(computing), peak_bytes(applying) + device_bytes(frozen)]
    if isinstance(recipe.teacher, Policy):
        peaks.append(device_bytes((state, frozen)) + _judging_bytes(recipe, recipe.teacher))
    return max(peaks) + device_bytes(_others(recipe))


def _judging_bytes(recipe: Recipe, teacher: Policy) -> int:
    """Bytes per device of scoring a micro-batch with the teacher, besides its parameters."""
    config, mesh = recipe.config, recipe.mesh
    params, frozen = shapes_of(teacher.params), shapes_of(teacher.frozen)
    judging = recipe._replace(decoder=teacher.config, reference=None)
    batch, packing = _longest_micro_batch(judging)

    def judge(params: Any, frozen: Any, batch: Batch, packing: Packing) -> Any:
        return score_batch(
            params,
            batch._replace(routing=None),
            teacher.config,
            frozen=frozen,
            temperature=config.rollout.temperature,
            compute_dtype=config.dtype,
            mesh=mesh,
            transfers=config.mesh.transfers,
            packing=packing,
        )

    compiled = jax.jit(judge).lower(params, frozen, batch, packing).compile()
    return peak_bytes(compiled) - device_bytes((params, frozen))


def _others(recipe: Recipe) -> Any:
    """Shapes of the parameters that are only scored with."""
    teacher = recipe.teacher
    scoring = (teacher.params, teacher.frozen) if isinstance(teacher, Policy) else None
    return shapes_of((recipe.reference, scoring))


def rollout_memory(recipe: Recipe, state: TrainState) -> int:
    """Compute the peak bytes per device of sampling, including parameters and optimizer state."""
    return _held_by(recipe, state) + _sampling_memory(
        _sampled(recipe, state), recipe.config, recipe.config.rollout
    )


class _Sampled(NamedTuple):
    """A policy that rows are drawn from: the shapes of its arrays."""

    params: Any
    frozen: Any
    decoder: DecoderConfig
    mesh: Mesh | None


def _sampled(recipe: Recipe, state: TrainState) -> _Sampled:
    return _Sampled(shapes_of(state.params), shapes_of(recipe.frozen), recipe.decoder, recipe.mesh)


def _held_by(recipe: Recipe, state: TrainState) -> int:
    """Bytes per device of what stays there from step to step."""
    held = map(shapes_of, (state, recipe.frozen))
    return sum(map(device_bytes, held)) + device_bytes(_others(recipe))


def _sampling_memory(policy: _Sampled, config: TrainConfig, rollout: RolloutConfig) -> int:
    """Peak bytes per device of a rollout, besides parameters."""
    rows = rollout.prompts * rollout.num_samples
    options: dict[str, Any] = {
        "sampling": rollout.sampling(stop_tokens=()),
        "frozen": policy.frozen,
        "compute_dtype": config.dtype,
        "mesh": policy.mesh,
        "keep_routing": config.update.replay_routing == "sampler",
    }
    if config.many_turns and (rollout.slots is None or rows <= rollout.slots):
        return conversations_memory(
            policy.params,
            policy.decoder,
            rows,
            max_length=rollout.max_episode_tokens,
            max_new_tokens=rollout.max_new_tokens,
            **options,
        )
    longest = rollout.max_prompt_tokens
    if config.many_turns:
        longest = rollout.max_episode_tokens - rollout.max_new_tokens
    samples = 1 if config.many_turns else rollout.num_samples  # each episode is a prompt
    return generate_memory(
        policy.params,
        policy.decoder,
        prompts=rows // samples,
        prompt_tokens=bucket_size(longest, smallest=8),
        num_samples=samples,
        max_new_tokens=rollout.max_new_tokens,
        slots=rollout.slots,
        **options,
    )


def evaluation_memory(recipe: Recipe, state: TrainState) -> int:
    """Compute the peak bytes per device of an evaluation, as `rollout_memory`."""
    return _held_by(recipe, state) + _evaluating_memory(_sampled(recipe, state), recipe.config)


def _evaluating_memory(policy: _Sampled, config: TrainConfig) -> int:
    prompts, k = min(config.evaluation.problems, BATCH), config.evaluation.pass_k

    def needed(samples: int) -> int:
        slots = config.evaluation.slots or config.rollout.slots
        rollout = replace(config.rollout, prompts=prompts, num_samples=samples, slots=slots)
        return _sampling_memory(policy, config, rollout)

    return max(needed(samples) for samples in ((1, 2 * k) if k else (1,)))


def fit(
    recipe: Recipe,
    state: TrainState,
    limit: int,
    note: Callable[[str], None],
    *,
    evaluates: bool = False,
) -> TrainConfig:
    """Choose what is recomputed, a budget of tokens and numbers of slots that fit into a device.

    A device has `limit` bytes; `note` is called with a sentence about each choice.

    Returns:
        The configuration, with `update.recompute` chosen, and a smaller
        `update.micro_batch_tokens`, `rollout.slots` and `evaluation.slots` where the automatic
        values do not fit.

    Raises:
        ValueError: if a value that the user set does not fit; the message names the largest that
            does, or what the smallest takes if none does.
    """
    config = recipe.config

    def counted(count: Callable[[Recipe, TrainState], int]) -> Callable[[TrainConfig], int]:
        return lambda config: count(recipe._replace(config=config), state)

    def fitted_evaluation(config: TrainConfig) -> TrainConfig:
        return _fit_evaluation(config, counted(evaluation_memory), limit, note)

    if config.update.recompute == "auto":  # fewer operations rather than more tokens at once
        config = with_setting(config, "update.recompute", "elementwise")
        if counted(update_memory)(config) > limit:
            config = with_setting(config, "update.recompute", "layers")
        note(f"update.recompute {config.update.recompute}")
    choose = partial(_choose, limit=limit, note=note)
    user_set = config.update.micro_batch_tokens != automatic_budget(config)
    budgets = _smaller_budgets(config)
    config = choose(config, "update.micro_batch_tokens", budgets, counted(update_memory), user_set)
    if config.server.url is not None:  # it samples, with memory of its own
        return config
    if config.examples is not None:  # only evaluations sample
        return fitted_evaluation(config) if evaluates else config
    shards = config.mesh.data * config.mesh.fsdp
    rows, slots = config.rollout.prompts * config.rollout.num_samples, config.rollout.slots
    fewer = _fewer_slots(slots, rows, shards)
    config = choose(config, "rollout.slots", fewer, counted(rollout_memory), slots is not None)
    return fitted_evaluation(config) if evaluates else config


def fit_evaluation(
    config: TrainConfig,
    policy: Policy,
    judges: Sequence[RewardModel],
    limit: int,
    note: Callable[[str], None],
) -> TrainConfig:
    """Choose a number of slots with which evaluations of a policy and its judges fit into a device.

    Returns:
        The configuration, with a smaller `evaluation.slots` where all rows at once do not fit.

    Raises:
        ValueError: if one row at a time does not fit, or `evaluation.slots` is given and does not.
    """
    params, frozen = shapes_of(policy.params), shapes_of(policy.frozen)
    sampled = _Sampled(params, frozen, policy.config, None)
    held = sum(map(device_bytes, [params, frozen, *(shapes_of(x.params) for x in judges)]))
    return _fit_evaluation(
        config, lambda config: held + _evaluating_memory(sampled, config), limit, note
    )


def _fit_evaluation(
    config: TrainConfig,
    count: Callable[[TrainConfig], int],
    limit: int,
    note: Callable[[str], None],
) -> TrainConfig:
    rows = min(config.evaluation.problems, BATCH) * max(2 * config.evaluation.pass_k, 1)
    slots = config.evaluation.slots or config.rollout.slots
    fewer = _fewer_slots(slots, rows, config.mesh.data * config.mesh.fsdp)
    user_set = config.evaluation.slots is not None
    return _choose(config, "evaluation.slots", fewer, count, user_set, limit=limit, note=note)


def _choose(
    config: TrainConfig,
    name: str,
    values: Iterator[int | None],
    count: Callable[[TrainConfig], int],
    user_set: bool,
    *,
    limit: int,
    note: Callable[[str], None],
) -> TrainConfig:
    """Set the first value that fits; raise if the user's, which is the first one, does not."""
    for number, value in enumerate(values):
        chosen = with_setting(config, name, value)
        needed = count(chosen)
        takes = f"{needed / _GIB:.2f} GiB of the {limit / _GIB:.2f} of a device"
        if needed > limit:
            continue
        if number > 0 and user_set:
            raise ValueError(f"{name} must be at most {value}, which takes {takes}")
        note(f"{name} {'all' if value is None else value}: takes {takes}")
        return chosen
    here = config.teacher.model is not None and config.teacher.url is None
    learns = config.examples is not None and name.startswith("update.")
    lengths = "max_episode_tokens" if learns else "max_new_tokens or max_prompt_tokens"
    raise ValueError(
        f"{name}: the smallest takes {takes}; a smaller {lengths} takes less, and in training more "
        "devices (mesh.fsdp) or adapters (lora.rank)"
        + (", or a teacher on a server (teacher.url)" if here else "")
    )


def _smaller_budgets(config: TrainConfig) -> Iterator[int]:
    """Halve the tokens of a micro-batch down to those that it must hold."""
    longest, tokens = config.least_budget, config.update.micro_batch_tokens
    yield tokens
    while tokens > longest:
        tokens = max(tokens // 2, longest)
        yield tokens


def _fewer_slots(given: int | None, rows: int, shards: int) -> Iterator[int | None]:
    """Halve the slots down to one for each device that rows are spread over."""
    yield given
    slots = given or rows
    while slots > shards:
        slots = max(-(-slots // (2 * shards)), 1) * shards
        yield slots


def _longest_micro_batch(recipe: Recipe) -> tuple[Batch, Packing]:
    """Return the shapes of a micro-batch of rows of maximum length, as `plan` makes it.

    It has a line more where a last one would not be full: shorter rows have narrower lines, which
    fill the budget.
    """
    config, mesh = recipe.config, recipe.mesh
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    multiple = 1 if mesh is None else mesh.shape["tensor"]
    several = takes_segments(recipe)
    longest = config.longest_row
    time = batch_width(longest, multiple=multiple)
    tokens = config.update.micro_batch_tokens
    width, lines_each = time, config.rows_together
    if several:
        width, lines_each = line_width(config.least_budget, tokens, multiple=multiple), 1
    lines = -(-tokens // (width * lines_each)) * shards * lines_each
    samples = config.rollout.prompts * config.group_size
    rows = samples * config.rows_each // config.update.mini_batches

    def struct(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    integers, floats = struct((rows, time), jnp.int32), struct((rows, time), jnp.float32)
    routing = replayed_routing(config, recipe.decoder)
    batch = Batch(
        tokens=integers,
        labels=integers,
        advantages=floats,
        old_logps=floats,
        ref_logps=None if recipe.reference is None else floats,
        routing=None
        if routing is None
        else struct((rows, time, routing.layers, routing.chosen), routing.dtype),
    )
    places = struct((lines, width), jnp.int32)
    return batch, Packing(places, places if several else None, places, integers)
