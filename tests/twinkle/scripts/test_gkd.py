"""Distillation as Twinkle's recipe runs it: a student samples, a teacher scores."""

import numpy as np
import pytest

import twinkle_jax.twinkle as twinkle
from tests.twinkle.rows import teacher_of
from tests.twinkle.scripts.conftest import SUMS, SYSTEM, fine_tune, talk
from twinkle_jax.twinkle import DeviceGroup
from twinkle_jax.twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle_jax.twinkle.data_format import SamplingParams
from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta
from twinkle_jax.twinkle.loss import GKDLoss
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.preprocessor import GSM8KProcessor
from twinkle_jax.twinkle.sampler import vLLMSampler

pytestmark = pytest.mark.exhaustive
LIKELY, STEPS, PROMPTS = 8, 24, 32


@pytest.fixture(scope="module")
def knowing_policy(guessing_policy, tmp_path_factory):
    """A checkpoint that knows the answers."""
    rows = [{"messages": talk(f"{a}+{b}", rf"\boxed{{{a + b}}}")} for a, b in SUMS * 128]
    target = tmp_path_factory.mktemp("teacher") / "knowing"
    return fine_tune(guessing_policy, target, rows, steps=60)


def make_sampler(policy, group):
    sampler = vLLMSampler(
        model_id=policy,
        engine_args={"max_model_len": 64, "logprobs_mode": "raw_logprobs"},
        remote_group=group,
    )
    sampler.set_template("Qwen3_5Template", model_id=policy)
    return sampler


def make_dataset(policy, data):
    dataset = Dataset(DatasetMeta(data, subset_name="main", split="train"))
    dataset.set_template("Qwen3_5Template", model_id=policy, max_length=64)
    dataset.map(GSM8KProcessor(system=SYSTEM))
    dataset.encode(add_generation_prompt=True)
    return dataset


def teacher_scores(sampler, features):
    params = SamplingParams(max_tokens=0, temperature=1.0, prompt_logprobs=LIKELY)
    return teacher_of(sampler.sample(features, params))


def test_a_student_comes_to_its_teacher(guessing_policy, knowing_policy, gsm8k):
    names = ("student_model", "student_sampler", "teacher_sampler")
    groups = [DeviceGroup(name=name, ranks=1, device_type="cuda") for name in names]
    twinkle.initialize(mode="ray", nproc_per_node=3, groups=groups)
    student = TransformersModel(model_id=guessing_policy, remote_group="student_model")
    student.set_optimizer("AdamW", lr=1e-3)
    student.set_lr_scheduler("CosineAnnealingLR", T_max=STEPS, eta_min=0)
    student.set_loss(GKDLoss(beta=0.5, temperature=1.0))
    sampler = make_sampler(guessing_policy, "student_sampler")
    teacher = make_sampler(knowing_policy, "teacher_sampler")
    manager = CheckpointEngineManager(model=student, sampler=sampler)
    loader = DataLoader(dataset=make_dataset(guessing_policy, gsm8k), batch_size=PROMPTS)
    losses = []
    for _, prompts in zip(range(STEPS), loader, strict=False):
        manager.sync_weights(merge_and_sync=True)
        responses = sampler.sample(prompts, SamplingParams(max_tokens=12, num_samples=1))
        inputs = [s.new_input_feature for r in responses for s in r.sequences]
        losses.append(
            float(
                student.forward_backward(inputs=inputs, **teacher_scores(teacher, inputs))["loss"]
            )
        )
        student.clip_grad_and_step()
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3]), losses


def test_sampling(knowing_policy, gsm8k):
    prompts = make_dataset(knowing_policy, gsm8k)[:20]
    sampler = make_sampler(knowing_policy, "sampler")
    responses = sampler.sample(prompts, SamplingParams(max_tokens=12, temperature=0))
    texts = [sequence.decoded for response in responses for sequence in response.sequences]
    assert sum(r"\boxed{4}" in text for text in texts) >= 18, texts
