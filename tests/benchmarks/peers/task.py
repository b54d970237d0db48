"""What every contestant trains: a random Qwen3, a tokenizer of words, prompts of 16 of them.

The policy itself ends its completions: after any token, the one end-of-sequence token has the
probability `1 / mean`, so that lengths are geometric in every library, whatever its options.
"""

import json
import math
from pathlib import Path

import numpy as np

PROMPTS, SAMPLES, PROMPT, COMPLETION = 8, 8, 16, 32
LEARNING_RATE = 1e-5
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
STEPS = 400  # more than anybody waits for
END = 1  # the token that ends a completion
CONSTANT = 8.0  # the first entry of all embeddings, beside which all others are small


def prompts(vocab):
    """Give as many prompts as there are steps for."""
    drawn = np.random.default_rng(0).integers(3, vocab, (PROMPTS * STEPS, PROMPT))
    return [" ".join(f"w{i}" for i in row) for row in drawn]


def make_tokenizer(vocab):
    """Make a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, vocab)}}
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    made = Tokenizer(models.WordLevel(words, unk_token=named["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **named)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def write_checkpoint(directory, vocab, mean=None):
    """Write the policy as transformers does, and the prompts as JSON lines.

    Args:
        directory: is made.
        vocab: size of the vocabulary.
        mean: mean length of completions, geometric; None: none ends before its room does.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen3", vocab_size=vocab, eos_token_id=END, bos_token_id=None, pad_token_id=0, **SHAPE
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        # The last norm makes the constant sqrt(width) in every position, so that an embedding with
        # d more of it has a logit that is d sqrt(width) above the others, which are all but equal.
        odds = math.log((vocab - 1) / (mean - 1)) if mean else -30
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = CONSTANT
        embedding[END, 0] += odds / math.sqrt(SHAPE["hidden_size"])
    model.save_pretrained(directory)
    make_tokenizer(vocab).save_pretrained(directory)
    lines = [json.dumps({"prompt": prompt, "answer": "w3"}) for prompt in prompts(vocab)]
    (Path(directory) / "prompts.jsonl").write_text("\n".join(lines) + "\n")
