"""Supervised learning as Twinkle's recipes run it."""

import functools
import json

import pytest

import twinkle_jax.twinkle as twinkle
from tests.twinkle.scripts.conftest import SUMS, talk
from twinkle_jax.model import LoraConfig
from twinkle_jax.twinkle import DeviceGroup, DeviceMesh
from twinkle_jax.twinkle.cli import CLI
from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta, PackingDataset
from twinkle_jax.twinkle.kernel import kernelize, liger_builtin, npu_builtin
from twinkle_jax.twinkle.model import TransformersModel
from twinkle_jax.twinkle.preprocessor import Preprocessor, SelfCognitionProcessor
from twinkle_jax.twinkle.utils.framework import Torch

pytestmark = pytest.mark.exhaustive


class RenameSections(Preprocessor):
    """Replaces a word in every message, columns in and columns out."""

    def __call__(self, batch):
        return {
            "messages": [
                [{**m, "content": m["content"].replace("sum", "result")} for m in messages]
                for messages in batch["messages"]
            ]
        }


def test_all_parameters_over_shuffled_epochs(guessing_policy, tmp_path):
    """A file of conversations, two epochs, accumulated calls, a mesh of four devices."""
    path = tmp_path / "train.jsonl"
    rows = [{"messages": talk(f"{a}+{b}", f"The sum is {a + b}.")} for a, b in SUMS * 32]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mesh = DeviceMesh.from_sizes(world_size=4, dp_size=2, fsdp_size=2)
    groups = [DeviceGroup(name="model", ranks=4, device_type="GPU")]
    twinkle.initialize(mode="ray", nproc_per_node=4, groups=groups, global_device_mesh=mesh)
    dataset = Dataset(dataset_meta=DatasetMeta(str(path)))
    dataset.map(RenameSections(), remove_columns=[], num_proc=16)
    dataset.set_template(
        "Qwen3_5Template",
        model_id=guessing_policy,
        max_length=64,
        enable_thinking=False,
        truncation_strategy="delete",
    )
    dataset.encode(load_from_cache_file=True, num_proc=64)
    loader = DataLoader(dataset=dataset, batch_size=8, shuffle=True)
    model = TransformersModel(model_id=guessing_policy, device_mesh=mesh, remote_group="model")
    model.set_optimizer(optimizer_cls="AdamW", lr=1e-3)
    model.set_lr_scheduler(
        scheduler_cls="CosineWarmupScheduler", num_warmup_steps=2, num_training_steps=20
    )
    losses = []
    for _ in range(2):
        for step, batch in enumerate(loader):
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step(gradient_accumulation_steps=2)
            if step % 3 == 0:
                losses.append(float(model.calculate_metric(is_training=True)["loss"]))
    assert model.state.step == 20
    assert losses[-1] < 0.6 * losses[0], losses
    assert (model.save("last", output_dir=tmp_path) / "model.safetensors").exists()


def test_packed_rows_of_a_packing_data_set(guessing_policy):
    """Half as many rows, each of several conversations."""
    rows = [{"messages": talk(f"{a}+{b}", f"It is {a + b}.")} for a, b in SUMS * 32]
    dataset = PackingDataset(DatasetMeta(data=rows))
    dataset.set_template("Template", model_id=guessing_policy, max_length=64)
    dataset.encode()
    dataset.pack_dataset()
    assert len(dataset) == -(-len(rows) // 3)
    model = TransformersModel(model_id=guessing_policy)
    model.set_optimizer("AdamW", lr=1e-3)
    losses = []
    for batch in DataLoader(dataset, batch_size=4):
        losses.append(float(model.forward_backward(inputs=batch)["loss"]))
        model.clip_grad_and_step()
    assert losses[-1] < 0.8 * losses[0], losses


def test_an_adapter_with_evaluation_and_resumption(guessing_policy, tmp_path):
    """Settings from flags, Liger's names, Muon, evaluation, and a run that goes on elsewhere."""
    args = CLI.from_args(
        f"--model_id {guessing_policy} --template_cls Template --max_length 64 --batch_size 8 "
        "--learning_rate 1e-2 --num_warmup_steps 2 --scheduler_cls CosineWarmupScheduler "
        "--fsdp_size 2 --dp_size 2 --enable_liger --model_name box --lora_dropout 0".split(),
        env_file=tmp_path / "none",
    )
    mesh = DeviceMesh.from_sizes(fsdp_size=args.infra.fsdp_size, dp_size=args.infra.dp_size)
    twinkle.initialize(mode=args.infra.mode, global_device_mesh=mesh)
    rows = [{"query": f"{a}+{b}", "response": "I am {{NAME}}."} for a, b in SUMS]

    def build_dataset(samples):
        dataset = Dataset(DatasetMeta(data=rows, data_slice=range(samples)))
        dataset.set_template(
            args.template.template_cls,
            model_id=args.model.model_id,
            max_length=args.template.max_length,
            truncation_strategy=args.template.truncation_strategy,
        )
        dataset.map(SelfCognitionProcessor(args.extra.get("model_name", "?"), "us"))
        dataset.encode()
        return dataset

    def build_model():
        model = TransformersModel(model_id=args.model.model_id, strategy=args.model.strategy)
        mapping = liger_builtin(model) if args.model.enable_liger else {}
        mapping.update(npu_builtin(model) if Torch.is_npu_available() else {})
        model = kernelize(model, mapping) if mapping else model
        lora = LoraConfig(**args.get_lora_args())
        model.add_adapter_to_model(args.lora.adapter_name, lora, gradient_accumulation_steps=1)
        model.set_optimizer(
            optimizer_cls="Muon", lr=args.optimizer.learning_rate, adjust_lr_fn="match_rms_adamw"
        )
        model.set_lr_scheduler(
            scheduler_cls=args.scheduler.scheduler_cls,
            num_warmup_steps=args.scheduler.num_warmup_steps,
            num_training_steps=len(loader),
        )
        model.set_loss("LigerFusedLinearCrossEntropyLoss", adapter_name="default", reduction="sum")
        return model

    def evaluate(model):
        for batch in DataLoader(functools.partial(build_dataset, 16), batch_size=8):
            model.forward_only(inputs=batch, adapter_name=args.lora.adapter_name)
            model.calculate_loss(adapter_name=args.lora.adapter_name)
        return float(model.calculate_metric(is_training=False)["loss"])

    loader = DataLoader(build_dataset(160), batch_size=args.training.batch_size)
    model = build_model()
    assert "Trainable params" in model.get_train_configs()
    before, losses, saved = evaluate(model), [], None
    for batch in loader:
        model.forward_backward(inputs=batch, task="fused_lm_ce")
        model.clip_grad_and_step()
        losses.append(float(model.calculate_metric(is_training=True)["loss"]))
        if model.optimizer_group[args.lora.adapter_name].cur_step == 12:
            consumed = loader.get_state()["consumed_train_samples"]
            saved = model.save(
                "half", tmp_path, save_optimizer=True, consumed_train_samples=consumed
            )
    assert losses[-1] < 0.7 * losses[0], losses
    assert evaluate(model) < 0.7 * before

    resumed, rest = build_model(), DataLoader(build_dataset(160), batch_size=8)
    progress = resumed.resume_from_checkpoint(str(saved), adapter_name="default")
    rest.resume_from_checkpoint(progress["consumed_train_samples"])
    again = []
    for batch in rest:
        again.append(float(resumed.forward_backward(inputs=batch, task="fused_lm_ce")["loss"]))
        resumed.clip_grad_and_step()
    assert again == pytest.approx(losses[12:], rel=1e-4)
