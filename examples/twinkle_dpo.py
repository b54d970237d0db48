r"""Twinkle's DPO recipe with an adapter, with the imports renamed, on a policy made on the spot.

    python examples/twinkle_dpo.py --max_steps 12

The chosen answer of a pair is right, the rejected one is not. The reference is the policy without
its adapter, at no cost in memory. Before that, `--sft_steps` steps of supervised learning on the
right answers run through the same verbs.

Left out: evaluation, intermediate checkpoints, data sets from a hub (`DatasetMeta("hf://…")`).
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import twinkle_jax.twinkle as twinkle
from twinkle_jax.data import small_tokenizer
from twinkle_jax.model import Decoder, LoraConfig, init_params, parse_config, save_pretrained
from twinkle_jax.twinkle import get_logger
from twinkle_jax.twinkle.cli import CLI
from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta
from twinkle_jax.twinkle.loss import DPOLoss
from twinkle_jax.twinkle.metric import DPOMetric
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.preprocessor import EmojiDPOProcessor

BETA = 0.1
POLICY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def write_policy(place: str) -> None:
    """Write a checkpoint of random weights, with a tokenizer of one token a character."""
    tokenizer = small_tokenizer("0123456789+=")
    config = parse_config({**POLICY, "vocab_size": len(tokenizer)})
    save_pretrained(Decoder(config, init_params(jax.random.key(0), config)), place)
    tokenizer.save_pretrained(place)


def make_dataset(model_id: str) -> Dataset:
    """Encode pairs of answers to sums, one right and one wrong."""
    sums = [(i % 10, i // 10 % 10) for i in range(800)]
    rows = [
        {"prompt": f"{a}+{b}=", "right": str(a + b), "wrong": str((a + b + 5) % 19)}
        for a, b in sums
    ]
    dataset = Dataset(DatasetMeta(data=rows, data_slice=range(800)))
    dataset.set_template("Template", model_id=model_id, max_length=32)
    keys = {"chosen_key": "right", "rejected_key": "wrong"}
    dataset.map(EmojiDPOProcessor, init_args=keys)
    dataset.encode()
    return dataset


def interleave(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lay pairs out as the loss reads them: chosen, rejected, chosen, rejected, and so on."""
    return [row[side] for row in batch for side in ("positive", "negative")]


def train(args: Any, model_id: str) -> tuple[list[float], list[float]]:
    """Train; return the losses of the supervised steps, and the margins of DPO's."""
    twinkle.initialize(seed=args.training.seed)
    logger = get_logger()
    loader = DataLoader(lambda: make_dataset(model_id), batch_size=16, min_batch_size=16)
    model = TransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32))
    model.set_optimizer("AdamW", lr=5e-3)

    losses: list[float] = []
    for _, batch in zip(range(args.get("sft_steps", 4)), loader, strict=False):
        losses.append(
            float(model.forward_backward(inputs=[row["positive"] for row in batch])["loss"])
        )
        model.clip_grad_and_step()
        logger.info(f"supervised: {model.calculate_metric(is_training=True)['loss']:.3f}")

    model.set_loss(DPOLoss(beta=BETA))
    model.add_metric(DPOMetric, beta=BETA)
    margins: list[float] = []
    for _, batch in zip(range(args.training.max_steps), loader, strict=False):
        pairs = interleave(batch)
        reference = model.forward_only(inputs=pairs, disable_lora=True)
        model.forward_backward(inputs=pairs, ref_outputs=reference)
        model.clip_grad_and_step()
        margins.append(float(model.calculate_metric(is_training=True)["rewards/margins"]))
        logger.info(f"margin: {margins[-1]:.3f}")
    return losses, margins


def run(argv: Sequence[str] | None = None) -> tuple[list[float], list[float]]:
    """Read the settings, make a policy unless there is one, and train it."""
    args = CLI.from_args(argv)
    with tempfile.TemporaryDirectory() as made:
        model_id = args.model.model_id or str(Path(made) / "policy")
        if args.model.model_id is None:
            write_policy(model_id)
        return train(args, model_id)


if __name__ == "__main__":
    run()
