"""`twinkle-jax export`: the policy of a run's checkpoint as a Hugging Face checkpoint."""

from typing import Any

from twinkle_jax.training.run.export import export

DESCRIPTION = "Write the policy of a run's checkpoint as a checkpoint."


def add_options(parser: Any) -> None:
    """Add from where, and where to."""
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("directory", help="where to write a Hugging Face checkpoint")
    parser.add_argument("--step", type=int, default=None, help="the newest by default")


def run(given: Any) -> int:
    """Write it, and say where."""
    export(given.run, given.directory, step=given.step)
    print(f"wrote {given.directory}")  # noqa: T201
    return 0
