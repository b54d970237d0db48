"""One contestant: `python -m tests.benchmarks.peers.trl_grpo CHECKPOINT`, by TRL's GRPOTrainer."""

import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.peers.task import (
    COMPLETION,
    LEARNING_RATE,
    PROMPTS,
    SAMPLES,
    STEPS,
    prompts,
)
from tests.benchmarks.peers.turns import Turns


def main(checkpoint):
    """Train until nobody gives the go-ahead any more."""
    turns = Turns()

    def reward(completions, **_):
        return turns(completions)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # 2 MB of activations: it would only cost time
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=COMPLETION,
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        loss_type="grpo",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = Dataset.from_dict({"prompt": prompts(len(tokenizer))})
    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
