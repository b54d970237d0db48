"""The tasks that a run can be given by name: prompts to train on, prompts to judge by, a reward."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from twinkle_jax.data import ArithmeticTask, Trajectory, read_gsm8k, read_jsonl
from twinkle_jax.reward.checked import RewardFunction
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.rewards import find_reward

_PROBLEMS = 100_000  # of the arithmetic task, before they come up again


class Task(NamedTuple):
    """What a policy is trained on.

    Attributes:
        train: prompts with their ground truths.
        held_out: prompts that are never trained on; empty where there are none.
        reward: of trajectories and ground truths.
    """

    train: Sequence[Trajectory]
    held_out: Sequence[Trajectory]
    reward: RewardFunction


def make_task(config: TrainConfig) -> Task:
    """Find the task that a configuration names.

    Args:
        config: of the run; `task`, `level`, `reward`, `system`, `seed` and `evaluation` are read.

    Returns:
        The task.

    Raises:
        ValueError: if there is no such task, or a record of its files is not what it should be.
    """
    count = config.evaluation.problems
    if config.task == "arithmetic":
        train = ArithmeticTask(config.level, size=_PROBLEMS, seed=config.seed)
        held_out = ArithmeticTask(config.level, split="eval", size=count, seed=config.seed)
        return Task(train, held_out, find_reward(config.reward or "exact"))
    kind, _, path = config.task.partition(":")
    gsm8k = kind == "gsm8k"
    if gsm8k and not path:
        raise ValueError("task must be gsm8k:FILE, the file in GSM8K's own format, got 'gsm8k'")
    read = read_gsm8k if gsm8k else read_jsonl
    files = {"task": path if gsm8k else config.task, "evaluation.path": config.evaluation.path}
    for name, file in files.items():
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{name} must be arithmetic, gsm8k:FILE or a JSONL file, got {file!r}")
    train_file, held_out_file = files.values()
    assert train_file is not None
    prompts = read(train_file, system=config.system)
    judged = read(held_out_file, system=config.system)[:count] if held_out_file else []
    return Task(prompts, judged, find_reward(config.reward or ("gsm8k" if gsm8k else "math")))
