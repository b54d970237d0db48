"""Twinkle's `TransformersModel`: scores, gradients, steps, schedules, saving, refused arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.families import config_of, hidden, params_of
from tests.twinkle.rows import INPUTS, OLD, ROWS, SIDE, assert_equal, assert_same, gradient
from twinkle_jax.loss import GRPOLoss, PPOValueLoss
from twinkle_jax.model import Decoder, output_logits, save_pretrained
from twinkle_jax.twinkle.model import TransformersModel


def logits_alone(row):
    params = params_of("qwen3")
    tokens = jnp.asarray([row + [0] * (16 - len(row))], jnp.int32)
    config = config_of("qwen3")
    logits = output_logits(params, config, hidden(params, config, tokens, remat=False))
    return np.asarray(logits[0, : len(row)])


@pytest.mark.parametrize("temperature", [0.5, pytest.param(1.0, marks=pytest.mark.exhaustive)])
def test_forward_only_scores_the_token_that_follows(model, temperature):
    everything = {"return_logits": True, "return_entropy": True, "temperature": temperature}
    outputs = model.forward_only(inputs=INPUTS, **everything)
    assert outputs["logps"].shape == outputs["entropies"].shape == (3, 5)
    assert outputs["logits"].shape == (3, 5, 48)
    for i, (row, feature) in enumerate(zip(ROWS, INPUTS, strict=True)):
        logits = logits_alone(row)
        np.testing.assert_allclose(outputs["logits"][i, : len(row)], logits, atol=1e-4)
        logprobs = np.array(jax.nn.log_softmax(logits / temperature))
        for t, label in enumerate(feature["labels"]):
            expected = 0 if label == -100 else logprobs[t, label]
            np.testing.assert_allclose(outputs["logps"][i, t], expected, atol=1e-4)
            expected = 0 if label == -100 else -np.sum(np.exp(logprobs[t]) * logprobs[t])
            np.testing.assert_allclose(outputs["entropies"][i, t], expected, atol=1e-4)
        assert not outputs["logps"][i, len(row) :].any()


def test_forward_only_without_labels_and_in_parts(model):
    outputs = model.forward_only(inputs=INPUTS)
    without = model.forward_only(inputs=[{"input_ids": ROWS[1]}])
    assert without.keys() == {"logps"}
    np.testing.assert_allclose(without["logps"][0, 1], outputs["logps"][1, 1], atol=1e-5)
    assert without["logps"][0, 2] == 0 and without["logps"][0, 0] != 0
    cut = model.forward_only(inputs=INPUTS, micro_batch_size=2)["logps"]
    np.testing.assert_allclose(cut, outputs["logps"], atol=1e-5)


@pytest.mark.exhaustive
def test_rows_padded_on_the_left_keep_their_columns(model):
    plain = model.forward_only(inputs=INPUTS)["logps"]
    feature = {
        "input_ids": [0, 0, *ROWS[1]],
        "labels": [-100, -100, *INPUTS[1]["labels"]],
        "attention_mask": [0, 0, 1, 1, 1],
    }
    left = model.forward_only(inputs=[INPUTS[0], feature, INPUTS[2]])["logps"]
    np.testing.assert_allclose(left[1, 2:], plain[1, :3], atol=1e-5)
    np.testing.assert_allclose(left[[0, 2]], plain[[0, 2]], atol=1e-5)


@pytest.mark.exhaustive
def test_micro_batches_and_accumulated_calls_change_no_gradient(model):
    loss = model.forward_backward(inputs=INPUTS, **SIDE)["loss"]
    full_batch = gradient(model)
    model.zero_grad()
    assert not any(g.any() for g in jax.tree.leaves(model.state.gradient_sum))
    np.testing.assert_allclose(
        model.forward_backward(inputs=INPUTS, micro_batch_size=2, **SIDE)["loss"], loss, rtol=1e-6
    )
    parts = gradient(model)
    model.zero_grad()
    model.forward_backward(inputs=INPUTS[:1], advantages=[1.0], old_logps=OLD[:1])
    model.forward_backward(inputs=INPUTS[1:], advantages=[-0.5, 0.25], old_logps=OLD[1:])
    calls = gradient(model)
    model.zero_grad()
    # Numbers for all positions, as `forward_only` gives them, and arrays for lists.
    wide = np.zeros((3, 5), np.float32)
    for i, (feature, row) in enumerate(zip(INPUTS, OLD, strict=True)):
        wide[i, : len(feature["labels"])][np.array(feature["labels"]) != -100] = row
    model.forward_backward(
        inputs=[{k: np.array(v) for k, v in x.items()} for x in INPUTS],
        advantages=jnp.asarray(SIDE["advantages"]),
        old_logps=wide,
    )
    for other in (parts, calls, gradient(model)):
        assert_same(other, full_batch)
    metrics = model.calculate_metric()
    assert metrics["tokens"] == 4 * 9
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


def test_a_step_is_clipped_and_separate_verbs_do_the_same(model):
    before = model.get_state_dict()
    model.forward_backward(inputs=INPUTS, **SIDE)
    names = [jax.tree_util.keystr(path) for path in paths(model.state.params)]
    plain = dict(zip(names, gradient(model), strict=True))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in plain.values()))
    limit = float(norm) / 4
    info = model.clip_grad_and_step(max_grad_norm=limit)
    np.testing.assert_allclose(info.gradient_norm, norm, rtol=1e-5)
    assert info.applied and model.state.step == 1
    after = model.get_state_dict()
    name = "model.norm.weight"
    expected = before[name] - 0.5 * plain["['norm']['scale']"] / 4
    np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-7)
    metrics = model.calculate_metric()
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert metrics["step"] == 1 and metrics["skipped_updates"] == 0
    # The same with separate verbs, from the same start, gives the same.
    again = TransformersModel(model.model_id)
    again.set_loss(GRPOLoss(epsilon=0.2))
    again.set_optimizer("SGD", lr=0.5)
    again.forward_backward(inputs=INPUTS, **SIDE)
    np.testing.assert_allclose(again.clip_grad_norm(limit), norm, rtol=1e-5)
    again.step()
    again.zero_grad()
    again.lr_step()
    for name, x in again.get_state_dict().items():
        np.testing.assert_allclose(x, after[name], rtol=1e-5, atol=1e-7)


def test_the_norm_reported_is_that_of_the_last_update(model):
    """Before clipping, whether that was a call of its own or not."""
    last = {name: np.asarray(x) * 0.5 if name == "advantages" else x for name, x in SIDE.items()}
    model.set_optimizer("SGD", lr=0.0)
    model.forward_backward(inputs=INPUTS, **SIDE)
    norm = model.clip_grad_and_step().gradient_norm
    for update in (model.clip_grad_and_step, model.step):
        model.forward_backward(inputs=INPUTS, **last)
        update()
        np.testing.assert_allclose(model.group().gradient_norm, norm / 2, rtol=1e-4)
        model.forward_backward(inputs=INPUTS, **SIDE)
        model.clip_grad_norm(1e-3)
        model.step()
        np.testing.assert_allclose(model.group().gradient_norm, norm, rtol=1e-4)
    np.testing.assert_allclose(model.calculate_metric()["grad_norm"], norm, rtol=1e-4)


def paths(tree):
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_gradients_that_are_not_finite_are_skipped_and_counted(model):
    before = model.get_state_dict()
    assert not model.step().applied  # nothing has been computed yet
    model.forward_backward(inputs=INPUTS, advantages=[np.inf, 1.0, 1.0], old_logps=OLD)
    model.clip_grad_norm(1.0)
    info = model.step()
    assert not info.applied
    assert model.calculate_metric()["skipped_updates"] == 2
    assert model.calculate_metric()["skipped_updates"] == 0
    assert_equal(model.get_state_dict(), before)
    assert model.state.step == 0
    model.forward_backward(inputs=INPUTS, **SIDE)
    assert model.clip_grad_and_step().applied


def test_schedules(model):
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=2, num_training_steps=6)
    rates = []
    for _ in range(8):
        rates.append(model.learning_rate)
        model.lr_step()
    np.testing.assert_allclose(rates[:4], [0, 0.25, 0.5, 0.25 * (1 + np.cos(np.pi / 4))])
    np.testing.assert_allclose(rates[6:], 0, atol=1e-12)
    model.set_lr_scheduler("LinearWarmupScheduler", num_training_steps=4)
    assert model.learning_rate == 0.5
    model.lr_step()
    assert model.learning_rate == 0.375
    model.set_lr_scheduler(lambda step: 0.5**step)
    model.lr_step()
    assert model.learning_rate == 0.25
    model.set_lr_scheduler("LambdaLR", lr_lambda=lambda step: 2.0)
    assert model.learning_rate == 1.0


@pytest.mark.exhaustive
def test_lengths_compile_nothing_beyond_their_buckets(model, compilations):
    """Two buckets of 16 and 24 tokens, warmed up; then twenty steps of any lengths in them."""
    rng = np.random.default_rng(0)
    model.set_optimizer("AdamW", lr=0.01)
    model.set_lr_scheduler("LinearWarmupScheduler", num_training_steps=30)

    def one_step(longest):
        lengths = [longest, *rng.integers(2, longest + 1, rng.integers(1, 4))]
        inputs = [{"input_ids": rng.integers(1, 48, n)} for n in lengths]
        for feature in inputs:
            feature["labels"] = np.append(feature["input_ids"][1:], -100)
        old = model.forward_only(inputs=inputs, micro_batch_size=2)["logps"]
        model.set_loss(GRPOLoss(epsilon=rng.uniform(0.1, 0.3)))
        model.forward_backward(
            inputs=inputs,
            advantages=rng.normal(size=len(lengths)),
            old_logps=old,
            micro_batch_size=2,
            temperature=rng.uniform(0.5, 1.5),
        )
        model.clip_grad_and_step(max_grad_norm=rng.uniform(0.5, 1.5))
        model.calculate_metric()

    for longest in (16, 24):
        one_step(longest)
    assert compilations
    compilations.clear()
    for _ in range(20):
        one_step(int(rng.integers(2, 25)))
    assert not compilations


def test_the_second_step_compiles_nothing(model, compilations):
    """What is new then, zeros and a state that was begun, is bound as an update leaves it."""

    def bound():
        return [leaf.committed for leaf in jax.tree.leaves(model.state)]

    first = bound()
    for step in range(2):
        model.forward_only(inputs=INPUTS)
        model.forward_backward(inputs=INPUTS, **SIDE)
        model.clip_grad_and_step()
        model.calculate_metric()
        if not step:
            compilations.clear()
    assert not compilations
    assert bound() == first


def test_a_second_model_starts_with_the_programs_of_the_first(model, compilations):
    TransformersModel(model_id=model.model_id)
    assert not compilations
    jax.jit(lambda x: x * 3 + 1)(np.ones(7, np.float32))
    assert compilations  # the listener does listen


def test_saved_and_loaded(model, tmp_path):
    model.forward_backward(inputs=INPUTS, **SIDE)
    model.clip_grad_and_step()
    model.save(tmp_path / "out")
    trained = model.get_state_dict()
    again = TransformersModel(tmp_path / "out")
    fresh = TransformersModel(model.model_id)
    fresh.load(tmp_path / "out")
    for read in (again, fresh):
        assert read.get_state_dict().keys() == trained.keys()
        assert_equal(read.get_state_dict(), trained)


def test_trajectories_need_a_template(model):
    trajectory = {"messages": [{"role": "user", "content": "5 6 7"}]}
    with pytest.raises(ValueError, match=r"^inputs\[0\].*set_template"):
        model.forward_only(inputs=[trajectory])

    class Template:
        def encode(self, trajectory):
            return {"input_ids": [int(x) for x in trajectory["messages"][0]["content"].split()]}

    expected = model.forward_only(inputs=[{"input_ids": [5, 6, 7]}])["logps"]
    for template in (Template(), Template().encode):
        model.set_template(template)
        np.testing.assert_array_equal(model.forward_only(inputs=[trajectory])["logps"], expected)
    model.set_template(lambda trajectory: None)
    with pytest.raises(ValueError, match="template"):
        model.forward_only(inputs=[trajectory])
    with pytest.raises(ValueError, match="Qwen"):
        model.set_template("Qwen")
    with pytest.raises(TypeError, match="template"):
        model.set_template(3)


@pytest.mark.parametrize(
    ("call", "error", "argument"),
    [
        (lambda m: m.set_optimizer("adanw"), ValueError, "optimizer"),
        (lambda m: m.set_optimizer("SGD", beta=1), TypeError, "beta"),
        (lambda m: m.set_optimizer(3), TypeError, "optimizer"),
        (lambda m: m.set_optimizer(optax.sgd(1.0), eps=1), TypeError, "eps"),
        (lambda m: m.set_optimizer("SGD", lr=-1), ValueError, "lr"),
        (lambda m: m.set_optimizer("SGD", lr=np.nan), ValueError, "lr"),
        (lambda m: m.set_lr_scheduler("Cosine"), ValueError, "scheduler"),
        (lambda m: m.set_lr_scheduler(lambda n: 1.0, T_max=3), TypeError, "T_max"),
        (lambda m: m.set_lr_scheduler("LambdaLR"), TypeError, "lr_lambda"),
        (lambda m: m.set_lr_scheduler("CosineAnnealingLR", T_max=0), ValueError, "T_max"),
        (lambda m: m.set_loss("gpro"), ValueError, "loss"),
        (lambda m: m.set_loss(3), TypeError, "loss"),
        (lambda m: m.set_loss(PPOValueLoss()), ValueError, "loss"),
        (lambda m: m.forward_only(inputs=[{"input_ids": [48]}]), ValueError, r"inputs\[0\]"),
        (lambda m: m.forward_only(inputs=INPUTS, micro_batch_size=0), ValueError, "micro_batch"),
        (lambda m: m.forward_backward(inputs=[{"input_ids": [1]}]), ValueError, r"inputs\[0\]"),
        (lambda m: m.forward_backward(inputs=INPUTS, advantages=[1]), ValueError, "advantages"),
        (lambda m: m.clip_grad_and_step(-1.0), ValueError, "max_grad_norm"),
        (lambda m: m.step(gradient_accumulation_steps=0), ValueError, "gradient_accumulation"),
        (lambda m: m.step(adapter_name="other"), ValueError, "adapter_name"),
        (lambda m: m.add_metric(3), TypeError, "metric"),
        (lambda m: m.add_metric("Mapping"), ValueError, "one of Accuracy, CISPOMetric"),
        (lambda m: m.forward_backward(inputs=INPUTS, ref_outputs={}), ValueError, "ref_outputs"),
    ],
)
def test_arguments_that_are_refused(model, call, error, argument):
    with pytest.raises(error, match=argument):
        call(model)


def test_steps_out_of_order(checkpoint, tmp_path):
    model = TransformersModel(checkpoint)
    with pytest.raises(ValueError, match="forward_only"):
        model.calculate_loss()
    with pytest.raises(ValueError, match="set_optimizer"):
        model.step()
    other = config_of("qwen2")
    save_pretrained(Decoder(other, params_of("qwen2")), tmp_path / "other")
    with pytest.raises(ValueError, match="configuration"):
        model.load(tmp_path / "other")
