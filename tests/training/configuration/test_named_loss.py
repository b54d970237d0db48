"""The loss by its name: what it takes of a run's settings, and which ones there are."""

import pytest

from twinkle_jax.loss import DRGRPOLoss, GRPOLoss, GSPOLoss
from twinkle_jax.training import TrainConfig, UpdateConfig
from twinkle_jax.training.configuration.named_loss import make_loss
from twinkle_jax.training.configuration.resolve import resolve

NAMES = "bnpo, cispo, dapo, dr_grpo, grpo, gspo, ppo, sapo"


def test_a_loss_gets_the_settings_that_it_takes():
    assert make_loss(UpdateConfig(loss="GRPOLoss", epsilon=0.1), 9) == GRPOLoss(0.1)
    own = UpdateConfig(loss="gspo", epsilon=3e-4, epsilon_high=4e-4, kl_beta=0.5)
    assert make_loss(own, 9) == GSPOLoss(3e-4, 4e-4, 0.5)


def test_dr_grpo_divides_by_the_most_tokens_of_a_completion():
    assert make_loss(UpdateConfig(loss="dr_grpo"), 9) == DRGRPOLoss(max_completion_length=9)


@pytest.mark.parametrize("name", NAMES.split(", "))
def test_without_other_settings_a_loss_is_the_librarys(name):
    made = make_loss(UpdateConfig(loss=name), 1024)
    assert made == type(made)()


@pytest.mark.parametrize("name", ["grop", "cross_entropy", "DPOLoss", "ppo_value", "mse", ""])
def test_losses_that_do_not_learn_from_rewards_are_refused_at_once(name):
    with pytest.raises(ValueError, match=f"update.loss must be one of {NAMES}, got '{name}'"):
        resolve(TrainConfig(update=UpdateConfig(loss=name)))
