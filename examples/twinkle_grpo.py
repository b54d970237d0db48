r"""Twinkle's GRPO recipe, with the imports renamed, on a policy that it makes itself.

    python examples/twinkle_grpo.py --max_steps 12

It has the parts of a script for Twinkle in their usual order: settings from the command line, a
mesh, a data set with a preprocessor and a template by name, a loader, a model with an adapter, a
sampler that copies its weights, an advantage, metrics. `--model_id` trains a checkpoint of
yours. The reward is brevity, which random weights learn in a few steps.

Left out: evaluation, intermediate checkpoints, a server (`vLLMSampler(base_url=…, shared_dir=…)`).
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import twinkle_jax.twinkle as twinkle
from twinkle_jax.data import small_tokenizer
from twinkle_jax.model import Decoder, LoraConfig, init_params, parse_config, save_pretrained
from twinkle_jax.twinkle import DeviceMesh, get_device_placement, get_logger
from twinkle_jax.twinkle.advantage import GRPOAdvantage
from twinkle_jax.twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle_jax.twinkle.cli import CLI
from twinkle_jax.twinkle.data_format import SamplingParams
from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta
from twinkle_jax.twinkle.metric import CompletionRewardMetric
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.preprocessor import Preprocessor
from twinkle_jax.twinkle.processor import InputProcessor
from twinkle_jax.twinkle.reward.base import Reward
from twinkle_jax.twinkle.sampler import vLLMSampler

ROOM = 8  # tokens of a completion
GENERATIONS = 4  # completions of a prompt
POLICY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


class SumProcessor(Preprocessor):
    """Makes a prompt of two numbers."""

    def preprocess(self, row: Any) -> dict[str, Any]:
        """Return the conversation."""
        return {"messages": [{"role": "user", "content": f"{row['a']}+{row['b']}="}]}


class Brevity(Reward):
    """Gives shorter answers a higher reward."""

    def __call__(self, trajectories: Sequence[Any], **facts: Any) -> list[float]:
        """Score the last message of each conversation."""
        return [1 - len(x["messages"][-1]["content"]) / ROOM for x in trajectories]


def write_policy(place: str) -> None:
    """Write a checkpoint of random weights, with a tokenizer of one token a character."""
    tokenizer = small_tokenizer("0123456789+-*()=")
    config = parse_config({**POLICY, "vocab_size": len(tokenizer)})
    save_pretrained(Decoder(config, init_params(jax.random.key(0), config)), place)
    tokenizer.save_pretrained(place)


def make_dataset(model_id: str) -> Dataset:
    """Encode sums as prompts."""
    rows = [{"a": i % 10, "b": i // 10} for i in range(1000)]
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template("Template", model_id=model_id, max_length=32)
    dataset.map(SumProcessor())
    dataset.encode(add_generation_prompt=True)
    return dataset


def train(args: Any, model_id: str) -> list[float]:
    """Train; return the mean reward of every step."""
    mesh = DeviceMesh.from_sizes(fsdp_size=args.infra.fsdp_size or 1)
    twinkle.initialize(mode=args.infra.mode, seed=args.training.seed, global_device_mesh=mesh)
    logger = get_logger()

    model = TransformersModel(model_id=model_id, device_mesh=mesh)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16))
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("CosineAnnealingLR", T_max=args.training.max_steps)
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_processor(InputProcessor)
    sampler = vLLMSampler(model_id=model_id, engine_args={"max_model_len": 32}, device_mesh=mesh)
    sampler.set_template("Template", model_id=model_id)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    loader = DataLoader(lambda: make_dataset(model_id), batch_size=8, shuffle=True)

    params = SamplingParams(max_tokens=ROOM, logprobs=1)
    reward_fn, advantage_fn, metrics = Brevity(), GRPOAdvantage(), CompletionRewardMetric()
    logger.info(get_device_placement())
    history = []
    for step, batch in enumerate(loader):
        if step == args.training.max_steps:
            break
        metrics.reset()
        manager.sync_weights(merge_and_sync=False)
        prompts = [prompt for prompt in batch for _ in range(GENERATIONS)]
        sequences = [s for response in sampler.sample(prompts, params) for s in response.sequences]
        inputs = [sequence.new_input_feature for sequence in sequences]
        old_logps = [[pair[0][1] for pair in s.logprobs or ()] for s in sequences]

        rewards = reward_fn(inputs)
        lengths = [len(s.tokens) for s in sequences]
        metrics.accumulate(rewards={"brevity": rewards}, completion_lengths=lengths)
        advantages = advantage_fn(rewards, num_generations=GENERATIONS, scale="group").tolist()

        model.forward_backward(inputs=inputs, advantages=advantages, old_logps=old_logps)
        model.clip_grad_and_step()
        numbers = {**metrics.calculate(), **model.calculate_metric(is_training=True)}
        logger.info(f"step {step}: reward {numbers['train/brevity_reward']:.2f}")
        history.append(float(numbers["train/brevity_reward"]))
    return history


def run(argv: Sequence[str] | None = None) -> list[float]:
    """Read the settings, make a policy unless there is one, and train it."""
    args = CLI.from_args(argv)
    with tempfile.TemporaryDirectory() as made:
        model_id = args.model.model_id or str(Path(made) / "policy")
        if args.model.model_id is None:
            write_policy(model_id)
        return train(args, model_id)


if __name__ == "__main__":
    run()
