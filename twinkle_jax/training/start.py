"""The start of a run: its policy, the parts of its steps, and what a resumed one restores."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from twinkle_jax.data import (
    ArithmeticTask,
    PromptLoader,
    Template,
    parse_tool_calls,
)
from twinkle_jax.data.prompts import GeneratedPrompts, prompts_fingerprint
from twinkle_jax.data.settings import AUTO
from twinkle_jax.loss import DPOLoss
from twinkle_jax.loss.token_logprobs import compute_capability
from twinkle_jax.model.decoder.lora import adapted_kernels
from twinkle_jax.model.decoder.sharding import place_params
from twinkle_jax.reward import RewardFunction, WeightedReward
from twinkle_jax.rollout import (
    Engine,
    EnvironmentFactory,
    MultiTurn,
    RolloutSource,
    SingleTurn,
    default_cohorts,
    hosts,
)
from twinkle_jax.rollout.engine import prompt_ids
from twinkle_jax.rollout.server_engine import NextRollout, ServerEngine
from twinkle_jax.sampler import ServerError
from twinkle_jax.sampler.generate import device_bytes
from twinkle_jax.training.by_name import make_estimator
from twinkle_jax.training.checkpoint import RunCheckpoints
from twinkle_jax.training.config import (
    MEASURED,
    TrainConfig,
    check_parts,
    lora_names,
    make_lora,
    make_loss,
    run_optimizer,
    with_setting,
)
from twinkle_jax.training.display import Display
from twinkle_jax.training.engine import make_engine
from twinkle_jax.training.evaluation import held_out
from twinkle_jax.training.examples import ExampleSource, check_examples
from twinkle_jax.training.hosts import code_hashes, fingerprint
from twinkle_jax.training.memory import device_memory, fit
from twinkle_jax.training.policy import (
    Policy,
    WarmStart,
    add_adapter,
    load_policy,
    save_policy,
    small_policy,
    warm_start,
)
from twinkle_jax.training.progress import Progress, Totals, restore
from twinkle_jax.training.run_directory import changed_code, write_atomically
from twinkle_jax.training.state import TrainState, begin_training, find_devices, shapes_of
from twinkle_jax.training.step import Recipe
from twinkle_jax.training.task import Task
from twinkle_jax.training.teacher import ServedTeacher, check_decoder, read_teacher
from twinkle_jax.training.tracking import MetricsLog, NoLog

_ENCODED_AT_ONCE = 4096  # prompts
_IMITATION_STEPS = 200  # of supervised training on an environment's demonstrations


class Run(NamedTuple):
    """The parts of a run, constant except for the loader's position."""

    config: TrainConfig
    task: Task
    policy: Policy  # as training began
    recipe: Recipe
    engine: Engine  # draws completions, in steps and evaluations
    next_rollout: NextRollout | None  # samples during an update, with `server.overlap`
    loader: PromptLoader
    checkpoints: RunCheckpoints
    log: MetricsLog | NoLog
    display: Display
    base: str | None = None  # fingerprint of the parameters that adapters are added to


def begin(
    config: TrainConfig,
    directory: Path,
    task: Task,
    log: MetricsLog | NoLog,
    display: Display,
    source: Path | None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Run, Progress]:
    """Make the policy and everything that trains it; restore them from `source` if there is one.

    `check` raises `InterruptedRunError` after a signal, which ends the first evaluation.
    """
    mesh = find_devices(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    if config.dtype is AUTO:
        config = with_dtype(config, mesh)
        display.note(f"dtype {config.dtype}")
    config = _choose_cohorts(config, display)
    policy = hosts.agreed("reading the policy", lambda: read_policy(config, mesh))
    if config.model is None and mesh is not None:
        policy = policy._replace(params=place_params(policy.params, mesh))
    if source is None:
        display.note(f"run in {directory}: {_describe(policy)}")
        _write_config(config, directory)
        if config.model is None and config.warm_start:
            policy = _warm(config, task, policy, display, mesh)
        if _has_tools(config, task):
            _check_template_of_tools(policy.template, config.rollout.tool_format, display)
    policy = with_adapter(config, policy, directory, source, mesh)
    if not config.many_turns and not isinstance(task.train, GeneratedPrompts):
        if len(task.train) > _ENCODED_AT_ONCE:
            kind = "prompts" if config.examples is None else _kind_of_examples(config)
            display.note(f"checking the lengths of {len(task.train):,} {kind}")
        hosts.together("checking prompts", lambda: _check_lengths(config, task, policy))
    if config.examples is not None:
        count, at_once = len(task.train), config.rollout.prompts
        steps = f"a pass over them takes {-(-count // at_once):,} steps"
        if count <= at_once:
            steps = f"a step passes over them {at_once / count:.3g} times"
        display.note(f"{count:,} {_kind_of_examples(config)}: {steps}")
    engine = make_engine(config, policy, mesh, note=display.note)
    if source is None:
        _check_server(config, engine)
    teacher = hosts.agreed(
        "reading the teacher", lambda: read_teacher(config, policy, mesh, display.note)
    )
    recipe = make_recipe(
        config,
        policy,
        task.reward,
        environment=task.environment,
        engine=engine,
        mesh=mesh,
        teacher=teacher,
    )
    loader = PromptLoader(task.train, config.rollout.prompts, seed=config.seed)
    state = begin_training(policy.params, recipe.optimizer, mesh)
    others = sum(device_bytes(shapes_of(model.params)) for model in task.reward_models())
    resumed = source is not None
    samples = bool(task.held_out) and config.task != "examples"  # in evaluations
    recipe = _fit_devices(recipe, state, display, others=others, resumed=resumed, evaluates=samples)
    if recipe.config != config and not resumed:
        _write_config(recipe.config, directory)
    config = recipe.config
    progress = Progress(state, jax.random.key(config.seed), 0, Totals(), loader.get_state())
    checkpoints = RunCheckpoints(directory / "checkpoints", keep=config.logging.keep_checkpoints)
    base = fingerprint_of_base(policy)
    if source is not None:
        saved = RunCheckpoints(source / "checkpoints") if source != directory else checkpoints
        progress, reference = restore(
            saved, progress, recipe.reference, config, loader, base,
            prompts_fingerprint(task.held_out),
        )  # fmt: skip
        recipe = recipe._replace(reference=reference)
        if progress.step < config.steps:
            _check_server(config, engine)
        offset = progress.totals.metrics_offset
        hosts.together("reading metrics.jsonl", lambda: log.truncate(offset, source))
        _write_config(config, directory)
        display.note(f"resuming after step {progress.step} of {source}")
        for option in changed_code(source, code_hashes(config)):
            display.note(f"warning: the file of {option} has changed since that step")
    if task.held_out and not progress.totals.evaluated:
        progress = _judge_first(progress, recipe, task, policy, engine, display, check)
    ahead = None
    if isinstance(engine, ServerEngine) and config.server.overlap:
        ahead = NextRollout(recipe.source, engine, config.rollout)
    run = Run(config, task, policy, recipe, engine, ahead, loader, checkpoints, log, display, base)
    return run, progress


def _kind_of_examples(config: TrainConfig) -> str:
    return "pairs" if config.learns_pairs else "examples"


def _check_server(config: TrainConfig, engine: Engine) -> None:
    """Refuse a server that is not there, or has no room for the longest row of a run.

    It forgets the adapters that a killed process of this run has left.
    """
    if not isinstance(engine, ServerEngine):
        return
    room, longest = hosts.agreed("asking the server", engine.room), config.longest_row
    names = "rollout.max_prompt_tokens or rollout.max_new_tokens"
    if config.many_turns:
        names = "rollout.max_episode_tokens"
    if room < longest:
        raise ServerError(
            f"server.url must be of a server with room for rows of {longest} tokens, got "
            f"{config.server.url} with a max_model_len of {room}: start it with --max-model-len "
            f"{longest}, or this run with a lower {names}"
        )
    if config.server.shared_dir is None:  # in `output_dir`, where no other run writes
        engine.remove_adapters()


def _judge_first(
    progress: Progress,
    recipe: Recipe,
    task: Task,
    policy: Policy,
    engine: Engine,
    display: Display,
    check: Callable[[], None],
) -> Progress:
    """Evaluate the policy before the first step, unless a resumed run has done it.

    A signal leaves that to the run that resumes this one, which ends before its first step.
    """
    if progress.step:
        measured = "accuracy"
        if recipe.config.task == "examples":
            measured = "preference_loss" if recipe.config.learns_pairs else "cross_entropy"
        display.note(
            f"{measured}_before is not known: settings or problems of the evaluation have changed "
            "since the first step"
        )
        return progress
    try:
        results = held_out(
            recipe.config, task, policy,
            engine=engine, params=progress.state.params, recipe=recipe, check=check,
        )  # fmt: skip
    except hosts.InterruptedRunError:
        return progress
    before: dict[str, Any] = {f"{x}_before": results[x] for x in MEASURED if x in results}
    if not before:
        return progress
    display.held_out("before the first step", results)
    problems = prompts_fingerprint(task.held_out)
    totals = dataclasses.replace(progress.totals, held_out=problems, **before)
    return progress._replace(totals=totals)


def _check_template_of_tools(template: Template, tool_format: str, display: Display) -> None:
    """Warn if a chat template does not show tools, or writes calls in a form that is not parsed."""
    chat = template.chat_template
    if chat is None or "tools" not in chat.source:
        display.note(
            "warning: the chat template does not show tools, so the policy is not told of "
            "those in --tools or in a column tools; say in --system or in the prompts what "
            "may be called, and how"
        )
        return
    text, formats = template.example_call, template.tool_formats
    if text and not parse_tool_calls(text, formats if tool_format == "any" else tool_format).calls:
        display.note(
            "warning: the chat template writes tool calls in a form that is not read with "
            f"--rollout.tool_format {tool_format}, so calls that the policy has learned to write "
            "are not run; say in --system or in the prompts how tools are called"
        )


def _has_tools(config: TrainConfig, task: Task) -> bool:
    if config.tools is not None or isinstance(task.train, GeneratedPrompts):
        return config.tools is not None
    return any(row.get("tools") for row in task.train)


def _check_lengths(config: TrainConfig, task: Task, policy: Policy) -> None:
    """Refuse prompts that are too long, which a run would otherwise find after hours."""
    longest = config.rollout.max_prompt_tokens
    to_complete, to_learn = {"prompts": task.train, "held-out prompts": task.held_out}, {}
    if config.examples is not None:
        to_learn["examples"] = to_complete.pop("prompts")
    if config.task == "examples":
        to_learn["evaluation.path"] = to_complete.pop("held-out prompts")
    for argument, examples in to_learn.items():
        limit = config.rollout.max_episode_tokens
        check_examples(policy.template, examples, longest=limit, argument=argument)
    for called, prompts in to_complete.items():
        for start in range(0, len(prompts), _ENCODED_AT_ONCE):
            part = prompts[start : start + _ENCODED_AT_ONCE]
            prompt_ids(policy.template, part, longest=longest, first=start, called=called)


def _choose_cohorts(config: TrainConfig, display: Display) -> TrainConfig:
    rollout = config.rollout
    if not config.many_turns or rollout.cohorts is not AUTO:
        return config
    cohorts = default_cohorts(rollout.prompts * rollout.num_samples)
    display.note(f"rollout.cohorts {cohorts}")
    return with_setting(config, "rollout.cohorts", cohorts)


def with_dtype(config: TrainConfig, mesh: Mesh | None) -> TrainConfig:
    """Choose the type of activations by the devices, unless it is set."""
    if config.dtype is not AUTO:
        return config
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    bfloat16 = device.platform == "tpu" or compute_capability(device) >= 8
    return dataclasses.replace(config, dtype="bfloat16" if bfloat16 else "float32")


def read_policy(config: TrainConfig, mesh: Mesh | None = None) -> Policy:
    """Read the policy that a configuration names, without adapters; the built-in one if none."""
    if config.model is None:
        policy = small_policy(config.seed)
    else:
        policy = load_policy(config.model, mesh=mesh, argument="model")
    check_decoder(config, policy.config, mesh, "policy")
    return policy


def fingerprint_of_base(policy: Policy) -> str | None:
    """Hash the files that the frozen parameters were read from; None without adapters."""
    if policy.frozen is None or policy.source is None:
        return None
    files = sorted(policy.source.glob("*.safetensors"))
    return hashlib.sha256("".join(map(fingerprint, files)).encode()).hexdigest()[:32]


def _write_config(config: TrainConfig, directory: Path) -> None:
    """Write config.json, once for all processes."""
    text = json.dumps(dataclasses.asdict(config), indent=1)
    hosts.first_decides(
        "writing config.json", lambda: write_atomically(directory / "config.json", text)
    )


def _fit_devices(
    recipe: Recipe,
    state: TrainState,
    display: Display,
    *,
    others: int,
    resumed: bool,
    evaluates: bool,
) -> Recipe:
    """Reduce automatic settings until they fit the devices' memory, where that is known.

    Other models take `others` bytes of each device.
    """
    memory = recipe.config.mesh.memory
    limits = hosts.share("reading the devices' memory", lambda: device_memory(memory))
    if None in limits:
        return recipe
    if others:
        display.note(f"reward models take {others / 2**30:.2f} GiB of each device")
    display.note("compiling the largest step to measure its memory")
    limit, recompute = min(limits) - others, recipe.config.update.recompute
    if resumed and recompute == "auto":  # it began where memory is not known, and layers were
        layers = with_setting(recipe.config, "update.recompute", "layers")
        config = fit(
            recipe._replace(config=layers), state, limit, display.note, evaluates=evaluates
        )
        return with_config(recipe, with_setting(config, "update.recompute", recompute))
    config = fit(recipe, state, limit, display.note, evaluates=evaluates)
    return with_config(recipe, config)


def with_adapter(
    config: TrainConfig, policy: Policy, directory: Path, source: Path | None, mesh: Mesh | None
) -> Policy:
    """Add adapters to the policy if `lora.rank` is set; saves the built-in one as their base."""
    if not config.lora.rank:
        return policy
    if policy.lora is not None:
        raise ValueError(
            "lora.rank must be 0 where the model is an adapter, which is trained, got "
            f"{config.lora.rank}"
        )
    settings = make_lora(config)
    with lora_names():
        adapted_kernels(policy.config, settings)  # raises if a target is no projection
    base = config.model
    if base is None:
        base = str((directory / "base").resolve())
        if source is None:
            save_policy(policy, base)
        elif source.resolve() != directory.resolve():
            save_policy(load_policy(str(source / "base"), mesh=mesh), base)
        policy = load_policy(base, mesh=mesh)
    return add_adapter(policy, settings, base=base, seed=config.seed, dtype=config.dtype, mesh=mesh)


def _warm(
    config: TrainConfig, task: Task, policy: Policy, display: Display, mesh: Mesh | None
) -> Policy:
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
        ArithmeticTask(config.level, size=200_000, seed=config.seed + 1, system=config.system),
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


# The parts of its steps.


def make_recipe(
    config: TrainConfig,
    policy: Policy,
    reward: RewardFunction | None,
    *,
    environment: EnvironmentFactory | None = None,
    engine: Engine | None = None,
    mesh: Mesh | None = None,
    teacher: Policy | ServedTeacher | None = None,
) -> Recipe:
    """Make the parts of a step from its configuration.

    Args:
        config: of the run.
        policy: before training; its parameters are copied if a reference policy is needed.
        reward: of trajectories and ground truths; may be None with an environment, with a teacher
            alone, or with examples.
        environment: makes environments; None: the policy completes prompts.
        engine: draws completions; None: as the configuration says.
        mesh: devices; None for one.
        teacher: that `teacher.model` names.

    Raises:
        ValueError: without a reward and an environment, for rewards that the estimator cannot
            compare by themselves, or without the teacher that the configuration names.
    """
    config = with_dtype(config, mesh)
    update = config.update
    if (teacher is None) != (config.teacher.model is None):
        raise ValueError(
            f"teacher must be the policy that teacher.model names, {config.teacher.model!r}, "
            f"got {'none' if teacher is None else 'one'}"
        )
    loss, reference = make_loss(config), None
    if update.kl_beta or (isinstance(loss, DPOLoss) and not loss.reference_free):
        # New adapters change nothing: the frozen parameters alone are the initial policy.
        reference = {} if config.lora.rank else jax.tree.map(jnp.copy, policy.params)
    estimator = make_estimator(update.advantage, update.advantage_options)
    if estimator.compares_parts and reward is not None:
        check_parts(config, len(reward.rewards) if isinstance(reward, WeightedReward) else 1)
    engine = engine or make_engine(config, policy, mesh)
    multiple = 1 if mesh is None else mesh.shape["tensor"]
    options: dict[str, Any] = {
        "reward_timeout": config.reward_timeout,
        "mask_truncated": update.mask_truncated,
        "width_multiple": multiple,
    }
    source: RolloutSource
    if config.examples is not None:
        source = ExampleSource(policy.template, config.rollout, multiple)
    elif environment is not None:
        source = MultiTurn(
            engine, environment, config.rollout, reward, discount=update.discount, **options
        )
    elif reward is not None or not config.compares_rewards:
        source = SingleTurn(engine, reward, config.rollout, **options)
    else:
        raise ValueError("reward must be given without an environment, got None")
    return Recipe(
        config,
        policy.config,
        policy.frozen,
        source,
        loss,
        run_optimizer(config),
        estimator,
        reference,
        mesh,
        teacher,
    )


def with_config(recipe: Recipe, config: TrainConfig) -> Recipe:
    """Replace the configuration of a recipe, and the settings of its source."""
    source: Any = recipe.source  # `make_recipe` makes those with settings
    source = dataclasses.replace(source, settings=config.rollout)
    return recipe._replace(config=config, source=source)
