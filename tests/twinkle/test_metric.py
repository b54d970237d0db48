"""Twinkle's metrics, by hand."""

import math

import numpy as np
import pytest

from twinkle_jax.twinkle.metric import (
    Accuracy,
    CISPOMetric,
    CompletionRewardMetric,
    DPOMetric,
    EmbeddingMetric,
    GRPOMetric,
    GSPOMetric,
    LossMetric,
    TrainMetric,
)

LABELS = [[1, 2, -100], [3, -100, -100]]
NEW = np.array([[-1.0, -2.0, np.nan], [-0.5, np.nan, np.nan]])


def test_accuracy():
    metric = Accuracy()
    logits = np.eye(5)[[1, 0, 3]]
    metric.accumulate({"labels": np.array([1, 2, -100])}, {"logits": logits})
    metric.accumulate({"labels": [9, 1, 0, 3], "completion_mask": [1, 1, 0, 1]}, {"logits": logits})
    assert metric.calculate() == {"accuracy": "0.75", "correct_tokens": 3, "total_tokens": 4}
    metric.accumulate({"labels": [1]}, {})
    assert metric.calculate() == {}
    with pytest.raises(AssertionError):
        metric.accumulate([{"labels": [1]}], {"logits": logits})


def test_loss():
    metric = LossMetric()
    for loss, norm in ((1.0, None), (2.0, 0.25)):
        metric.accumulate([], {"loss": loss}, grad_norm=norm)
    assert metric.calculate() == {"loss": "1.5000", "grad_norm": "0.250000"}
    metric.accumulate([{"labels": [1, -100, 2]}], {"loss": 3.0}, loss_reduction="sum")
    metric.accumulate([], {"loss": 3.0, "num_tokens": 4}, loss_reduction="sum")
    assert metric.calculate() == {"loss": "1.0000"}
    assert metric.calculate() == {"loss": "0.0000"}
    metric.accumulate([], {"loss": 1.0}, grad_norm=float("nan"))
    assert metric.calculate() == {"loss": "1.0000", "grad_norm": "nan"}


def test_training():
    metric = TrainMetric()
    metric.accumulate([], {}, lr=1e-3, step=6, gradient_accumulation_steps=2)
    numbers = metric.calculate()
    assert numbers["learning rate"] == "1.000000e-03" and numbers["iters"] == 3
    assert numbers["total time elapse"] == "0 seconds" and numbers["speed"].endswith(" iters/s")
    metric.accumulate([], {}, lr=[1e-3, 2e-3], step=8)
    assert metric.last_step == 6
    metric.time -= 120
    numbers = metric.calculate()
    assert numbers["learning rate(param group 2)"] == "2.000000e-03"
    assert numbers["total time elapse"] == "0.0 minutes" and numbers["speed"] == "0.01 iters/s"


def test_rewards():
    metric = CompletionRewardMetric()
    assert metric.calculate() == {}
    metric.accumulate(rewards={"a": [1.0, 0.0]}, completion_lengths=[2, 4], generate_time=0.5)
    metric.accumulate(rewards={"a": [0.5], "b": [1.0]}, weight_sync_time=0.25)
    expected = {
        "profiling/Time taken: move_model_to_sampler": 0.25,
        "profiling/Time taken: generate": 0.5,
        "train/a_reward": 0.5,
        "train/a_reward_std": 0.5,
        "train/b_reward": 1.0,
        "train/b_reward_std": 0.0,
        "train/completion_length": 3.0,
    }
    assert metric.calculate() == metric.calculate() == expected
    metric.reset()
    assert metric.calculate() == {}
    metric.accumulate(rewards={"a": [1.0, None]}, completion_lengths=np.array([1, 2]))
    assert metric.calculate()["train/a_reward"] == 1.0  # None: it does not apply
    assert metric.calculate()["train/completion_length"] == 1.5


def test_pairs():
    metric = DPOMetric(beta=0.5)
    inputs = [{"labels": row} for row in LABELS]
    reference = {"logps": [[-2.0, -2.0], [-1.5, 7.0]]}
    metric.accumulate(inputs, {"logps": NEW}, ref_outputs=reference)
    # Sums: −3 and −0.5; references −4 and −1.5; both rewards 0.5.
    assert metric.calculate() == {
        "logps/chosen": "-3.00",
        "logps/rejected": "-0.50",
        "logps/ref_chosen": "-4.00",
        "logps/ref_rejected": "-1.50",
        "rewards/chosen": "0.5000",
        "rewards/rejected": "0.5000",
        "rewards/margins": "0.0000",
        "rewards/accuracies": "0.0%",
    }
    metric.accumulate({"labels": LABELS}, {"logps": NEW}, ref_logps=np.array([[-4, -2], [-1, 0]]))
    numbers = metric.calculate()
    assert numbers["rewards/margins"] == "1.2500" and numbers["rewards/accuracies"] == "100.0%"
    # One for each label, as `forward_backward` takes them: they were read as one for each position.
    tokens = {"labels": [[-100, 1, 2], [-100, -100, 3]]}
    new = np.array([[9.0, -1.0, -2.0], [9.0, 9.0, -0.5]])
    metric.accumulate(tokens, {"logps": new}, ref_logps=[[-2.0, -2.0], [-1.5]])
    numbers = metric.calculate()
    assert (numbers["logps/ref_chosen"], numbers["logps/ref_rejected"]) == ("-4.00", "-1.50")
    with pytest.raises(ValueError, match="row 0 must be one number, one for each of 3 labels"):
        metric.accumulate(
            {"labels": [[1, 2, 3], [-100, 1, 2]]}, {"logps": new}, ref_logps=[[-1.0] * 2] * 2
        )
    metric.accumulate({"labels": LABELS}, {"logps": NEW})
    assert metric.calculate().keys() == {"logps/chosen", "logps/rejected"}
    metric.accumulate(inputs, {})
    assert metric.calculate() == {}
    with pytest.raises(AssertionError, match="even"):
        metric.accumulate({"labels": LABELS[:1]}, {"logps": NEW[:1]})


OLD = [[-1.0, -2.0 + math.log(2)], [-0.5 - math.log(4)]]  # ratios 1, 1/2 and 4


@pytest.mark.parametrize(
    ("cls", "advantages", "low", "high"),
    [
        (GRPOMetric, [-1.0, 1.0], 1 / 3, 1 / 3),
        (GRPOMetric, [1.0, -1.0], 0, 0),
        (CISPOMetric, [1.0, -1.0], 1 / 3, 1 / 3),
        (GSPOMetric, [-1.0, 1.0], 1 / 2, 1 / 2),  # ratios 0.71 and 4
        (GSPOMetric, [1.0, -1.0], 0, 0),
    ],
)
def test_how_far_the_policy_went(cls, advantages, low, high):
    metric = cls(epsilon=0.2)
    entropies = np.array([[1.0, 2.0, np.nan], [3.0, 0, 0]])
    metric.accumulate(
        [{"labels": row} for row in LABELS],
        {"logps": NEW, "entropies": entropies},
        old_logps=OLD,
        advantages=advantages,
    )
    numbers = metric.calculate()
    mean = -3.5 / 3
    kls = [0, 0.5 + math.log(2) - 1, 4 - math.log(4) - 1]
    expected = {
        "train/policy_confidence": math.exp(mean),
        "train/mean_new_logp": mean,
        "train/mean_old_logp": mean - math.log(2) / 3,
        "train/logp_diff_mean": math.log(2) / 3,
        "train/approx_kl": sum(kls) / 3,
        "train/token_kl_max": max(kls),
        "train/token_ratio_max": 4,
        "train/entropy": 2,
        "train/clip_ratio_low": low,
        "train/clip_ratio_high": high,
        "train/clip_ratio": low + high,
    }
    assert numbers.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(numbers[name], value, atol=1e-9, err_msg=name)
    assert metric.calculate() == {}


def test_at_temperature_0_log_probabilities_are_those_at_1():
    """They were multiplied by 0."""
    metric = GRPOMetric(temperature=0)
    metric.accumulate({"labels": np.array([[1, 2]])}, {"logps": np.array([[-1.0, -2.0]])})
    assert metric.calculate()["train/mean_new_logp"] == -1.5


def test_the_temperature_of_log_probabilities_and_a_clip_of_its_own():
    metric = GRPOMetric(temperature=0.5, epsilon=0.9, epsilon_high=0.2)
    metric.accumulate({"labels": LABELS}, {"logps": NEW}, old_logps=OLD, advantages=[-1.0, 1.0])
    numbers = metric.calculate()
    np.testing.assert_allclose(numbers["train/mean_new_logp"], -1.75 / 3)
    np.testing.assert_allclose(numbers["train/token_ratio_max"], 2)
    assert numbers["train/clip_ratio_low"] == 0 < numbers["train/clip_ratio_high"]
    metric.accumulate({"labels": LABELS}, {"logps": NEW})
    assert metric.calculate().keys() == {"train/policy_confidence", "train/mean_new_logp"}
    metric.accumulate({"labels": LABELS}, None)
    metric.accumulate({"labels": [[-100]]}, {"logps": [[0.0]]})
    assert metric.calculate() == {}
    with pytest.raises(TypeError, match="top_k"):
        GRPOMetric(top_k=3)


def test_padding_of_parts_is_ignored_with_any_ignore_index():
    metric = GRPOMetric(ignore_index=0)
    parts = [{"labels": [[1, 0]]}, {"labels": [[2, 3, 0, 4]]}]
    metric.accumulate(parts, {"logps": [[[-1.0, 0.0]], [[-2.0, -3.0, 0.0, -4.0]]]})
    assert metric.calculate()["train/mean_new_logp"] == -2.5  # of 1, 2, 3 and 4


def test_the_tokens_that_moved_most():
    metric = GRPOMetric(top_k_kl=2)
    metric.accumulate({"labels": [[-100, -100]]}, {"logps": [[0.0, 0.0]]}, old_logps=[[]])
    metric.accumulate({"labels": LABELS}, {"logps": NEW}, old_logps=[[-2.0, -2.0], [-2.5]])
    records = metric.calculate()["_high_kl_records"]
    # Differences 1, 0 and 2: e − 2 and e² − 3; the pass before has sequence 0.
    assert [(r["gsi"], r["pos"], r["token_id"]) for r in records] == [(2, 0, 3), (1, 0, 1)]
    np.testing.assert_allclose([r["kl"] for r in records], [math.e**2 - 3, math.e - 2], rtol=1e-12)
    np.testing.assert_allclose([r["ratio"] for r in records], [math.e**2, math.e], rtol=1e-12)
    assert [(r["logp_new"], r["logp_old"]) for r in records] == [(-0.5, -2.5), (-1.0, -2.0)]
    metric.accumulate({"labels": LABELS}, {"logps": NEW}, old_logps=[[-1.0, -2.0], [-0.5]])
    assert "_high_kl_records" not in metric.calculate()  # nothing moved


def test_embeddings():
    metric = EmbeddingMetric()
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
    metric.accumulate({"labels": [1, 0, 1, 0]}, {"embeddings": rows, "loss": 0.5}, grad_norm=2.0)
    assert metric.calculate() == {
        "pos_sim": "0.8536",  # (1 + 1/√2) / 2
        "pos_sim_min": "0.7071",
        "pos_sim_max": "1.0000",
        "neg_sim": "1.0000",  # (2 + 0) / 2
        "loss": "0.5000",
        "grad_norm": "2.000000",
    }
    metric.accumulate([{"labels": [1, 0]}], {"logits": np.stack([rows[:2]] * 2, 1)})
    assert metric.calculate()["pos_sim"] == "1.0000"
    metric.accumulate({"labels": [0, 0]}, {"embeddings": rows[:2]})
    metric.accumulate({"labels": [1, 0]}, {})
    assert metric.calculate() == {}


@pytest.mark.parametrize("cls", [DPOMetric, GRPOMetric, GSPOMetric])
def test_parts_of_a_batch_weigh_what_they_hold(cls):
    """Two rows, then four, report what the six do at once."""
    rng = np.random.default_rng(3)
    labels = np.where(np.arange(5) < rng.integers(1, 6, (6, 1)), 1, -100)
    new, old, entropies = rng.normal(-1, 0.3, (3, 6, 5))
    facts = {"old_logps": old, "ref_logps": old, "advantages": rng.normal(size=6)}
    whole, parts = cls(), cls()
    for metric, rows in ((whole, slice(6)), (parts, slice(2)), (parts, slice(2, 6))):
        outputs = {"logps": new[rows], "entropies": entropies[rows]}
        given = {name: values[rows] for name, values in facts.items()}
        metric.accumulate({"labels": labels[rows]}, outputs, **given)
    expected, numbers = whole.calculate(), parts.calculate()
    assert numbers.keys() == expected.keys()
    for name, value in numbers.items():
        assert type(value) in (str, float)
        same = value if isinstance(value, str) else pytest.approx(value, rel=1e-5)
        assert expected[name] == same, name


def test_embeddings_of_parts():
    metric = EmbeddingMetric()
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    metric.accumulate({"labels": [1, 0]}, {"embeddings": rows[:2], "loss": 1.0})
    metric.accumulate({"labels": [1, 0, 1, 0]}, {"embeddings": rows[2:], "loss": 2.0})
    assert metric.pos_count == 3
    assert metric.calculate() == {
        "pos_sim": "0.6667",  # 1, 0 and 1
        "pos_sim_min": "0.0000",
        "pos_sim_max": "1.0000",
        "neg_sim": "0.5000",  # 1 and 0; the first anchor has no other positive
        "loss": "1.5000",
    }
