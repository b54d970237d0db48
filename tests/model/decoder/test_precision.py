"""One token has the same log-probability in every path: bfloat16 on CPUs, float32 elsewhere."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import optimised
from tests.model.families import ALL, each, family
from tests.sampler.completions import trainer_logprobs
from twinkle_jax.loss import token_logprobs
from twinkle_jax.model import (
    Decoder,
    decode_step,
    extend,
    hidden_states,
    init_params,
    output_logits,
    output_matrix,
    parameter_shapes,
    parse_config,
    prefill,
    save_pretrained,
)
from twinkle_jax.model.decoder.precision import multiply, rounded, tracing_for
from twinkle_jax.sampler import Sampling, generate
from twinkle_jax.sampler.sampling import scaled_logits

scoring = importlib.import_module("twinkle_jax.loss.token_logprobs")  # the function has its name
_GET = "pip install 'twinkle-jax[test,oracle]'"
WIDE = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 512, "head_dim": 32}
_SLIDING = {
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 16,
}
_LATENT = {
    "head_dim": 16,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
DEEP = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "phi3": {"sliding_window": 16, "rope_parameters": {"rope_theta": 500.0}},
    "gemma3_text": _SLIDING,
    # Bounds that leave a sharp policy sharp.
    "gemma2": _SLIDING | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma4_text": {"final_logit_softcapping": 30.0},
    "gemma4_text mixture": {"final_logit_softcapping": 30.0},
    "gemma4_text small": {"vocab_size_per_layer_input": 512, "final_logit_softcapping": 30.0},
    "olmo3": _SLIDING,
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "swiglu_limit": 7.0,
    },
    "youtu": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
}


@pytest.fixture(scope="module")
def compiled_as_users_do():
    """What most tests here are about are the compiler's fusions."""
    with optimised():
        yield


with_fusions = pytest.mark.usefixtures("compiled_as_users_do")


def sharp(name):
    """Give a decoder of 4 layers whose matrices are ten times as large as random ones usually are.

    Its distributions are sharp, so that a rounding in one path and not in the other shows.
    """
    shape = {"num_hidden_layers": 4, **WIDE, **DEEP.get(name, {})}
    config = parse_config(family(name, **shape))

    def grow(path, leaf):
        return 10 * leaf if path[-1].key in ("kernel", "embedding") else leaf

    return config, jax.tree_util.tree_map_with_path(grow, init_params(jax.random.key(0), config))


def transformers_difference(config, params, tokens, folder):
    """Mean difference of log-probabilities in transformers: whole rows, and token by token."""
    torch = pytest.importorskip("torch", reason=_GET)
    transformers = pytest.importorskip("transformers", reason=_GET)
    save_pretrained(Decoder(config, params), folder, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokens = torch.tensor(np.array(tokens), dtype=torch.long)
    cache, steps = None, []
    with torch.no_grad():
        at_once = model(input_ids=tokens).logits.float()
        for column in tokens.split(1, dim=1):
            out = model(input_ids=column, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits.float())
        chosen = [
            torch.log_softmax(logits[:, 3:-1], -1).gather(-1, tokens[:, 4:, None])
            for logits in (at_once, torch.cat(steps, dim=1))
        ]
    return float((chosen[0] - chosen[1]).abs().mean())


@pytest.mark.slow
@with_fusions
@pytest.mark.parametrize("name", each(["qwen3", *(x for x in ALL if x != "qwen3")]))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_trainer_scores_what_the_sampler_drew(name, tmp_path):
    """Linear attention computes in chunks what it decodes token by token; all else is the same."""
    config, params = sharp(name)
    prompts = np.random.default_rng(0).integers(3, 512, (32, 4)).astype(np.int32)
    key, options = jax.random.key(1), {"compute_dtype": "bfloat16"}
    drawn = generate(params, config, prompts, None, key, Sampling(), max_new_tokens=60, **options)
    scored = trainer_logprobs(params, config, prompts.tolist(), drawn, 1.0, **options)
    allowed = 0.001
    if config.delta_net is not None:
        tokens = np.concatenate([prompts, drawn.tokens], axis=1)
        allowed += transformers_difference(config, params, tokens, tmp_path)
        # A rounding may choose another expert, in transformers too.
        assert allowed < (0.01 if config.experts is None else 0.05)
    if config.attention.latent is not None:
        # Keys and values are rounded in one path, and queries and outputs in the other.
        exact = trainer_logprobs(params, config, prompts.tolist(), drawn, 1.0)
        allowed = np.mean(np.abs(scored - exact))
        assert np.mean(np.abs(drawn.logprobs - exact)) <= 1.05 * allowed < 0.06
    assert np.mean(np.abs(scored - drawn.logprobs)) <= allowed
    assert np.min(scored) < -5 and np.max(scored) > -0.5


@pytest.mark.slow
@with_fusions
@pytest.mark.parametrize("name", each(["qwen3", *(x for x in ALL if x != "qwen3")]))
def test_scores_do_not_depend_on_the_batch_nor_on_gradients(name):
    config, params = sharp(name)
    tokens = jax.random.randint(jax.random.key(2), (16, 40), 3, 512)

    @jax.jit
    def scores(params, tokens, segment_ids=None):
        hidden = hidden_states(
            params, config, tokens[:, :-1], segment_ids=segment_ids, compute_dtype="bfloat16"
        )
        logprobs = jax.nn.log_softmax(output_logits(params, config, hidden))
        return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[:, :, 0]

    def loss(params):
        values = scores(params, tokens)
        return jnp.sum(values), values

    every = scores(params, tokens)
    few = scores(params, tokens[:2, :16])
    assert np.mean(np.abs(every[:2, :15] - few)) <= 0.001
    packed = jnp.pad(tokens.reshape(8, 80), ((0, 0), (0, 1)))
    packed = scores(params, packed, jnp.repeat(jnp.array([[0, 1]]), 40, axis=1).repeat(8, axis=0))
    allowed = 0.001
    if config.delta_net is not None:
        # The chunks of linear attention begin elsewhere in a packed row, and sum in another order;
        # a rounding may choose another expert.
        allowed = 0.006 if config.experts is None else 0.01
    assert np.mean(np.abs(every - packed.reshape(16, 40)[:, :39])) <= allowed
    with jax.numpy_dtype_promotion("standard"):
        (_, trained), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.mean(np.abs(every - trained)) <= 0.001


@pytest.mark.slow
@with_fusions
def test_a_rounding_is_kept_between_float32_and_float32():
    x = jax.random.normal(jax.random.key(0), (64, 32))
    expected = np.asarray(x.astype(jnp.bfloat16), np.float32)

    def around(x):
        return jnp.sum(jnp.square(rounded(x, jnp.bfloat16).astype(jnp.float32)), axis=-1)

    np.testing.assert_allclose(jax.jit(around)(x), np.sum(expected**2, axis=-1), rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(rounded(x, jnp.bfloat16).astype(jnp.float32)))(x)
    np.testing.assert_array_equal(gradient, 1)


@pytest.mark.slow
@with_fusions
def test_products_and_their_derivatives_are_those_of_bfloat16():
    x, y = (jax.random.normal(jax.random.key(i), (8, 8), jnp.bfloat16) for i in (1, 2))

    def sines(product):
        return lambda x, y: jnp.sum(jnp.sin(product(x, y).astype(jnp.float32)))

    ours = sines(lambda x, y: multiply(jnp.matmul, x, y))
    for function in (
        jax.value_and_grad,
        lambda f, argnums: jax.jit(jax.value_and_grad(f, argnums)),
    ):
        (value, grads), (expected, expected_grads) = (
            function(f, argnums=(0, 1))(x, y) for f in (ours, sines(jnp.matmul))
        )
        np.testing.assert_allclose(value, expected, rtol=0.02)
        for grad, wanted in zip(grads, expected_grads, strict=True):
            assert grad.dtype == jnp.bfloat16
            np.testing.assert_allclose(
                np.asarray(grad, np.float32), np.asarray(wanted, np.float32), atol=0.1
            )


@pytest.mark.parametrize(
    ("backend", "dtype", "same"),
    [("cpu", "bfloat16", False), ("cpu", "float32", True), ("tpu", "bfloat16", True)],
)
def test_other_backends_and_types_get_no_instruction(backend, dtype, same):
    x = jax.ShapeDtypeStruct((4, 4), dtype)
    with tracing_for(backend, dtype, None):
        ours = jax.make_jaxpr(lambda x: multiply(jnp.matmul, x, rounded(x)))(x)
        plain = jax.make_jaxpr(lambda x: jnp.matmul(x, x))(x)
    assert (str(ours) == str(plain)) is same


def precisions(jaxpr):
    """Type and precision of the factors of every product of a program, kernels left out."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            factors = "".join(sorted({x.aval.dtype.name for x in equation.invars}))
            chosen = equation.params["precision"]
            names = chosen if isinstance(chosen, tuple) else (chosen,)
            yield factors, "".join(sorted({getattr(name, "name", "") for name in names}))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=callable):
            inner = getattr(value, "jaxpr", value)
            yield from precisions(inner) if hasattr(inner, "eqns") else ()


def sums(jaxpr):
    """Type of every sum of a program, and how many numbers are added up."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "reduce_sum":
            (x,), (y,) = equation.invars, equation.outvars
            yield y.aval.dtype.name, x.aval.size // max(y.aval.size, 1)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=callable):
            inner = getattr(value, "jaxpr", value)
            yield from sums(inner) if hasattr(inner, "eqns") else ()


@pytest.mark.parametrize(
    "name",
    each(["qwen2", "gpt_oss", "gemma4_text mixture", "glm4_moe", "qwen3_next", "olmoe"], default=4),
)
def test_no_gradient_is_summed_in_bfloat16(name):
    """Those of norms, biases and gates: a GPU sums in the type that the program says."""
    config, tokens = parse_config(family(name)), jnp.zeros((2, 24), jnp.int32)

    def total(params):
        hidden = hidden_states(params, config, tokens, compute_dtype="bfloat16")
        return jnp.sum(hidden.astype(jnp.float32))

    with jax.numpy_dtype_promotion("standard"):
        program = jax.make_jaxpr(jax.grad(total))(parameter_shapes(config))
    added = list(sums(program.jaxpr))
    assert ("float32", 48) in added  # over the tokens
    assert [sum for sum in added if sum[0] == "bfloat16" and sum[1] > 1] == []


def whole_step(params, config, tokens, dtype):
    """Score and differentiate rows; read prompts, draw a token, read more."""
    options = {"compute_dtype": dtype}

    def logprobs(params):
        hidden = hidden_states(params, config, tokens, **options)
        flat, head = hidden.reshape(-1, config.hidden_size), output_matrix(params)
        return jnp.sum(token_logprobs(flat, head.astype(dtype), tokens.reshape(-1)))

    hidden, cache = prefill(params, config, tokens, max_length=12, **options)
    logits = (
        output_logits(params, config, hidden),
        scaled_logits(params, config, hidden, jnp.float32(1.0)),
    )
    drawn = decode_step(params, config, tokens[:, 0], cache, **options)
    return jax.grad(logprobs)(params), logits, drawn, extend(params, config, tokens, cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", each(["qwen2", "gemma3_text", "qwen3_5_text"]))
def test_float32_is_exact_on_accelerators(name, monkeypatch):
    """JAX would round factors to TensorFloat-32 on a GPU and to bfloat16 on a TPU."""
    config = parse_config(family(name))
    params = init_params(jax.random.key(0), config)
    tokens = jnp.ones((2, 5), jnp.int32)

    def trace(dtype):
        jax.clear_caches()
        with jax.numpy_dtype_promotion("standard"):
            program = jax.make_jaxpr(lambda params: whole_step(params, config, tokens, dtype))
            return set(precisions(program(params).jaxpr))

    wide = {("float32", "HIGHEST")}
    try:
        assert ("float32", "") in trace("float32")  # on a CPU nothing is rounded
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert trace("float32") == wide
        assert {x for x in trace("bfloat16") if x[0] == "bfloat16"} <= {
            ("bfloat16", ""),
            ("bfloat16", "BF16_BF16_F32"),
        }
        with jax.default_matmul_precision("tensorfloat32"):
            assert ("float32", "HIGHEST") not in trace("float32") or name == "qwen3_5_text"
        # On an NVIDIA GPU; linear attention asks for float32 itself.
        monkeypatch.setattr(scoring, "compute_capability", lambda device: 9.0)
        assert trace("float32") - wide == {("float32", "TF32_TF32_F32_X3")}
    finally:
        jax.clear_caches()


@pytest.mark.parametrize("name", each(["qwen3", "gemma4_text"]))
def test_means_of_norms_are_added_up_in_one_order(name):
    """In bfloat16 on a CPU, hidden states of a step are those of whole rows, to the bit."""
    config = parse_config(family(name, hidden_size=128, intermediate_size=512, vocab_size=512))
    params = init_params(jax.random.key(0), config)
    tokens = np.random.default_rng(1).integers(3, 512, (192, 48)).astype(np.int32)
    fill = jax.jit(prefill, static_argnames=("config", "max_length", "compute_dtype"))
    step = jax.jit(decode_step, static_argnames=("config", "compute_dtype"))
    whole = jax.jit(hidden_states, static_argnames=("config", "compute_dtype"))
    options = {"compute_dtype": "bfloat16"}
    expected = whole(params, config, tokens, **options)
    last, cache = fill(params, config, tokens[:, :16], max_length=48, **options)
    np.testing.assert_array_equal(last, expected[:, 15])
    for time in range(16, 48):
        last, cache = step(params, config, tokens[:, time], cache, **options)
        np.testing.assert_array_equal(last, expected[:, time])
