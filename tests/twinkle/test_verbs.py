"""`TransformersModel`: several adapters, references, evaluation, teachers, Megatron's names."""

import warnings

import jax
import numpy as np
import optax
import pytest

from tests.model.families import config_of, params_of
from tests.twinkle.rows import INPUTS, SIDE, assert_equal, assert_same, gradient
from twinkle_jax.data import Tokenizer, small_tokenizer
from twinkle_jax.loss import CrossEntropyLoss, DPOLoss, GRPOLoss
from twinkle_jax.model import Decoder, LoraConfig, make_mesh
from twinkle_jax.twinkle import DeviceMesh
from twinkle_jax.twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle_jax.twinkle.metric import DPOMetric, Metric
from twinkle_jax.twinkle.model import MegatronModel, TransformersModel
from twinkle_jax.twinkle.model.optimizer import choose_optimizer
from twinkle_jax.twinkle.model.transformers import read_teacher
from twinkle_jax.twinkle.model.transformers.moe.router_replay import RouterReplayAction
from twinkle_jax.twinkle.processor import InputProcessor

PAIRS = [INPUTS[0], INPUTS[1], INPUTS[2], INPUTS[1]]
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=("q_proj", "down_proj"))


@pytest.fixture
def two(checkpoint):
    model = TransformersModel(model_id=checkpoint)
    for seed, name in enumerate(("first", "second")):
        model.add_adapter_to_model(name, LORA, seed=seed, gradient_accumulation_steps=1)
        model.set_optimizer("SGD", lr=0.5, adapter_name=name)
    return model


def test_adapters_are_trained_by_themselves(two, checkpoint):
    base = TransformersModel(checkpoint).forward_only(inputs=INPUTS)["logps"]
    before = two.get_state_dict(adapter_name="second")
    two.set_loss("GRPOLoss", adapter_name="first")
    for _ in range(2):  # B starts at 0, so A moves from the second step on
        two.forward_backward(inputs=INPUTS, adapter_name="first", **SIDE)
        two.clip_grad_and_step(adapter_name="first")
    assert_equal(two.get_state_dict(adapter_name="second"), before)
    assert two.optimizer_group["first"].cur_step == 2 and two.cur_step == 0
    np.testing.assert_array_equal(two.forward_only(inputs=INPUTS)["logps"], base)
    learnt = two.forward_only(inputs=INPUTS, adapter_name="first")["logps"]
    assert np.abs(learnt - base).max() > 1e-3
    off = two.forward_only(inputs=INPUTS, adapter_name="first", disable_lora=True)["logps"]
    np.testing.assert_array_equal(off, base)
    # The frozen parameters are there once.
    kernels = [g.frozen["lm_head"]["kernel"] for g in two.optimizer_group.values()]
    assert kernels[0] is kernels[1]
    assert type(two.group("first").loss) is GRPOLoss
    assert type(two.group("second").loss) is CrossEntropyLoss
    with pytest.raises(ValueError, match="'first' or 'second'"):
        two.step(adapter_name="third")


def test_saved_adapters_and_checkpoints_have_their_tokenizer(two, tmp_path):
    two.set_template("Qwen3_5Template", model_id=small_tokenizer("123"), adapter_name="first")
    place = two.save("a", tmp_path, adapter_name="first", save_optimizer=True)
    assert (place / "tokenizer.json").exists() and (place / "adapter_config.json").exists()
    two.resume_from_checkpoint(place, adapter_name="second")
    states = (two.get_state_dict(adapter_name=name) for name in ("first", "second"))
    assert_equal(*states)
    assert not (two.save("b", tmp_path, adapter_name="second") / "tokenizer.json").exists()
    merged = two.save("c", tmp_path, adapter_name="first", merge=True, dtype="bfloat16")
    assert Tokenizer.from_pretrained(merged).encode("21") == small_tokenizer("123").encode("21")
    weights = (merged / "model.safetensors").read_bytes()
    assert b'"BF16"' in weights and b'"F32"' not in weights


def test_a_reference_pass_and_dpo(checkpoint):
    model = TransformersModel(model_id=checkpoint)
    model.add_adapter_to_model("default", LORA)
    model.set_loss(DPOLoss(beta=0.5))
    model.set_optimizer("SGD", lr=0.5)
    model.add_metric(DPOMetric, beta=0.5)
    model.add_metric("GRPOMetric", is_training=False)
    reference = model.forward_only(inputs=PAIRS, disable_lora=True)
    losses = []
    for _ in range(4):
        losses.append(float(model.forward_backward(inputs=PAIRS, ref_outputs=reference)["loss"]))
        by_hand = gradient(model)
        model.zero_grad()
        model.forward_backward(inputs=PAIRS, ref_logps=reference["logps"])
        assert_equal(gradient(model), by_hand)
        model.clip_grad_and_step()
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-5)
    assert losses == sorted(losses, reverse=True)
    numbers = model.calculate_metric(is_training=True)
    assert float(numbers["rewards/margins"]) > 0 and numbers["iters"] == 8
    assert float(numbers["learning rate"]) == numbers["learning_rate"] == 0.5
    chosen = float(numbers["logps/ref_chosen"])
    np.testing.assert_allclose(chosen, reference["logps"][[0, 2]].sum(1).mean(), atol=0.01)
    assert "train/policy_confidence" in model.calculate_metric(is_training=False)
    with pytest.raises(ValueError, match="ref_logps"):
        model.forward_backward(inputs=PAIRS, ref_outputs=reference, ref_logps=OLD_REFERENCE)


OLD_REFERENCE = np.zeros((4, 5))


class Passes(Metric):
    """A metric as scripts for Twinkle write them."""

    def __init__(self, device_mesh, process_group, unit, **kwargs):
        super().__init__(device_mesh, process_group, unit=unit, **kwargs)
        self.unit = unit
        self.reset()

    def accumulate(self, inputs, outputs, **kwargs):
        self.count += 1

    def calculate(self):
        results = self.gather_results([{self.unit: self.count}])
        assert self.device_mesh is self.process_group is None
        self.reset()
        return results[0]

    def reset(self):
        self.count = len(self.unit) - len("passes")


def test_a_metric_of_a_scripts_own(checkpoint):
    model = TransformersModel(checkpoint)
    model.add_metric(Passes, is_training=False, unit="passes")
    model.forward_only(inputs=PAIRS)
    model.forward_only(inputs=PAIRS)
    assert model.calculate_metric(is_training=False) == {"passes": 2}
    assert model.calculate_metric(is_training=False) == {"passes": 0}


@pytest.mark.slow
def test_liger_changes_no_number(model):
    model.set_loss("CrossEntropyLoss")
    plain = model.forward_backward(inputs=INPUTS)["loss"]
    expected = gradient(model)
    model.zero_grad()
    model.set_loss("LigerFusedLinearCrossEntropyLoss", reduction="sum")
    fused = model.forward_backward(inputs=INPUTS, task="fused_lm_ce", micro_batch_size=2)["loss"]
    np.testing.assert_allclose(fused, plain, rtol=1e-6)
    assert_same(gradient(model), expected)
    scores = model.forward_only(inputs=INPUTS, task="fused_lm_ce")["logps"]
    np.testing.assert_array_equal(scores, model.forward_only(inputs=INPUTS)["logps"])
    with pytest.raises(ValueError, match="task"):
        model.forward_only(inputs=INPUTS, task="embedding")
    with pytest.raises(ValueError, match="InfonceLoss"):
        model.set_loss("InfonceLoss")


def test_losses_of_evaluation(model):
    logps = model.forward_only(inputs=INPUTS)["logps"]
    mean = -logps.sum() / np.count_nonzero(logps)
    model.set_loss("CrossEntropyLoss")
    np.testing.assert_allclose(model.calculate_loss(), mean, rtol=1e-5)
    model.forward_only(inputs=INPUTS[:1])
    first = model.calculate_loss()
    assert model.calculate_metric(is_training=False)["loss"] == pytest.approx((mean + first) / 2)
    assert model.calculate_metric(is_training=False) == {}
    model.set_loss("GRPOLoss")
    model.forward_only(inputs=INPUTS)
    expected = model.forward_backward(inputs=INPUTS, **SIDE)["loss"]
    np.testing.assert_allclose(model.calculate_loss(**SIDE), expected, rtol=1e-4)
    model.set_loss("GKDLoss")
    with pytest.raises(ValueError, match="GKDLoss"):
        model.calculate_loss()


@pytest.mark.slow
def test_separate_verbs_give_the_gradient_of_forward_backward(model):
    options = {"temperature": 0.5, "micro_batch_size": 2}
    whole = float(model.forward_backward(inputs=INPUTS, **options, **SIDE)["loss"])
    expected = gradient(model)
    model.zero_grad()
    model.calculate_metric()
    outputs = model.forward(inputs=INPUTS, **options)
    scored = model.forward_only(inputs=INPUTS, temperature=0.5)["logps"]
    np.testing.assert_array_equal(outputs["logps"], scored)
    assert outputs.keys() == {"logps"} and model.cur_step == 1
    model.forward(inputs=INPUTS, **options)
    np.testing.assert_allclose(model.calculate_loss(**SIDE), whole, rtol=1e-4)
    model.forward_only(inputs=INPUTS[:1])  # does not change what `backward` trains on
    model.backward(gradient_accumulation_steps=2)
    assert_equal(gradient(model), expected)
    assert model.cur_step == 2
    assert model.calculate_metric()["loss"] == pytest.approx(whole, rel=1e-6)
    assert model.calculate_metric(is_training=False) == {}
    model.step()
    assert not np.array_equal(model.forward_only(inputs=INPUTS)["logps"], outputs["logps"])
    with pytest.raises(ValueError, match="call forward, then calculate_loss"):
        model.backward()
    model.forward(inputs=INPUTS)
    model.calculate_loss(**SIDE)
    model.forward(inputs=INPUTS)
    with pytest.raises(ValueError, match="calculate_loss"):  # the loss was of the pass before
        model.backward()
    with pytest.raises(ValueError, match="labels"):
        model.forward(inputs=[{"input_ids": [5, 6]}])


def test_gradients_are_clipped_by_their_2_norm(model):
    model.forward_backward(inputs=INPUTS, **SIDE)
    norm = np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in gradient(model)))
    np.testing.assert_allclose(model.clip_grad_norm(norm / 4, 2), norm, rtol=1e-5)
    clipped = np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in gradient(model)))
    np.testing.assert_allclose(clipped, norm / 4, rtol=1e-5)
    for clip in (model.clip_grad_norm, model.clip_grad_and_step):
        with pytest.raises(ValueError, match="norm_type must be 2"):
            clip(1.0, norm_type=float("inf"))


def test_what_scripts_ask_of_pytorchs_module(model):
    layers = {type(m).__name__ for m in model.model.modules()}
    model.model._no_split_modules = list(layers) or [f"{model.model.config.model_type}DecoderLayer"]
    assert model.model._no_split_modules == ["qwen3DecoderLayer"]
    with pytest.raises(AttributeError, match="lm_head"):
        model.model.lm_head = None


def test_a_mask_that_no_loss_reads(model):
    with pytest.warns(UserWarning, match="positive_mask changes nothing"):
        masked = model.forward_backward(inputs=INPUTS, positive_mask=[True, False, True], **SIDE)
    plain = model.forward_backward(inputs=INPUTS, **SIDE)
    np.testing.assert_array_equal(masked["loss"], plain["loss"])


def test_a_temperature_that_the_loss_does_not_read(model):
    model.set_loss("GKDLoss")
    teacher = {"teacher_logits": np.ones((3, 5, 48), np.float32)}
    with pytest.warns(UserWarning, match="temperature=0.5 changes nothing: GKDLoss"):
        scaled = model.forward_backward(inputs=INPUTS, temperature=0.5, **teacher)
    plain = model.forward_backward(inputs=INPUTS, **teacher)
    np.testing.assert_array_equal(scaled["loss"], plain["loss"])
    scored = model.forward_only(inputs=INPUTS)["logps"]
    np.testing.assert_array_equal(plain["logps"], scored)  # which it does not read, either
    model.set_loss("GRPOLoss")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.forward_backward(inputs=INPUTS, temperature=0.25, **SIDE)


def test_a_forward_pass_returns_the_entropies_that_its_loss_needs(model):
    model.set_loss("GRPOLoss", entropy_coef=0.5)
    whole = model.forward_backward(inputs=INPUTS, **SIDE)["loss"]
    expected = gradient(model)
    model.zero_grad()
    outputs = model.forward(inputs=INPUTS, return_logits=True)
    assert outputs["entropies"].shape == (3, 5) and outputs["logits"].shape == (3, 5, 48)
    np.testing.assert_allclose(model.calculate_loss(**SIDE), whole, rtol=1e-4)
    model.backward()
    assert_equal(gradient(model), expected)


def test_megatrons_passes_without_gradients_have_a_loss(checkpoint):
    model = MegatronModel(checkpoint, mixed_precision="no")
    outputs = model.forward_only(inputs=INPUTS)
    mean = -outputs["logps"].sum() / np.count_nonzero(outputs["logps"])
    np.testing.assert_allclose(outputs["loss"], mean, rtol=1e-5)
    assert model.calculate_metric(is_training=False)["loss"] == pytest.approx(mean)
    model.set_loss("GRPOLoss")
    assert model.forward_only(inputs=INPUTS).keys() == {"logps"}  # a reference: no advantages
    assert model.calculate_metric(is_training=False) == {}
    expected = model.forward_backward(inputs=INPUTS, **SIDE)["loss"]
    scored = model.forward_only(inputs=INPUTS, micro_batch_size=2, **SIDE)
    np.testing.assert_allclose(scored["loss"], expected, rtol=1e-4)


def test_columns_of_a_data_set_may_stay_in_features(model):
    rows = [{**x, "question": "?", "answer": 4, "length": 5} for x in INPUTS]
    plain = model.forward_only(inputs=INPUTS)["logps"]
    np.testing.assert_array_equal(model.forward_only(inputs=rows)["logps"], plain)
    for key in ("pixel_values", "advantages", "completion_mask"):
        with pytest.raises(ValueError, match=key):
            model.forward_only(inputs=[{**INPUTS[0], key: [1]}])


@pytest.fixture
def mixture():
    decoder = Decoder(config_of("qwen3_moe"), params_of("qwen3_moe"))
    model = TransformersModel(decoder, enable_router_replay=True)
    model.set_loss("GRPOLoss")
    model.set_optimizer("SGD", lr=30.0)
    return model


@pytest.mark.slow
def test_recorded_experts_are_replayed_after_the_router_has_changed(mixture):
    before = mixture.forward_only(inputs=INPUTS, router_replay_action=RouterReplayAction.RECORD)
    experts = before["routed_experts"]
    assert experts.shape == (3, 5, 2, 2) and not experts[1, 3:].any()
    rows = [row | {"routed_experts": x} for row, x in zip(INPUTS, experts, strict=True)]
    replay = {"inputs": rows, "router_replay_action": RouterReplayAction.REPLAY_FORWARD}
    np.testing.assert_allclose(mixture.forward_only(**replay)["logps"], before["logps"], atol=1e-6)
    for _ in range(3):
        outputs = mixture.forward_backward(**replay, **SIDE)
        mixture.clip_grad_and_step()
    replayed = mixture.forward_only(**replay)["logps"]
    live = mixture.forward_only(inputs=rows, router_replay_action=RouterReplayAction.RECORD)
    chosen = (np.sort(x["routed_experts"], axis=-1) for x in (before, live))
    assert np.any(next(chosen) != next(chosen))
    assert np.abs(replayed - live["logps"]).max() > 1e-2
    np.testing.assert_array_equal(mixture.forward_only(inputs=rows)["logps"], live["logps"])

    # One pass, and three verbs: the same.
    outputs = mixture.forward_backward(**replay, **SIDE)
    np.testing.assert_allclose(outputs["logps"], replayed, atol=1e-6)
    expected = gradient(mixture)
    mixture.zero_grad()
    mixture.forward(**replay)
    np.testing.assert_allclose(mixture.calculate_loss(**SIDE), outputs["loss"], rtol=1e-5)
    mixture.backward()
    assert_same(gradient(mixture), expected, 1e-5)


def test_what_cannot_be_replayed_is_named(mixture, model):
    replay = {"router_replay_action": RouterReplayAction.REPLAY_FORWARD}
    with pytest.raises(ValueError, match=r"inputs\[0\] must have 'routed_experts'"):
        mixture.forward_only(inputs=INPUTS, **replay)
    with pytest.raises(ValueError, match="router_replay_action"):
        mixture.forward_backward(inputs=INPUTS, router_replay_action=RouterReplayAction.RECORD)
    with pytest.raises(ValueError, match="'replay'"):
        mixture.forward_only(inputs=INPUTS, router_replay_action="replay")
    with pytest.warns(UserWarning, match="enable_router_replay"):
        model.forward_only(inputs=INPUTS, **replay)


@pytest.mark.slow
def test_outputs_of_a_training_pass(model):
    outputs = model.forward_backward(inputs=INPUTS, micro_batch_size=2, **SIDE)
    assert set(outputs) == {"loss", "logps"}
    scored = model.forward_only(inputs=INPUTS)["logps"]
    np.testing.assert_allclose(outputs.get("logps"), scored, atol=1e-6)
    assert outputs["logps"] is outputs["logps"]
    outputs["logps"] = list(outputs["logps"])  # as scripts do for metrics
    assert len(outputs["logps"]) == 3


def test_options_that_change_nothing_and_unknown_ones(checkpoint, model):
    model.set_processor(InputProcessor, padding_free=True)
    model.set_processor("InputProcessor")
    with pytest.raises(TypeError, match="processor_cls"):
        model.set_processor(type("Mine", (InputProcessor,), {}))
    with pytest.warns(UserWarning, match="model_cls"):
        TransformersModel(model_id=checkpoint, model_cls=dict, attn_implementation="sdpa")
    with pytest.raises(TypeError, match="quantization_config"):
        TransformersModel(model_id=checkpoint, quantization_config={})
    with pytest.raises(ValueError, match="task"):
        model.forward_backward(inputs=INPUTS, task="embedding")
    text = model.get_train_configs()
    assert "Trainable params" in text and "trainable%: 100.0000" in text and "GRPOLoss" in text


def test_a_teacher_has_one_name():
    logits = [[[0.0, 3.0, 1.0, 2.0], [5.0, 4.0, 7.0, 6.0]]]
    for output in ({"logits": logits, "topk": 2}, {"teacher_logits": logits}):
        values, tokens = read_teacher(output, None, None, None, 2)
        assert values.tolist() == [[[3.0, 2.0], [7.0, 6.0]]]
    pair = read_teacher({"topk_logprobs": values, "topk_indices": tokens}, None, None, None, 1)
    assert pair == (values, tokens)
    with pytest.raises(ValueError, match="teacher_output"):
        read_teacher({"logits": logits}, logits, None, None, None)


def test_adapters_lie_over_parameters_of_the_type_that_is_computed_in(checkpoint):
    model = TransformersModel(model_id=checkpoint, mixed_precision="bf16")
    assert {x.dtype.name for x in jax.tree.leaves(model.params)} == {"float32"}
    model.add_adapter_to_model("default", LORA)
    frozen = {x.dtype.name for x in jax.tree.leaves(model.group().frozen["lm_head"])}
    assert frozen == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(model.state.params)} == {"float32"}


def test_an_adapter_that_is_read_brings_its_own_scale(checkpoint, tmp_path):
    first, other = TransformersModel(checkpoint), TransformersModel(checkpoint)
    first.add_adapter_to_model(
        "default", LoraConfig(r=2, lora_alpha=16, target_modules=("q_proj",))
    )
    other.add_adapter_to_model("default", LORA)
    other.load(first.save("adapter", tmp_path))
    assert other.group().lora == first.group().lora
    scale = other.params["layers"]["0"]["self_attn"]["q_proj"]["lora_scale"]
    assert scale.tolist() == [8.0] * other.config.repeats


def test_a_device_mesh_is_the_mesh_of_the_model(checkpoint):
    mesh = DeviceMesh.from_sizes(dp_size=2)
    model = TransformersModel(model_id=checkpoint, device_mesh=mesh)
    assert model.mesh.shape == make_mesh(data=2).shape


def test_megatrons_defaults(checkpoint):
    model = MegatronModel(model_id=checkpoint, variable_seq_lengths=True, mixed_precision="no")
    model.set_optimizer("default", lr=0.5)
    assert model.learning_rate == 0.5
    options = {"lr_decay_steps": 4, "max_lr": 0.25, "lr_warmup_steps": 1, "min_lr": 0.05}
    model.set_lr_scheduler("default", **options)
    rates = []
    for _ in range(5):
        rates.append(model.learning_rate)
        model.lr_step()
    np.testing.assert_allclose(rates, [0, 0.25, 0.2, 0.1, 0.05], atol=1e-12)
    model.set_optimizer("SGD")
    model.set_lr_scheduler("ConstantLR")
    with pytest.raises(TypeError, match="lr_decay_steps"):
        model.set_lr_scheduler("default", max_lr=0.25)


@pytest.mark.parametrize("options", [{"merge_lora": True}, {"merge": True}, {}])
def test_megatron_merges_an_adapter_by_its_own_word(checkpoint, tmp_path, options):
    model = MegatronModel(model_id=checkpoint, mixed_precision="no")
    model.add_adapter_to_model("default", LoraConfig(r=2))
    model.save("policy", tmp_path, **options)
    assert (tmp_path / "policy" / "adapter_config.json").exists() == (not options)


def test_muon_orthogonalizes_each_layer():
    rng = np.random.default_rng(0)
    params = {"layers": {"kernel": rng.normal(size=(2, 4, 8)).astype(np.float32)}}
    gradients = jax.tree.map(lambda x: x * 3, params)

    class Muon:  # as PyTorch's class, whose name it is
        pass

    for scale, size in ((None, 2**0.5), ("match_rms_adamw", 0.2 * 8**0.5)):
        optimizer = choose_optimizer(Muon, {"weight_decay": 0.0, "adjust_lr_fn": scale})
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        values = np.linalg.svd(updates["layers"]["kernel"], compute_uv=False)
        np.testing.assert_allclose(values, size, rtol=0.35)
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        choose_optimizer("Muon", {"adjust_lr_fn": "other"})
    assert choose_optimizer(optax.sgd(1.0), {}).init


def test_weights_are_taken_to_the_sampler(model):
    calls = []

    class Plain:
        def sync_weights(self, actor):
            calls.append((actor, None))

    class Server:
        def sync_weights(self, actor, *, merge=False):
            calls.append((actor, merge))

    CheckpointEngineManager(model=model, sampler=Plain()).sync_weights(merge_and_sync=False)
    CheckpointEngineManager(model=model, sampler=Server()).sync_weights()
    assert calls == [(model, None), (model, True)]


def test_an_adapter_begins_without_the_loss_and_the_accumulation_of_another(checkpoint):
    """It skipped updates that were due, and had a policy loss, which is 0 without advantages."""
    model = TransformersModel(checkpoint)
    model.set_loss("DPOLoss")
    model.add_adapter_to_model("a", LORA, gradient_accumulation_steps=2)
    model.set_loss("GRPOLoss", adapter_name="a")
    model.add_adapter_to_model("b", LORA)
    group = model.group("b")
    assert (type(group.loss).__name__, group.gradient_accumulation_steps) == ("DPOLoss", 1)
    assert model.group("a").gradient_accumulation_steps == 2
