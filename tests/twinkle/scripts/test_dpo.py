"""DPO with an adapter, as Twinkle's recipe does it: the margin rises."""

import numpy as np
import pytest

import twinkle_jax.twinkle as twinkle
from tests.twinkle.scripts.conftest import SUMS, SYSTEM
from twinkle_jax.model import LoraConfig
from twinkle_jax.twinkle import DeviceMesh
from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta
from twinkle_jax.twinkle.loss import DPOLoss
from twinkle_jax.twinkle.metric import DPOMetric
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.preprocessor import EmojiDPOProcessor
from twinkle_jax.twinkle.processor import InputProcessor

pytestmark = pytest.mark.exhaustive


def test_dpo_with_an_adapter(guessing_policy):
    def make_dataset():
        rows = [
            {
                "prompt": f"{a}+{b}",
                "answer_zh": rf"\boxed{{{a + b}}}",
                "answer_en": rf"\boxed{{{1 + a % 3}}}",
            }
            for a, b in SUMS * 36
        ]
        dataset = Dataset(DatasetMeta(data=rows, data_slice=range(180)))
        dataset.set_template("Template", model_id=guessing_policy, max_length=64)
        dataset.map(EmojiDPOProcessor, init_args={"system": SYSTEM})
        dataset.encode(load_from_cache_file=True)
        return dataset

    mesh = DeviceMesh.from_sizes(world_size=2, dp_size=2)
    twinkle.initialize(mode="ray", nproc_per_node=2, groups=[])
    loader = DataLoader(make_dataset, batch_size=8, min_batch_size=8, device_mesh=mesh)
    policy = TransformersModel(
        model_id=guessing_policy, device_mesh=mesh, attn_implementation="flash_attention_2"
    )
    lora = LoraConfig(target_modules="all-linear", r=8, lora_alpha=32, lora_dropout=0.05)
    policy.add_adapter_to_model("default", lora, gradient_accumulation_steps=2)
    policy.set_optimizer("AdamW", lr=3e-3, weight_decay=0.01)
    policy.set_lr_scheduler("CosineAnnealingLR", T_max=len(loader), eta_min=1e-4)
    policy.set_loss(DPOLoss(beta=0.1, loss_type="sigmoid", reference_free=False, sft_weight=1.0))
    policy.add_metric(DPOMetric, beta=0.1)
    policy.set_processor(InputProcessor, padding_free=True)
    margins, losses = [], []
    for step, batch in enumerate(loader, 1):
        pairs = [{**row[side]} for row in batch for side in ("positive", "negative")]
        reference = policy.forward_only(inputs=pairs, disable_lora=True)
        policy.forward_backward(inputs=pairs, ref_outputs=reference)
        policy.clip_grad_and_step()
        if step % 2 == 0:
            numbers = policy.calculate_metric(is_training=True)
            margins.append(float(numbers["rewards/margins"]))
            losses.append(float(numbers["loss"]))
    assert margins[0] == pytest.approx(0, abs=1e-3)  # before the first update
    assert np.mean(margins[-3:]) > 0.05, margins
    assert np.mean(losses[-3:]) < np.mean(losses[:3]), losses
