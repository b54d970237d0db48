"""Training: the functions that train, and runs made of them.

The functional core: a train state, the gradient of a micro-batch, the update, scoring. Around it a
run: its settings, steps, evaluations, checkpoints. What is listed here is public; all else in this
folder is private.
"""

from twinkle_jax.rollout import RolloutConfig, ServerConfig
from twinkle_jax.training.by_name import (
    Estimator,
    Schedule,
    make_estimator,
    make_optimizer,
    make_schedule,
)
from twinkle_jax.training.config import (
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    LoraSettings,
    MeshConfig,
    OptimizerConfig,
    Options,
    TeacherConfig,
    TrainConfig,
    UpdateConfig,
)
from twinkle_jax.training.engine import make_engine
from twinkle_jax.training.evaluation import evaluate
from twinkle_jax.training.features import (
    FeatureRows,
    grad_features,
    loss_of_scores,
    pack_features,
    score_features,
)
from twinkle_jax.training.gradient import StepSummary, add_summaries, grad_step
from twinkle_jax.training.metrics import Learnt
from twinkle_jax.training.packing import IntRows, Packing
from twinkle_jax.training.policy import (
    Policy,
    WarmStart,
    add_adapter,
    load_policy,
    save_policy,
    small_policy,
    warm_start,
)
from twinkle_jax.training.run import export, train
from twinkle_jax.training.score import Scores, Transfers, score_batch
from twinkle_jax.training.start import make_recipe
from twinkle_jax.training.state import (
    TrainState,
    UpdateInfo,
    apply_gradients,
    begin_training,
    clip_gradients,
    train_state,
    zero_gradients,
)
from twinkle_jax.training.step import Recipe, SamplerMismatchError, collect, learn, train_step
from twinkle_jax.training.teacher import ServedTeacher
from twinkle_jax.training.tracking import Tracker, Trackers

__all__ = [
    "DistributedConfig",
    "Estimator",
    "EvaluationConfig",
    "FeatureRows",
    "IntRows",
    "Learnt",
    "LoggingConfig",
    "LoraSettings",
    "MeshConfig",
    "OptimizerConfig",
    "Options",
    "Packing",
    "Policy",
    "Recipe",
    "RolloutConfig",
    "SamplerMismatchError",
    "Schedule",
    "Scores",
    "ServedTeacher",
    "ServerConfig",
    "StepSummary",
    "TeacherConfig",
    "Tracker",
    "Trackers",
    "TrainConfig",
    "TrainState",
    "Transfers",
    "UpdateConfig",
    "UpdateInfo",
    "WarmStart",
    "add_adapter",
    "add_summaries",
    "apply_gradients",
    "begin_training",
    "clip_gradients",
    "collect",
    "evaluate",
    "export",
    "grad_features",
    "grad_step",
    "learn",
    "load_policy",
    "loss_of_scores",
    "make_engine",
    "make_estimator",
    "make_optimizer",
    "make_recipe",
    "make_schedule",
    "pack_features",
    "save_policy",
    "score_batch",
    "score_features",
    "small_policy",
    "train",
    "train_state",
    "train_step",
    "warm_start",
    "zero_gradients",
]
