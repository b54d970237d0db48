"""Settings of a training run: a frozen dataclass whose fields are the command's options.

A `TrainConfig` is valid: its constructor raises a ValueError or a TypeError for invalid values, and
fills in `auto` ones that do not depend on the devices. A new setting is one field with its range,
whether a resumed run may change it, its line of documentation, and its use.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_type_hints

import jax
import numpy as np

from twinkle_jax.data.settings import (
    AUTO,
    MAY_CHANGE,
    at_least,
    check_32_bits,
    check_values,
    positive,
    seconds,
    seed_of_32_bits,
    share,
    share_below_one,
)
from twinkle_jax.loss import (
    LOSSES,
    CISPOLoss,
    CrossEntropyLoss,
    DPPOLoss,
    ImportanceCorrection,
    Loss,
    PolicyLoss,
    PreferenceLoss,
    SAPOLoss,
    VESPOLoss,
)
from twinkle_jax.model import LoraConfig
from twinkle_jax.rollout import RolloutConfig, ServerConfig
from twinkle_jax.training.by_name import (
    Schedule,
    check_options,
    make_estimator,
    make_optimizer,
    make_schedule,
    optax_schedule,
    rises,
)
from twinkle_jax.training.tracking import Trackers

_BUILT_IN_SCHEDULES = ("constant", "linear", "cosine")
Options = dict[str, Any]
"""Hyper-parameters by name, of an estimator, a loss or an optimizer."""


@dataclass(frozen=True)
class UpdateConfig:
    """How the policy learns from what was sampled.

    Attributes:
        advantage: name of the estimator: grpo, rloo, maxrl, opo, remax, reinforce_plus_plus,
            reinforce (no baseline), ...; auto: maxrl for the built-in policy, whose rare right
            answers it weighs most; grpo for a checkpoint, or with an environment, a scale, options
            or a penalty in rewards.
        advantage_options: hyper-parameters of the estimator, such as k of pass_at_k and pkpo.
        scale: what advantages are divided by, for estimators that have a scale; auto: group, or
            none with a penalty in rewards, which the scale of a group with equal rewards would
            blow up to the size of any other difference.
        loss: name of the loss: grpo, dapo, bnpo, dr_grpo, cispo, gspo, luspo, gmpo, sapo, dppo,
            vespo or ppo; with examples cross_entropy, or of pairs of answers dpo, simpo, cpo or
            orpo; auto: grpo, or cross_entropy with examples.
        loss_options: hyper-parameters of the loss, such as entropy_coef, dual_clip,
            off_policy_delta, tau_neg of sapo, delta of dppo, and beta and label_smoothing of dpo.
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far a ratio may rise above 1; none: as far as it may fall, or 0.28 for
            dapo.
        kl_beta: weight of the divergence from the initial policy, per nat.
        kl_in: where this penalty is. loss: added to the loss, as an estimate of at least 0 a token
            (k3); reward: log-ratios to the initial policy are subtracted from the reward of a
            completion or episode, or with reinforce_plus_plus from that of each token.
        credit: advantages of the turns of an episode. episode: all turns get that of the episode's
            return; turn: each gets that of the rewards from it on, compared with the same turn of
            the group's other episodes; mixed: the mean of both.
        discount: discount factor of rewards, for each turn.
        gae_lambda: of credit by turn. 1 credits a turn with all rewards from it on; less
            replaces part of the later rewards by the group's mean return (GAE over turns).
        mask_truncated: exclude completions that reached a limit of tokens, and episodes that
            reached one of tokens or turns, from statistics and loss.
        top_entropy: share of a step's tokens that have an advantage, those at which the policy has
            the highest entropy before the step's updates. Below 1 takes one more scoring pass.
        dynamic_sampling: the most rollouts that a step samples until enough prompts have rewards
            that differ (DAPO); 1 trains on the first as it is.
        epochs: passes over each rollout.
        mini_batches: updates in each pass; prompts are dealt out to them at random; auto: 4, or 1
            with examples.
        micro_batch_tokens: tokens, padding included, whose gradients are computed at once on each
            device; at least as many as the longest row may have; auto: 16,384, or fewer where a
            device has no room for them.
        recompute: what the backward pass computes again rather than keep: layers (least memory),
            elementwise (all but matrix products), or nothing; auto: nothing for the built-in
            policy; for a checkpoint layers, or elementwise where a device is known to have room.
        correction: weights that correct for the difference between the sampler's and the trainer's
            probabilities: none, or per token or per sequence, truncated at the cap or masked above
            it. Takes one more scoring pass.
        correction_cap: the largest weight of `correction`.
        replay_routing: for mixtures of experts, through which experts updates send each token.
            none: those that the router chooses in each update; sampler: those that it chose when
            the token was drawn (a server needs --enable-return-routed-experts); trainer: those that
            it chooses before the first update of the step, in one more scoring pass.
        on_mismatch: what happens if the sampler's log-probabilities are not the trainer's: stop
            the run, or warn and continue.
        max_logp_diff: the largest mean difference between sampler and trainer, in nats a token;
            auto: 0.001 in float32, 0.2 in bfloat16 and with server.overlap.
        max_outside_band: the largest share of tokens whose probability under the trainer is more
            than twice, or less than half, that under the sampler.
    """

    advantage: str = AUTO
    advantage_options: Options = field(default_factory=dict)
    scale: Literal["group", "batch", "none"] = AUTO
    loss: str = AUTO
    loss_options: Options = field(default_factory=dict)
    epsilon: float = at_least(0, default=0.2)
    epsilon_high: float | None = at_least(0, default=None)
    kl_beta: float = at_least(0, default=0.0)
    kl_in: Literal["loss", "reward"] = "loss"
    credit: Literal["episode", "turn", "mixed"] = "episode"
    discount: float = share(default=1.0)
    gae_lambda: float = share(default=1.0)
    mask_truncated: bool = False
    top_entropy: float = share(default=1.0)
    dynamic_sampling: int = at_least(1, default=1)
    epochs: int = at_least(1, default=1)
    mini_batches: int = at_least(1, default=AUTO)
    micro_batch_tokens: int = at_least(1, default=AUTO)
    recompute: Literal["auto", "layers", "elementwise", "nothing"] = AUTO
    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    correction_cap: float = positive(default=2.0)
    replay_routing: Literal["none", "sampler", "trainer"] = "none"
    on_mismatch: Literal["stop", "warn"] = field(default="stop", metadata=MAY_CHANGE)
    max_logp_diff: float = at_least(0, default=AUTO, may_change=True)
    max_outside_band: float = share(default=0.05, may_change=True)


@dataclass(frozen=True)
class TeacherConfig:
    """A policy that judges each sampled token: distillation on the policy's own completions.

    Attributes:
        model: a directory or hub id of a checkpoint, or of an adapter, with the policy's tokenizer;
            none: no teacher.
        url: of a vLLM server that has this model and scores with it, http://HOST:PORT; its key is
            in `VLLM_API_KEY`; none: the devices of the run score.
        served_name: what the server calls the model; none: as in --teacher.model.
        timeout: seconds that the server may take for the rows of a step.
        patience: seconds that the run waits for a server that is gone, restarts or is busy.
        weight: of a token's log-probability under the teacher, minus that under the sampler, in its
            advantage, per nat.
        reward_weight: of the advantage by rewards, which is added; 0 learns from the teacher alone,
            so that prompts need neither answers nor rewards.
    """

    model: str | None = None
    url: str | None = field(default=None, metadata=MAY_CHANGE)
    served_name: str | None = field(default=None, metadata=MAY_CHANGE)
    timeout: float = seconds(default=3600.0, may_change=True)
    patience: float = seconds(default=600.0, may_change=True)
    weight: float = positive(default=1.0)
    reward_weight: float = at_least(0, default=0.0)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its learning rate, and the limit of gradients.

    Attributes:
        name: an optimizer of Optax: adamw, adam, sgd, lion, adafactor, muon, ...
        options: arguments of the optimizer, such as b1, b2 and weight_decay; for adamw the defaults
            are Optax's, except b2 0.99 and no weight decay.
        learning_rate: at its peak; auto: 6e-4 for the built-in policy, 1e-6 for a checkpoint, 1e-5
            with examples that are no pairs.
        warmup_steps: steps over which the learning rate rises to its peak; auto: 10, or 0 with an
            Optax schedule that rises to a peak itself.
        schedule: of the learning rate: constant, linear or cosine (from the end of the warmup to 0
            after the last step), or the name of an Optax schedule; auto: linear for the built-in
            policy, else constant.
        schedule_options: arguments of an Optax schedule, which counts the steps of the run from the
            first on; in warmup_steps its rates are scaled by a factor that rises to 1.
        max_grad_norm: gradients with a larger global norm are scaled down to it.
        max_skipped: end the run after this many steps in a row whose gradients were not finite.
    """

    name: str = "adamw"
    options: Options = field(default_factory=dict)
    learning_rate: float = positive(default=AUTO)
    warmup_steps: int = at_least(0, default=AUTO)
    schedule: str = AUTO
    schedule_options: dict[str, Any] = field(default_factory=dict)
    max_grad_norm: float = positive(default=1.0)
    max_skipped: int = at_least(1, default=5)


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters, which are trained instead of the policy's own parameters.

    Attributes:
        rank: of the adapters; 0 trains all parameters instead.
        alpha: adapters are scaled by alpha / rank.
        dropout: share of an adapter's input that is dropped in training.
        target_modules: projections that get adapters, such as q_proj; all-linear for all but the
            head.
    """

    rank: int = at_least(0, default=0)
    alpha: float = positive(default=16.0)
    dropout: float = share_below_one(default=0.0)
    target_modules: list[str] | str = "all-linear"


@dataclass(frozen=True)
class MeshConfig:
    """The mesh of a run, which uses as many devices as the product of its axes.

    Attributes:
        data: copies of the parameters, each with a share of the rows.
        fsdp: devices that a copy and its rows are sharded over, for models too large for one.
        tensor: devices that each layer is split over; must divide the key-value heads.
        transfers: when an update moves parameters and gradients between devices: layers, where each
            layer runs (least memory), or once before and once after all of them, which takes room
            for all parameters and gradients on each device and is not for tensor; auto: once for
            the built-in policy, layers for a checkpoint.
        memory: GiB of each device that the run may use; none: 92 % of what GPUs and TPUs report.
            The memory of a step is computed before the first one, and automatic settings are
            reduced until they fit; on CPUs only if this is set.
    """

    data: int = at_least(1, default=1)
    fsdp: int = at_least(1, default=1)
    tensor: int = at_least(1, default=1)
    transfers: Literal["layers", "once"] = AUTO
    memory: float | None = positive(default=None)


@dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a run find each other; not needed for a single process.

    Attributes:
        coordinator_address: HOST:PORT of process 0, the same in all; auto: JAX asks the cluster;
            none: the same if a scheduler has started several processes (SLURM, Open MPI,
            Kubernetes, TPU slices), otherwise there is one process.
        num_processes: number of processes; none: what the cluster says.
        process_id: number of this process, from 0; none: what the cluster says.
        connect_timeout: seconds to wait until all processes have connected.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    connect_timeout: int = at_least(1, default=50)


_LONGEST_EXAMPLE, _PASSES = 4096, 3  # tokens, and passes over examples, by default
MEASURED = ("accuracy", "reward", "cross_entropy", "preference_loss")
"""What evaluations measure: of problems the first two, of examples or of pairs the last two."""
_OF_EXAMPLES = (AUTO, "cross_entropy", "CrossEntropyLoss")  # losses; others are of pairs


@dataclass(frozen=True)
class EvaluationConfig:
    """How the policy is evaluated, on problems that it is never trained on.

    Attributes:
        every: steps between evaluations; 0: only before the first step and after the last.
        problems: number of held-out problems; of a file, the first ones.
        path: a file of held-out problems, for tasks from files, which are not evaluated without it.
        pass_k: k of pass@k; 0 evaluates greedily alone.
        reward: in place of the training reward, and named like it; an answer is right if its reward
            is 1 or more.
        slots: rows sampled at a time, a multiple of mesh.data times mesh.fsdp; none: rollout.slots,
            or all rows of 256 problems without it, or fewer if these do not fit a device.
    """

    every: int = at_least(0, default=25)
    problems: int = at_least(1, default=256)
    path: str | None = None
    pass_k: int = at_least(0, default=0)
    reward: str | None = None
    slots: int | None = None


@dataclass(frozen=True)
class LoggingConfig(Trackers):
    """What is saved and shown, and the `Trackers` that metrics go to.

    Attributes:
        checkpoint_every: steps between checkpoints; the last step always has one.
        keep_checkpoints: number of checkpoints to keep, the newest ones.
        samples_every: steps between displays of some completions or episodes; 0 for none.
        traces_every: steps between files of all episodes, traces/STEP.jsonl; 0 for none.
    """

    checkpoint_every: int = at_least(1, default=50)
    keep_checkpoints: int = at_least(1, default=3)
    samples_every: int = at_least(0, default=50)
    traces_every: int = at_least(0, default=0)


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        model: a directory or hub id of a Hugging Face checkpoint; none: a small built-in policy,
            which learns from examples until it gets some answers right.
        environment: what the policy talks to in several turns: FILE.py:NAME or MODULE:NAME of a
            class or function that makes one; trl: or gym: before it for TRL's environment_factory
            or gymnasium's interface; or openenv:URL of a server.
        tools: FILE.py with functions that the policy may call, or FILE.py:NAME of one or a list.
        examples: a file of conversations to learn from, in place of completions that are sampled
            and scored (JSON Lines, or .parquet), or of pairs of a chosen and a rejected answer, by
            update.loss; the task is then only evaluated.
        task: arithmetic (problems made on the spot), gsm8k (from the hub; gsm8k:ID and gsm8k:FILE
            for one in its format), a file of prompts and answers (JSON Lines, or .parquet),
            environment, which gives the prompts itself, or examples, whose evaluation is the
            loss of others; auto: environment or examples if there are any, else arithmetic.
        level: difficulty of the arithmetic task, 1 to 6.
        reward: exact, math, gsm8k, FILE.py:NAME, MODULE:NAME, or the directory or hub id of a
            reward model; may be given several times, then the rewards are added up; none: the
            task's own, or the environment's alone.
        reward_weights: weights of several rewards, in their order; none: 1 each.
        reward_timeout: seconds that a reward may take for the completions of a step.
        system: system message of conversations that begin with none.
        warm_start: the built-in policy first learns from examples, until it has this held-out
            accuracy; or from all demonstrations of the environment, if it has any; 0 for neither.
        output_dir: the directory of the run.
        steps: rollouts, each with its updates; auto: 200 for the built-in policy, 500 for a
            checkpoint, or three passes over examples.
        seed: of all random numbers.
        dtype: type of activations; trained parameters and moments are float32; auto: bfloat16 for a
            checkpoint on TPUs and on GPUs from compute capability 8.0, else float32.
        resume: never: start fresh. auto: continue from the newest checkpoint in output_dir, if
            there is one. Anything else: the directory of another run to continue.
        overwrite: delete the run that output_dir holds.
        rollout: what is sampled in each step.
        server: a vLLM server that samples.
        update: how the policy learns from it.
        teacher: a policy to learn from, besides rewards or without them.
        optimizer: the optimizer and its learning rate.
        lora: low-rank adapters.
        mesh: devices.
        distributed: how several processes find each other.
        evaluation: how the policy is evaluated.
        logging: what is saved and shown.
    """

    model: str | None = None
    environment: str | None = None
    tools: str | None = None
    examples: str | None = None
    task: str = AUTO
    level: int = 2
    reward: list[str] | str | None = None
    reward_weights: list[float] | None = None
    reward_timeout: float = seconds(default=600.0, may_change=True)
    system: str | None = None
    warm_start: float = share(default=0.3)
    output_dir: str = field(default="runs/arithmetic", metadata=MAY_CHANGE)
    steps: int = at_least(0, default=AUTO, may_change=True)
    seed: int = seed_of_32_bits(default=0)
    dtype: Literal["float32", "bfloat16"] = AUTO
    resume: str = field(default="never", metadata=MAY_CHANGE)
    overwrite: bool = field(default=False, metadata=MAY_CHANGE)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    server: ServerConfig = field(default_factory=ServerConfig, metadata=MAY_CHANGE)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraSettings = field(default_factory=LoraSettings)
    mesh: MeshConfig = field(default_factory=MeshConfig, metadata=MAY_CHANGE)
    distributed: DistributedConfig = field(default_factory=DistributedConfig, metadata=MAY_CHANGE)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig, metadata=MAY_CHANGE)
    logging: LoggingConfig = field(default_factory=LoggingConfig, metadata=MAY_CHANGE)

    def __post_init__(self) -> None:
        rollout = self.rollout
        if self.examples is not None and rollout.max_episode_tokens is AUTO:
            rollout = dataclasses.replace(rollout, max_episode_tokens=_LONGEST_EXAMPLE)
        rollout = rollout.resolved(max_new_tokens=automatic_new_tokens(self))
        object.__setattr__(self, "rollout", rollout)
        for name, value in _automatic(self).items():
            part, _, setting = name.rpartition(".")
            holder = getattr(self, part) if part else self
            if getattr(holder, setting) is not AUTO:
                continue
            value = value() if callable(value) else value
            if part:
                object.__setattr__(self, part, dataclasses.replace(holder, **{setting: value}))
            else:
                object.__setattr__(self, setting, value)
        if isinstance(self.reward, list | tuple):
            object.__setattr__(
                self, "reward", self.reward[0] if len(self.reward) == 1 else list(self.reward)
            )
        _check(self)

    @property
    def rewards(self) -> list[str]:
        """The names of the rewards; none if the task's own is taken."""
        if self.reward is None:
            return []
        return [self.reward] if isinstance(self.reward, str) else self.reward

    @property
    def compares_rewards(self) -> bool:
        """Whether rewards have a part in advantages: not with a teacher alone."""
        return self.teacher.model is None or self.teacher.reward_weight > 0

    @property
    def many_turns(self) -> bool:
        """Whether episodes may have several turns."""
        return self.environment is not None or self.tools is not None

    @property
    def group_size(self) -> int:
        """Completions or episodes of a prompt; 1 with examples, or 2 with pairs."""
        return self.rollout.num_samples if self.examples is None else self.rows_together

    @property
    def learns_pairs(self) -> bool:
        """Whether examples are pairs of a chosen and a rejected answer."""
        return self.examples is not None and self.update.loss not in _OF_EXAMPLES

    @property
    def rows_together(self) -> int:
        """Rows that must be in one micro-batch: 2 with pairs."""
        return 2 if self.learns_pairs else 1

    @property
    def rows_each(self) -> int:
        """Rows of a batch for each episode or completion."""
        return self.rollout.rows_each if self.many_turns else 1

    @property
    def longest_row(self) -> int:
        """Maximum number of tokens in a row."""
        rollout = self.rollout
        if self.many_turns or self.examples is not None:
            return rollout.max_episode_tokens
        return rollout.max_prompt_tokens + rollout.max_new_tokens

    @property
    def least_budget(self) -> int:
        """Tokens that a micro-batch must hold."""
        return self.rows_together * self.longest_row

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        optimizer = self.optimizer
        rise = min(1.0, (step + 1) / max(optimizer.warmup_steps, 1))
        if optimizer.schedule in _BUILT_IN_SCHEDULES:  # these begin at the end of the warmup
            step = max(step - optimizer.warmup_steps, 0)
        return run_schedule(self)(step) * rise


def _automatic(config: TrainConfig) -> dict[str, Any]:
    """Values of the settings whose default is `auto`, from the other settings."""
    small = config.model is None
    dtype = "float32" if small and config.dtype is AUTO else config.dtype
    update = config.update
    default_estimator = not update.advantage_options and update.scale is AUTO
    default_estimator &= update.kl_in == "loss"
    # MaxRL divides by the mean reward, which an environment may have below 0, and a penalty too.
    maxrl = small and default_estimator and config.environment is None
    task = "arithmetic" if config.environment is None else "environment"
    supervised = config.examples is not None
    of_checkpoint = 1e-5 if supervised and not config.learns_pairs else 1e-6
    return {
        "dtype": dtype,  # of a checkpoint: when the devices are known
        "task": "examples" if supervised else task,
        "update.advantage": "maxrl" if maxrl else "grpo",
        "update.scale": automatic_scale(config),
        "update.loss": "cross_entropy" if supervised else "grpo",
        "update.mini_batches": 1 if supervised else 4,
        "update.recompute": "nothing" if small else "auto",
        "mesh.transfers": automatic_transfers(small=small, tensor=config.mesh.tensor),
        "steps": AUTO if supervised else 200 if small else 500,  # of examples: when they are read
        "optimizer.learning_rate": 6e-4 if small else of_checkpoint,
        "optimizer.schedule": "linear" if small else "constant",
        "optimizer.warmup_steps": 0 if rises(config.optimizer.schedule) else 10,
        "update.max_logp_diff": automatic_logp_diff(dtype, overlap=config.server.overlap),
        # The longest row depends on the settings above.
        "update.micro_batch_tokens": lambda: automatic_budget(config),
    }


def automatic_new_tokens(config: TrainConfig) -> int:
    """Return the default of `rollout.max_new_tokens`."""
    return 8 if config.model is None else 512


def automatic_scale(config: TrainConfig) -> str:
    """Return the default of `update.scale`.

    In a group whose rewards are equal a penalty in rewards, or its rounding, is the only difference
    that there is: divided by its own deviation it would count as much as any other.
    """
    return "none" if config.update.kl_in == "reward" else "group"


def automatic_logp_diff(dtype: str, *, overlap: bool) -> float | None:
    """Return the default of `update.max_logp_diff`; None before the type is known."""
    if overlap:  # sampler and trainer are an update apart
        return 0.2
    return {"float32": 1e-3, "bfloat16": 0.2}.get(dtype, AUTO)


def automatic_transfers(*, small: bool, tensor: int) -> str:
    """Return the default of `mesh.transfers`."""
    return "once" if small and tensor == 1 else "layers"


def automatic_budget(config: TrainConfig) -> int:
    """Return the default tokens of a micro-batch, before memory is considered."""
    return max(16384, config.least_budget)


def with_steps(config: TrainConfig, examples: int) -> TrainConfig:
    """Choose the number of steps by that of the examples, unless it is set."""
    if config.steps is not AUTO:
        return config
    return dataclasses.replace(config, steps=-(-_PASSES * examples // config.rollout.prompts))


def with_setting(config: TrainConfig, name: str, value: Any) -> TrainConfig:
    """Replace a setting of a section, by its name: `rollout.slots`."""
    section, _, setting = name.partition(".")
    changed = dataclasses.replace(getattr(config, section), **{setting: value})
    return dataclasses.replace(config, **{section: changed})


def from_dict(saved: Mapping[str, Any]) -> TrainConfig:
    """Make a configuration from its `dataclasses.asdict`, read back from JSON.

    Raises:
        ValueError: as `TrainConfig`, and for a section that is not a dictionary of settings. None,
            which YAML has for a section without any, stands for the defaults.
        TypeError: as `TrainConfig`, and for an unknown setting.
    """
    values = dict(saved)
    for part in fields(TrainConfig):
        if not callable(part.default_factory):
            continue
        settings = values.get(part.name)
        settings = {} if settings is None else settings
        if not isinstance(settings, Mapping):
            raise ValueError(not_a_section(part.name, settings))
        values[part.name] = part.default_factory(**settings)
    return TrainConfig(**values)


def not_a_section(name: str, value: object, dashes: str = "") -> str:
    """Say that a value is given to a section in place of to one of its settings."""
    first = next(
        key for key in flat(dataclasses.asdict(TrainConfig())) if key.startswith(f"{name}.")
    )
    return (
        f"{dashes}{name} must be a dictionary of settings or a YAML file of them, got {value!r}: "
        f"set one of them, such as {dashes}{first}"
    )


def make_loss(config: TrainConfig) -> Loss:
    """Make the loss of a run from its name and coefficients.

    Raises:
        ValueError: if no loss of policies, or of examples, has that name, or it does not have these
            options.
    """
    update, supervised = config.update, config.examples is not None
    fitting = PreferenceLoss if supervised else PolicyLoss
    kinds: dict[str, type[Loss]] = {
        name: kind for name, kind in LOSSES.items() if issubclass(kind, fitting)
    }
    if supervised:
        kinds["cross_entropy"] = CrossEntropyLoss
    kind = (kinds | {kind.__name__: kind for kind in kinds.values()}).get(update.loss)
    if kind is None:
        known, of = ", ".join(sorted(kinds)), " with examples" if supervised else ""
        raise ValueError(f"update.loss must be one of {known}{of}, got {update.loss!r}")
    options: dict[str, Any] = {} if supervised else _policy_loss_options(config, kind)
    with _names("update.loss_options", "update.loss_options"):
        _check_loss_options(update, kind)
        loss = kind(**options | update.loss_options)
        hash(loss)  # it is a static argument
    return loss


def _policy_loss_options(config: TrainConfig, kind: type[Loss]) -> dict[str, Any]:
    """Collect the coefficients of a policy loss that settings have by name."""
    update = config.update
    options: dict[str, Any] = {"epsilon": update.epsilon}
    if update.epsilon_high is not None:
        options["epsilon_high"] = update.epsilon_high
    if update.kl_beta and update.kl_in == "loss":
        options["beta"] = update.kl_beta
    if update.correction != "none":
        options["correction"] = ImportanceCorrection(update.correction, update.correction_cap)
    if hasattr(kind, "max_completion_length"):  # what Dr. GRPO divides by
        turns = config.rollout.max_turns if config.many_turns else 1
        options["max_completion_length"] = config.rollout.max_new_tokens * turns
    return options


_SET_BY_NAME = {"epsilon", "epsilon_high", "beta", "correction"}
_NOT_SET = {"ignore_index", "reduction", "tokens_per_pair"}
_POSITIVE = (
    "tau_pos", "tau_neg", "k_pos", "k_neg", "lambda_pos", "lambda_neg", "max_completion_length",
    "beta",
)  # fmt: skip


def _check_loss_options(update: UpdateConfig, kind: type[Loss]) -> None:
    """Check names, and the numbers of options that are numbers by default."""
    defaults = {name: x.default for name, x in inspect.signature(kind).parameters.items()}
    elsewhere = _NOT_SET | (_SET_BY_NAME if issubclass(kind, PolicyLoss) else set())
    check_options(update.loss, update.loss_options, defaults.keys() - elsewhere)
    for name, value in update.loss_options.items():
        if name in ("dual_clip", "off_policy_delta") and value is None:
            continue
        if isinstance(defaults[name], bool) and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        least = 0.0 if name in _POSITIVE else -math.inf
        if name == "dual_clip":
            by_default = defaults.get("epsilon_high") or update.epsilon
            least = 1 + (by_default if update.epsilon_high is None else update.epsilon_high)
        elif name == "off_policy_delta":
            least = 0.0
        elif isinstance(defaults[name], bool) or not isinstance(defaults[name], int | float):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "label_smoothing" and not (is_number and 0 <= value < 0.5):
            raise ValueError(f"{name} must be a number, at least 0 and below 0.5, got {value!r}")
        if not is_number or not least < value < math.inf:
            which = "finite" if least == -math.inf else f"above {least:g}"
            raise ValueError(f"{name} must be a number, {which}, got {value!r}")


def run_optimizer(config: TrainConfig) -> Any:
    """Make the optimizer of a run."""
    optimizer = config.optimizer
    defaults = {"b2": 0.99, "weight_decay": 0.0} if optimizer.name == "adamw" else {}
    return make_optimizer(optimizer.name, **(defaults | optimizer.options))


def make_lora(config: TrainConfig) -> LoraConfig:
    """Make the configuration of a run's adapters, with a `lora.rank` above 0."""
    lora = config.lora
    targets = lora.target_modules
    with lora_names():
        return LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
        )


def run_schedule(config: TrainConfig) -> Schedule:
    """Make the learning-rate schedule of a run, without its warmup: our own begin after it."""
    optimizer = config.optimizer
    return make_schedule(
        optimizer.schedule,
        steps=max((config.steps or 0) - optimizer.warmup_steps, 1),  # none before examples are read
        peak=optimizer.learning_rate,
        **optimizer.schedule_options,
    )


# Validation: each setting, then combinations. No check before `check_learning_rates` may use a
# device: processes find each other before JAX initializes its devices.


def _check(config: TrainConfig) -> None:
    """Raise for the first invalid setting or combination, by its name."""
    check_values(config)
    update, optimizer = config.update, config.optimizer
    with _names("update.advantage", "update.advantage_options"):
        estimator = make_estimator(update.advantage, update.advantage_options)
    if update.advantage_options:
        with _names("update.advantage_options", "update.advantage_options"):
            estimator.check(config.rollout.num_samples)
    _check_clip_range(config)
    with _names("optimizer.name", "optimizer.options"):
        run_optimizer(config)
    with _names("optimizer.schedule", "optimizer.schedule_options"):
        run_schedule(config)
    if config.lora.rank:
        make_lora(config)
    if config.task == "environment" and config.environment is None:
        raise ValueError("environment must be given for the task environment, got none")
    if config.server.url is not None and config.model is None:
        raise ValueError("model must be the checkpoint that server.url serves, got none")
    _check_examples(config)
    if config.model is None and config.task not in ("arithmetic", "environment"):
        raise ValueError(f"model must be a checkpoint for the task {config.task}, got none")
    teacher = config.teacher
    if teacher.url is not None and config.rollout.temperature != 1:
        raise ValueError(
            "rollout.temperature must be 1 with teacher.url, since a vLLM server scores given "
            f"tokens at 1 only, got {config.rollout.temperature}"
        )
    weights = config.reward_weights
    if weights is not None and not config.rewards:
        raise ValueError(f"reward_weights must go with named rewards, --reward, got {weights}")
    if weights is not None and len(weights) != len(config.rewards):
        raise ValueError(
            f"reward_weights must have a number for each of {len(config.rewards)} rewards, "
            f"got {len(weights)}"
        )
    if update.kl_in == "reward":
        _check_kl_in_reward(update)
    if optimizer.schedule_options and optimizer.schedule in _BUILT_IN_SCHEDULES:
        raise ValueError(
            "optimizer.schedule_options must go with a schedule of Optax, "
            f"got optimizer.schedule={optimizer.schedule!r}"
        )
    if config.mesh.transfers == "once" and config.mesh.tensor > 1:
        raise ValueError(
            "mesh.transfers must be layers with a mesh.tensor above 1, got "
            f"mesh.transfers='once' and mesh.tensor={config.mesh.tensor}"
        )
    _check_rows(config)
    if estimator.compares_parts:
        check_parts(config, len(config.rewards))


def _check_examples(config: TrainConfig) -> None:
    """Refuse what draws or judges completions where examples take their place."""
    if config.examples is None:
        if config.task == "examples":
            raise ValueError("examples must be given for the task examples, got none")
        return
    if config.model is None:
        raise ValueError("model must be a checkpoint, which learns from examples, got none")
    for name, value in (
        ("environment", config.environment),
        ("tools", config.tools),
        ("server.url", config.server.url),
        ("teacher.model", config.teacher.model),
    ):
        if value is not None:
            raise ValueError(
                f"{name} must be none with examples, since nothing is sampled, got {value!r}"
            )


_TAKE_ANY_REWARD = (
    "grpo", "rloo", "opo", "remax", "reinforce", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)  # fmt: skip


def _check_kl_in_reward(update: UpdateConfig) -> None:
    """Refuse a penalty in rewards whose parts, turns or sign an estimator depends on."""
    if update.advantage not in _TAKE_ANY_REWARD:
        raise ValueError(
            f"update.kl_in must be loss with update.advantage={update.advantage!r}, got reward, "
            f"which goes with {', '.join(_TAKE_ANY_REWARD)}"
        )
    if update.credit != "episode":
        raise ValueError(
            f"update.kl_in must be loss with update.credit={update.credit!r}, got reward: the "
            "penalty is that of a whole episode"
        )


def check_parts(config: TrainConfig, rewards: int) -> None:
    """Refuse several rewards where an estimator that compares each by itself has their sum only.

    `rewards` is their number, without the environment's own.
    """
    update, several = config.update, rewards + (config.environment is not None) > 1
    together = config.environment is not None or update.discount != 1 or update.credit != "episode"
    if several and together:
        raise ValueError(
            "update.advantage must not be gdpo, which compares each reward by itself, where only "
            f"the sum of several is known, got {rewards} beside "
            f"environment={config.environment!r}, update.credit={update.credit!r} and "
            f"update.discount={update.discount}"
        )


@contextmanager
def _names(name: str, options: str) -> Iterator[None]:
    """Name settings in the errors of `by_name`: ValueErrors are of names, TypeErrors of options."""
    try:
        yield
    except (ValueError, TypeError) as error:
        setting = options if isinstance(error, TypeError) else name
        raise ValueError(f"{setting}: {error}") from error


@contextmanager
def lora_names() -> Iterator[None]:
    """Name settings in the errors about a `LoraConfig`, whose arguments have PEFT's names."""
    settings = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"lora.{settings.get(name, name)} {rest}") from error


def _check_clip_range(config: TrainConfig) -> None:
    """Refuse a bound at 1: on-policy ratios are on either side of it, by their rounding."""
    # No ratio is clipped.
    if isinstance(make_loss(config), CISPOLoss | SAPOLoss | DPPOLoss | VESPOLoss):
        return
    for name in ("epsilon", "epsilon_high"):
        if getattr(config.update, name) == 0:
            raise ValueError(
                f"update.{name} must be above 0 for a loss that clips, got 0: ratios differ from 1 "
                "by rounding alone, and clipped tokens have no gradient; usual are 0.2, and 3e-4 "
                "for gspo"
            )


def _check_rows(config: TrainConfig) -> None:
    """Check that mini-batches and devices divide the rows, and that the longest row fits."""
    rollout, update = config.rollout, config.update
    if rollout.prompts % update.mini_batches:
        raise ValueError(
            f"update.mini_batches must divide rollout.prompts, {rollout.prompts}, "
            f"got {update.mini_batches}"
        )
    devices = config.mesh.data * config.mesh.fsdp
    for name, slots in (("rollout", rollout.slots), ("evaluation", config.evaluation.slots)):
        if slots is not None and (slots < 1 or slots % devices):
            raise ValueError(
                f"{name}.slots must be a positive multiple of mesh.data times mesh.fsdp, "
                f"{devices}, got {slots}"
            )
    rows, what = rollout.prompts * config.group_size, "rollout.prompts"
    if config.examples is None:
        what += " times rollout.num_samples"
    if rows % devices:
        raise ValueError(f"mesh.data times mesh.fsdp must divide {what}, {rows}, got {devices}")
    longest, by_episodes = config.longest_row, config.many_turns or config.examples is not None
    parts = "max_episode_tokens" if by_episodes else "max_prompt_tokens + max_new_tokens"
    for what, number in (("prompts * num_samples", rows), (parts, longest)):
        check_32_bits(f"rollout.{what}", number)
    if update.micro_batch_tokens < config.least_budget:
        held = "a pair of the longest rows, twice" if config.learns_pairs else "the longest row,"
        raise ValueError(
            f"update.micro_batch_tokens must hold {held} rollout.{parts} = {longest}, "
            f"got {update.micro_batch_tokens}"
        )
    if config.many_turns:
        _check_episodes(config)


def _check_episodes(config: TrainConfig) -> None:
    """Check the settings of episodes of several turns."""
    rollout, update = config.rollout, config.update
    if rollout.max_episode_tokens <= rollout.max_prompt_tokens:
        raise ValueError(
            "rollout.max_episode_tokens must be more than rollout.max_prompt_tokens, "
            f"{rollout.max_prompt_tokens}, got {rollout.max_episode_tokens}"
        )
    if update.credit == "episode" and update.gae_lambda != 1:
        raise ValueError(
            "update.gae_lambda must go with update.credit turn or mixed, "
            f"got update.credit='episode' and {update.gae_lambda}"
        )
    one_an_episode = update.credit == "episode" and config.rows_each == 1
    if update.advantage == "reinforce_plus_plus" and not one_an_episode:
        raise ValueError(
            "update.advantage must not be reinforce_plus_plus, a per-token estimator, with "
            f"update.credit={update.credit!r} and rollout.history={rollout.history!r}"
        )
    if update.advantage == "remax" and update.credit != "episode":
        raise ValueError(
            "update.credit must be episode with update.advantage='remax', whose baseline is the "
            f"reward of a whole greedy episode, got {update.credit!r}"
        )


def check_learning_rates(config: TrainConfig) -> None:
    """Raise for the first learning rate of a schedule of Optax that is negative or not finite.

    Uses a device. Of more than a million steps, a million are looked at.
    """
    optimizer, count = config.optimizer, config.steps
    if optimizer.schedule in _BUILT_IN_SCHEDULES:
        return
    schedule = optax_schedule(
        optimizer.schedule, optimizer.learning_rate, optimizer.schedule_options
    )
    steps = np.linspace(0, count - 1, min(count, 10**6)).astype(np.int32)
    with jax.numpy_dtype_promotion("standard"):
        rates = np.asarray(jax.jit(jax.vmap(schedule))(steps))
    for step in steps[~((rates >= 0) & (rates < math.inf))].tolist():
        rate = config.learning_rate(step)  # as the run computes it
        if not 0 <= rate < math.inf:
            raise ValueError(
                "optimizer.schedule_options must make learning rates that are finite and at least "
                f"0, got {rate} in step {step + 1} with {config.optimizer.schedule_options}"
            )


def automatic_settings(section: Any = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Name the settings whose default is `auto`: None, where their type has no None."""
    hints = get_type_hints(section)
    for setting in fields(section):
        hint = hints[setting.name]
        if is_dataclass(hint):
            yield from automatic_settings(hint, f"{setting.name}.")
        elif setting.default is AUTO and not {type(None), "auto"} & set(get_args(hint)):
            yield prefix + setting.name


def optional_settings(section: Any = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Name the settings that may be None."""
    for name, hint in get_type_hints(section).items():
        if is_dataclass(hint):
            yield from optional_settings(hint, f"{name}.")
        elif type(None) in get_args(hint):
            yield prefix + name


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Name each setting as the command does: `rollout.prompts`."""
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            settings |= {f"{name}.{key}": x for key, x in value.items()}
        else:
            settings[name] = value
    return settings
