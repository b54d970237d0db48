"""A rollout of a real model by its shapes, compiled for a chip that is described."""

import contextlib
import functools
import math
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.compiled.costs import Costs, costs
from tests.compiled.described import described_mesh
from tests.compiled.models import WHOLE, Cut, Setting, config_of
from tests.compiled.program import Program, read_program
from tests.compiled.traffic import loop_of_steps, traffic
from twinkle_jax.model import DecoderConfig, parameter_shapes, shard_like_params
from twinkle_jax.model.decoder.sharding import AXES
from twinkle_jax.sampler import Sampling, sizes
from twinkle_jax.sampler import slots as sampler_slots
from twinkle_jax.sampler.sampling import traced_sampling

PROMPT = 128  # tokens of a row's capacity that its prompt has
BLOCK = 128  # slots of a row that are read and written with its token, at most


class Rollout(NamedTuple):
    """What a step of decoding costs one chip, in bytes.

    Attributes:
        weights: all parameters, in bfloat16.
        cache: keys and values, as many as there is room for.
        filled: those of the tokens that rows hold, in sliding layers of the window.
        moved: read and written by a step, as far as the compiler's text says.
        kernel: read and written by the kernel that writes tokens into a TPU's cache, at most; by
            arithmetic, since the text says nothing about it.
        temporary: memory beyond arguments and results.
        program: what was compiled.
        step: the name of the loop's body in it.
    """

    weights: int
    cache: int
    filled: int
    moved: float
    kernel: int
    temporary: int
    program: Program
    step: str

    @property
    def total(self) -> float:
        """Bytes that a step moves."""
        return self.moved + self.kernel

    @property
    def least(self) -> int:
        """Weights and what the cache holds, each once."""
        return self.weights + self.filled

    def largest(self, count: int = 8) -> list[str]:
        """The instructions that move most."""
        largest_moves = sorted(traffic(self.program, self.step), key=lambda moved: -moved[0])[
            :count
        ]
        return [f"{size / 2**20:.1f} MiB {one.opcode} {one.shape}" for size, one in largest_moves]


@functools.cache
def rollout(
    model: str,
    topology: str,
    rows: int,
    capacity: int,
    *,
    stacked: bool = False,
    filled: int | None = None,
    windows: bool = True,
    samples: int = 1,
    prompt: int = PROMPT,
    shared: bool = True,
) -> Rollout:
    """Compile the loop that draws tokens on one chip of four, in bfloat16, unfiltered.

    Args:
        model: one of `MODELS`.
        topology: the chip is one of these.
        rows: that are completed together.
        capacity: tokens that each can hold.
        filled: tokens that each holds, on average: geometric, up to the capacity. Rows then have
            pages, as many as `next_capacity` chooses. None: rows are whole, and full.
        windows: let sliding layers keep their window only; False to compare.
        samples: rows of a group. With several, all rows are longer than the prompt.
        prompt: its tokens.
        shared: let the rows of a group share its pages; False to compare.
        stacked: leave layers in one stack where they would lie one by one, to compare.
    """
    config = config_of(model)
    with contextlib.ExitStack() as patches:
        if stacked:
            jax.clear_caches()  # what was traced otherwise
            patches.callback(jax.clear_caches)
            patches.enter_context(mock.patch.object(sampler_slots, "unstack_layers", lambda x: x))
        compiled, weights, layers, seen = _compile(
            config, topology, rows, capacity, filled, windows, samples, prompt, shared
        )
    program = read_program(compiled.as_text())
    step = loop_of_steps(program)
    # In a loop over layers, attention to a window is the branch for true.
    branches = topology.startswith("v") and windows and config.attention.window is not None
    true_share = float(config.sliding.mean()) if branches else 1
    a = config.attention
    entries = 2 * a.key_value_heads * a.head_dim  # of a token in a layer
    if a.latent is not None:
        entries = 2 * a.latent.width + a.rotary_dim
    written = config.repeats * len(config.block) * rows * entries * BLOCK
    return Rollout(
        weights=_bytes(weights),
        cache=_bytes(layers),
        filled=2 * entries * seen,
        # A trip of the loop is several steps on a mesh.
        moved=sum(size for size, _ in traffic(program, step, 1, true_share)) / sizes._STEPS_ON_MESH,
        kernel=2 * 2 * written if topology.startswith("v") else 0,
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        program=program,
        step=step,
    )


class Wire(NamedTuple):
    """What a device sends in a part of a rollout, in bytes: counted, and the least."""

    sent: float
    least: float
    costs: Costs


def wire(
    model: str, setting: Setting, cut: Cut = WHOLE, *, samples: int = 8, new: int = 1024
) -> dict[str, Wire]:
    """Compile a rollout on many chips, in bfloat16, and count what it sends.

    Args:
        model: one of `MODELS`.
        setting: on what it runs; `rows` are completions, `time` the tokens of a prompt.
        cut: what is left of the model.
        samples: completions of a prompt.
        new: tokens of a completion.

    Returns:
        `layout` of the parameters, once a rollout: a gather in bfloat16. `prefill` of all prompts:
        each layer sums its tokens over tensor twice. `token`: the same for a token of each row of a
        device, and what of its logits must be told over tensor, two numbers of a row and the token.
    """
    s, config = setting, config_of(model, cut)
    mesh = described_mesh(s.topology, s.data, s.fsdp, s.tensor, bare=True)
    shapes = parameter_shapes(config)
    params = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=where),
        shapes,
        shard_like_params(shapes, mesh),
    )
    dtype, full = jnp.dtype("bfloat16"), s.time - 1 + new
    slots = s.rows // s.data // s.fsdp
    setup = sizes.Setup(config, samples, new, slots, dtype, None, mesh)
    prompts = jax.ShapeDtypeStruct((s.rows // samples, s.time), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), s.rows))
    limits = prompts.update(shape=(s.rows,))
    with jax.numpy_dtype_promotion("standard"):
        layout, weights = _compiled(jax.jit(sampler_slots.lay_out_weights, static_argnums=(1, 2))
            .lower(params, dtype, mesh))  # fmt: skip
        begin = functools.partial(sampler_slots.begin, setup=setup, slots=slots, capacity=full)
        prefill, state = _compiled(
            jax.jit(begin).lower(weights, prompts, prompts.update(dtype=bool), keys, limits)
        )
        run = functools.partial(sampler_slots.run, setup=setup, capacity=full, full=full)
        sampling = traced_sampling(Sampling())
        draw, _ = _compiled(jax.jit(run, donate_argnums=1).lower(weights, state, sampling))
    layers, share = config.repeats * len(config.block), (s.tensor - 1) / s.tensor
    sums = 2 * layers * 2 * 2 * config.hidden_size * share  # of a token, two bytes an entry
    tokens = s.time * slots / samples
    gathered = 2 * sum(
        math.prod(x.sharding.shard_shape(x.shape)) * s.fsdp
        for x in jax.tree.leaves(params)
        if "fsdp" in x.sharding.spec  # norms and biases are on all devices already
    )
    program_costs = [costs(program, s.devices) for program in (layout, prefill, draw)]
    sent = [
        program_costs[0].wire,
        program_costs[1].wire,
        program_costs[2].wire / sizes._STEPS_ON_MESH,
    ]
    least = [gathered * (s.fsdp - 1) / s.fsdp, sums * tokens, (sums + 12 * share) * slots]
    return {
        name: Wire(*values)
        for name, *values in zip(
            ("layout", "prefill", "token"), sent, least, program_costs, strict=True
        )
    }


def _compiled(lowered: Any) -> tuple[Any, Any]:
    """Compile; give the program, and the shapes of its results where they are."""
    compiled = lowered.compile()
    results = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        lowered.out_info,
        compiled.output_shardings,
    )
    return compiled, results


def _compile(
    config: DecoderConfig,
    topology: str,
    rows: int,
    capacity: int,
    filled: int | None,
    windows: bool,
    samples: int,
    prompt: int,
    shared: bool,
) -> Any:
    """Give the program, shapes of its weights and caches, and the tokens seen."""
    devices = described_mesh(topology, 1, 4, 1, bare=True).devices
    mesh = Mesh(devices.reshape(-1)[:1].reshape(1, 1, 1), AXES)
    replicated = NamedSharding(mesh, PartitionSpec())

    def there(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree
        )

    weights = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), parameter_shapes(config)
    )
    setup = sizes.Setup(
        config=config,
        num_samples=samples,
        new=capacity - prompt,
        refill=1,
        compute_dtype=jnp.dtype("bfloat16"),
        attention="xla",
        mesh=mesh,
    )
    full, lengths, counts = 2 * capacity, np.full(rows, capacity), {}
    if filled is not None:
        full, setup = capacity, setup.in_pages(capacity)
        setup = setup if windows else setup._replace(window_pages=None)
        setup = setup if shared else setup._replace(prompt_pages=0)
        page = setup.page
        lengths = np.random.default_rng(0).geometric(1 / filled, rows)
        if samples > 1:
            lengths = prompt + np.random.default_rng(0).geometric(1 / (filled - prompt), rows)
        lengths = np.minimum(lengths, capacity)
        groups = rows // samples if samples > 1 else 0
        own = lengths - setup.prompt_pages * page
        pages = int(np.sum(-(-own // page)))
        status = sizes.Status(
            rows, 0, 0, int(lengths.max()), pages + 1, groups * setup.prompt_pages
        )
        capacity = sizes.next_capacity(setup, status, rows, 0, prompt, full)
        counts = {"prompt_pages": sizes.next_prompt_pages(setup, status, rows, 0)}
        if setup.prompt_pages:  # the tokens of a prompt are seen once
            lengths = np.concatenate([own, np.full(groups, setup.prompt_pages * page)])
    prompts = jax.ShapeDtypeStruct((rows // samples, prompt), jnp.int32)
    begin = functools.partial(
        sampler_slots.begin, setup=setup, slots=rows, capacity=capacity, **counts
    )
    lay_out = functools.partial(
        sampler_slots.lay_out_weights, compute_dtype=setup.compute_dtype, mesh=mesh
    )
    run = functools.partial(sampler_slots.run, setup=setup, capacity=capacity, full=full)
    with jax.numpy_dtype_promotion("standard"):
        laid_out = jax.eval_shape(lay_out, weights)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        mask, limits = prompts.update(dtype=bool), prompts.update(shape=(rows,))
        state = jax.eval_shape(begin, laid_out, prompts, mask, keys, limits)
        arguments = map(there, (laid_out, state, traced_sampling(Sampling())))
        compiled = jax.jit(run, donate_argnums=1).lower(*arguments).compile()
        return compiled, weights, state.slots.cache.layers, _tokens_seen(config, lengths)


def _tokens_seen(config: DecoderConfig, lengths: np.ndarray) -> int:
    """Sum the tokens that layers see: in sliding layers those of the window."""
    window, sliding = config.attention.window, int(config.sliding.sum())
    in_window = np.minimum(lengths, lengths if window is None else window.size)
    return int((config.layers - sliding) * lengths.sum() + sliding * in_window.sum())


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
