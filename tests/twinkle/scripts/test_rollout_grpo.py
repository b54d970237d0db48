"""GRPO over rollouts, as Twinkle's recipe for questions with short answers runs it."""

import numpy as np
import pytest

import twinkle_jax.twinkle as twinkle
from tests.twinkle.scripts.conftest import SYSTEM
from twinkle_jax.model import LoraConfig
from twinkle_jax.twinkle.advantage import GRPOAdvantage
from twinkle_jax.twinkle.agentic.reward import CoTReward, F1Reward
from twinkle_jax.twinkle.agentic.rollout.multi_turn import MultiTurnRollout
from twinkle_jax.twinkle.agentic.tools.tool_manager import ToolManager
from twinkle_jax.twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle_jax.twinkle.data_format import Message, SamplingParams, Trajectory
from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.preprocessor.base import Preprocessor
from twinkle_jax.twinkle.sampler import vLLMSampler
from twinkle_jax.twinkle.template import Qwen3_5Template

pytestmark = pytest.mark.exhaustive
GENERATIONS, PROMPTS, MINI_BATCH, STEPS = 8, 8, 32, 24


class Questions(Preprocessor):
    """Questions with their answers in `user_data`."""

    def __call__(self, rows):
        rows = self.map_col_to_row(rows)
        return self.map_row_to_col([self.preprocess(row) for row in rows])

    def preprocess(self, row):
        turns = {"system": SYSTEM, "user": row["question"]}
        return Trajectory(
            messages=[Message(role=role, content=text) for role, text in turns.items()],
            user_data=[("ground_truth", row["answer"].removeprefix("#### "))],
        )


def test_grpo_over_rollouts(guessing_policy, gsm8k):
    pytest.importorskip("nltk", reason="pip install 'twinkle-jax[nltk]'")
    twinkle.initialize(mode="ray", nproc_per_node=2, lazy_collect=False)
    dataset = Dataset()
    dataset.add_dataset(DatasetMeta(gsm8k))
    dataset.set_template("Qwen3_5Template", model_id=guessing_policy, max_length=64)
    dataset.map(Questions(), remove_columns=["question", "answer"])
    model = TransformersModel(model_id=guessing_policy, remote_group="model")
    lora = LoraConfig(target_modules="all-linear", r=16, lora_alpha=32, lora_dropout=0.05)
    model.add_adapter_to_model("default", lora, gradient_accumulation_steps=1)
    model.set_optimizer("AdamW", lr=1e-3)
    model.set_loss("GRPOLoss", epsilon=0.2, epsilon_high=0.2, beta=0.02, entropy_coef=0.0)
    model.set_template("Qwen3_5Template", model_id=guessing_policy, enable_thinking=False)
    model.add_metric("GRPOMetric", is_training=True, epsilon=0.2, top_k_kl=2)
    sampler = vLLMSampler(model_id=guessing_policy, engine_args={"max_model_len": 64})
    sampler.set_template("Qwen3_5Template", model_id=guessing_policy, enable_thinking=False)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    rollout = MultiTurnRollout(
        sampler=sampler,
        template=Qwen3_5Template(guessing_policy, max_length=64, enable_thinking=False),
        tool_manager=ToolManager(),
        sampling_params=SamplingParams(max_tokens=12, num_samples=1, logprobs=1),
        max_turns=1,
    )
    history = []
    loader = DataLoader(dataset=lambda: dataset, batch_size=PROMPTS, min_batch_size=PROMPTS)
    for _, prompts in zip(range(STEPS), loader, strict=False):
        manager.sync_weights(merge_and_sync=False)
        trajectories = rollout([p for p in prompts for _ in range(GENERATIONS)])
        scores, steps = F1Reward()(trajectories), CoTReward()(trajectories)
        assert set(scores) <= {0.0, 1.0} and set(steps) == {0.0}
        advantages = GRPOAdvantage()(scores, num_generations=GENERATIONS).tolist()
        old_logps = [[pairs[0][1] for pairs in t["logprobs"]] for t in trajectories]
        for start in range(0, len(trajectories), MINI_BATCH):
            part = slice(start, start + MINI_BATCH)
            reference = model.forward_only(inputs=trajectories[part], disable_lora=True)
            model.forward_backward(
                inputs=trajectories[part],
                old_logps=old_logps[part],
                advantages=advantages[part],
                ref_logps=reference["logps"],
                positive_mask=[score > 0 for score in scores[part]],
                micro_batch_size=16,
            )
            model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        records = numbers.pop("_high_kl_records")
        assert len(records) == 2 * len(trajectories) // MINI_BATCH
        for record in records:
            labels = trajectories[record["gsi"]]["labels"]
            assert labels[record["pos"]] == record["token_id"] != -100
            assert record["kl"] <= numbers["train/token_kl_max"] * (1 + 1e-6)
        history.append(np.mean(scores))
    assert np.mean(history[:3]) < 0.4
    assert np.mean(history[-4:]) > np.mean(history[:3]) + 0.08, history
