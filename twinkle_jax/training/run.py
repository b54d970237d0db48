"""A run: what it is made of, how it begins or goes on, and what a checkpoint of it holds."""

import dataclasses
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from twinkle_jax.data import ArithmeticTask, PromptLoader
from twinkle_jax.model import TrainState, train_state
from twinkle_jax.training.config import TrainConfig, check_resumable, from_dict
from twinkle_jax.training.display import Display
from twinkle_jax.training.evaluation import evaluate
from twinkle_jax.training.metrics_log import MetricsLog
from twinkle_jax.training.policy import Policy, load_policy, save_policy, small_policy
from twinkle_jax.training.recipe import make_recipe
from twinkle_jax.training.run_checkpoints import RunCheckpoints
from twinkle_jax.training.step import Recipe
from twinkle_jax.training.tasks import Task, make_task
from twinkle_jax.training.warm_start import WarmStart, warm_start


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


class Progress(NamedTuple):
    """Where a run is: what a checkpoint holds besides the reference policy.

    Attributes:
        state: parameters, moments, number of updates.
        key: the root of all randomness on the device; step s draws with `fold_in(key, s)`.
        step: steps done.
        facts: numbers that go on: tokens so far, accuracies, seconds, skipped steps in a row.
    """

    state: TrainState
    key: jax.Array
    step: int
    facts: dict[str, Any]


def begin(
    config: TrainConfig,
    directory: Path,
    task: Task,
    log: MetricsLog,
    display: Display,
    source: Path | None,
) -> tuple[Run, Progress]:
    """Make the policy, or restore what a checkpoint holds."""
    policy = small_policy(config.seed) if config.model is None else load_policy(config.model)
    facts: dict[str, Any] = {"num_tokens": 0, "skipped": 0, "seconds": 0.0, "accuracy_before": None}
    if source is None:
        display.note(f"run in {directory}: {_describe(policy)}")
        (directory / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
        if config.model is None and config.warm_start:
            policy = _warm(config, task, policy, display)
        facts["accuracy_before"] = held_out_accuracy(config, task, policy).get("accuracy")
    recipe = make_recipe(config, task, policy)
    loader = PromptLoader(task.train, config.rollout.prompts, seed=config.seed)
    state = train_state(policy.params, recipe.learner.optimizer)
    progress = Progress(state, jax.random.key(config.seed), 0, facts)
    checkpoints = RunCheckpoints(directory / "checkpoints", keep=config.logging.keep_checkpoints)
    if source is not None:
        saved = RunCheckpoints(source / "checkpoints") if source != directory else checkpoints
        progress, reference = _restore(saved, config, loader, progress, recipe)
        recipe = recipe._replace(reference=reference)
        log.truncate(progress.facts["metrics_offset"])
        display.note(f"going on after step {progress.step} of {source}")
    run = Run(config, policy, task, recipe, loader, checkpoints, log, display)
    if source is None:
        save(run, progress)
    return run, progress


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
    )


def held_out_accuracy(
    config: TrainConfig, task: Task, policy: Policy, params: Any = None
) -> dict[str, float]:
    """Evaluate a policy, or its parameters of now, on the task's held-out problems."""
    if not task.held_out:
        return {}
    assert config.rollout.max_new_tokens is not None
    return evaluate(
        policy,
        task.held_out,
        task.reward,
        params=params,
        max_new_tokens=config.rollout.max_new_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        pass_k=config.evaluation.pass_k,
        temperature=config.rollout.temperature,
        seed=config.seed,
        compute_dtype=config.dtype,
    )


def _arrays(progress: Progress, recipe: Recipe) -> dict[str, Any]:
    held = {} if recipe.reference is None else {"reference": recipe.reference}
    return {"state": progress.state, "key": progress.key, **held}


def save(run: Run, progress: Progress) -> None:
    """Save a checkpoint: all that the next step depends on."""
    facts = progress.facts | {
        "metrics_offset": run.log.offset,
        "data": run.loader.get_state(),
        "config": json.loads(json.dumps(dataclasses.asdict(run.config))),
        "versions": _versions(),
    }
    run.checkpoints.save(progress.step, _arrays(progress, run.recipe), facts)


def export(directory: str | Path, target: str | Path, *, step: int | None = None) -> None:
    """Write the policy of a run's checkpoint as a Hugging Face checkpoint.

    Args:
        directory: of the run.
        target: where to write it.
        step: whose checkpoint; None for the newest whole one.

    Raises:
        FileNotFoundError: if there is no run, or no whole checkpoint.
    """
    config = from_dict(json.loads((Path(directory) / "config.json").read_text()))
    policy = small_policy(config.seed) if config.model is None else load_policy(config.model)
    recipe = make_recipe(config, make_task(config), policy)
    state = train_state(policy.params, recipe.learner.optimizer)
    like = _arrays(Progress(state, jax.random.key(config.seed), 0, {}), recipe)
    found = RunCheckpoints(Path(directory) / "checkpoints").restore(like, step=step)
    save_policy(policy._replace(params=found.arrays["state"].params), str(target))


def _restore(
    checkpoints: RunCheckpoints,
    config: TrainConfig,
    loader: PromptLoader,
    fresh: Progress,
    recipe: Recipe,
) -> tuple[Progress, Any]:
    step, arrays, facts = checkpoints.restore(_arrays(fresh, recipe))
    check_resumable(facts["config"], config)
    loader.set_state(facts["data"])
    return Progress(arrays["state"], arrays["key"], step, facts), arrays.get("reference")


def _describe(policy: Policy) -> str:
    count = sum(x.size for x in jax.tree.leaves(policy.params))
    return f"{count:,} parameters on {jax.device_count()} {jax.default_backend()} device(s)"


def _versions() -> dict[str, str]:
    names = ("twinkle-jax", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}
