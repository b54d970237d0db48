"""All settings of a training run: a frozen dataclass, whose fields are the command's flags."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from twinkle_jax.training.configuration.parts import (
    EvaluationConfig,
    LoggingConfig,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
    UpdateConfig,
)


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        model: a directory or hub id of a Hugging Face checkpoint; None makes a small policy and
            teaches it by example until it gets some answers right.
        task: arithmetic (made up on the spot), gsm8k (from the hub; gsm8k:ID and gsm8k:FILE for one
            in its format), or a JSONL file of prompts and answers.
        level: of the arithmetic task, 1 to 6.
        reward: exact, math, gsm8k, or FILE.py:NAME or MODULE:NAME, a function of trajectories and
            ground truths; None: what fits the task.
        reward_timeout: seconds that it may take for the completions of a step.
        system: what the system says first in each conversation.
        warm_start: held-out accuracy to which a small policy learns from examples, before it learns
            from rewards; 0 for no examples.
        output_dir: the directory of the run.
        steps: updates from rollouts; None: 300 for the built-in policy, 500 for a checkpoint.
        seed: of everything that is random.
        dtype: what is computed in; parameters that are trained and their moments are float32.
        resume: auto goes on from the newest checkpoint of output_dir if there is one, never
            does not, anything else is the directory of another run to go on from.
        overwrite: delete what output_dir holds.
        rollout: see RolloutConfig.
        update: see UpdateConfig.
        optimizer: see OptimizerConfig.
        mesh: see MeshConfig.
        evaluation: see EvaluationConfig.
        logging: see LoggingConfig.
    """

    model: str | None = None
    task: str = "arithmetic"
    level: int = 2
    reward: str | None = None
    reward_timeout: float = 600.0
    system: str | None = None
    warm_start: float = 0.3
    output_dir: str = "runs/arithmetic"
    steps: int | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    resume: str = "never"
    overwrite: bool = False
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def from_dict(saved: Mapping[str, Any]) -> TrainConfig:
    """Make a configuration of what `dataclasses.asdict` and JSON have made of one."""
    values = dict(saved)
    for part in fields(TrainConfig):
        if isinstance(values[part.name], Mapping):
            inner = dict(values[part.name])
            if "betas" in inner:
                inner["betas"] = tuple(inner["betas"])
            assert callable(part.default_factory)
            values[part.name] = part.default_factory(**inner)
    return TrainConfig(**values)
