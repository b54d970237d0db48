"""The command `twinkle-jax`: its sub-commands and options, and errors as one line."""

import dataclasses
import difflib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twinkle_jax._package import require
from twinkle_jax.data import Message, Trajectory, message_text
from twinkle_jax.data.settings import AUTO, check_32_bits
from twinkle_jax.rollout import RolloutConfig
from twinkle_jax.sampler import Filters
from twinkle_jax.training import EvaluationConfig, TrainConfig
from twinkle_jax.training.config import (
    automatic_logp_diff,
    automatic_settings,
    automatic_transfers,
    flat,
    from_dict,
    not_a_section,
    optional_settings,
)
from twinkle_jax.training.effects import check_effects

_MAX_TURNS = RolloutConfig().max_turns
_PARSER_MODE = "yaml_or_text"
_NULL = ("", "~", "null", "Null", "NULL")  # what YAML reads as null
_NONE = ("none", "None")  # what options without a value are called in --help, and by Python
_OPTIONAL = ("environment", "tools", "task", "reward", "system", "step")  # but for `train`
# Options of TRL, verl and other trainers, for suggestions; by the last part of a name.
_OPTIONS_ELSEWHERE = {
    "batch_size": "rollout.prompts",
    "beta": "update.kl_beta",
    "bf16": "dtype",
    "clip_ratio": "update.epsilon",
    "clip_ratio_high": "update.epsilon_high",
    "clip_ratio_low": "update.epsilon",
    "dataset_name": "task",
    "gradient_checkpointing": "update.recompute",
    "kl_coef": "update.kl_beta",
    "kl_loss_coef": "update.kl_beta",
    "loss_agg_mode": "update.loss",
    "loss_type": "update.loss",
    "lr": "optimizer.learning_rate",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "model_name_or_path": "model",
    "num_generations": "rollout.num_samples",
    "num_iterations": "update.epochs",
    "off_policy_mask_threshold": "update.loss_options",
    "per_device_train_batch_size": "rollout.prompts",
    "ppo_epochs": "update.epochs",
    "ppo_mini_batch_size": "update.mini_batches",
    "reward_funcs": "reward",
    "save_steps": "logging.checkpoint_every",
    "scale_rewards": "update.scale",
    "steps_per_generation": "update.mini_batches",
    "top_entropy_quantile": "update.top_entropy",
    "train_batch_size": "rollout.prompts",
    "use_kl_in_reward": "update.kl_in",
}
_SECTIONS = {"evaluation": EvaluationConfig, "rollout": RolloutConfig}  # that `evaluate` fills in
# Of `evaluate`, with the names that they have in `RolloutConfig`.
_ROLLOUT_OPTIONS = ("max_new_tokens", "max_prompt_tokens", "max_turns", "max_failed")
_NOT_INHERITED = ("resume", "overwrite", "output_dir", "distributed")  # by a resumed run


class Subcommand(NamedTuple):
    """One sub-command.

    Attributes:
        description: one line for `--help`.
        add_options: gives a parser its options.
        run: runs it and returns the exit status.
        positional: arguments that are no options, for `--help`.
    """

    description: str
    add_options: Callable[[Any], None]
    run: Callable[[Any], int]
    positional: str = ""


def _train_options(parser: Any) -> None:
    """Add an option for each field of `TrainConfig`."""
    parser.add_argument("--config", action="config", help="a YAML file with settings by name")
    parser.add_class_arguments(TrainConfig, as_group=False)


def _train(options: Any) -> int:
    from twinkle_jax.training import train

    values = options.as_dict()  # whose types jsonargparse has checked
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    config = from_dict({name: values[name] for name in names})
    return 143 if train(config)["interrupted"] else 0


def resumed_settings(options: Any) -> dict[str, Any]:
    """Read the settings of the run to resume; empty for a new run."""
    from twinkle_jax.training.run_directory import run_to_resume, saved_settings

    source = run_to_resume(options.resume, Path(options.output_dir).expanduser())
    if source is None:
        return {}
    settings = flat(saved_settings(source))
    # What follows from server.overlap and mesh.tensor, which the resumed run may change.
    overlap, tensor = settings.get("server.overlap", False), settings.get("mesh.tensor", 1)
    automatic = {
        "update.max_logp_diff": automatic_logp_diff(settings["dtype"], overlap=overlap),
        "mesh.transfers": automatic_transfers(small=settings["model"] is None, tensor=tensor),
    }
    for name, value in automatic.items():
        if settings.get(name) == value:
            settings.pop(name, None)
    return {n: value for n, value in settings.items() if n.split(".")[0] not in _NOT_INHERITED}


def evaluation_settings(options: Any) -> dict[str, Any]:
    """Read what a run is evaluated with; empty for a checkpoint."""
    from twinkle_jax.training.task import has_held_out

    run = _run_config(options.model)
    if run is None:
        return {}
    task: str | None = run.task
    if run.evaluation.path is not None:
        is_gsm8k = run.task.partition(":")[0] == "gsm8k"
        task = f"gsm8k:{run.evaluation.path}" if is_gsm8k else run.evaluation.path
    if not has_held_out(run.task) and (run.evaluation.path is None or run.task == "examples"):
        task = None  # it was trained on all that the file holds
    return {
        "task": task,
        "environment": run.environment,
        "tools": run.tools,
        "level": run.level,
        "reward": run.evaluation.reward or run.reward,
        "system": run.system,
        "seed": run.seed,
        "problems": run.evaluation.problems,
        "pass_k": run.evaluation.pass_k,
        **{name: getattr(run.rollout, name) for name in _ROLLOUT_OPTIONS},
    }


def _run_config(model: str) -> TrainConfig | None:
    """Read the settings of a run, but for where it ran; None for a checkpoint."""
    from twinkle_jax.training.run_directory import holds_run, saved_settings

    run = Path(model).expanduser()
    if not holds_run(run):
        return None
    places = (*_NOT_INHERITED, "server", "mesh")
    return from_dict({k: x for k, x in saved_settings(run).items() if k not in places})


def _add_policy(parser: Any) -> None:
    """Add the options that name a policy and a seed."""
    parser.add_argument(
        "--model",
        required=True,
        help="directory of a run, or directory or hub id of a checkpoint or an adapter",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")


def _add_environment(parser: Any) -> None:
    """Add the options of episodes of several turns."""
    parser.add_argument(
        "--environment",
        type=str | None,
        default=None,
        help="what the policy talks to, as for train",
    )
    parser.add_argument(
        "--tools",
        type=str | None,
        default=None,
        help="FILE.py with functions that the policy may call, or FILE.py:NAME",
    )
    parser.add_argument(
        "--max_turns", type=int, default=_MAX_TURNS, help="the most turns of an episode"
    )


def _read_policy(path: str) -> Any:
    from twinkle_jax.training import load_policy
    from twinkle_jax.training.checkpoint import RunCheckpoints
    from twinkle_jax.training.run_directory import holds_run, read_summary

    run = Path(path).expanduser()
    trained = run / "policy"
    if holds_run(run):
        ended = read_summary(run).get("steps")
        newest = max(RunCheckpoints(run / "checkpoints").steps(), default=0)
        problem = None if trained.is_dir() else "which has no policy yet"
        if problem is None and ended is not None and newest > ended:
            problem = f"which has gone on after step {ended}, whose policy {trained} is"
        if problem is not None:
            raise ValueError(
                f"model must be a run that has ended, got {path}, {problem}: "
                f"twinkle-jax export {path} DIRECTORY writes that of its last checkpoint"
            )
    return load_policy(str(trained) if trained.is_dir() else path, argument="model")


def _dtype_of(path: str) -> Any:
    """Return the type of activations of a run, or of one that would train this checkpoint."""
    from twinkle_jax.training.start import with_dtype

    run = _run_config(path)
    return with_dtype(TrainConfig(model=path), None).dtype if run is None else run.dtype


def _evaluate_options(parser: Any) -> None:
    _add_policy(parser)
    parser.add_argument(
        "--task",
        type=str | None,
        default=None,
        help="arithmetic, gsm8k, gsm8k:FILE, or a file of prompts and answers (JSON Lines, or "
        ".parquet); none: the environment's, or arithmetic",
    )
    _add_environment(parser)
    parser.add_argument(
        "--level", type=int, default=2, help="difficulty of the arithmetic task, 1 to 6"
    )
    parser.add_argument(
        "--reward",
        type=list[str] | str | None,
        default=None,
        help="exact, math, gsm8k, FILE.py:NAME, MODULE:NAME or a reward model, several times for "
        "their sum; none: the task's own",
    )
    parser.add_argument("--problems", type=int, default=256, help="number of problems")
    parser.add_argument("--pass_k", type=int, default=0, help="k of pass@k; 0 leaves it out")
    parser.add_argument(
        "--max_new_tokens", type=int, default=512, help="the most tokens of a completion"
    )
    parser.add_argument(
        "--max_prompt_tokens", type=int, default=1024,
        help="the most tokens of a prompt; longer ones are refused",
    )  # fmt: skip
    parser.add_argument(
        "--max_failed", type=float, default=RolloutConfig().max_failed,
        help="share of environments that may fail",
    )  # fmt: skip
    parser.add_argument("--system", type=str | None, default=None, help="system message")


def _evaluate(options: Any) -> int:
    """Evaluate a policy, and print one metric a line."""
    from twinkle_jax.training.evaluation import held_out
    from twinkle_jax.training.memory import device_memory, fit_evaluation
    from twinkle_jax.training.task import has_held_out, make_task

    run = _run_config(options.model)
    if run is not None and options.task is None:
        raise ValueError(
            f"task must be given for a run without held-out problems, got none for {options.model}"
        )
    without_file = options.task is None or has_held_out(options.task)
    file = None if without_file else options.task.removeprefix("gsm8k:")
    base = TrainConfig(model=options.model) if run is None else run
    limits = {name: options[name] for name in _ROLLOUT_OPTIONS}
    rollout = dataclasses.replace(base.rollout, **limits)
    if rollout != base.rollout or not base.many_turns:
        rollout = dataclasses.replace(rollout, max_episode_tokens=AUTO)
    weights = None
    if run is not None and not run.evaluation.reward and options.reward == run.reward:
        weights = run.reward_weights
    level = options.level
    if run is not None and level == run.level and options.task != "arithmetic":
        level = TrainConfig.level  # it belongs to the task of the run
    config = dataclasses.replace(
        base,
        model=options.model,
        environment=options.environment,
        tools=options.tools,
        task=options.task,
        level=level,
        reward=options.reward,
        reward_weights=weights,
        system=options.system,
        seed=options.seed,
        warm_start=base.warm_start if run is None else 0.0,
        evaluation=EvaluationConfig(
            problems=options.problems,
            path=file,
            pass_k=options.pass_k,
            slots=base.evaluation.slots,
        ),
        rollout=rollout,
        update=dataclasses.replace(base.update, micro_batch_tokens=1 << 30),  # nothing is updated
    )
    check_effects(config)
    task, policy = make_task(config), _read_policy(options.model)
    config = dataclasses.replace(config, dtype=_dtype_of(options.model))
    _say(f"evaluating on {len(task.held_out)} problems; compiling first")
    limit = device_memory(None)
    if limit is not None and task.held_out:
        config = fit_evaluation(config, policy, task.reward_models(), limit, _say)
    results = held_out(config, task, policy)
    for name, value in results.items():
        print(f"{name} {value:.4f}")  # noqa: T201
    return 0


def _say(text: str) -> None:
    """Tell who sits at a terminal what a command does."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)  # noqa: T201


def _sample_options(parser: Any) -> None:
    _add_policy(parser)
    parser.add_argument(
        "prompt", nargs="?", type=str | None, default=None,
        help="message of the user; may be left out with an environment",
    )  # fmt: skip
    _add_environment(parser)
    parser.add_argument("--system", type=str | None, default=None, help="system message")
    parser.add_argument("--num_samples", type=int, default=4, help="completions to draw")
    parser.add_argument(
        "--max_new_tokens", type=int, default=128, help="the most tokens of a completion"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most probable token")
    for setting in dataclasses.fields(Filters):
        default = setting.default
        parser.add_argument(
            f"--{setting.name}", type=type(default), default=default,
            help=f"{default:g} for all tokens",
        )  # fmt: skip


def _sample(options: Any) -> int:
    """Print completions, each below a header line, with control characters escaped."""
    import jax

    from twinkle_jax.rollout import LocalEngine
    from twinkle_jax.rollout.engine import read_texts
    from twinkle_jax.training.display import harmless

    if not 0 <= options.seed < 2**32:
        raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {options.seed}")
    for name in ("max_new_tokens", "max_turns", "temperature"):
        check_32_bits(name, options[name])
    many_turns = options.environment is not None or options.tools is not None
    if options.max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, got {options.max_turns}")
    if options.max_turns != _MAX_TURNS and not many_turns:
        raise ValueError(
            "max_turns must go with an environment or tools, without which it has no effect, "
            f"got {options.max_turns}"
        )
    policy = _read_policy(options.model)
    if options.prompt is None and options.environment is None:
        raise ValueError(
            "PROMPT or --environment must be given, got neither: "
            "twinkle-jax sample PROMPT --model MODEL"
        )
    system = [Message(role="system", content=options.system)] if options.system else []
    user = [] if options.prompt is None else [Message(role="user", content=options.prompt)]
    prompt = Trajectory(messages=[*system, *user])
    dtype = _dtype_of(options.model)
    engine = LocalEngine(policy.config, policy.template, policy.frozen, dtype)
    settings = RolloutConfig(
        num_samples=options.num_samples,
        max_new_tokens=options.max_new_tokens,
        max_prompt_tokens=1 << 20,
        temperature=options.temperature,
        max_turns=options.max_turns,
        max_episode_tokens=1 << 20,
        **{setting.name: options[setting.name] for setting in dataclasses.fields(Filters)},
    )
    if many_turns:
        return _play(options, engine, policy.params, prompt, settings)
    drawn = engine.draw(policy.params, [prompt], jax.random.key(options.seed), settings)
    texts = read_texts(drawn, [prompt], policy.template)
    rows = zip(texts.trajectories, texts.lengths, texts.truncated, strict=True)
    for number, (trajectory, length, truncated) in enumerate(rows, 1):
        end = "cut off" if truncated else "ended"
        print(f"--- {number} of {options.num_samples}: {length} tokens, {end}")  # noqa: T201
        print(harmless(message_text(trajectory["messages"][-1])))  # noqa: T201
    return 0


def _play(
    options: Any, engine: Any, params: Any, prompt: Trajectory, settings: RolloutConfig
) -> int:
    """Print episodes as conversations."""
    import jax

    from twinkle_jax.rollout import MultiTurn, find_environment
    from twinkle_jax.training.display import harmless

    source = MultiTurn(engine, find_environment(options.environment, options.tools), settings)
    episodes = source.play(params, [prompt], jax.random.key(options.seed))
    for number, episode in enumerate(episodes, 1):
        rewards = ", ".join(f"{reward:g}" for reward in episode.rewards)
        end = f"{episode.ended} {harmless(episode.error)}".rstrip()
        print(f"--- {number} of {len(episodes)}: {end}, rewards {rewards or 'none'}")  # noqa: T201
        for message in episode.messages:
            print(f"{message['role']}: {harmless(message_text(message))}")  # noqa: T201
    return 0


def _export_options(parser: Any) -> None:
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("directory", help="where to write the policy")
    parser.add_argument(
        "--step",
        type=int | None,
        default=None,
        help="step of the checkpoint; the newest by default",
    )
    parser.add_argument(
        "--merge", action="store_true", help="add adapters to the kernels: a whole checkpoint"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what the directory holds")


def _export(options: Any) -> int:
    from twinkle_jax.training import export

    export(
        options.run,
        options.directory,
        step=options.step,
        merge=options.merge,
        overwrite=options.overwrite,
    )
    print(f"wrote {options.directory}")  # noqa: T201
    return 0


SUBCOMMANDS = {
    "train": Subcommand(
        "Train a policy from rewards; without options, a small built-in one.",
        _train_options,
        _train,
    ),
    "evaluate": Subcommand(
        "Evaluate a policy on problems with known answers; the directory of a run on its held-out "
        "problems, with its settings as the defaults.",
        _evaluate_options,
        _evaluate,
    ),
    "sample": Subcommand("Show completions of a prompt.", _sample_options, _sample, " PROMPT"),
    "export": Subcommand(
        "Write the policy of a run's checkpoint in Hugging Face's format.",
        _export_options,
        _export,
        " RUN DIRECTORY",
    ),
}


_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError, OverflowError)


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
            _print_error(_with_suggestion(str(error), arguments))
            return 2
        _keep_compiled_programs()
        name = options.subcommand
        return SUBCOMMANDS[name].run(options[name])
    except _ERRORS as error:
        from twinkle_jax.training.hosts import end_without_others, is_reported_by_another

        if not is_reported_by_another(error):
            message = str(error) or type(error).__name__
            _print_error(_without_sections(message) if "evaluate" in arguments[:1] else message)
        end_without_others(error)
        return 1
    except Exception as error:
        from twinkle_jax.training.hosts import end_without_others

        end_without_others(error, traceback=True)
        raise


def _without_sections(message: str) -> str:
    """Name settings as `evaluate` does, whose options have no sections as those of `train` have."""
    names = "|".join(
        field.name for kind in _SECTIONS.values() for field in dataclasses.fields(kind)
    )
    return re.sub(rf"(?<![\w./])({'|'.join(_SECTIONS)})\.({names})\b", r"\2", message)


def _print_error(message: str) -> None:
    from twinkle_jax.training.display import harmless

    line = harmless(" ".join(message.split()), encoding=sys.stderr.encoding or "utf-8")
    print(f"twinkle-jax: {line}", file=sys.stderr)  # noqa: T201


def _parse(arguments: list[str]) -> Any:
    arguments = _join_negative(_complete_switches(_join_repeated(arguments, "--reward")))
    arguments = _none_as_null(arguments)
    if arguments[:1] == ["train"]:
        arguments = _leave_out_auto(arguments)
    files, rest = _split_off(arguments, "--config")
    files = [path for path in files if _has_settings(Path(path))]
    # First, so that flags win over files wherever they stand.
    arguments = [*rest[:1], *(f"--config={path}" for path in files), *rest[1:]]
    options = _parser().parse_args(arguments)
    settings = {}  # of the run to resume or to evaluate, which are the defaults
    if options.subcommand == "train":
        settings = resumed_settings(options.train)
    elif options.subcommand == "evaluate":
        settings = evaluation_settings(options.evaluate)
    return _parser({options.subcommand: settings}).parse_args(arguments) if settings else options


def _parser(defaults: Mapping[str, dict[str, Any]] | None = None) -> Any:
    import yaml  # comes with jsonargparse
    from jsonargparse import ArgumentParser, set_loader

    class Parser(ArgumentParser):
        """Shows `auto` as the default of settings that the run chooses."""

        def format_help(self, formatter: Any = None) -> str:
            text = super().format_help(formatter) if formatter else super().format_help()
            automatic = r"(\(type:\s+)Optional\[((?!list)[^()]+)\](,\s+default:\s+)null\)"
            return re.sub(automatic, r"\1\2\3auto)", text)

    set_loader(_PARSER_MODE, _read_value, (yaml.YAMLError,))
    settings: dict[str, Any] = {
        "exit_on_error": False,
        "allow_abbrev": False,
        "parser_mode": _PARSER_MODE,
    }
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
        subparser.set_defaults((defaults or {}).get(name, {}))
        commands.add_subcommand(name, subparser, help=subcommand.description)
    return parser


def _read_value(text: str) -> Any:
    """Read YAML; but text that is a comment to YAML, such as `# Heading`, is text, and not null."""
    from jsonargparse import get_loader

    value = get_loader("yaml")(text)
    if isinstance(value, dict):
        return _read_words(value, set(automatic_settings()), set(optional_settings()))
    return text if value is None and text.strip() not in _NULL else value


def _read_words(
    settings: dict[Any, Any], automatic: set[str], optional: set[str], prefix: str = ""
) -> Any:
    """Leave out the settings of a file that are `auto`, and read `none`, where these are values."""
    read: dict[Any, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            read[key] = _read_words(value, automatic, optional, f"{key}.")
        elif value != "auto" or name not in automatic:
            read[key] = None if value in _NONE and name in optional else value
    return read


def _none_as_null(arguments: list[str]) -> list[str]:
    """Turn `none` into YAML's null for the options that need not have a value."""
    names = optional_settings() if arguments[:1] == ["train"] else _OPTIONAL
    options = {f"--{name}" for name in names}
    read: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if argument in _NONE and read and read[-1] in options:
            argument = "null"
        elif value in _NONE and name in options:
            argument = f"{name}=null"
        read.append(argument)
    return read


def _leave_out_auto(arguments: list[str]) -> list[str]:
    """Leave out options of `train` that are `auto`, where that is the default."""
    automatic = {f"--{name}" for name in automatic_settings()}
    kept: list[str] = []
    for argument in arguments:
        name, _, value = argument.rpartition("=")
        if argument == "auto" and kept[-1] in automatic:
            kept.pop()
        elif value != "auto" or name not in automatic:
            kept.append(argument)
    return kept


def _split_off(arguments: list[str], flag: str) -> tuple[list[str], list[str]]:
    """Return the values of an option, and the other arguments."""
    values, rest = [], []
    position = iter(arguments)
    for argument in position:
        if argument == flag:
            values.append(next(position, ""))
        elif argument.startswith(f"{flag}="):
            values.append(argument.removeprefix(f"{flag}="))
        else:
            rest.append(argument)
    return values, rest


def _has_settings(path: Path) -> bool:
    """Check a YAML file of settings; whether it has any.

    A key that stands twice is refused: the first one would be lost, with all below it.
    """
    import yaml  # comes with jsonargparse
    from jsonargparse import ArgumentError

    def visit(node: Any) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key in keys:
                if keys.count(key) > 1:
                    raise ValueError(f"{path} must have each setting once, got {key!r} twice")
            for _, value in node.value:
                visit(value)

    if not path.is_file():
        return True  # the parser says what it is
    try:
        root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        message = f"--config must be a file of YAML, got {path}: {error}"
        raise ArgumentError(None, message) from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ArgumentError(None, f"--config must be a file with settings by name, got {path}")
    visit(root)
    return root is not None


def _join_repeated(arguments: list[str], flag: str) -> list[str]:
    """Turn an option that is given several times into one with a list."""
    values, rest = _split_off(arguments, flag)
    return arguments if len(values) < 2 else [*rest, f"{flag}=[{', '.join(values)}]"]


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


def _join_negative(arguments: list[str]) -> list[str]:
    """Join a negative number to its option: argparse takes `-1e-4` for an option."""
    joined: list[str] = []
    for argument in arguments:
        is_number = re.fullmatch(r"-[\d.]+e[+-]?\d+", argument, re.IGNORECASE)
        if is_number and joined and re.fullmatch(r"--[^=]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _with_suggestion(message: str, arguments: Sequence[str]) -> str:
    match = re.search(
        r"[Uu]nrecognized arguments: (--[^\s=]+)|does not accept option '(.+)'", message
    )
    nested = re.search(r"Parser key \"([^\"]+)\".*?NestedArg\(key='([^']+)'", message, re.DOTALL)
    if nested is not None:  # `--warm_start.steps`, where `--warm_start` has no settings below it
        mistyped = f"--{nested.group(1)}.{nested.group(2)}"
    elif match is not None:
        mistyped = match.group(1) or f"--{match.group(2)}"  # on the command line, or in a file
    else:
        return _plain_type_error(_with_missing_options(message))
    if mistyped == "--prompt" and "sample" in arguments[:1]:
        return "the prompt of sample goes without --prompt: twinkle-jax sample PROMPT --model MODEL"
    known = sorted(set(re.findall(r"--[a-z][\w.]*", _help_of(arguments))))
    same = _OPTIONS_ELSEWHERE.get(mistyped.removeprefix("--").rpartition(".")[2])
    close = [f"--{same}"] if f"--{same}" in known else []
    close = close or difflib.get_close_matches(mistyped, known, n=3, cutoff=0.6)
    close += [name for name in known if name.endswith(f".{mistyped[2:]}") and name not in close]
    hint = f"; did you mean {' or '.join(close[:3])}?" if close else ""
    return f"unknown option {mistyped}{hint} (--help lists all)"


def _with_missing_options(message: str) -> str:
    """Name required options and arguments as they are typed: `--model`, `DIRECTORY`."""
    start, colon, names = message.partition("the following arguments are required: ")
    for subcommand, argument in re.findall(r"(\w+)\.(\w+)", names):
        position = argument.upper()
        typed = position if position in SUBCOMMANDS[subcommand].positional else f"--{argument}"
        names = names.replace(f"{subcommand}.{argument}", typed)
    return start + colon + names


def _plain_type_error(message: str) -> str:
    """Describe in one sentence which option has a value of the wrong type."""
    keys = re.findall(r'Parser key "([^"]+)"', message)  # of sections first, then of what is in it
    section = re.search(r"Unable to load config \"(.*)\"$", message, re.DOTALL)
    if section is not None:
        return not_a_section(keys[-1], section.group(1), "--")
    match = re.search(r".*(?:Given|Got) value: (.*)$", message, re.DOTALL)
    kinds = r"<class '(\w+)'>|typing\.Literal\[(.+?)\]|list\[(\w+)\]"
    union = re.search(r"Subtypes: \[.*\]$", message, re.MULTILINE)
    expected = union or re.search(rf"Expected an? (?:{kinds})", message)
    if match is None or not keys or expected is None:
        return re.sub(r'^Parser key "([^"]+)": ', r"--\1: ", message)
    types = [
        kind or (f"a list of {items}" if items else "one of " + choices.replace("'", ""))
        for kind, choices, items in re.findall(kinds, expected.group())
        if kind != "NoneType"
    ]
    return f"--{keys[-1]} must be {' or '.join(types)}, got {match.group(1)!r}"


def _help_of(arguments: Sequence[str]) -> str:
    """Return the help of the sub-command that is called."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    name = next((argument for argument in arguments if argument in SUBCOMMANDS), "train")
    SUBCOMMANDS[name].add_options(parser)
    text: str = parser.format_help()
    return text


def _keep_compiled_programs() -> None:
    """Cache compiled programs in the user's cache directory, unless JAX has a directory already."""
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir") is not None:  # noqa: B009
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # CPU programs are compiled for the instructions of one machine; machines may share a home.
    directory = cache / "twinkle_jax" / f"compiled-{platform.node()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home: no cache of compiled programs
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
