"""GRPO as Twinkle's recipes run it: the reward of a policy that guesses rises."""

import re

import numpy as np
import pytest

import twinkle_jax.twinkle as twinkle
from tests.twinkle.scripts.conftest import SYSTEM
from twinkle_jax.model import LoraConfig
from twinkle_jax.twinkle import DeviceGroup, DeviceMesh
from twinkle_jax.twinkle.advantage import GRPOAdvantage
from twinkle_jax.twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle_jax.twinkle.data_format import SamplingParams
from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta
from twinkle_jax.twinkle.metric import CompletionRewardMetric
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.preprocessor import GSM8KProcessor
from twinkle_jax.twinkle.processor import InputProcessor
from twinkle_jax.twinkle.reward import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle_jax.twinkle.reward.base import Reward
from twinkle_jax.twinkle.sampler import vLLMSampler

pytestmark = pytest.mark.exhaustive
GENERATIONS, PROMPTS, MINI_BATCH, STEPS = 8, 8, 32, 24


class Brevity(Reward):
    """1 for a short completion with an answer, less for a longer one."""

    def __call__(self, trajectories, **facts):
        texts = [x["messages"][-1]["content"] for x in trajectories]
        return [
            max(0.0, 1 - max(len(text) - 9, 0) / 9) if re.search(r"\\boxed\{.+\}", text) else 0.0
            for text in texts
        ]


def train(policy, data, shape_reward, *, template, sampling, processor):
    """Sample, score, take mini-batches; return the mean accuracy of every rollout."""

    def make_dataset():
        dataset = Dataset()
        dataset.add_dataset(DatasetMeta(data, subset_name="main", split="train"))
        dataset.set_template("Qwen3_5Template", model_id=policy, max_length=64, **template)
        dataset.map(GSM8KProcessor(system=SYSTEM))
        dataset.encode(add_generation_prompt=True)
        return dataset

    groups = [DeviceGroup("model", [0], "GPU"), DeviceGroup("sampler", [1], "GPU")]
    mesh = DeviceMesh.from_sizes(world_size=1, dp_size=1)
    twinkle.initialize(mode="ray", nproc_per_node=2, groups=groups, lazy_collect=False)
    model = TransformersModel(model_id=policy, device_mesh=mesh, remote_group="model")
    lora = LoraConfig(target_modules="all-linear", r=16, lora_alpha=32, lora_dropout=0.05)
    model.add_adapter_to_model("default", lora, gradient_accumulation_steps=1)
    model.set_optimizer("AdamW", lr=3e-3)
    model.set_lr_scheduler("CosineAnnealingLR", T_max=4 * STEPS, eta_min=0)
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_processor(InputProcessor, **processor)
    model.set_template("Qwen3_5Template", model_id=policy)
    sampler = vLLMSampler(
        model_id=policy,
        engine_args={"gpu_memory_utilization": 0.8, "max_model_len": 64, "enable_lora": True},
        device_mesh=mesh,
        remote_group="sampler",
    )
    sampler.set_template("Qwen3_5Template", model_id=policy)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    loader = DataLoader(
        dataset=make_dataset, batch_size=PROMPTS, min_batch_size=PROMPTS, device_mesh=mesh
    )
    params = SamplingParams(max_tokens=12, num_samples=1, logprobs=1, **sampling)
    advantage_fn, metrics, accuracy_fn = (
        GRPOAdvantage(),
        CompletionRewardMetric(),
        GSM8KAccuracyReward(),
    )
    history = []
    for _, prompts in zip(range(STEPS), loader, strict=False):
        metrics.reset()
        manager.sync_weights(merge_and_sync=False)
        sampler.reset_prefix_cache()
        responses = sampler.sample([p for p in prompts for _ in range(GENERATIONS)], params)
        sequences = [s for response in responses for s in response.sequences]
        inputs = [s.new_input_feature for s in sequences]
        old_logps = [[pair[0][1] for pair in s.logprobs] for s in sequences]
        accuracy = accuracy_fn(inputs)
        total = [a + b for a, b in zip(accuracy, shape_reward(inputs), strict=True)]
        lengths = [len(s.tokens) for s in sequences]
        metrics.accumulate(completion_lengths=lengths, rewards={"accuracy": accuracy})
        advantages = advantage_fn(total, num_generations=GENERATIONS, scale="group").tolist()
        for start in range(0, len(inputs), MINI_BATCH):
            part = slice(start, start + MINI_BATCH)
            model.forward_backward(
                inputs=inputs[part],
                old_logps=old_logps[part],
                advantages=advantages[part],
                micro_batch_size=16,
            )
            model.clip_grad_and_step()
        numbers = metrics.calculate() | model.calculate_metric(is_training=True)
        history.append(numbers["train/accuracy_reward"])
    return history


def test_grpo(guessing_policy, gsm8k):
    rewards = train(
        guessing_policy, gsm8k, GSM8KFormatReward(), template={}, sampling={}, processor={}
    )
    assert np.mean(rewards[:3]) < 0.4
    assert np.mean(rewards[-4:]) > np.mean(rewards[:3]) + 0.08, rewards


def test_short_math_grpo(guessing_policy, gsm8k):
    rewards = train(
        guessing_policy,
        gsm8k,
        Brevity(),
        template={"truncation_strategy": "delete", "enable_thinking": False},
        sampling={"temperature": 1.0, "top_p": 0.95},
        processor={"padding_free": True},
    )
    assert np.mean(rewards[-4:]) > np.mean(rewards[:3]) + 0.08, rewards
