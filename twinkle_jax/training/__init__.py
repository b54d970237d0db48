"""Training: rollouts, updates and evaluations as functions, a loop of them, and the command.

What is listed here is public; all else in this folder is private.
"""

from twinkle_jax.training.config import (
    EvaluationConfig,
    LoggingConfig,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
)
from twinkle_jax.training.estimator import Estimator, make_estimator
from twinkle_jax.training.evaluation import evaluate
from twinkle_jax.training.export import export
from twinkle_jax.training.loop import train
from twinkle_jax.training.policy import Policy, load_policy, save_policy, small_policy
from twinkle_jax.training.recipe import Recipe
from twinkle_jax.training.rollout import Rollout, draw_rollout, encode_prompts, training_batch
from twinkle_jax.training.sample_and_score import Sampled, sample_and_score
from twinkle_jax.training.step import train_step
from twinkle_jax.training.update import Learner, learn

__all__ = [
    "Estimator",
    "EvaluationConfig",
    "Learner",
    "LoggingConfig",
    "MeshConfig",
    "OptimizerConfig",
    "Policy",
    "Recipe",
    "Rollout",
    "RolloutConfig",
    "Sampled",
    "TrainConfig",
    "UpdateConfig",
    "draw_rollout",
    "encode_prompts",
    "evaluate",
    "export",
    "learn",
    "load_policy",
    "make_estimator",
    "sample_and_score",
    "save_policy",
    "small_policy",
    "train",
    "train_step",
    "training_batch",
]
