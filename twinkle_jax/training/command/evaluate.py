"""`twinkle-jax evaluate`: accuracy of a policy on problems with known answers."""

from typing import Any

from twinkle_jax.training.command.read_policy import add_policy, read_policy
from twinkle_jax.training.configuration.parts import EvaluationConfig
from twinkle_jax.training.configuration.tasks import hub_id, make_task
from twinkle_jax.training.configuration.train_config import TrainConfig
from twinkle_jax.training.step.evaluation import evaluate

DESCRIPTION = "Judge a policy on problems with known answers."


def add_options(parser: Any) -> None:
    """Add what is judged, and how."""
    add_policy(parser)
    parser.add_argument(
        "--task", default="arithmetic", help="arithmetic, gsm8k, gsm8k:FILE or a JSONL"
    )
    parser.add_argument("--level", type=int, default=2, help="of the arithmetic task")
    parser.add_argument("--reward", default=None, help="exact, math, gsm8k or FILE.py:NAME")
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--pass_k", type=int, default=0, help="also measure pass@k")
    parser.add_argument("--max_new_tokens", type=int, default=512)


def run(given: Any) -> int:
    """Print one line for each number."""
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
        read_policy(given.model),
        task.held_out,
        task.reward,
        max_new_tokens=given.max_new_tokens,
        pass_k=given.pass_k,
        seed=given.seed,
    )
    for name, value in results.items():
        print(f"{name} {value:.4f}")  # noqa: T201
    return 0
