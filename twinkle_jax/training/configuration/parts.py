"""The parts of a run's settings: what is sampled, how it is learnt from, judged and logged."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RolloutConfig:
    """What is sampled in each step.

    Attributes:
        prompts: prompts a step.
        num_samples: completions of each prompt, at least 2: their rewards are compared.
        max_new_tokens: the most tokens of a completion; None: 8 for the built-in policy, 512 for a
            checkpoint.
        max_prompt_tokens: longer prompts are refused.
        temperature: what logits are divided by, when sampling and when training.
        top_k: how many of the most probable tokens may be drawn; 0 for all.
        top_p: the most probable tokens up to this probability may be drawn.
        min_p: tokens with this share of the most probable one's probability may be drawn.
    """

    prompts: int = 128
    num_samples: int = 8
    max_new_tokens: int | None = None
    max_prompt_tokens: int = 1024
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class UpdateConfig:
    """How the policy learns from what was sampled.

    Attributes:
        advantage: the estimator's name: grpo, rloo, maxrl, opo, remax, reinforce_plus_plus,
            reinforce (which has no baseline), ...
        advantage_options: its hyper-parameters, such as k of pass_at_k and pkpo.
        scale: what advantages are divided by, for estimators that have a scale.
        loss: the loss's name: grpo, dapo, cispo, gspo, ...
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far a ratio may rise above 1; None: as far, or 0.28 where loss is dapo.
        kl_beta: weight of the divergence from the policy that training began with, per nat.
        mask_truncated: leave completions that ran out of length out of statistics and loss.
        dynamic_sampling: rollouts a step may take until there are enough prompts whose rewards
            differ; 1 takes what the first gives.
        epochs: how often each rollout is gone through.
        mini_batches: updates in each epoch; prompts are dealt out to them at random.
        micro_batch_rows: completions whose gradients are computed at once; None for all.
        recompute: what the backward pass computes again rather than keep: layers, which takes the
            least memory; elementwise, all but matrix products; or nothing.
    """

    advantage: str = "grpo"
    advantage_options: dict[str, int | float | str] = field(default_factory=dict)
    scale: Literal["group", "batch", "none"] = "group"
    loss: str = "grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    kl_beta: float = 0.0
    mask_truncated: bool = False
    dynamic_sampling: int = 1
    epochs: int = 1
    mini_batches: int = 4
    micro_batch_rows: int | None = None
    recompute: Literal["layers", "elementwise", "nothing"] = "layers"


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, and how large its steps are.

    Attributes:
        learning_rate: None: 6e-4 for the built-in policy, 1e-6 for a checkpoint.
        warmup_steps: steps until the learning rate is reached.
        decay: whether it then falls to 0 at the last step; None: for the built-in policy alone.
        weight_decay: of AdamW.
        betas: decay rates of AdamW's moments.
        max_grad_norm: gradients with a larger norm are scaled down to it.
        max_skipped: abort after so many steps in a row whose gradients were not finite.
    """

    learning_rate: float | None = None
    warmup_steps: int = 10
    decay: bool | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: float = 1.0
    max_skipped: int = 5


@dataclass(frozen=True)
class MeshConfig:
    """How many devices share a run: their product is what it uses.

    Attributes:
        data: each has all parameters, and a share of the rows.
        fsdp: each has a share of the parameters and of the rows; for models too large for one.
        tensor: each has a share of every layer; must divide the key-value heads.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class EvaluationConfig:
    """How the policy is judged, on problems that it is never trained on.

    Attributes:
        every: steps from one evaluation to the next; 0: only before the first and after the last.
        problems: how many held-out problems.
        path: a file of them, for tasks from files; without one such tasks are not evaluated.
        pass_k: k of pass@k; 0 evaluates greedily alone.
        reward: named as that of training, and used in its place: right is what it gives 1 or more.
    """

    every: int = 25
    problems: int = 256
    path: str | None = None
    pass_k: int = 0
    reward: str | None = None


@dataclass(frozen=True)
class LoggingConfig:
    """What is saved and shown.

    Attributes:
        checkpoint_every: steps from one checkpoint to the next; the last step always has one.
        keep_checkpoints: how many of the newest are kept.
        samples_every: steps from one table of completions to the next; 0 shows none.
        tensorboard: write TensorBoard's files too.
        wandb: log to Weights & Biases too.
    """

    checkpoint_every: int = 50
    keep_checkpoints: int = 3
    samples_every: int = 50
    tensorboard: bool = False
    wandb: bool = False
