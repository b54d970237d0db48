"""The policy that a sub-command is about: that of a run, or a checkpoint."""

from pathlib import Path
from typing import Any

from twinkle_jax.training.policies.text_policy import Policy, load_policy


def add_policy(parser: Any) -> None:
    """Add the options that name a policy and a seed."""
    parser.add_argument("--model", required=True, help="a checkpoint, or the directory of a run")
    parser.add_argument("--seed", type=int, default=0)


def read_policy(path: str) -> Policy:
    """Read the policy of a run's directory, or a checkpoint in a directory or on the hub."""
    trained = Path(path) / "policy"
    return load_policy(str(trained) if trained.is_dir() else path)
