"""Configurations: what is filled in, and what is refused."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from tests.training.options import config_of
from twinkle_jax.loss import (
    LOSSES,
    CISPOLoss,
    DRGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    ImportanceCorrection,
    PolicyLoss,
    SAPOLoss,
    VESPOLoss,
)
from twinkle_jax.rollout import RolloutConfig
from twinkle_jax.training import (
    OptimizerConfig,
    TrainConfig,
    UpdateConfig,
    train,
)
from twinkle_jax.training.by_name import make_optimizer
from twinkle_jax.training.config import (
    check_learning_rates,
    flat,
    from_dict,
    make_loss,
    run_optimizer,
)


def as_saved(config):
    return json.loads(json.dumps(dataclasses.asdict(config)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer.learning_rate", "1e-5"), ("steps", 2.5), ("reward_timeout", [1]), ("seed", 0.5)],
)
def test_numbers_of_another_type_are_refused_by_name(name, value):
    """YAML reads 1e-5 as text: it has a point in numbers with an exponent."""
    with pytest.raises(TypeError, match=f"^{re.escape(name)} must be an? "):
        config_of({name: value})


@pytest.mark.parametrize("name", ["overwrite", "update.mask_truncated", "logging.tensorboard"])
def test_a_switch_is_true_or_false(name):
    """The text "no" is true to Python: it would have deleted a run."""
    with pytest.raises(TypeError, match=f"^{re.escape(name)} must be True or False, got 'no'"):
        config_of({name: "no"})


def test_what_depends_on_the_policy_is_filled_in():
    small, large = TrainConfig(), TrainConfig(model="somewhere", task="x.jsonl", dtype="bfloat16")
    assert (small.rollout.max_new_tokens, large.rollout.max_new_tokens) == (8, 512)
    assert small.optimizer.learning_rate > large.optimizer.learning_rate == 1e-6
    assert (small.optimizer.schedule, large.optimizer.schedule) == ("linear", "constant")
    assert (small.update.max_logp_diff, large.update.max_logp_diff) == (1e-3, 0.2)
    assert large.steps == 500
    assert (small.update.advantage, large.update.advantage) == ("maxrl", "grpo")
    scaled = TrainConfig(update=UpdateConfig(scale="batch"))  # which maxrl would not heed
    assert (scaled.update.advantage, scaled.update.scale) == ("grpo", "batch")
    assert TrainConfig(steps=7).steps == 7
    assert TrainConfig(steps=0).steps == 0  # not taken for "none given"
    assert not [name for name, x in flat(dataclasses.asdict(small)).items() if x == "auto"]


NAN = float("nan")
LONG = {"max_new_tokens": 2**31 - 1024, "max_episode_tokens": 4096}  # with a prompt of 1024
LONG = {f"rollout.{name}": value for name, value in LONG.items()}
LONG |= {"update.micro_batch_tokens": 2**31 - 1}
TWO_REWARDS_OF_TOOLS = {"environment": None, "tools": "x.py", "reward": ["exact", "math"]}
REFUSED = [  # a setting and a value that it cannot have, perhaps only with others
    ("seed", 2**32),
    ("steps", -1),
    ("warm_start", 1.5),
    ("dtype", "float16"),
    ("rollout.num_samples", 1),
    ("rollout.temperature", 0.0),
    ("rollout.top_p", 0.0),
    ("rollout.cohorts", 0),
    ("rollout.slots", 0),
    ("evaluation.slots", 0),
    ("optimizer.learning_rate", NAN),
    ("optimizer.max_grad_norm", -1.0),
    ("optimizer.name", "adanw"),
    ("optimizer.options", {"b3": 1}),
    ("optimizer.schedule", "falling"),
    ("update.advantage", "grop"),
    ("update.kl_beta", -0.1),
    ("update.epsilon", -0.1),
    ("update.epsilon", NAN),
    ("update.epsilon", 0),
    ("update.epsilon_high", -0.1),
    ("update.epsilon_high", 0.0),
    ("update.max_logp_diff", NAN),
    ("update.max_outside_band", 2),
    ("update.correction", "tis"),
    ("update.correction_cap", 0),
    ("update.recompute", "all"),
    ("update.micro_batch_tokens", 9),
    ("update.epochs", None),
    ("evaluation.problems", 0),
    ("logging.checkpoint_every", 0),
    ("mesh.data", 3),  # of 1024 rows
    ("mesh.memory", 0.0),
    ("lora.rank", -1),
    ("lora.alpha", 0.0),
    ("lora.rank", 2**17),
    ("optimizer.options", {"b1": "x"}),
    ("optimizer.options", {"eps": None}),
    # What 32 bits do not hold.
    ("optimizer.learning_rate", 1e308),
    ("rollout.temperature", 1e-300),  # 0 on a device
    ("rollout.prompts", 10**30),
    ("rollout.max_new_tokens", 2**31),
    ("rollout.prompts", 2**29),  # rows of a step
    ("rollout.max_prompt_tokens", 1024, LONG),
    ("steps", 10**26),
    ("rollout.slots", 10**12),
    ("evaluation.slots", 10**12),
    ("reward_weights", [-1e39], {"reward": ["exact"]}),
    ("optimizer.options", {"eps": 1e-50}),
    ("update.advantage_options", {"k": 10**20}, {"update.advantage": "pass_at_k"}),
    ("reward_timeout", 1e10),  # which no clock of the system counts to
    ("environment", None, {"task": "environment"}),
    ("model", None, {"task": "x.jsonl"}),
    ("update.mini_batches", 4, {"rollout.prompts": 6}),
    ("rollout.slots", 3, {"mesh.data": 2}),
    ("evaluation.slots", 3, {"mesh.data": 2}),
    ("lora.dropout", 1.0, {"lora.rank": 4}),
    ("lora.alpha", NAN, {"lora.rank": 4}),
    ("lora.target_modules", [3], {"lora.rank": 4}),
    *(
        ("optimizer.schedule_options", options, {"optimizer.schedule": name})
        for name, options in [
            ("exponential_decay", {"x": 1}),
            ("constant_schedule", {"value": "x"}),
            ("piecewise_constant_schedule", {"boundaries_and_scales": [1]}),
            ("piecewise_constant_schedule", {"boundaries_and_scales": {"x": 0.5}}),
            ("piecewise_constant_schedule", {"boundaries_and_scales": {"1": {"x": 0.5}}}),
        ]
    ),
    *(
        ("update.advantage_options", options, {"update.advantage": name})
        for name, options in [
            ("pass_at_k", {}),
            ("pass_at_k", {"k": 9}),  # of 8 completions
            ("pass_at_k", {"k": 8}),  # of which there is one subset: all advantages are 0
            ("pkpo", {"k": 8}),
            ("pass_at_k", {"k": 2, "threshold": "x"}),
            ("pkpo", {"k": 0}),
            ("pkpo", {"k": 2, "baseline": "x"}),
            ("grpo", {"epsilon": None}),
            ("grpo", {"epsilon": -1.0}),  # below the deviation it turns the sign of advantages
            ("dgpo", {"epsilon": NAN}),
            ("reinforce_plus_plus", {"gamma": 1.5}),
            ("reinforce_plus_plus", {"gamma": NAN}),
            ("reinforce_plus_plus", {"gamma": "x"}),
        ]
    ),
    *(
        ("update.loss_options", options, {"update.loss": name})
        for name, options in [
            ("grpo", {"epsilon": 0.1}),  # an option of its own
            ("grpo", {"tau_neg": 1.05}),
            ("grpo", {"entropy_coef": "x"}),
            ("grpo", {"entropy_coef": None}),
            ("grpo", {"entropy_coef": [0.1]}),
            ("grpo", {"entropy_coef": True}),
            ("grpo", {"entropy_coef": NAN}),
            ("grpo", {"dual_clip": 1.2}),
            ("dapo", {"dual_clip": 1.28}),
            ("cispo", {"dual_clip": 3}),
            ("sapo", {"dual_clip": 3}),
            ("sapo", {"tau_neg": 0}),
            ("vespo", {"lambda_neg": 0}),
            ("dr_grpo", {"max_completion_length": -1}),
            ("ppo", {"loss_agg_mode": "x"}),
            ("ppo", {"loss_agg_mode": ["token-mean"]}),
        ]
    ),
    *(
        (name, value, {"environment": "x.py:Y"} | options)
        for name, value, options in [
            ("rollout.max_turns", 0, {}),
            ("rollout.max_episode_tokens", 1024, {}),
            ("rollout.max_failed", 2.0, {}),
            ("rollout.environment_timeout", 0.0, {}),
            ("rollout.history", "forget", {}),
            ("update.credit", "token", {}),
            ("update.gae_lambda", 0.9, {}),
            ("update.gae_lambda", 1.5, {"update.credit": "turn"}),
            ("update.advantage", "reinforce_plus_plus", {"update.credit": "turn"}),
            ("update.credit", "turn", {"update.advantage": "remax"}),
            ("update.credit", "mixed", {"update.advantage": "remax"}),
            ("update.advantage", "gdpo", {"reward": ["exact"]}),
            *(
                ("update.advantage", "gdpo", options | TWO_REWARDS_OF_TOOLS)
                for options in ({"update.credit": "turn"}, {"update.discount": 0.9})
            ),
            ("update.micro_batch_tokens", 100, {}),
        ]
    ),
]


def test_gdpo_takes_the_rewards_that_are_known_by_themselves():
    for options in ({}, TWO_REWARDS_OF_TOOLS, {"environment": "x.py:Y", "update.discount": 0.9}):
        config_of({"update.advantage": "gdpo"} | options)


def test_all_completions_may_be_compared_with_smaller_subsets():
    options = {"k": 8, "baseline": "leave_one_out_minus_one"}
    config_of({"update.advantage": "pkpo", "update.advantage_options": options})


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_be_is_refused_by_name(case):
    name, value, *others = case
    options = dict(*others) | {name: value}
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}\b"):
        config_of(options)


@pytest.mark.parametrize(
    ("reward", "message"),
    [(None, "must go with named rewards"), (["exact", "math"], "must have a number for each of 2")],
)
def test_weights_are_those_of_the_rewards(reward, message):
    with pytest.raises(ValueError, match=rf"^reward_weights {message}"):
        TrainConfig(reward=reward, reward_weights=[1.0])


@pytest.mark.parametrize("value", [NAN, -1e-3])
def test_learning_rates_that_cannot_be_are_refused_before_a_run(value, tmp_path):
    """They are computed when a run starts: a schedule of Optax needs a device for that."""
    falling = {"end_value": value, "power": 1, "transition_steps": 2}
    optimizer = OptimizerConfig(schedule="polynomial_schedule", schedule_options=falling)
    with pytest.raises(ValueError, match=r"^optimizer\.schedule_options .* in step [123] with"):
        train(TrainConfig(optimizer=optimizer, steps=3, output_dir=str(tmp_path / "run")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("transition_steps", "rate"), [(1, "-"), (2, "nan")])
def test_learning_rates_between_the_first_and_the_last_are_looked_at(transition_steps, rate):
    """A negative factor to the power of step / transition_steps: 1 in the first and last of 5."""
    options = {"transition_steps": transition_steps, "decay_rate": -0.5}
    optimizer = OptimizerConfig(schedule="exponential_decay", schedule_options=options)
    config = TrainConfig(optimizer=optimizer, steps=5)
    assert config.learning_rate(0) > 0 and config.learning_rate(4) > 0
    with pytest.raises(
        ValueError, match=rf"^optimizer\.schedule_options .* got {rate}.* in step 2 "
    ):
        check_learning_rates(config)
    check_learning_rates(dataclasses.replace(config, steps=1))
    check_learning_rates(dataclasses.replace(config, steps=0))


def test_of_many_learning_rates_a_million_are_looked_at():
    falling = {"end_value": -1.0, "power": 1, "transition_steps": 10**9}
    optimizer = OptimizerConfig(schedule="polynomial_schedule", schedule_options=falling)
    with pytest.raises(ValueError, match=r"^optimizer\.schedule_options "):
        check_learning_rates(TrainConfig(optimizer=optimizer, steps=10**9))


@pytest.mark.slow
def test_a_configuration_uses_no_device():
    """Several processes find each other with its settings, before JAX initializes its devices."""
    code = """
import socket

import jax
from twinkle_jax.training import OptimizerConfig, TrainConfig, UpdateConfig

TrainConfig(
    optimizer=OptimizerConfig(
        name="muon",
        options={"beta": 0.5},
        schedule="exponential_decay",
        schedule_options={"transition_steps": 1, "decay_rate": 0.5},
    ),
    update=UpdateConfig(advantage="pkpo", advantage_options={"k": 2}),
)
with socket.create_server(("localhost", 0)) as free:
    port = free.getsockname()[1]
jax.distributed.initialize(f"localhost:{port}", 1, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_json_gives_a_configuration_back():
    options = OptimizerConfig(options={"b1": 0.8, "b2": 0.95})
    config = TrainConfig(seed=3, optimizer=options, reward=["exact", "math"])
    assert from_dict(as_saved(config)) == config
    assert TrainConfig(reward=["exact"]) == TrainConfig(reward="exact")
    assert from_dict({"rollout": None}) == TrainConfig()
    for section in (0, "", []):
        with pytest.raises(ValueError, match=r"^rollout "):
            from_dict({"rollout": section})


def test_the_learning_rate_rises_and_falls():
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=4, schedule="linear")
    config = TrainConfig(steps=8, optimizer=optimizer)
    rates = [config.learning_rate(step) for step in range(9)]
    assert rates == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0]
    short = TrainConfig(steps=2, optimizer=optimizer)
    assert [short.learning_rate(step) for step in range(2)] == [0.25, 0.5]
    constant = dataclasses.replace(optimizer, schedule="constant")
    assert TrainConfig(optimizer=constant).learning_rate(100) == 1.0


def test_a_schedule_of_optax_that_rises_is_not_warmed_up_twice():
    options = {"warmup_steps": 20, "decay_steps": 100}
    name = "warmup_cosine_decay_schedule"
    optimizer = OptimizerConfig(learning_rate=1.0, schedule=name, schedule_options=options)
    config = TrainConfig(steps=100, optimizer=optimizer)
    assert [config.learning_rate(step) for step in (0, 5, 20)] == [0, 0.25, 1]
    both = dataclasses.replace(optimizer, warmup_steps=10)  # 6 / 10 of it then
    rate = TrainConfig(steps=100, optimizer=both).learning_rate(5)
    assert rate == pytest.approx(0.15, rel=1e-6)
    assert TrainConfig().optimizer.warmup_steps == 10


def test_a_schedule_of_optax():
    optimizer = OptimizerConfig(
        learning_rate=1.0,
        warmup_steps=0,
        schedule="exponential_decay",
        schedule_options={"transition_steps": 1, "decay_rate": 0.5},
    )
    config = TrainConfig(optimizer=optimizer)
    assert [config.learning_rate(step) for step in range(3)] == [1.0, 0.5, 0.25]
    warm = TrainConfig(optimizer=dataclasses.replace(optimizer, warmup_steps=2))  # counts from 0
    assert [warm.learning_rate(step) for step in range(3)] == [0.5, 0.5, 0.25]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_learning_rate_falls_as_in_transformers(name):
    get = "pip install 'twinkle-jax[oracle]'"
    transformers = pytest.importorskip("transformers", reason=get)
    torch = pytest.importorskip("torch", reason=get)
    optimizer = OptimizerConfig(learning_rate=0.5, warmup_steps=4, schedule=name)
    config = TrainConfig(steps=10, optimizer=optimizer)
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    make = getattr(transformers, f"get_{name}_schedule_with_warmup")
    scheduler = make(theirs, num_warmup_steps=4, num_training_steps=10)
    for step in range(1, 11):
        theirs.step()
        scheduler.step()
        (rate,) = scheduler.get_last_lr()
        # Theirs rises from 0, which is an update of nothing: ours is a step ahead until the peak.
        assert config.learning_rate(step if step >= 4 else step - 1) == pytest.approx(rate)


def loss_of(**changes):
    return make_loss(
        TrainConfig(update=UpdateConfig(**changes), rollout=RolloutConfig(max_new_tokens=9))
    )


def test_a_loss_gets_the_settings_that_it_takes():
    assert loss_of(loss="GRPOLoss", epsilon=0.1) == GRPOLoss(0.1)
    settings = {"epsilon": 3e-4, "epsilon_high": 4e-4, "kl_beta": 0.5}
    assert loss_of(loss="gspo", **settings) == GSPOLoss(3e-4, 4e-4, 0.5)
    assert loss_of(loss="dr_grpo") == DRGRPOLoss(max_completion_length=9)
    corrected = loss_of(correction="token_mask", correction_cap=3.0)
    assert corrected == GRPOLoss(correction=ImportanceCorrection("token_mask", 3.0))


def test_a_loss_gets_its_own_options():
    options = {"entropy_coef": 0.01, "dual_clip": 3}
    assert loss_of(loss_options=options) == GRPOLoss(entropy_coef=0.01, dual_clip=3)
    assert loss_of(loss="sapo", loss_options={"tau_neg": 1.05}) == SAPOLoss(tau_neg=1.05)
    longer = {"max_completion_length": 4096}
    assert loss_of(loss="dr_grpo", loss_options=longer) == DRGRPOLoss(max_completion_length=4096)
    assert loss_of(loss_options={"dual_clip": None}) == GRPOLoss()
    assert loss_of(loss_options={"off_policy_delta": 0.1}) == GRPOLoss(off_policy_delta=0.1)
    assert loss_of(loss_options={"off_policy_delta": None}) == GRPOLoss()
    with pytest.raises(ValueError, match=r"^update\.loss_options: off_policy_delta .* above 0"):
        loss_of(loss_options={"off_policy_delta": 0})


def test_a_loss_of_ones_own_may_have_a_dual_clip_without_an_upper_range(monkeypatch):
    mine = dict(LOSSES)
    for module in ("loss.loss_object", "training.config"):
        monkeypatch.setattr(f"twinkle_jax.{module}.LOSSES", mine)

    class Symmetric(PolicyLoss, name="symmetric_with_dual_clip"):
        def __init__(self, epsilon=0.2, beta=0.0, *, dual_clip=None):
            self.epsilon, self.beta, self.dual_clip = epsilon, beta, dual_clip

    mine = {"loss": "symmetric_with_dual_clip", "epsilon": 0.3}
    assert loss_of(**mine, loss_options={"dual_clip": 1.4}).dual_clip == 1.4
    with pytest.raises(ValueError, match=r"^update\.loss_options: dual_clip .* above 1\.3"):
        loss_of(**mine, loss_options={"dual_clip": 1.3})


def test_a_weight_may_be_bounded_by_1():
    """Where tokens that reach the bound keep their gradient."""
    assert loss_of(loss="cispo", epsilon=0.0) == CISPOLoss(0.0)
    assert loss_of(loss="vespo", epsilon=0.0) == VESPOLoss(epsilon=0.0)  # which has no effect


def test_dr_grpo_divides_by_all_turns_of_an_episode():
    config = TrainConfig(
        environment="games.py:Guess",
        rollout=RolloutConfig(max_new_tokens=9, max_turns=4),
        update=UpdateConfig(loss="dr_grpo"),
    )
    assert make_loss(config) == DRGRPOLoss(max_completion_length=36)


def test_adamw_has_its_own_defaults_unless_options_say_otherwise():
    def optimizer(**options):
        return run_optimizer(TrainConfig(optimizer=OptimizerConfig(**options)))

    assert optimizer() is make_optimizer("adamw", b2=0.99, weight_decay=0.0)
    decayed = optimizer(options={"weight_decay": 0.1})
    assert decayed is make_optimizer("adamw", b2=0.99, weight_decay=0.1)
    assert optimizer(name="lion") is make_optimizer("lion")


@pytest.mark.parametrize("name", ["grop", "cross_entropy", "DPOLoss", "ppo_value", "mse", ""])
def test_losses_that_do_not_learn_from_rewards_are_refused_at_once(name):
    with pytest.raises(ValueError, match=r"^update.loss"):
        TrainConfig(update=UpdateConfig(loss=name))
