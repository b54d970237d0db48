"""A policy that guesses what sums are: what the recipes of these tests start from."""

import itertools
import json
import random
import warnings

import jax
import pytest

from twinkle_jax.data import small_tokenizer
from twinkle_jax.model import Decoder, init_params, parse_config, save_pretrained
from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta
from twinkle_jax.twinkle.model import TransformersModel

SYSTEM = "Add."
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
SUMS = [(n, 4 - n) for n in range(5)]  # always 4, which is learnt before sums are


def talk(question, answer):
    roles = ("system", SYSTEM), ("user", question), ("assistant", answer)
    return [{"role": role, "content": content} for role, content in roles]


def fine_tune(place, target, rows, steps, rate=3e-3):
    """Train all parameters on conversations; write the checkpoint and its tokenizer."""
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template("Template", model_id=place)
    dataset.encode()
    model = TransformersModel(model_id=place)
    model.set_optimizer("AdamW", lr=rate)
    batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(dataset, batch_size=32)))
    for batch in itertools.islice(batches, steps):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
    model.save(target)
    small_tokenizer().save_pretrained(target)
    return str(target)


@pytest.fixture(autouse=True)
def ignore_warnings():
    """Leave warnings about workers out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*docs/from_twinkle.md")
        yield


@pytest.fixture(scope="session")
def guessing_policy(tmp_path_factory):
    """A checkpoint whose answers have the form, and are right in one case of five."""
    folder = tmp_path_factory.mktemp("scripts")
    tokenizer = small_tokenizer()
    config = parse_config(CONFIG | {"vocab_size": len(tokenizer)})
    save_pretrained(Decoder(config, init_params(jax.random.key(0), config)), folder / "random")
    tokenizer.save_pretrained(folder / "random")
    draw = random.Random(0)
    rows = [
        {"messages": talk(f"{a}+{b}", rf"\boxed{{{draw.randrange(1, 6)}}}")}
        for a, b in draw.choices(SUMS, k=960)
    ]
    return fine_tune(folder / "random", folder / "guessing", rows, steps=80)


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory):
    """Sums as GSM8K's files have their problems."""
    path = tmp_path_factory.mktemp("scripts") / "gsm8k.jsonl"
    rows = [{"question": f"{a}+{b}", "answer": f"#### {a + b}"} for a, b in SUMS * 100]
    random.Random(1).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
