"""The oracle: checkpoints of transformers' models give transformers' logits and gradients."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.families import (
    ALL,
    NAMES,
    REAL_GEMMA4,
    REAL_GLM4_MOE,
    REAL_GPT_OSS,
    REAL_LATENT,
    batch,
    each,
    family,
)
from twinkle_jax.model import (
    decode_step,
    hidden_states,
    load_pretrained,
    output_logits,
    parse_config,
    prefill,
    save_pretrained,
)
from twinkle_jax.model.decoder.parameters import parameter_table
from twinkle_jax.model.huggingface.checkpoint_files import (
    stored_names,
    stored_outputs,
    stored_shape,
    to_stored,
)

_GET = "pip install 'twinkle-jax[test,oracle]'"
torch = pytest.importorskip("torch", reason=_GET)
transformers = pytest.importorskip("transformers", reason=_GET)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
hidden = jax.jit(hidden_states, static_argnames="config")
fill = jax.jit(prefill, static_argnames=("config", "max_length"))
step = jax.jit(decode_step, static_argnames="config")

ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15], [16, 17, 18, 19, 20]]
RESCALED = {"rope_type": "default", "rope_theta": 9.0}
YARN = {  # of the four pairs one stays, one is slower by the factor, and two are between
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2,
    "beta_slow": 0.05,
}
CASES = {
    "llama": {"num_hidden_layers": 1},
    "llama tied, biased": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": None,
        "rope_theta": 1e5,
    },
    "llama linear": {
        "rope_parameters": None,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "mistral": {"num_hidden_layers": 1},
    "youtu": {},
    "youtu tied, biased, in halves": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_interleave": False,
    },
    "youtu without narrow queries, YaRN": {
        "q_lora_rank": None,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek_v3": {},
    "deepseek_v3 of one group, two dense": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "rope_parameters": None,
        "rope_theta": 700.0,
    },
    "deepseek_v3 all groups": {"topk_group": 3, "rope_interleave": False},
    "glm4_moe_lite": {},
    "glm4_moe_lite by number, in groups": {
        "mlp_layer_types": None,
        "attention_bias": True,
        "n_group": 2,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "ministral3": {},
    "ministral3 tied, sliding": {"tie_word_embeddings": True, "sliding_window": 3},
    "mistral sliding": {"sliding_window": 3, "rope_parameters": None, "rope_theta": 500.0},
    "qwen3 rope_scaling": {"rope_scaling": RESCALED, "num_hidden_layers": 1},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2 ungrouped": {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "qwen3": {},
    "qwen3 tied, biased": {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3 wide heads": {
        "head_dim": 16,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
    },
    "qwen3_5_text": {},
    "qwen3_5_text tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3_5_text by interval": {
        "layer_types": None,
        "linear_num_key_heads": 4,
        "attention_bias": True,
    },
    "qwen3_moe": {},
    "qwen3_moe unnormalised": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "qwen3_next by interval": {
        "layer_types": None,
        "linear_num_key_heads": 4,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "qwen2_moe": {},
    "qwen2_moe normalised": {"norm_topk_prob": True, "num_key_value_heads": 4},
    "olmoe": {},
    "olmoe normalised": {"norm_topk_prob": True, "attention_bias": True},
    "seed_oss": {},
    "glm": {},
    "glm tied, unbiased": {
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 1.0,
        },
    },
    "glm4": {},
    "glm4 three of four, by older names": {
        "attention_bias": False,
        "rope_parameters": None,
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.75,
        "num_key_value_heads": 1,
    },
    "glm4_moe": {},
    "glm4_moe two dense, unnormalised": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": False,
        "use_qk_norm": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rope_parameters": None,
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.75,
    },
    "glm4_moe without dense": {"first_k_dense_replace": 0, "num_experts_per_tok": 1},
    "gemma3_text": {},
    "gemma3_text by pattern": {
        "layer_types": None,
        "sliding_window_pattern": 2,
        "attention_bias": True,
        "sliding_window": 2,
        "rope_parameters": None,
        "rope_theta": 700.0,
        "rope_local_base_freq": 30.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma2": {},
    "gemma2 by pattern": {
        "layer_types": None,
        "num_hidden_layers": 4,
        "attention_bias": True,
        "sliding_window": 2,
        "rope_parameters": None,
        "rope_theta": 700.0,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": None,
        "num_key_value_heads": 4,
    },
    "gemma4_text": {},
    "gemma4_text by pattern": {
        "layer_types": None,
        "num_hidden_layers": 8,  # the last one is full, too
        "sliding_window": 2,
        "rope_parameters": None,
        "attention_bias": True,
        "global_head_dim": 24,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
    },
    "gemma4_text mixture": family("gemma4_text mixture"),
    "gemma4_text small": family("gemma4_text small"),
    "gemma4_text small, deep": family(  # the last repetition of two is what is reused
        "gemma4_text small",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "gemma4_text small, narrow": family(  # more layers reuse keys and values than have some
        "gemma4_text small",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=4,
        use_double_wide_mlp=False,
        attention_k_eq_v=True,
    ),
    "gemma4_text small, with experts": family(
        "gemma4_text small",
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=16,
    ),
    "gemma4_text with values": {
        "attention_k_eq_v": False,
        "layer_types": ["full_attention"] * 2,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
        "use_bidirectional_attention": "vision",
    },
    "olmo2": {"num_hidden_layers": 1},
    "olmo2 biased, tied": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "rope_parameters": None,
        "rope_theta": 1e5,
    },
    "olmo3": {},
    "olmo3 yarn by pattern": {
        "layer_types": None,
        "num_hidden_layers": 5,
        "rope_parameters": None,
        "rope_theta": 5e5,
        "rope_scaling": {key: x for key, x in YARN.items() if key != "rope_theta"},
    },
    "smollm3": {},
    "smollm3 by interval": {
        "no_rope_layers": None,
        "no_rope_layer_interval": 3,
        "num_hidden_layers": 7,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "exaone4": {},
    "exaone4 by pattern": {
        "layer_types": None,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "exaone4 without windows": {
        "layer_types": ["full_attention"] * 4,
        "sliding_window": None,
        "rope_parameters": None,
        "rope_theta": 1e5,
    },
    "ernie4_5": {},
    "ernie4_5 tied": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "rope_parameters": None,
        "rope_theta": 1e5,
    },
    "solar_open": {},
    "solar_open unnormalised, in groups": {
        "norm_topk_prob": False,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "granite": {},
    "granite tied, biased": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "embedding_multiplier": 12,
    },
    "phi3": {},
    "phi3 unscaled": {
        "rope_parameters": None,
        "rope_theta": 1e5,
        "sliding_window": None,
        "num_key_value_heads": 4,
    },
    "phi3 tied, by older names": {
        "rope_parameters": None,
        "rope_theta": 700.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.1, 2, 3.5],
            "long_factor": [4, 5, 6],
        },
        "original_max_position_embeddings": 64,
        "sliding_window": 512,  # wider than the longest row
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "gpt_oss": {},
    "gpt_oss yarn by pattern": {
        "layer_types": None,
        "num_hidden_layers": 4,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 3,
        "swiglu_limit": 7.0,
        "rope_parameters": YARN | {"truncate": False},
    },
    "smollm3 yarn": {"rope_parameters": YARN},
    "qwen3 three groups": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "gemma3_text sliding alone": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 1},
    "gemma3_text wide window": {"sliding_window": 64, "num_key_value_heads": 1},
    "llama yarn": {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}},
    "qwen2 yarn": {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": YARN},
    "qwen3 yarn": {"rope_parameters": YARN | {"truncate": False}},
    "qwen3 yarn, implied": {  # the factor is 256 / 16
        "rope_parameters": YARN | {"factor": None, "attention_factor": 0.75},
    },
    "qwen3_5_text yarn": {
        "layer_types": ["full_attention"] * 4,  # linear ones have no positions
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
    },
}


def _logits(decoder, tokens, mask):
    params = decoder.params
    return output_logits(params, decoder.config, hidden(params, decoder.config, tokens, mask))


def oracle(case, **changes):
    """A random model of transformers', in which no weight is special."""
    config = family(case.split()[0]) | CASES[case] | changes
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            special = ("norm", "dt_bias", "router.scale", "per_expert_scale")
            centre = 0.7 if any(part in name for part in special) else 0.0
            p.copy_(centre + 0.3 * torch.randn_like(p))
        for name, x in model.named_buffers():
            if name.endswith("layer_scalar"):
                x.copy_(0.7 + 0.3 * torch.randn_like(x))
            if name.endswith("e_score_correction_bias"):
                x.copy_(0.5 * torch.randn_like(x))
    return model


def logits_of(model, tokens, mask):
    with torch.no_grad():
        return _their_logits(model, tokens, mask).numpy()


def _their_logits(model, tokens, mask):
    """With positions that count tokens, as in `generate`; by default they count padding, too."""
    kept = torch.tensor(np.array(mask), dtype=torch.long)
    return model(
        input_ids=torch.tensor(np.array(tokens)),
        attention_mask=kept,
        position_ids=(kept.cumsum(dim=1) - 1).clamp(min=0),
    ).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each model and the directory that it saved itself to."""
    models = {}

    def save(case):
        if case not in models:
            directory = tmp_path_factory.mktemp("model")
            model = oracle(case)
            model.save_pretrained(directory)
            models[case] = model, directory
        return models[case]

    return save


@pytest.mark.parametrize(
    "case", [c if c in ALL else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_logits_on_unequal_lengths_and_both_paddings(case, saved):
    model, directory = saved(case)
    decoder = load_pretrained(directory)
    for side in ("left", "right"):
        tokens, mask = batch(ROWS, 8, side)
        expected = logits_of(model, tokens, mask)
        actual = _logits(decoder, tokens, mask)
        assert np.std(expected[mask]) > 0.5
        np.testing.assert_allclose(actual[mask], expected[mask], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "yarn" in case])
def test_yarn_beyond_the_original_length(case, saved):
    """A row of 40 tokens where 16 were the original length; some are decoded and packed too."""
    model, directory = saved(case)
    decoder = load_pretrained(directory)
    params, config = decoder.params, decoder.config
    rng = np.random.default_rng(0)
    long, short = rng.integers(1, 48, 40), rng.integers(1, 48, 8)
    expected = logits_of(model, long[None], np.ones((1, 40)))[0]

    def close(hidden):
        scale = np.abs(expected).max()
        actual = output_logits(params, decoder.config, hidden)
        np.testing.assert_allclose(actual, expected[-len(actual) :], rtol=0, atol=1e-5 * scale)

    packed = jnp.asarray(np.concatenate([short, long])[None])
    segments = jnp.asarray([[1] * 8 + [2] * 40])
    close(hidden(params, config, packed[:, 8:])[0])
    # With one table of angles, with another of sliding layers, and with layers that have none.
    if case not in (
        *("qwen3 yarn, implied", "olmo3 yarn by pattern", "smollm3 yarn"),
        "gpt_oss yarn by pattern",
    ):
        return
    close(hidden(params, config, packed, segment_ids=segments)[0, 8:])
    last, cache = fill(params, config, packed[:, 8:38], max_length=40)
    decoded = [last[0]]
    for token in packed[:, 38:].T:
        last, cache = step(params, config, token, cache)
        decoded.append(last[0])
    close(jnp.stack(decoded))


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_longrope_around_the_original_length(same, tmp_path):
    """transformers takes the second list for rows of more than 16 tokens, in whole batches."""
    lists = {"short_factor": [2.0, 9.0] if same else [1.0, 1.5], "long_factor": [2.0, 9.0]}
    changes = {"original_max_position_embeddings": 16, "sliding_window": 9}
    rope = family("phi3")["rope_parameters"] | lists
    model = oracle("phi3", rope_parameters=rope, **changes)
    model.save_pretrained(tmp_path)
    decoder = load_pretrained(tmp_path)
    params, config = decoder.params, decoder.config
    assert config.attention.longest_row == (None if same else 16)
    row = np.random.default_rng(0).integers(1, 48, 20)
    expected = logits_of(model, row[None, :16], np.ones((1, 16)))[0]
    longer = logits_of(model, row[None], np.ones((1, 20)))[0]

    def close(hidden, expected):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            output_logits(params, decoder.config, hidden), expected, atol=1e-5 * scale
        )

    # Beside a longer row, which is longer than supported, and padded to more than the length.
    tokens, mask = batch([row[:16].tolist(), row.tolist()], 24, "right")
    both = hidden(params, config, tokens, mask)
    close(both[0, :16], expected)
    if same:
        close(both[1, :20], longer)
    else:
        assert np.isnan(both[1, 16:20]).all() and np.abs(longer[:16] - expected).max() > 0.1
    packed = jnp.concatenate([tokens[:1, :16], tokens[:1, :16], tokens[:1, 16:]], axis=1)
    segments = jnp.asarray([[1] * 16 + [2] * 24])
    kept = jnp.arange(40)[None] < 32
    close(hidden(params, config, packed, kept, segment_ids=segments)[0, 16:32], expected)
    _, full = fill(params, config, tokens[:, :16], mask[:, :16], max_length=24)
    ended, _ = step(params, config, tokens[:, 16], full, mask=jnp.zeros(2, bool))
    assert np.isfinite(ended).all()  # rows that ended exactly there are no error
    last, cache = fill(params, config, tokens[:, :14], mask[:, :14], max_length=24)
    decoded = [last]
    for token in tokens[:, 14:20].T:
        last, cache = step(params, config, token, cache)
        decoded.append(last)
    close(jnp.stack(decoded)[:3, 0], expected[13:])
    if same:
        close(jnp.stack(decoded)[:, 1], longer[13:])
    else:
        assert np.isnan(jnp.stack(decoded)[3:]).all()


@pytest.mark.parametrize("name", each(NAMES))
def test_gradients_of_a_loss(name, saved):
    model, directory = saved(name)
    decoder = load_pretrained(directory)
    tokens, mask = batch(ROWS, 8, "left")
    targets = jnp.roll(tokens, -1, axis=1)

    def loss(params):
        logits = output_logits(
            params, decoder.config, hidden_states(params, decoder.config, tokens, mask)
        )
        logprobs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(logprobs, targets[:, :, None], axis=-1)[:, :, 0]
        return -jnp.sum(jnp.where(mask, chosen, 0))

    value, gradient = jax.jit(jax.value_and_grad(loss))(decoder.params)
    model.zero_grad()
    logits = _their_logits(model, tokens, mask)
    chosen = torch.log_softmax(logits, -1).gather(
        -1, torch.tensor(np.array(targets), dtype=torch.long)[:, :, None]
    )[:, :, 0]
    expected = -(chosen * torch.tensor(np.array(mask))).sum()
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)

    # The gradient has the tree of the parameters, so that it can be named like a checkpoint.

    theirs = {name: p.grad.numpy() for name, p in model.named_parameters()}
    table = parameter_table(decoder.config)
    for path, p in table.items():
        start, _ = stored_outputs(decoder.config, path, table)
        ours = gradient
        for key in path:
            ours = ours[key]
        if path[-1] in ("layer_scalar", "e_score_correction_bias"):  # they are not trained
            np.testing.assert_array_equal(ours, 0)
            continue
        for repeat, stored in enumerate(stored_names(decoder.config, path, p, "model.")):
            ours_stored = np.asarray(ours if path[0] != "layers" else ours[repeat])
            ours_stored = to_stored(path, ours_stored, transposed=p.transposed)
            expected = theirs[stored][start : start + len(ours_stored)]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(ours_stored, expected, atol=2e-4 * scale + 1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "llama linear",
        "mistral",
        "mistral sliding",
        "qwen2 tied",
        "qwen3 tied, biased",
        "qwen3 wide heads",
        "qwen3_5_text by interval",
        "qwen3_moe unnormalised",
        "qwen3_5_moe_text",
        "qwen3_next",
        "qwen3_next by interval",
        "qwen2_moe",
        "olmoe normalised",
        "seed_oss",
        "ministral3",
        "glm",
        "glm4 three of four, by older names",
        "glm4_moe",
        "glm4_moe two dense, unnormalised",
        "glm4_moe without dense",
        "gemma3_text",
        "gemma3_text by pattern",
        "gemma2",
        "gemma4_text",
        "gemma4_text by pattern",
        "gemma4_text with values",
        "gemma4_text mixture",
        "gemma4_text small",
        "gemma4_text small, deep",
        "gemma4_text small, narrow",
        "gemma4_text small, with experts",
        "olmo2 biased, tied",
        "olmo3",
        "olmo3 yarn by pattern",
        "smollm3",
        "smollm3 by interval",
        "exaone4",
        "exaone4 without windows",
        "ernie4_5",
        "solar_open",
        "granite tied, biased",
        "phi3",
        "phi3 unscaled",
        "phi3 tied, by older names",
        "gpt_oss",
        "gpt_oss yarn by pattern",
        "llama yarn",
        "qwen2 yarn",
    ],
)
def test_transformers_reads_what_is_saved_here(case, saved, tmp_path):
    model, directory = saved(case)
    tokens, mask = batch(ROWS, 8, "left")
    decoder = load_pretrained(directory)
    save_pretrained(decoder, tmp_path / "out", max_shard_size=20_000)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    np.testing.assert_array_equal(
        logits_of(again, tokens, mask)[mask], logits_of(model, tokens, mask)[mask]
    )
    state, original = again.state_dict(), model.state_dict()
    assert state.keys() == original.keys()
    for name, x in original.items():
        assert torch.equal(state[name], x)


def test_bfloat16_there_and_back(saved, tmp_path):
    model, directory = saved("qwen3")
    save_pretrained(load_pretrained(directory), tmp_path / "out", dtype="bfloat16")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    for name, x in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], x.to(torch.bfloat16))
    assert load_pretrained(tmp_path / "out").params["norm"]["scale"].dtype == jnp.bfloat16


def test_old_configurations(saved, tmp_path):
    """transformers 4 wrote `rope_theta`, flat, and `torch_dtype`."""
    model, directory = saved("qwen3 wide heads")
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    tokens, mask = batch(ROWS, 8, "right")
    decoder = load_pretrained(tmp_path)
    actual = _logits(decoder, tokens, mask)
    expected = logits_of(model, tokens, mask)
    np.testing.assert_allclose(actual[mask], expected[mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "llama",
            "mistral",
            "ministral3",
            "olmo2",
            "olmo3",
            "smollm3",
            "exaone4",
            "ernie4_5",
            "granite",
            "phi3",
            "qwen2",
            "qwen3",
        ),
        *("gemma2", "gemma3_text", "gemma4_text", "gpt_oss"),
        *("glm4_moe", "glm4_moe_lite", "deepseek_v3", "youtu", "solar_open"),
    ],
)
def test_what_a_configuration_leaves_out_is_transformers_default(name):
    sizes = {"vocab_size": 48, "hidden_size": 256, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 8, "num_attention_heads": 32}
    sizes |= {"num_local_experts": 6} if name == "gpt_oss" else {}
    if name in ("glm4_moe_lite", "deepseek_v3", "youtu"):
        del sizes["num_attention_heads"]  # where `num_key_value_heads` has a default of its own
    written = {"model_type": name, **({} if name.startswith("gemma") else sizes)}
    full = transformers.AutoConfig.for_model(**written).to_dict()
    assert parse_config(written) == parse_config(full)


@pytest.mark.parametrize(
    "real",
    [
        *(*REAL_GEMMA4.values(), *REAL_GPT_OSS.values()),
        *(*REAL_GLM4_MOE.values(), *REAL_LATENT.values()),
    ],
)
def test_real_models_have_the_tensors_of_transformers(real):
    """By name and shape; nothing is allocated. The output matrix of Gemma is the embedding."""
    with torch.device("meta"):
        unpacked = {key: x for key, x in real.items() if key != "quantization_config"}
        written = transformers.AutoConfig.for_model(**copy.deepcopy(unpacked))
        theirs = transformers.AutoModelForCausalLM.from_config(written).state_dict()
    config, ours = parse_config(real), {}
    table = parameter_table(config)
    for path, p in table.items():
        for stored in stored_names(config, path, p, "model."):
            ours[stored] = stored_shape(p)
    ours.setdefault("lm_head.weight", (config.vocab_size, config.hidden_size))
    assert ours == {n: tuple(x.shape) for n, x in theirs.items()}


_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 16,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
}
VISION = {
    "mistral3": _PIXTRAL,
    "mistral3 of ministral3": _PIXTRAL,
    "mistral3 of ministral3, tied": _PIXTRAL,
    "qwen3_5": _QWEN_VISION,
    "qwen3_5_moe": _QWEN_VISION,
    "gemma3": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    "gemma4": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
def test_vision_language_checkpoints(name, tmp_path):
    """Nested names and configuration, with the vision tensors kept for transformers."""
    torch.manual_seed(0)
    enclosing, _, variant = name.partition(" of ")
    text = variant.split(",")[0] or {"mistral3": "mistral"}.get(name, f"{name}_text")
    tied = name.startswith("gemma") or "tied" in name
    config = transformers.AutoConfig.for_model(
        enclosing,
        text_config=family(text, tie_word_embeddings=tied),
        vision_config=VISION[name],
        **({"tie_word_embeddings": tied} if enclosing == "mistral3" else {}),
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    model.save_pretrained(tmp_path / "in")
    tokens, mask = batch(ROWS, 8, "left")
    decoder = load_pretrained(tmp_path / "in")
    expected = logits_of(model, tokens, mask)
    actual = _logits(decoder, tokens, mask)
    np.testing.assert_allclose(actual[mask], expected[mask], atol=1e-4, rtol=1e-4)
    save_pretrained(decoder, tmp_path / "out")
    again, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    for name, x in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name


@pytest.mark.parametrize("name", each(NAMES))
def test_greedy_decoding_of_a_mixed_batch(name, saved):
    """transformers generates each row alone; here they share a batch, padded on the right."""
    model, directory = saved(name)
    decoder = load_pretrained(directory)
    params, config = decoder.params, decoder.config
    tokens, mask = batch(ROWS[:2], 8, "right")
    last, cache = fill(params, config, tokens, mask, max_length=16)
    chosen = []
    for _ in range(5):
        chosen.append(jnp.argmax(output_logits(params, config, last), axis=-1))
        last, cache = step(params, config, chosen[-1], cache)
    for i, row in enumerate(ROWS[:2]):
        out = model.generate(
            torch.tensor([row]),
            attention_mask=torch.ones(1, len(row), dtype=torch.long),
            max_new_tokens=5,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out[0, len(row) :].tolist() == [int(token[i]) for token in chosen]
