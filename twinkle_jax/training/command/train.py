"""`twinkle-jax train`: a run as flags or a YAML file describe it."""

from dataclasses import fields
from typing import Any

from twinkle_jax.training.configuration.train_config import TrainConfig, from_dict
from twinkle_jax.training.run.loop import train

DESCRIPTION = "Train a policy by rewards; without arguments, a small one."


def add_options(parser: Any) -> None:
    """Give each field of `TrainConfig` a flag."""
    parser.add_argument("--config", action="config", help="a YAML file of the same names")
    parser.add_class_arguments(TrainConfig, as_group=False)


def run(given: Any) -> int:
    """Train; the exit status tells whether a signal ended the run."""
    values = given.as_dict()  # whose types jsonargparse has checked
    config = from_dict({field.name: values[field.name] for field in fields(TrainConfig)})
    return 143 if train(config)["interrupted"] else 0
