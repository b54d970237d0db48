"""A run: what it is made of, and how it begins or goes on."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from twinkle_jax.data import ArithmeticTask, PromptLoader
from twinkle_jax.training.checkpoints.progress import Progress, restore
from twinkle_jax.training.checkpoints.run_checkpoints import RunCheckpoints
from twinkle_jax.training.checkpoints.run_directory import write_whole
from twinkle_jax.training.configuration.tasks import Task
from twinkle_jax.training.configuration.train_config import TrainConfig
from twinkle_jax.training.policies.devices import begin_training, place, run_mesh
from twinkle_jax.training.policies.text_policy import Policy, load_policy, small_policy
from twinkle_jax.training.policies.warm_start import WarmStart, warm_start
from twinkle_jax.training.run.held_out import held_out_accuracy
from twinkle_jax.training.shown.display import Display
from twinkle_jax.training.shown.metrics_log import MetricsLog
from twinkle_jax.training.step.recipe import Recipe, make_recipe


class Run(NamedTuple):
    """What a run is made of, fixed but for the loader's position."""

    config: TrainConfig
    policy: Policy
    task: Task
    recipe: Recipe
    loader: PromptLoader
    checkpoints: RunCheckpoints
    log: MetricsLog
    display: Display


def begin(
    config: TrainConfig,
    directory: Path,
    task: Task,
    log: MetricsLog,
    display: Display,
    source: Path | None,
) -> tuple[Run, Progress]:
    """Make the policy, or restore what a checkpoint holds; nothing is saved yet."""
    mesh = run_mesh(config)
    policy = start_policy(config, mesh)
    facts: dict[str, Any] = {"num_tokens": 0, "skipped": 0, "seconds": 0.0, "accuracy_before": None}
    settings = json.dumps(dataclasses.asdict(config), indent=1)
    if source is None:
        display.note(f"run in {directory}: {_describe(policy)}")
        write_whole(directory / "config.json", settings)
        if config.model is None and config.warm_start:
            policy = _warm(config, task, policy, display)
        facts["accuracy_before"] = held_out_accuracy(config, task, policy).get("accuracy")
    recipe = make_recipe(config, task, policy, mesh)
    loader = PromptLoader(task.train, config.rollout.prompts, seed=config.seed)
    state = begin_training(policy.params, recipe.learner.optimizer, mesh)
    progress = Progress(state, jax.random.key(config.seed), 0, facts, loader.get_state())
    checkpoints = RunCheckpoints(directory / "checkpoints", keep=config.logging.keep_checkpoints)
    if source is not None:
        saved = RunCheckpoints(source / "checkpoints") if source != directory else checkpoints
        progress, reference = restore(saved, progress, recipe.reference, config, loader)
        recipe = recipe._replace(reference=reference)
        log.truncate(progress.facts["metrics_offset"])
        write_whole(directory / "config.json", settings)
        display.note(f"going on after step {progress.step} of {source}")
    run = Run(config, policy, task, recipe, loader, checkpoints, log, display)
    return run, progress


def start_policy(config: TrainConfig, mesh: Mesh | None) -> Policy:
    """Make or read the policy that training begins with, where it belongs."""
    if config.model is not None:
        return load_policy(config.model, mesh=mesh)
    policy = small_policy(config.seed)
    return policy._replace(params=place(policy.params, mesh))


def _warm(config: TrainConfig, task: Task, policy: Policy, display: Display) -> Policy:
    examples = ArithmeticTask(config.level, size=200_000, seed=config.seed + 1)
    return warm_start(
        policy,
        examples,
        lambda policy: held_out_accuracy(config, task, policy)["accuracy"],
        WarmStart(accuracy=config.warm_start),
        lambda step, accuracy: display.note(
            f"warm start, {step} steps on examples: held-out accuracy {accuracy:.2f}"
        ),
        mesh=run_mesh(config),
    )


def _describe(policy: Policy) -> str:
    count = sum(x.size for x in jax.tree.leaves(policy.params))
    return f"{count:,} parameters on {jax.device_count()} {jax.default_backend()} device(s)"
