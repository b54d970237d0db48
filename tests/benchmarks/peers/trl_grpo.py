"""TRL's GRPOTrainer: `python -m tests.benchmarks.peers.trl_grpo CHECKPOINT ROOM ROWS`.

Gradients are computed for ROWS of the rows at a time, all drawn together.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.peers.task import (
    LEARNING_RATE,
    PROMPTS,
    SAMPLES,
    STEPS,
    prompts,
)
from tests.benchmarks.peers.turns import Turns


def main(checkpoint, room, rows):
    """Train until nobody gives the go-ahead any more."""
    turns = Turns(int(room))

    def reward(completions, **_):
        return turns(completions)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # it would only cost time
        per_device_train_batch_size=int(rows),
        gradient_accumulation_steps=PROMPTS * SAMPLES // int(rows),
        num_generations=SAMPLES,
        max_completion_length=int(room),
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
