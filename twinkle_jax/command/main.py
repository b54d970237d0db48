"""The command `twinkle-jax`: its options, and errors as one line."""

import dataclasses
import difflib
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle_jax.command.subcommands import SUBCOMMANDS, resumed_settings
from twinkle_jax.data.missing_extra import require
from twinkle_jax.training import TrainConfig
from twinkle_jax.training.config import flat

_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit status: 0; 1 after an error, with one line on standard error; 2 for invalid
        options; 143 after a signal, when the run can be resumed.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        require("jsonargparse", "training")
        import jsonargparse

        try:
            options = _parse(arguments)
        except jsonargparse.ArgumentError as error:
            _complain(_with_suggestion(str(error), arguments))
            return 2
        _keep_compiled_programs()
        name = options.subcommand
        return SUBCOMMANDS[name].run(options[name])
    except _ERRORS as error:
        from twinkle_jax.training.hosts import end_without_others, is_reported_by_another

        if not is_reported_by_another(error):
            _complain(str(error) or type(error).__name__)
        end_without_others(error)
        return 1


def _complain(message: str) -> None:
    print(f"twinkle-jax: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201


def _parse(arguments: list[str]) -> Any:
    arguments = _complete_switches(_join_repeated(arguments, "reward"))
    options = _parser().parse_args(arguments)
    if options.subcommand == "train":
        # A resumed run has its settings; options are compared with them.
        settings = resumed_settings(options.train)
        if settings:
            options = _parser(settings).parse_args(arguments)
    return options


def _parser(train_settings: dict[str, Any] | None = None) -> Any:
    from jsonargparse import ArgumentParser

    class Parser(ArgumentParser):
        """Says `auto` for settings that the run chooses; their type has no null."""

        def format_help(self, formatter: Any = None) -> str:
            text = super().format_help(formatter) if formatter else super().format_help()
            return re.sub(r"(\(type:\s+[^(),|]+,\s+default:\s+)null\)", r"\1auto)", text)

    settings: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
    parser = Parser(
        prog="twinkle-jax",
        description="Train language models by reinforcement learning.",
        **settings,
    )
    commands = parser.add_subcommands(required=True)
    for name, subcommand in SUBCOMMANDS.items():
        usage = f"twinkle-jax {name} [options]{subcommand.positional}"
        subparser = Parser(description=subcommand.description, usage=usage, **settings)
        subcommand.add_options(subparser)
        if name == "train" and train_settings:
            subparser.set_defaults(train_settings)
        commands.add_subcommand(name, subparser, help=subcommand.description)
    return parser


def _join_repeated(arguments: list[str], name: str) -> list[str]:
    """Turn an option that is given several times into one with a list."""
    flag, values, rest = f"--{name}", [], []
    position = iter(arguments)
    for argument in position:
        if argument == flag:
            values.append(next(position, ""))
        elif argument.startswith(f"{flag}="):
            values.append(argument.removeprefix(f"{flag}="))
        else:
            rest.append(argument)
    if len(values) < 2:
        return arguments
    return [*rest, f"{flag}=[{', '.join(values)}]"]


def _complete_switches(arguments: list[str]) -> list[str]:
    """Let `--overwrite` alone mean `--overwrite=true`, for each of `train`'s switches."""
    if "train" not in arguments[:1]:
        return arguments
    settings = flat(dataclasses.asdict(TrainConfig()))
    switches = {f"--{name}" for name, value in settings.items() if isinstance(value, bool)}
    following = [*arguments[1:], "--"]
    return [
        f"{argument}=true" if argument in switches and value.startswith("--") else argument
        for argument, value in zip(arguments, following, strict=True)
    ]


def _with_suggestion(message: str, arguments: Sequence[str]) -> str:
    match = re.search(r"[Uu]nrecognized arguments: (--[^\s=]+)", message)
    if match is None:
        return _plain_type_error(message)
    mistyped = match.group(1)
    known = sorted(set(re.findall(r"--[a-z][\w.]*", _help_of(arguments))))
    close = difflib.get_close_matches(mistyped, known, n=3, cutoff=0.6)
    close += [name for name in known if name.endswith(f".{mistyped[2:]}") and name not in close]
    hint = f"; did you mean {' or '.join(close[:3])}?" if close else ""
    return f"unknown option {mistyped}{hint} (--help lists all)"


def _plain_type_error(message: str) -> str:
    """One sentence that names the option whose value has the wrong type."""
    match = re.search(r'Parser key "([^"]+)".*Given value: (.*)$', " ".join(message.split()))
    expected = re.findall(r"Expected an? <class '(\w+)'>", message)
    if match is None or not expected:
        return message
    types = " or ".join(name for name in expected if name != "NoneType")
    return f"--{match.group(1)} must be {types}, got {match.group(2)!r}"


def _help_of(arguments: Sequence[str]) -> str:
    """Give the help of the sub-command that is called."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    name = next((argument for argument in arguments if argument in SUBCOMMANDS), "train")
    SUBCOMMANDS[name].add_options(parser)
    text: str = parser.format_help()
    return text


def _keep_compiled_programs() -> None:
    """Keep what is compiled below the user's cache directory, unless JAX has been told where."""
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir") is not None:  # noqa: B009
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Programs for CPUs are made for one machine's instructions: a shared home has several.
    directory = cache / "twinkle_jax" / f"compiled-{platform.node()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home: no cache of compiled programs
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
