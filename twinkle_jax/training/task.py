"""Tasks by name: prompts to train on, prompts to evaluate on, and a reward."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from twinkle_jax.data import (
    ArithmeticTask,
    Message,
    Trajectory,
    read_examples,
    read_gsm8k,
    read_jsonl,
    read_preferences,
    user_data_get,
)
from twinkle_jax.data.prompt_files import download_split
from twinkle_jax.data.prompts import GeneratedPrompts
from twinkle_jax.model import RewardModel, make_mesh
from twinkle_jax.reward import (
    RewardFunction,
    WeightedReward,
    as_reward,
    find_reward,
    find_rewards,
)
from twinkle_jax.reward.reward import REWARDS, ColumnsReward
from twinkle_jax.rollout import EnvironmentFactory, ProcessLimits, find_environment
from twinkle_jax.training.config import TrainConfig

_GSM8K = "openai/gsm8k"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_PROBLEMS = 100_000  # of the arithmetic task, before it repeats


def hub_id(task: str) -> str | None:
    """Return the hub id of the data set that a task names, or None."""
    kind, _, path = task.partition(":")
    path = path or _GSM8K
    is_file = Path(path).is_file() or Path(path).suffix in (".jsonl", ".json", ".parquet")
    return path if kind == "gsm8k" and not is_file and _HUB_ID.fullmatch(path) else None


def has_held_out(task: str) -> bool:
    """Whether a task has held-out problems of its own, without a file of them."""
    return task in ("arithmetic", "environment") or hub_id(task) is not None


class Task(NamedTuple):
    """What a policy is trained on, and what judges it.

    Without a reward, the environment's is the only one, a teacher judges prompts without answers,
    or examples are learned, which end with the answer.
    """

    train: Sequence[Trajectory]
    held_out: Sequence[Trajectory]  # never trained on; may be empty
    reward: RewardFunction | None
    judge: RewardFunction | None = None  # of evaluations; None: `reward`
    environment: EnvironmentFactory | None = None  # None: the policy completes prompts

    def reward_models(self) -> list[RewardModel]:
        """The models among the rewards, each once."""
        rewards: list[Any] = []
        for reward in (self.reward, self.judge):
            rewards += reward.rewards.values() if isinstance(reward, WeightedReward) else [reward]
        return list(dict.fromkeys(x for x in rewards if isinstance(x, RewardModel)))


class EnvironmentRows(GeneratedPrompts):
    """Rows without prompts, whose `user_data` holds their index, from that of the first on.

    The environment's reset gives the first message, but for the system's.
    """

    def __init__(self, size: int, *, system: str | None = None, first: int = 0) -> None:
        self.size, self._first = size, first
        self._messages = [Message(role="system", content=system)] if system else []

    def make(self, index: int) -> Trajectory:
        """Make the row of an index."""
        return Trajectory(messages=list(self._messages), user_data=[("index", self._first + index)])


def make_task(config: TrainConfig, reward: RewardFunction | None = None) -> Task:
    """Find the task that a configuration names; `reward` is in place of the one that it names.

    Raises:
        ValueError: for an unknown task, a missing file, an unreadable record, or records without
            what the reward needs.
        TypeError: if `reward` is none, see [`as_reward`][twinkle_jax.reward.as_reward].
    """
    environment = None
    if config.many_turns:
        environment = find_environment(
            config.environment,
            config.tools,
            tools_in=config.rollout.tools_in,
            environment_in=config.rollout.environment_in,
            limits=ProcessLimits(
                config.rollout.environment_timeout, config.rollout.process_megabytes
            ),
        )
    if config.task == "examples":
        if reward is not None:
            raise ValueError("reward must be none for the task examples, got one")
        return Task(_find_examples(config), _find_examples(config, held_out=True), None)
    train, held_out, fitting = _find_prompts(config)
    models: dict[str, RewardModel] = {}  # by name: the judge is often the same
    find = partial(_find_reward, config, models)
    if reward is None:
        # Environments give rewards themselves; named ones are added to them.
        needed = config.environment is None and (config.compares_rewards or _answered(train))
        names = config.rewards or ([fitting] if needed else [])
        # One reward without a weight is called directly: there is nothing to add up.
        reward = find(names[0]) if names else None
        if len(names) > 1 or config.reward_weights:
            reward = find_rewards(names, config.reward_weights, find=find)
    else:
        reward = as_reward(reward)
    judge = None
    if config.evaluation.reward:
        judge = find(config.evaluation.reward, argument="evaluation.reward")
    elif reward is None and config.environment is None and len(held_out):
        judge = find(fitting)
    for argument, prompts, scored_by in (
        ("task", train, reward),
        ("evaluation.path", held_out, judge or reward),
    ):
        if len(prompts):
            _check_reward(argument, prompts, scored_by, adds_columns=config.many_turns)
    if config.examples is not None:
        train = _find_examples(config)
    return Task(train, held_out, reward, judge, environment)


def _find_reward(
    config: TrainConfig, models: dict[str, RewardModel], name: str, *, argument: str = "reward"
) -> RewardFunction:
    """Find a reward by its name; read a reward model once, on the devices of this process."""
    if not is_reward_model(name):
        return find_reward(name, argument=argument)
    if name in models:
        return models[name]
    mesh, devices = config.mesh, jax.local_devices()
    if jax.process_count() == 1:
        devices = devices[: mesh.data * mesh.fsdp * mesh.tensor]
    spread = make_mesh(fsdp=len(devices), devices=devices) if len(devices) > 1 else None
    models[name] = RewardModel.from_pretrained(name, mesh=spread, argument=argument)
    return models[name]


def is_reward_model(name: str) -> bool:
    """Whether a reward is named by a directory or a hub id, rather than by a function."""
    if name in REWARDS or ":" in name or name.endswith(".py"):
        return False
    return "/" in name or Path(name).expanduser().is_dir()


def _check_reward(
    argument: str, prompts: Sequence[Trajectory], reward: Any, *, adds_columns: bool
) -> None:
    """Refuse a reward that needs what the prompts do not have; the first step would find it."""
    if isinstance(reward, WeightedReward):
        for part in reward.rewards.values():
            _check_reward(argument, prompts, part, adds_columns=adds_columns)
        return
    rows = prompts if isinstance(prompts, list) else prompts[:1]  # others are generated, and alike
    columns = dict.fromkeys(name for row in rows for name, _ in row["user_data"])
    answered = _answered(rows)
    if not answered and getattr(reward, "needs_ground_truth", False):
        raise ValueError(
            f"{argument} must have an 'answer' in each record for this reward, got none"
        )
    if isinstance(reward, ColumnsReward) and not adds_columns:
        answers = ["ground_truth", "answer"] if answered else []
        reward.check_columns([*dict.fromkeys([*columns, *answers]), "prompts", "completions"])


def _answered(prompts: Sequence[Trajectory]) -> bool:
    """Whether prompts have ground truths: all of a file do, or none."""
    return user_data_get(prompts[0]["user_data"], "ground_truth") is not None


def _find_examples(config: TrainConfig, *, held_out: bool = False) -> list[Trajectory]:
    name, file = "examples", config.examples
    if held_out:
        name, file = "evaluation.path", config.evaluation.path
    if file is None:
        return []
    _check_file(name, "a file", file)
    read = read_preferences if config.learns_pairs else read_examples
    examples = read(Path(file).expanduser(), system=config.system)
    return examples[: config.evaluation.problems] if held_out else examples


def _find_prompts(config: TrainConfig) -> tuple[Sequence[Trajectory], Sequence[Trajectory], str]:
    """Find prompts to train on, prompts to evaluate on, and the name of the reward that fits."""
    count = config.evaluation.problems
    if config.task == "environment":
        rows = EnvironmentRows(_PROBLEMS, system=config.system)
        return rows, EnvironmentRows(count, system=config.system, first=_PROBLEMS), "exact"
    if config.task == "arithmetic":
        made = partial(ArithmeticTask, config.level, seed=config.seed, system=config.system)
        return made(size=_PROBLEMS), made(split="eval", size=count), "exact"
    kind, _, path = config.task.partition(":")
    gsm8k = kind == "gsm8k"
    read = read_gsm8k if gsm8k else read_jsonl
    held_out_file = config.evaluation.path
    files = [path if gsm8k else config.task]
    held_out_files = [held_out_file] if held_out_file else []
    repository = hub_id(config.task)
    if repository is not None:
        files = [str(file) for file in download_split(repository, "train")]
        if not held_out_files:
            held_out_files = [str(file) for file in download_split(repository, "test")]
    for name, choices, paths in (
        ("task", "arithmetic, gsm8k, gsm8k:FILE or a file of JSON Lines or Parquet", files),
        ("evaluation.path", "a file", held_out_files),
    ):
        for file in paths:
            _check_file(name, choices, file)

    def read_all(paths: Sequence[str]) -> list[Trajectory]:
        expanded = [Path(path).expanduser() for path in paths]
        return [prompt for path in expanded for prompt in read(path, system=config.system)]

    return read_all(files), read_all(held_out_files)[:count], "gsm8k" if gsm8k else "math"


def _check_file(name: str, choices: str, file: str) -> None:
    if not Path(file).expanduser().is_file():
        problem = "is a directory" if Path(file).expanduser().is_dir() else "was not found"
        raise ValueError(f"{name} must be {choices}, got {file!r}, which {problem}")
