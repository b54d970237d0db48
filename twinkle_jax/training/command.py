"""The command `twinkle-jax`: train, evaluate, sample and export, with flags or a YAML file."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from twinkle_jax.data.missing_extra import require

_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError)


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
        parser, runs = _parser()
        given = parser.parse_args(arguments)
        name = given.subcommand
        return runs[name](getattr(given, name))
    except _ERRORS as error:
        print(f"twinkle-jax: {_one_line(error)}", file=sys.stderr)  # noqa: T201
        return 1


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> tuple[Any, dict[str, Any]]:
    from jsonargparse import ArgumentParser

    from twinkle_jax.training.config import TrainConfig

    parser = ArgumentParser(prog="twinkle-jax", description="Train language models by rewards.")
    commands = parser.add_subcommands(required=True)
    train = ArgumentParser(description="Train a policy by rewards; without arguments, a small one.")
    train.add_argument("--config", action="config", help="a YAML file of the same names")
    train.add_class_arguments(TrainConfig, as_group=False)
    commands.add_subcommand("train", train, help="train a policy by rewards")

    evaluate = ArgumentParser(description="Judge a policy on problems with known answers.")
    _add_policy(evaluate)
    evaluate.add_argument(
        "--task", default="arithmetic", help="arithmetic, gsm8k, gsm8k:FILE or a JSONL"
    )
    evaluate.add_argument("--level", type=int, default=2, help="of the arithmetic task")
    evaluate.add_argument("--reward", default=None, help="exact, math, gsm8k or FILE.py:NAME")
    evaluate.add_argument("--problems", type=int, default=256)
    evaluate.add_argument("--pass_k", type=int, default=0, help="also measure pass@k")
    evaluate.add_argument("--max_new_tokens", type=int, default=512)
    commands.add_subcommand("evaluate", evaluate, help="judge a policy")

    sample = ArgumentParser(description="Show completions of a prompt.")
    _add_policy(sample)
    sample.add_argument("prompt", help="what the user says")
    sample.add_argument("--system", default=None, help="what the system says first")
    sample.add_argument("--num_samples", type=int, default=4)
    sample.add_argument("--max_new_tokens", type=int, default=128)
    sample.add_argument("--temperature", type=float, default=1.0)
    sample.add_argument("--top_k", type=int, default=0)
    sample.add_argument("--top_p", type=float, default=1.0)
    sample.add_argument("--min_p", type=float, default=0.0)
    commands.add_subcommand("sample", sample, help="show completions of a prompt")

    export = ArgumentParser(description="Write the policy of a run's checkpoint as a checkpoint.")
    export.add_argument("run", help="the directory of a run")
    export.add_argument("directory", help="where to write a Hugging Face checkpoint")
    export.add_argument("--step", type=int, default=None, help="the newest by default")
    commands.add_subcommand("export", export, help="write a Hugging Face checkpoint")
    return parser, {"train": _train, "evaluate": _evaluate, "sample": _sample, "export": _export}


def _add_policy(parser: Any) -> None:
    parser.add_argument("--model", required=True, help="a checkpoint, or the directory of a run")
    parser.add_argument("--seed", type=int, default=0)


def _train(given: Any) -> int:
    from twinkle_jax.training.loop import train

    summary = train(_config(given))
    return 143 if summary["interrupted"] else 0


def _config(given: Any) -> Any:
    """Make the dataclasses of what was parsed, which jsonargparse has checked the types of."""
    from twinkle_jax.training.config import TrainConfig, from_dict

    values = given.as_dict()
    return from_dict({field.name: values[field.name] for field in fields(TrainConfig)})


def _policy(path: str) -> Any:
    from twinkle_jax.training.policy import load_policy

    trained = Path(path) / "policy"
    return load_policy(str(trained) if trained.is_dir() else path)


def _evaluate(given: Any) -> int:
    from twinkle_jax.training.config import EvaluationConfig, TrainConfig
    from twinkle_jax.training.evaluation import evaluate
    from twinkle_jax.training.tasks import hub_id, make_task

    without_file = given.task == "arithmetic" or hub_id(given.task) is not None
    file = None if without_file else given.task.removeprefix("gsm8k:")
    task = make_task(
        TrainConfig(
            task=given.task,
            level=given.level,
            reward=given.reward,
            seed=given.seed,
            evaluation=EvaluationConfig(problems=given.problems, path=file),
        )
    )
    results = evaluate(
        _policy(given.model),
        task.held_out,
        task.reward,
        max_new_tokens=given.max_new_tokens,
        pass_k=given.pass_k,
        seed=given.seed,
    )
    for name, value in results.items():
        print(f"{name} {value:.4f}")  # noqa: T201
    return 0


def _sample(given: Any) -> int:
    import jax

    from twinkle_jax.data import Message, Trajectory, message_text
    from twinkle_jax.sampler import Sampling
    from twinkle_jax.training.display import harmless
    from twinkle_jax.training.rollout import draw_rollout, encode_prompts, read_texts

    policy = _policy(given.model)
    system = [Message(role="system", content=given.system)] if given.system else []
    prompt = Trajectory(messages=[*system, Message(role="user", content=given.prompt)])
    tokens, mask = encode_prompts(policy.template, [prompt], longest=1 << 20)
    sampling = Sampling(
        given.temperature,
        given.top_k,
        given.top_p,
        given.min_p,
        stop_tokens=policy.tokenizer.stop_token_ids,
    )
    rollout = draw_rollout(
        policy.params,
        policy.config,
        tokens,
        mask,
        jax.random.key(given.seed),
        sampling,
        num_samples=given.num_samples,
        max_new_tokens=given.max_new_tokens,
    )
    for said in read_texts(rollout, [prompt], policy.template).trajectories:
        print(harmless(message_text(said["messages"][-1])))  # noqa: T201
    return 0


def _export(given: Any) -> int:
    from twinkle_jax.training.export import export

    export(given.run, given.directory, step=given.step)
    print(f"wrote {given.directory}")  # noqa: T201
    return 0
