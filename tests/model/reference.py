"""The decoder again, in float64 NumPy, one row and one token at a time."""

import dataclasses
from typing import Any

import numpy as np

from twinkle_jax.model import (
    AttentionConfig,
    DecoderConfig,
    LinearScaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)


def reference_hidden(
    params: Any,
    config: DecoderConfig,
    tokens: list[int],
    positions: list[int] | None = None,
    routing: np.ndarray | None = None,
) -> np.ndarray:
    """Hidden states of one row without padding, behind the final norm.

    The experts of `routing`, [time, layers, chosen], are taken where they are not -1; where they
    are, those that the router chooses are written there.
    """
    x = np.asarray(params["embed_tokens"]["embedding"], np.float64)[np.asarray(tokens)]
    x = x * config.embedding_multiplier
    read = None if config.token_width is None else _per_layer(params, config, x, tokens)
    places = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    made: dict[str, Any] = {}  # the keys and values of the last layer of each kind
    for layer, kind in enumerate(config.layer_kinds):
        stack = [stack for stack in config.stacks if stack.first_layer <= layer][-1]
        repeat, member = divmod(layer - stack.first_layer, len(stack.block))
        w = _layer(params["layers"][str(stack.first_member + member)], repeat)
        y = _before(x, "input_layernorm", w, config)
        if kind == "linear_attention":
            y = _delta_net(y, w["linear_attn"], config)
        else:
            turns = 0 * places if layer in config.unrotated_layers else places
            reused = made[kind] if stack.reuses else None
            slides = kind == "sliding_attention"
            y, made[kind] = _attention(y, w["self_attn"], config, turns, reused, sliding=slides)
        x = x + config.residual_multiplier * _between(y, "post_attention_layernorm", w, config)
        before = "pre_feedforward" if config.output_norms else "post_attention"
        y = _before(x, f"{before}_layernorm", w, config)
        named = None if routing is None else routing[:, layer]
        if config.experts is None or layer < config.dense_layers:
            y = _gated(y, w["mlp"], config)
            if named is not None:
                named[:] = 0
        elif config.experts.beside_dense:
            y = norm(
                _gated(y, w["mlp"], config), w["post_feedforward_layernorm_1"]["scale"], config
            )
            y = y + _added_experts(x, w, config, named)
        else:
            router = w["mlp"]["gate" if config.experts.swiglu_limit is None else "router"]
            logits = y @ router["kernel"] + router.get("bias", 0)
            y = _experts(y, logits, w["mlp"], config, named)
        x = x + config.residual_multiplier * _between(y, "post_feedforward_layernorm", w, config)
        if read is not None:
            y = gelu(x @ w["per_layer_input_gate"]["kernel"]) * read[:, layer]
            y = y @ w["per_layer_projection"]["kernel"]
            x = x + norm(y, w["post_per_layer_input_norm"]["scale"], config)
        x = x * w.get("layer_scalar", 1)
    hidden = norm(x, np.asarray(params["norm"]["scale"], np.float64), config)
    return hidden / config.logits_scaling


def _per_layer(params: Any, config: DecoderConfig, x: np.ndarray, tokens: list[int]) -> np.ndarray:
    """What each layer reads of each token, [time, layers, width]."""
    shape = len(tokens), config.layers, config.token_width
    kernel = np.asarray(params["per_layer_model_projection"]["kernel"], np.float64)
    projected = (x @ kernel / np.sqrt(config.hidden_size)).reshape(shape)
    scale = np.asarray(params["per_layer_projection_norm"]["scale"], np.float64)
    table = np.asarray(params["embed_tokens_per_layer"]["embedding"], np.float64)
    embedded = table[np.asarray(tokens)].reshape(shape) * np.sqrt(config.token_width)
    return (norm(projected, scale, config) + embedded) / np.sqrt(2)


def reference_logits(
    params: Any, config: DecoderConfig, tokens: list[int], positions: list[int] | None = None
) -> np.ndarray:
    hidden = reference_hidden(params, config, tokens, positions)
    if config.tie_embeddings:
        head = np.asarray(params["embed_tokens"]["embedding"], np.float64).T
    else:
        head = np.asarray(params["lm_head"]["kernel"], np.float64)
    return _capped(hidden @ head, config.logits_soft_cap)


def _capped(logits: np.ndarray, cap: float | None) -> np.ndarray:
    return logits if cap is None else cap * np.tanh(logits / cap)


def _layer(weights: Any, repeat: int) -> Any:
    if isinstance(weights, dict):
        return {key: _layer(value, repeat) for key, value in weights.items()}
    return np.asarray(weights, np.float64)[repeat]


def _before(x: np.ndarray, name: str, w: Any, config: DecoderConfig) -> np.ndarray:
    """What half a layer reads: the residual stream, in some families without a norm."""
    return norm(x, w[name]["scale"], config) if config.input_norms else x


def _between(y: np.ndarray, name: str, w: Any, config: DecoderConfig) -> np.ndarray:
    """What is added to the residual stream: with a norm before that, in some families."""
    return norm(y, w[name]["scale"], config) if config.output_norms else y


def _gated(y: np.ndarray, w: Any, config: DecoderConfig) -> np.ndarray:
    gate = y @ w["gate_proj"]["kernel"]
    gate = silu(gate) if config.activation == "silu" else gelu(gate)
    return (gate * (y @ w["up_proj"]["kernel"])) @ w["down_proj"]["kernel"]


def _added_experts(
    x: np.ndarray, w: Any, config: DecoderConfig, routing: np.ndarray | None
) -> np.ndarray:
    """What experts beside a dense layer add: they and their router read the residual stream."""
    length = np.sqrt((x**2).sum(-1, keepdims=True) + config.hidden_size * config.norm_epsilon)
    logits = (x / length * w["router"]["scale"]) @ w["router"]["proj"]["kernel"]
    y = norm(x, w["pre_feedforward_layernorm_2"]["scale"], config)
    y = _experts(y, logits, w, config, routing, factors=w["router"]["per_expert_scale"])
    return norm(y, w["post_feedforward_layernorm_2"]["scale"], config)


def _experts(
    y: np.ndarray,
    all_logits: np.ndarray,
    w: Any,
    config: DecoderConfig,
    routing: np.ndarray | None,
    factors: np.ndarray | None = None,
) -> np.ndarray:
    """Each token goes through its likeliest experts, one after the other."""
    e, out = config.experts, np.zeros_like(y)
    activate = silu if config.activation == "silu" else gelu
    for t, (token, logits) in enumerate(zip(y, all_logits, strict=True)):
        share = np.exp(logits - logits.max())
        share, correction = share / share.sum(), 0
        if e.corrected:
            share, correction = 1 / (1 + np.exp(-logits)), w["gate"]["e_score_correction_bias"]
        preferred = share + correction
        if e.groups > 1:
            each = np.sort(preferred.reshape(e.groups, -1))[:, -2:].sum(axis=1)
            far = np.argsort(-each)[e.chosen_groups :]
            preferred[np.isin(np.arange(e.number) // (e.number // e.groups), far)] = -np.inf
        chosen = np.argsort(-preferred)[: e.chosen]
        if routing is not None:
            routing[t] = chosen = np.where(routing[t] < 0, chosen, routing[t])
        total = share[chosen].sum() if e.normalised else 1
        for expert in chosen:
            hidden = token @ w["experts"]["gate_up_proj"]["kernel"][expert]
            bias = np.zeros(y.shape[1])
            if e.swiglu_limit is None:
                hidden = activate(hidden[: e.width]) * hidden[e.width :]
            else:
                hidden = hidden + w["experts"]["gate_up_proj"]["bias"][expert]
                gate, up = hidden.reshape(-1, 2).T
                gate = np.where(gate > e.swiglu_limit, e.swiglu_limit, gate)
                up = np.clip(up, -e.swiglu_limit, e.swiglu_limit)
                hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
                bias = w["experts"]["down_proj"]["bias"][expert]
            if factors is not None:
                hidden = hidden * factors[expert]
            hidden = hidden @ w["experts"]["down_proj"]["kernel"][expert] + bias
            out[t] += e.scaling * share[expert] / total * hidden
        if e.corrected:
            out[t] += _gated(token, w["shared_experts"], config)
        elif e.shared_width:
            opened = 1 / (1 + np.exp(-(token @ w["shared_expert_gate"]["kernel"])))
            out[t] += opened * _gated(token, w["shared_expert"], config)
    return out


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def norm(x: np.ndarray, weight: np.ndarray, config: DecoderConfig) -> np.ndarray:
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
    return scaled * (1 + weight if config.centred_norms else weight)


def frequencies(a: AttentionConfig) -> np.ndarray:
    """Angles per position; Llama 3's stretched ones by wavelength, one after the other."""
    angles = []
    for i in range(a.rotary_dim // 2):
        wavelength = 2 * np.pi * a.rope_theta ** (2 * i / a.rotary_dim)
        s = a.rope_scaling
        if isinstance(s, LinearScaling):
            angles.append(2 * np.pi / (wavelength * s.factor))
            continue
        if isinstance(s, LongRopeScaling):
            angles.append(2 * np.pi / (wavelength * s.factors[i]))
            continue
        if isinstance(s, YarnScaling):
            log = np.log(s.original_length / (2 * np.pi * np.array([s.beta_fast, s.beta_slow])))
            first, last = a.rotary_dim / 2 * log / np.log(a.rope_theta)
            first, last = max(np.floor(first), 0), min(np.ceil(last), a.rotary_dim - 1)
            stretched = np.clip((i - first) / (last - first or 1e-3), 0, 1)  # or a step
            angles.append(2 * np.pi / wavelength * (1 - stretched + stretched / s.factor))
            continue
        if isinstance(s, ProportionalScaling):
            angles.append(2 * np.pi / wavelength if 2 * (i + 1) <= s.part * a.head_dim else 0)
            continue
        if s is not None and wavelength > s.original_length / s.low_frequency:
            wavelength *= s.factor
        elif s is not None and wavelength >= s.original_length / s.high_frequency:
            part = s.original_length / wavelength - s.low_frequency
            part /= s.high_frequency - s.low_frequency
            wavelength /= (1 - part) / s.factor + part
        angles.append(2 * np.pi / wavelength)
    return np.array(angles)


def rotated(x: np.ndarray, place: int, a: AttentionConfig) -> np.ndarray:
    """Rotate the first entries of a head, as complex numbers."""
    dim, half = a.rotary_dim, a.rotary_dim // 2
    turn = np.exp(1j * place * frequencies(a))
    if isinstance(a.rope_scaling, YarnScaling):
        assert a.rope_scaling.truncate
        turn *= a.rope_scaling.attention_factor
    if isinstance(a.rope_scaling, LongRopeScaling):
        s = a.rope_scaling
        turn *= np.sqrt(1 + np.log(s.max_length / s.original_length) / np.log(s.original_length))
    if a.interleaved:
        z = (x[:dim:2] + 1j * x[1:dim:2]) * turn
        return np.concatenate([np.stack([z.real, z.imag], axis=1).reshape(-1), x[dim:]])
    z = (x[:half] + 1j * x[half:dim]) * turn
    return np.concatenate([z.real, z.imag, x[dim:]])


def _attention(
    y: np.ndarray,
    w: Any,
    config: DecoderConfig,
    places: np.ndarray,
    reused: tuple[np.ndarray, np.ndarray] | None,
    *,
    sliding: bool,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Attention, and the keys, before their rotation, and values that it attended to."""
    if config.attention.latent is not None:
        return _latent_attention(y, w, config, places), (y, y)
    a, time, seen = config.attention, len(y), len(y)
    if not sliding and config.full_attention is not None:
        a = config.full_attention
    scale = a.multiplier or 1 / np.sqrt(a.query_width or a.head_dim)
    if sliding:
        seen = a.window.size
    if sliding and a.window.rope_theta is not None:
        a = dataclasses.replace(a, rope_theta=a.window.rope_theta, rope_scaling=None)

    def project(name: str) -> np.ndarray:
        return y @ w[name]["kernel"] + w[name].get("bias", 0)

    queries = project("q_proj")
    if a.joint_qk_norm:
        queries = norm(queries, w["q_norm"]["scale"], config)
    queries = queries.reshape(time, a.query_heads, -1)
    if reused is not None:
        keys, values = reused
    else:
        keys = project("k_proj")
        if a.joint_qk_norm:
            keys = norm(keys, w["k_norm"]["scale"], config)
        keys = keys.reshape(time, a.key_value_heads, -1)
        values = project("k_proj" if a.shared_values else "v_proj")
        values = values.reshape(time, a.key_value_heads, -1)
        if a.value_norm:
            values = values / np.sqrt((values**2).mean(-1, keepdims=True) + config.norm_epsilon)
        if a.qk_norm and not a.joint_qk_norm:
            keys = norm(keys, w["k_norm"]["scale"], config)
    out = np.zeros((time, a.query_heads, a.head_dim))
    for head in range(a.query_heads):
        group = head // (a.query_heads // a.key_value_heads)
        for t in range(time):
            query = queries[t, head, : a.head_dim]
            start = max(t + 1 - seen, 0)
            near = keys[start : t + 1, group]
            if a.qk_norm and not a.joint_qk_norm:
                query = norm(query, w["q_norm"]["scale"], config)
            query = rotated(query, places[t], a)
            if isinstance(a.rope_scaling, YarnScaling):
                lengths = places[t] // a.rope_scaling.original_length
                query = query * (1 + a.rope_scaling.query_growth * np.log(1 + lengths))
            turned = [rotated(k, places[s], a) for s, k in enumerate(near, start)]
            scores = _capped(np.array(turned) @ query * scale, a.soft_cap)
            weights = np.exp(scores - scores.max())
            total = weights.sum()
            if a.sinks:
                total += np.exp(w["sinks"][head] - scores.max())
            out[t, head] = weights @ values[start : t + 1, group] / total
            if a.output_gate:
                out[t, head] /= 1 + np.exp(-queries[t, head, a.head_dim :])
    mixed = out.reshape(time, -1) @ w["o_proj"]["kernel"]
    return mixed + w["o_proj"].get("bias", 0), (keys, values)


def _latent_attention(
    y: np.ndarray, w: Any, config: DecoderConfig, places: np.ndarray
) -> np.ndarray:
    """Latent attention with keys and values of each head."""
    a, time = config.attention, len(y)
    latent, unrotated = a.latent, a.head_dim - a.rotary_dim
    scale = 1 / np.sqrt(a.head_dim)
    if isinstance(a.rope_scaling, YarnScaling):
        scale *= a.rope_scaling.logit_factor

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[name]["kernel"] + w[name].get("bias", 0)

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[name]["scale"]

    if latent.query_width is None:
        queries = project(y, "q_proj")
    else:
        queries = project(normed(project(y, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    queries = queries.reshape(time, a.query_heads, a.head_dim)
    narrow = project(y, "kv_a_proj_with_mqa")
    turned = [rotated(k, places[t], a) for t, k in enumerate(narrow[:, latent.width :])]
    narrow = normed(narrow[:, : latent.width], "kv_a_layernorm")
    each = project(narrow, "kv_b_proj").reshape(time, a.query_heads, -1)
    out = np.zeros((time, a.query_heads, latent.value_dim))
    for head in range(a.query_heads):
        for t in range(time):
            query = queries[t, head]
            query = np.concatenate([query[:unrotated], rotated(query[unrotated:], places[t], a)])
            keys = [np.concatenate([each[s, head, :unrotated], turned[s]]) for s in range(t + 1)]
            scores = np.array(keys) @ query * scale
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ each[: t + 1, head, unrotated:] / weights.sum()
    return project(out.reshape(time, -1), "o_proj")


def _delta_net(y: np.ndarray, w: Any, config: DecoderConfig) -> np.ndarray:
    d, time = config.delta_net, len(y)
    kernel = w["conv1d"]["kernel"]
    if d.by_key_head:
        ends = np.cumsum([d.key_dim, d.key_dim, d.value_heads // d.key_heads * d.value_dim])
        heads = (y @ w["in_proj_qkvz"]["kernel"]).reshape(time, d.key_heads, -1)
        *parts, gate = (x.reshape(time, -1) for x in np.split(heads, ends, axis=2))
        mixed = np.concatenate(parts, axis=1)
        heads = (y @ w["in_proj_ba"]["kernel"]).reshape(time, d.key_heads, 2, -1)
        strength, step = (heads[:, :, i].reshape(time, -1) for i in (0, 1))
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        mixed, gate, strength, step = (y @ w[name]["kernel"] for name in names)
    padded = np.concatenate([np.zeros((d.kernel - 1, d.channels)), mixed])
    convolved = silu(np.stack([(padded[t : t + d.kernel] * kernel).sum(0) for t in range(time)]))
    wide = d.key_heads * d.key_dim
    query = convolved[:, :wide].reshape(time, d.key_heads, -1)
    key = convolved[:, wide : 2 * wide].reshape(time, d.key_heads, -1)
    value = convolved[:, 2 * wide :].reshape(time, d.value_heads, -1)
    strength = 1 / (1 + np.exp(-strength))
    decay = -np.exp(w["A_log"]) * np.log1p(np.exp(step + w["dt_bias"]))
    gate = gate.reshape(time, d.value_heads, -1)
    out = np.zeros((time, d.value_heads, d.value_dim))
    for head in range(d.value_heads):
        group = head // (d.value_heads // d.key_heads)
        q, k = (x[:, group] for x in (query, key))
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        o = reference_delta_rule(
            q / np.sqrt(d.key_dim), k, value[:, head], decay[:, head], strength[:, head]
        )[0]
        o = o / np.sqrt((o**2).mean(-1, keepdims=True) + config.norm_epsilon) * w["norm"]["scale"]
        out[:, head] = o * silu(gate[:, head])
    return out.reshape(time, -1) @ w["out_proj"]["kernel"]


def reference_delta_rule(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, decay: np.ndarray, strength: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of one head, token by token; outputs and the last state."""
    state = np.zeros((key.shape[1], value.shape[1]))
    outs = []
    for q, k, v, g, b in zip(query, key, value, decay, strength, strict=True):
        state = state * np.exp(g)
        state = state + np.outer(k, b * (v - state.T @ k))
        outs.append(state.T @ q)
    return np.array(outs), state
