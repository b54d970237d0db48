"""The start of a run: read or restore the policy, warm it up, add adapters, fit the devices."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax

from twinkle_jax.data import ArithmeticTask, PromptLoader
from twinkle_jax.model import LoraConfig, shard_like_params
from twinkle_jax.rollout import default_cohorts, hosts
from twinkle_jax.rollout.settings import AUTO
from twinkle_jax.training.checkpoint import RunCheckpoints
from twinkle_jax.training.config import TrainConfig
from twinkle_jax.training.display import Display
from twinkle_jax.training.evaluation import held_out
from twinkle_jax.training.memory import device_memory, fit
from twinkle_jax.training.metrics import MetricsLog, NoLog
from twinkle_jax.training.policy import (
    Policy,
    WarmStart,
    add_adapter,
    load_policy,
    save_policy,
    small_policy,
    warm_start,
)
from twinkle_jax.training.progress import Progress, Totals, restore, write_whole
from twinkle_jax.training.recipe import Recipe, make_recipe, with_config
from twinkle_jax.training.state import begin_training, find_devices
from twinkle_jax.training.task import Task

_IMITATION_STEPS = 200  # of supervised training on an environment's demonstrations


class Run(NamedTuple):
    """The parts of a run, constant except for the loader's position."""

    config: TrainConfig
    task: Task
    recipe: Recipe
    loader: PromptLoader
    checkpoints: RunCheckpoints
    log: MetricsLog | NoLog
    display: Display

    @property
    def policy(self) -> Policy:
        """The policy as training began."""
        return self.recipe.policy


def begin(
    config: TrainConfig,
    directory: Path,
    task: Task,
    log: MetricsLog | NoLog,
    display: Display,
    source: Path | None,
) -> tuple[Run, Progress]:
    """Make the policy and everything that trains it, or restore a checkpoint; does not save."""
    mesh = find_devices(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    config = _choose_cohorts(config, display)
    policy = hosts.agreed("reading the policy", lambda: _read_policy(config, mesh))
    if config.model is None and mesh is not None:
        placed = jax.device_put(policy.params, shard_like_params(policy.params, mesh))
        policy = policy._replace(params=placed)
    totals = Totals()
    settings = json.dumps(dataclasses.asdict(config), indent=1)
    if source is None:
        display.note(f"run in {directory}: {_describe(policy)}")
        _write_first(directory / "config.json", settings)
        if config.model is None and config.warm_start:
            policy = _warm(config, task, policy, display, mesh)
    policy = with_adapter(config, policy, directory, source, mesh)
    if source is None:
        before = held_out(config, task, policy, mesh=mesh).get("accuracy")
        totals = dataclasses.replace(totals, accuracy_before=before)
    recipe = make_recipe(config, policy, task.reward, environment=task.environment, mesh=mesh)
    loader = PromptLoader(task.train, config.rollout.prompts, seed=config.seed)
    state = begin_training(policy.params, recipe.optimizer, mesh)
    recipe = _fit_devices(recipe, state, directory, display)
    config = recipe.config
    progress = Progress(state, jax.random.key(config.seed), 0, totals, loader.get_state())
    checkpoints = RunCheckpoints(directory / "checkpoints", keep=config.logging.keep_checkpoints)
    if source is not None:
        saved = RunCheckpoints(source / "checkpoints") if source != directory else checkpoints
        progress, reference = restore(saved, progress, recipe.reference, config, loader)
        recipe = recipe._replace(reference=reference)
        offset = progress.totals.metrics_offset
        hosts.together("reading metrics.jsonl", lambda: log.truncate(offset))
        settings = json.dumps(dataclasses.asdict(config), indent=1)
        _write_first(directory / "config.json", settings)
        display.note(f"going on after step {progress.step} of {source}")
    return Run(config, task, recipe, loader, checkpoints, log, display), progress


def _choose_cohorts(config: TrainConfig, display: Display) -> TrainConfig:
    rollout = config.rollout
    if not config.many_turns or rollout.cohorts is not AUTO:
        return config
    cohorts = default_cohorts(rollout.prompts * rollout.num_samples)
    display.note(f"rollout.cohorts {cohorts}")
    return dataclasses.replace(config, rollout=dataclasses.replace(rollout, cohorts=cohorts))


def _read_policy(config: TrainConfig, mesh: Any) -> Policy:
    return load_policy(config.model, mesh=mesh) if config.model else small_policy(config.seed)


def _write_first(path: Path, text: str) -> None:
    """Write a file once for all processes."""
    hosts.first_decides(f"writing {path.name}", lambda: write_whole(path, text))


def _fit_devices(recipe: Recipe, state: Any, directory: Path, display: Display) -> Recipe:
    """Reduce automatic settings until they fit the devices' memory, where that is known."""
    memory = recipe.config.mesh.memory
    limits = hosts.share("reading the devices' memory", lambda: device_memory(memory))
    if None in limits:
        return recipe
    display.note("compiling the largest step, to see what it takes")
    config = fit(recipe, state, min(limits), display.note)
    if config == recipe.config:
        return recipe
    _write_first(directory / "config.json", json.dumps(dataclasses.asdict(config), indent=1))
    return with_config(recipe, config)


def with_adapter(
    config: TrainConfig, policy: Policy, directory: Path, source: Path | None, mesh: Any
) -> Policy:
    """Add adapters to the policy if `lora.rank` is set; saves the built-in one as their base."""
    lora = config.lora
    if not lora.rank:
        return policy
    base = config.model
    if base is None:
        base = str((directory / "base").resolve())
        if source is None:
            save_policy(policy, base)
        elif source.resolve() != directory.resolve():
            save_policy(load_policy(str(source / "base"), mesh=mesh), base)
        policy = load_policy(base, mesh=mesh)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules
        if isinstance(lora.target_modules, str)
        else tuple(lora.target_modules),
    )
    return add_adapter(policy, settings, base=base, seed=config.seed, dtype=config.dtype, mesh=mesh)


def _warm(config: TrainConfig, task: Task, policy: Policy, display: Display, mesh: Any) -> Policy:
    """Train the built-in policy on answers, or on the environment's demonstrations."""
    if task.environment is not None:
        demonstrate = getattr(task.environment, "demonstrations", None)
        if demonstrate is None:
            return policy
        settings = WarmStart(accuracy=math.inf, steps=_IMITATION_STEPS)
        examples = demonstrate(settings.steps * settings.rows, config.seed)
        policy = warm_start(policy, examples, lambda policy: 0.0, settings, mesh=mesh)
        display.note(f"warm start, {settings.steps} steps on the environment's demonstrations")
        return policy
    return warm_start(
        policy,
        ArithmeticTask(config.level, size=200_000, seed=config.seed + 1),
        lambda policy: held_out(config, task, policy, mesh=mesh)["accuracy"],
        WarmStart(accuracy=config.warm_start),
        lambda step, accuracy: display.note(
            f"warm start, {step} steps on examples: held-out accuracy {accuracy:.2f}"
        ),
        mesh=mesh,
    )


def _describe(policy: Policy) -> str:
    count = sum(x.size for x in jax.tree.leaves(policy.params))
    return f"{count:,} parameters on {jax.device_count()} {jax.default_backend()} device(s)"
