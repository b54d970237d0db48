"""The command `twinkle-jax`: its sub-commands, and one line for what is wrong."""

import sys
from collections.abc import Sequence
from typing import Any

from twinkle_jax.data.missing_extra import require
from twinkle_jax.training.command import evaluate, export, sample, train

_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError)
_SUBCOMMANDS = {
    "train": (train, "train a policy by rewards"),
    "evaluate": (evaluate, "judge a policy"),
    "sample": (sample, "show completions of a prompt"),
    "export": (export, "write a Hugging Face checkpoint"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit status: 0; 1 where something was wrong, which one line on standard error says; 143
        where a signal ended the run, which can be resumed.
    """
    try:
        require("jsonargparse", "training")
        given = _parser().parse_args(arguments)
        name = given.subcommand
        return _SUBCOMMANDS[name][0].run(getattr(given, name))
    except _ERRORS as error:
        print(f"twinkle-jax: {_one_line(error)}", file=sys.stderr)  # noqa: T201
        return 1


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="twinkle-jax", description="Train language models by rewards.")
    commands = parser.add_subcommands(required=True)
    for name, (subcommand, what_for) in _SUBCOMMANDS.items():
        own = ArgumentParser(description=subcommand.DESCRIPTION)
        subcommand.add_options(own)
        commands.add_subcommand(name, own, help=what_for)
    return parser
