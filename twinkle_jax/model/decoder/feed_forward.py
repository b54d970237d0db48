"""The second half of a layer: SwiGLU or GeGLU, or experts of which a router chooses some.

Expert parallelism: experts are spread over the mesh axis tensor. Each device applies its own ones
to its rows, and what the devices get is added up.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax.model.decoder.config import DecoderConfig, ExpertsConfig
from twinkle_jax.model.decoder.layers import (
    activate,
    add,
    input_norm,
    layer_output,
    norm,
    project,
    project_all,
    rms_norm,
)
from twinkle_jax.model.decoder.parameters import CORRECTION, EXPERTS, Params
from twinkle_jax.model.decoder.precision import (
    matmul,
    rounded,
    same_tracing,
    spread,
    traced_backend,
)
from twinkle_jax.model.decoder.sharding import ROWS, row_shards


class _Routed(NamedTuple):
    """The experts of each token: their weights, and their numbers among those at hand."""

    share: Float[Array, "tokens chosen"]
    chosen: Int[Array, "tokens chosen"]


class _Experts(NamedTuple):
    """The matrices of all experts, in a stack of layers, the layer to apply, and biases if any."""

    gate_up: Float[Array, "layers experts width two_inner"]
    down: Float[Array, "layers experts inner width"]
    layer: Int[Array, ""]
    biases: tuple[Float[Array, "layers experts out"], ...] = ()


_SLOPE = 1.702  # of GPT-OSS's activation
_AddUp = Callable[[Array, _Routed, _Experts], Array]


def feed_forward(
    config: DecoderConfig,
    experts: ExpertsConfig | None,
    x: Float[Array, "tokens width"],
    weights: Params,
    mesh: Mesh | None = None,
    stack: tuple[Params, Int[Array, ""]] | None = None,
    routing: Int[Array, "tokens chosen"] | None = None,
    token: Float[Array, "tokens token_width"] | None = None,
) -> tuple[Float[Array, "tokens width"], Int[Array, "tokens chosen"] | None]:
    """Add the second half of a layer to the residual stream, its end; also return the experts.

    Args:
        config: the decoder.
        experts: of the layer; None if it is dense alone.
        x: rows of the residual stream.
        weights: of the layer.
        mesh: devices that experts are spread over; None for one.
        stack: the weights of all layers, and the place of this one. Its experts are taken from
            there, since a kernel would read a copy of what a loop over layers hands to it.
        routing: the experts of each token, as for `hidden_states`; None: the router chooses.
        token: what this layer reads of each token besides the residual stream.

    Returns:
        The residual stream, and the experts that each token went through: 0 in dense layers, None
        in a decoder without experts.
    """
    # Without output norms, "post_attention" names the norm of the feed-forward's input.
    name = "pre_feedforward" if config.output_norms else "post_attention"
    y = input_norm(config, x, weights, f"{name}_layernorm")
    chosen = None
    if experts is None:
        y = _gated(config, y, weights["mlp"])
        if config.experts is not None:
            chosen = jnp.zeros((len(x), config.experts.chosen), jnp.int32)
    elif experts.beside_dense:
        y = norm(config, _gated(config, y, weights["mlp"]), weights["post_feedforward_layernorm_1"])
        mixed, chosen = _add_experts(config, experts, x, weights, mesh, stack, routing)
        y = rounded(y + mixed)
    else:
        y, chosen = _mix_experts(config, experts, y, weights["mlp"], mesh, stack, routing)
    if config.output_norms:
        y = norm(config, y, weights["post_feedforward_layernorm"])
    return layer_output(config, add(config, x, y), weights, token), chosen


def _gated(
    config: DecoderConfig, x: Float[Array, "tokens width"], weights: Mapping[str, Any]
) -> Float[Array, "tokens width"]:
    gate, up = project_all(x, weights, "gate_up_proj")
    return project(rounded(activate(config, gate) * up), weights["down_proj"])


def _mix_experts(
    config: DecoderConfig,
    experts: ExpertsConfig,
    x: Float[Array, "tokens width"],
    weights: Mapping[str, Any],
    mesh: Mesh | None,
    stack: tuple[Params, Int[Array, ""]] | None,
    routing: Int[Array, "tokens chosen"] | None,
) -> tuple[Float[Array, "tokens width"], Int[Array, "tokens chosen"]]:
    r"""Add up the chosen experts of each token, and the shared one, if there is one.

    $$y = \sum_{e \in \text{top-}k(p)} w_e \, f_e(x) + \sigma(x \cdot s) \, f_s(x), \qquad
    p = \text{softmax}(x R)$$

    where $w$ are the chosen entries of $p$, divided by their sum in some families. With a routing,
    the experts are those that it names, and their weights are the router's still. Experts with
    corrections $b$ have

    $$y = \sum_{e \in \text{top-}k(p + b)} w_e \, f_e(x) + f_s(x), \qquad p = \sigma(x R)$$
    """
    router = "gate" if experts.swiglu_limit is None else "router"
    routed = _route(x, weights[router], experts, routing)
    if stack is not None:
        stack = stack[0]["mlp"], stack[1]
    y = _apply_experts(config, experts, x, routed, weights, mesh, stack)
    if experts.shared_width is None:
        return y, routed.chosen
    if experts.corrected:
        return rounded(y + _gated(config, x, weights["shared_experts"])), routed.chosen
    gate = rounded(jax.nn.sigmoid(project(x, weights["shared_expert_gate"])))
    shared = _gated(config, x, weights["shared_expert"])
    shared = rounded(spread(gate, shared.shape, shared.dtype) * shared)
    return rounded(y + shared), routed.chosen


def _add_experts(
    config: DecoderConfig,
    experts: ExpertsConfig,
    x: Float[Array, "tokens width"],
    weights: Params,
    mesh: Mesh | None,
    stack: tuple[Params, Int[Array, ""]] | None,
    routing: Int[Array, "tokens chosen"] | None,
) -> tuple[Float[Array, "tokens width"], Int[Array, "tokens chosen"]]:
    r"""Compute what experts beside a dense layer add to its output, from the residual stream.

    $$y = n_2\Big(\sum_{e \in \text{top-}k(p)} s_e w_e \, f_e(n_1(x))\Big), \qquad
    p = \text{softmax}\Big(\frac{a \, x}{\sqrt{d \, \overline{x^2}}} R\Big)$$

    with the norms $n$, a factor $s_e$ of each expert, and one $a$ of each of the $d$ inputs of the
    router; $w$ as in `_mix_experts`.
    """
    router = weights["router"]
    y = rms_norm(x, None, epsilon=config.norm_epsilon)
    y = rounded(y * spread(router["scale"], y.shape, x.dtype))
    y = rounded(y * jnp.asarray(config.hidden_size**-0.5, x.dtype))
    routed = _choose(project(y, router["proj"]), experts, routing)
    factors = router["per_expert_scale"].astype(routed.share.dtype)[routed.chosen]
    routed = _Routed(rounded(routed.share * factors, x.dtype), routed.chosen)
    y = norm(config, x, weights["pre_feedforward_layernorm_2"])
    y = _apply_experts(config, experts, y, routed, weights, mesh, stack)
    return norm(config, y, weights["post_feedforward_layernorm_2"]), routed.chosen


def _apply_experts(
    config: DecoderConfig,
    experts: ExpertsConfig,
    x: Float[Array, "tokens width"],
    routed: _Routed,
    weights: Mapping[str, Any],
    mesh: Mesh | None,
    stack: tuple[Params, Int[Array, ""]] | None,
) -> Float[Array, "tokens width"]:
    """Add up the chosen experts of each token, on the devices that have them."""
    if stack is None:
        layers, layer = jax.tree.map(lambda x: x[None], weights[EXPERTS]), jnp.int32(0)
    else:
        layers, layer = stack[0][EXPERTS], stack[1]
    # XLA has no product of groups on CPUs and GPUs: it would multiply every row by every matrix.
    add_up: _AddUp = partial(_in_groups if traced_backend() == "tpu" else _in_blocks, config)
    if mesh is not None:
        add_up = _on_devices(add_up, experts, mesh)
    gate_up, down = layers["gate_up_proj"], layers["down_proj"]
    biases = () if experts.swiglu_limit is None else (gate_up["bias"], down["bias"])
    matrices = _Experts(gate_up["kernel"], down["kernel"], layer, biases)
    return rounded(add_up(x, routed, matrices), x.dtype)


def _inner(
    config: DecoderConfig, gate_up: Float[Array, "rows two_inner"]
) -> Float[Array, "rows inner"]:
    r"""Apply the activation of experts: SwiGLU or GeGLU, or the clamped SwiGLU of GPT-OSS.

    $$y = (u + 1) \, g \, \sigma(1.702 \, g), \quad g \le l, \; -l \le u \le l$$
    """
    assert config.experts is not None
    limit = config.experts.swiglu_limit
    if limit is None:
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return rounded(activate(config, gate) * up)
    gate, up = jnp.minimum(gate_up[:, ::2], limit), jnp.clip(gate_up[:, 1::2], -limit, limit)
    opened = rounded(jax.nn.sigmoid(rounded(_SLOPE * gate)))
    return rounded(rounded(up + 1) * rounded(gate * opened))


def _route(
    x: Float[Array, "tokens width"],
    router: Mapping[str, Any],
    experts: ExpertsConfig,
    routing: Int[Array, "tokens chosen"] | None = None,
) -> _Routed:
    """Choose the experts of each token, or take those that are named for it."""
    if experts.corrected:  # in float32 from here on
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        kernel = rounded(router["kernel"], x.dtype)
        logits = jnp.matmul(x, kernel, preferred_element_type=wide)
        routed = _choose(logits, experts, routing, router[CORRECTION])
    else:
        routed = _choose(project(x, router), experts, routing)
    return routed._replace(share=rounded(routed.share, x.dtype))


def _choose(
    logits: Float[Array, "tokens experts"],
    experts: ExpertsConfig,
    routing: Int[Array, "tokens chosen"] | None,
    correction: Float[Array, " experts"] | None = None,
) -> _Routed:
    """Choose experts by the router's logits, or take those that are named, in float32."""
    wide = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    if correction is None:
        scores = jax.nn.softmax(logits.astype(wide), axis=-1)
        share, chosen = jax.lax.top_k(scores, experts.chosen)
    else:
        scores = jax.nn.sigmoid(logits.astype(wide))
        _, chosen = jax.lax.top_k(scores + correction.astype(wide)[None], experts.chosen)
        share = jnp.take_along_axis(scores, chosen, axis=-1)
    if routing is not None:
        named = routing.astype(jnp.int32)
        is_known = jnp.all((named >= 0) & (named < experts.number), axis=-1, keepdims=True)
        chosen = jnp.where(is_known, named, chosen)
        share = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalised:
        total = jnp.sum(share, axis=-1, keepdims=True)
        share = share / (total if correction is None else total + 1e-20)  # sigmoids may all be 0
    if experts.scaling != 1:
        share = share * experts.scaling
    return _Routed(share, chosen)


def _on_devices(add_up: _AddUp, experts: ExpertsConfig, mesh: Mesh) -> _AddUp:
    """Apply each device's experts to its rows, and add up over the devices along tensor."""
    split = None if experts.number % mesh.shape["tensor"] else "tensor"

    def on_device(x: Array, routed: _Routed, experts: _Experts) -> Array:
        if split is None:
            return add_up(x, routed, experts)
        first = jax.lax.axis_index(split) * experts.down.shape[1]
        routed = routed._replace(chosen=routed.chosen - first)
        return jax.lax.psum(add_up(x, routed, experts), split)

    def on_mesh(x: Array, routed: _Routed, experts: _Experts) -> Array:
        rows = PartitionSpec(None if len(x) % row_shards(mesh) else ROWS)
        by_expert: Any = PartitionSpec(None, split)
        everywhere: Any = PartitionSpec()
        y: Array = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(rows, rows, _Experts(by_expert, by_expert, everywhere, by_expert)),
            out_specs=rows,
            check_vma=False,
        )(x, routed, experts)
        return y

    return on_mesh


class _Blocks(NamedTuple):
    """Tokens sorted by expert, in blocks of one expert each; a token is in one for each of its own.

    Attributes:
        tokens: of each block; the number of all tokens where it has no more.
        slots: which of the token's experts it is.
        expert: of each block.
        is_first: whether the block is the first one of its expert.
    """

    tokens: Int[Array, "blocks size"]
    slots: Int[Array, "blocks size"]
    expert: Int[Array, " blocks"]
    is_first: Bool[Array, " blocks"]


def _block_size(rows: int, experts: int) -> int:
    """Choose the rows of a block: twice as many as an expert has on average, from 8 to 128.

    Most experts then have one block, and their matrices are read once. With more rows than that,
    multiplying takes longer than reading: half the average, so that few places stay empty.
    """
    mean = max(rows // experts, 1)
    half = 1 << max((mean // 2).bit_length() - 1, 0)
    return max(half, min(max(8, 1 << (2 * mean - 1).bit_length()), 128))


def _sort_into_blocks(
    chosen: Int[Array, "tokens chosen"], number: int, size: int
) -> tuple[_Blocks, Int[Array, "tokens chosen"]]:
    """Sort tokens by expert; also return where each is, which is beyond all if in no block.

    Tokens of experts outside [0, number), those of other devices, are in none.
    """
    (tokens, each), rows = chosen.shape, chosen.size
    index = jnp.arange(min(rows, rows // size + number), dtype=jnp.int32)  # as many as can be
    is_here = (chosen >= 0) & (chosen < number)
    expert = jnp.where(is_here, chosen, number).reshape(-1)
    counts = jnp.zeros(number, jnp.int32).at[expert].add(1, mode="drop")
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    row_start = jnp.cumsum(counts, dtype=jnp.int32) - counts
    taken = (counts + size - 1) // size
    block_end = jnp.cumsum(taken, dtype=jnp.int32)
    block_start = block_end - taken
    # Blocks behind the last one are empty ones of the last expert.
    of_block = jnp.searchsorted(block_end, index, side="right").astype(jnp.int32)
    of_block = jnp.minimum(of_block, number - 1)
    rank = (index - block_start[of_block])[:, None] * size
    rank = rank + jnp.arange(size, dtype=jnp.int32)[None]
    occupied = rank < counts[of_block][:, None]
    row = order[jnp.where(occupied, row_start[of_block][:, None] + rank, 0)]
    blocks = _Blocks(
        tokens=jnp.where(occupied, row // each, tokens),
        slots=row % each,
        expert=of_block,
        is_first=of_block != jnp.pad(of_block[:-1], (1, 0), constant_values=-1),
    )
    known = jnp.minimum(expert, number - 1)
    place = block_start[known] * size + jnp.argsort(order).astype(jnp.int32) - row_start[known]
    return blocks, jnp.where(is_here, place.reshape(chosen.shape), len(index) * size)


def _start(block: _Blocks, experts: _Experts, stack: Array) -> tuple[Any, ...]:
    """Return where in a stack the part of a block's expert begins."""
    return experts.layer, block.expert, *[jnp.int32(0)] * (stack.ndim - 2)


def _biased(
    y: Float[Array, "rows out"], bias: Float[Array, "*rows out"] | None = None
) -> Float[Array, "rows out"]:
    """Add a bias, if there is one."""
    return y if bias is None else rounded(y + spread(bias, y.shape, y.dtype))


def _in_blocks(
    config: DecoderConfig,
    x: Float[Array, "tokens width"],
    routed: _Routed,
    experts: _Experts,
) -> Float[Array, "tokens width"]:
    """Sort rows by expert, and multiply them block by block; add up in a wide type.

    How many blocks there are depends on shapes alone: about three for each expert. The gradient is
    written out, since that of a loop over blocks would be as large as all matrices for each block.
    """
    assert config.experts is not None
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    size = _block_size(routed.chosen.size, config.experts.number)
    sorted_blocks = _sort_into_blocks(routed.chosen, experts.down.shape[1], size)
    trace_again = same_tracing()

    def mix(rows: Array, share: Array, gate_up: Array, down: Array, *biases: Array) -> Array:
        y = _inner(config, _biased(matmul(rows, gate_up), *biases[:1]))
        y = _biased(matmul(y, down), *biases[1:])
        return rounded(y * spread(share[:, None], y.shape, y.dtype))

    def stacks_of(experts: _Experts) -> list[Array]:
        return [experts.gate_up, experts.down, *experts.biases]

    def inputs(block: _Blocks, x: Array, share: Array, experts: _Experts) -> tuple[Array, ...]:
        weights = (
            jax.lax.dynamic_slice(y, _start(block, experts, y), (1, 1, *y.shape[2:]))[0, 0]
            for y in stacks_of(experts)
        )
        shares = share.at[block.tokens, block.slots].get(mode="fill", fill_value=0)
        return x.at[block.tokens].get(mode="fill", fill_value=0), shares, *weights

    def of_tokens(values: Array, places: Array) -> Array:
        rows = values.reshape(-1, *values.shape[2:])
        return rows.at[places].get(mode="fill", fill_value=0)

    @jax.custom_vjp
    def run(x: Array, share: Array, experts: _Experts, blocks: _Blocks, places: Array) -> Array:
        def step(_: None, block: _Blocks) -> tuple[None, Array]:
            return None, mix(*inputs(block, x, share, experts))

        _, y = jax.lax.scan(step, None, blocks)
        return jnp.sum(of_tokens(y, places).astype(wide), axis=1)

    def forward(*arrays: Any) -> tuple[Array, Any]:
        return run(*arrays), arrays

    def backward(arrays: Any, cotangent: Array) -> tuple[Any, ...]:
        x, share, experts, blocks, places = arrays

        def step(carry: Any, block: _Blocks) -> tuple[Any, tuple[Array, Array]]:
            stacks, sums = carry
            y, pull = jax.vjp(mix, *inputs(block, x, share, experts))
            rows = cotangent.at[block.tokens].get(mode="fill", fill_value=0)
            d_rows, d_share, *d_matrices = pull(rows.astype(y.dtype))
            # The blocks of an expert follow each other; the last one writes the whole sum.
            sums = [
                jnp.where(block.is_first, 0, total) + new.astype(wide)
                for total, new in zip(sums, d_matrices, strict=True)
            ]
            stacks = [
                jax.lax.dynamic_update_slice(
                    stack, total[None, None].astype(stack.dtype), _start(block, experts, stack)
                )
                for stack, total in zip(stacks, sums, strict=True)
            ]
            return (stacks, sums), (d_rows, d_share)

        stacks = [jnp.zeros_like(stack) for stack in stacks_of(experts)]
        sums = [jnp.zeros(stack.shape[2:], wide) for stack in stacks]
        with trace_again():
            (stacks, _), (d_rows, d_share) = jax.lax.scan(step, (stacks, sums), blocks)
        d_x = jnp.sum(of_tokens(d_rows, places).astype(wide), axis=1).astype(x.dtype)
        gate_up, down, *biases = stacks
        d_experts = experts._replace(gate_up=gate_up, down=down, layer=None, biases=tuple(biases))
        return d_x, of_tokens(d_share, places), d_experts, None, None

    run.defvjp(forward, backward)
    total: Array = run(x, routed.share, experts, *sorted_blocks)
    return total


def _in_groups(
    config: DecoderConfig,
    x: Float[Array, "tokens width"],
    routed: _Routed,
    experts: _Experts,
) -> Float[Array, "tokens width"]:
    """Sort rows by expert, so that each expert's are one product; add up in float32.

    Each row is there once for each of its experts. Those of other devices' experts come last, in no
    group. The groups of other layers are empty.
    """
    chosen, (layers, number) = routed.chosen, experts.down.shape[:2]
    (tokens, each), groups = chosen.shape, layers * number
    is_here = (chosen >= 0) & (chosen < number)
    group = jnp.where(is_here, experts.layer * number + chosen, groups).reshape(-1)
    sizes = jnp.zeros(groups, jnp.int32).at[group].add(1, mode="drop")
    order = jnp.argsort(group, stable=True)
    # What a product leaves in rows of no group is undefined.
    grouped = (jnp.arange(tokens * each, dtype=jnp.int32) < jnp.sum(sizes))[:, None]

    def multiply(rows: Array, matrices: Array, bias: Array | None = None) -> Array:
        from twinkle_jax.model.decoder.tpu_kernels import multiply_groups  # slow to import

        rows = jnp.where(grouped, rows, 0)
        matrices = rounded(matrices, rows.dtype).reshape(groups, *matrices.shape[2:])
        product = multiply_groups(rows, matrices, sizes, interpret=traced_backend() != "tpu")
        if bias is not None:  # in float32, in which gradients of many rows are added up
            table = bias.reshape(groups, -1).astype(jnp.float32)
            product = _biased(product, table.at[group[order]].get(mode="fill", fill_value=0))
        return jnp.where(grouped, product, 0)

    # Repeated, then permuted: the gradient is a permutation and a sum, not a scatter that adds.
    rows = jnp.repeat(x, each, axis=0, total_repeat_length=tokens * each)[order]
    y = _inner(config, multiply(rows, experts.gate_up, *experts.biases[:1]))
    y = multiply(y, experts.down, *experts.biases[1:])
    y = y[jnp.argsort(order)].reshape(tokens, each, -1)
    y = rounded(y * spread(routed.share[..., None], y.shape, y.dtype))
    return jnp.sum(y.astype(jnp.float32), axis=1)
