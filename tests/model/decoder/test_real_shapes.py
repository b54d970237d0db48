"""The oracle at the shapes that people train: random weights, transformers' logits, float32."""

import gc
import shutil

import jax
import numpy as np
import pytest

from tests.model.families import REAL_GEMMA4, REAL_GLM4_MOE, REAL_GPT_OSS, REAL_LATENT, batch
from twinkle_jax.model import hidden_states, load_pretrained, output_logits

_GET = "pip install 'twinkle-jax[test,oracle]'"
torch = pytest.importorskip("torch", reason=_GET)
transformers = pytest.importorskip("transformers", reason=_GET)
pytest.importorskip("safetensors", reason="pip install 'twinkle-jax[checkpoints]'")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
TIED = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}
SHAPES = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    },
    "Mistral-7B, 1 layer of 32": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "OLMo-2-1B, 4 layers of 16": {
        "model_type": "olmo2",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "Olmo-3-7B, 4 layers of 32": {
        "model_type": "olmo3",
        "vocab_size": 100278,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "sliding_window": 16,  # 4,096 there
        "max_position_embeddings": 65536,
        "rope_parameters": None,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 8192,
        },
    },
    "SmolLM3-3B, 4 layers of 36": {
        "model_type": "smollm3",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
    },
    "EXAONE-4.0-1.2B, 4 layers of 30": {
        "model_type": "exaone4",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "ERNIE-4.5-0.3B": {
        "model_type": "ernie4_5",
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "granite-3.3-2b, 4 layers of 40": {
        "model_type": "granite",
        "vocab_size": 49159,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    },
    "Phi-4-mini, 2 layers of 32": {
        "model_type": "phi3",
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_parameters": None,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [32 ** (i / 47) for i in range(48)],  # not used, for short rows
        },
        "sliding_window": 262144,
    },
    "Phi-4, 1 layer of 40": {
        "model_type": "phi3",
        "vocab_size": 100352,
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 1,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2.5e5},
    },
    "Phi-3-mini-4k, 2 layers of 32": {
        "model_type": "phi3",
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 16,  # 2,047 there
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "Gemma-3-270M": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 16,  # 512 there: shorter than the rows here, so that it does something
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
# Layers are left out of these: with all of them they have billions of parameters.
SHAPES["Gemma-2-2B, two layers"] = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 16,
}
SHAPES["Gemma-4-E2B, four layers"] = REAL_GEMMA4["E2B"] | {
    "vocab_size": 262144,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 16,
}
SHAPES["gpt-oss-20b, two layers, 8 experts of 32"] = REAL_GPT_OSS["20b"] | {
    "vocab_size": 20_000,
    "pad_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 8,
    "sliding_window": 16,
}
del SHAPES["gpt-oss-20b, two layers, 8 experts of 32"]["quantization_config"]
SHAPES["GLM-4.5-Air, two layers, 8 experts of 128"] = REAL_GLM4_MOE["4.5-Air"] | {
    "vocab_size": 20_000,
    "pad_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
SHAPES["GLM-4.7-Flash, two layers, 8 experts of 64"] = REAL_LATENT["GLM-4.7-Flash"] | {
    "vocab_size": 20_000,
    "pad_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
SHAPES["DeepSeek-V3, two layers, 8 experts of 256"] = REAL_LATENT["DeepSeek-V3"] | {
    "vocab_size": 20_000,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
}
SHAPES["Youtu-LLM-2B, four layers of 32"] = {
    "model_type": "youtu",
    "vocab_size": 20_000,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.6e6},
    **TIED,
}
# Errors of float32 against the largest logit; 5.5e-6 was measured for Qwen3.5, and between 1.7e-6
# and 2.5e-6 for most others. Gemma 4 does not scale attention logits, which amplifies rounding:
# from logits in float64 these are off by 8.5e-6, and those of transformers by 4.8e-6.
TOLERANCE = {"Qwen3.5-0.8B": 4e-5, "Gemma-4-E2B, four layers": 2e-5}


def write_oracle(name, directory, tokens, mask):
    """Save a random model of transformers', and give its logits."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**(SHAPES[name] | TIED))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # norms, biases, decay rates: as drawn, but none is special
                p.add_(0.1 * torch.randn_like(p))
        logits = model(
            input_ids=torch.tensor(np.array(tokens)),
            attention_mask=torch.tensor(np.array(mask), dtype=torch.long),
        ).logits.numpy()
    model.save_pretrained(directory)
    return logits


@pytest.mark.parametrize("name", SHAPES)
def test_logits_at_real_shapes(name, tmp_path):
    rng = np.random.default_rng(0)
    rows = [list(rng.integers(0, SHAPES[name]["vocab_size"], size)) for size in (20, 13)]
    tokens, mask = batch(rows, 20, "left")
    try:
        expected = write_oracle(name, tmp_path / "model", tokens, mask)
        gc.collect()
        decoder = load_pretrained(tmp_path / "model")
    finally:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)  # gigabytes

    @jax.jit
    def logits(params):
        return output_logits(
            params, decoder.config, hidden_states(params, decoder.config, tokens, mask)
        )

    actual = np.asarray(logits(decoder.params))
    kept = np.asarray(mask)
    error = np.abs(actual - expected)[kept].max() / np.abs(expected[kept]).max()
    assert np.std(expected[kept]) > 0.1
    assert error < TOLERANCE.get(name, 1e-5), f"{error:.2g}"
