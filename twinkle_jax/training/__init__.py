"""Training: rollouts, updates and evaluations as functions, a loop of them, and the command.

What is listed here is public; all else in this folder is private.
"""

from twinkle_jax.training.configuration.named_estimator import Estimator, make_estimator
from twinkle_jax.training.configuration.parts import (
    EvaluationConfig,
    LoggingConfig,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
    UpdateConfig,
)
from twinkle_jax.training.configuration.train_config import TrainConfig
from twinkle_jax.training.policies.text_policy import Policy, load_policy, save_policy, small_policy
from twinkle_jax.training.run.export import export
from twinkle_jax.training.run.loop import train
from twinkle_jax.training.step.evaluation import evaluate
from twinkle_jax.training.step.learner import Learner, learn
from twinkle_jax.training.step.recipe import Recipe
from twinkle_jax.training.step.rollout import Rollout, draw_rollout, encode_prompts
from twinkle_jax.training.step.sample_and_score import Sampled, sample_and_score
from twinkle_jax.training.step.train_step import train_step
from twinkle_jax.training.step.training_batch import training_batch

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
