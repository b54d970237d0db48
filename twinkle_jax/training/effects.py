"""Settings that have an effect only with another one: without it, a run refuses them."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from twinkle_jax.data.settings import AUTO
from twinkle_jax.loss import CISPOLoss, DPPOLoss, SAPOLoss, VESPOLoss
from twinkle_jax.training.by_name import make_estimator
from twinkle_jax.training.config import (
    TrainConfig,
    automatic_logp_diff,
    automatic_new_tokens,
    automatic_scale,
    flat,
    make_loss,
)
from twinkle_jax.training.task import has_held_out


class _Condition(NamedTuple):
    """When settings have an effect."""

    needed: str  # what they must go with, for the error
    holds: Callable[[TrainConfig], bool]
    names: str  # of the settings, separated by spaces


_CONDITIONS = (
    _Condition(
        "a lora.rank above 0",
        lambda config: config.lora.rank > 0,
        "lora.alpha lora.dropout lora.target_modules",
    ),
    _Condition(
        "an environment or tools",
        lambda config: config.many_turns,
        "update.credit update.discount update.gae_lambda logging.traces_every "
        "rollout.max_turns rollout.history rollout.tool_format rollout.cohorts "
        "rollout.environment_timeout rollout.environment_threads "
        "rollout.max_failed rollout.max_observation",
    ),
    _Condition(
        "a rollout.max_turns above 1",
        lambda config: config.rollout.max_turns > 1,
        "update.credit update.discount update.gae_lambda rollout.history",
    ),
    _Condition(
        "an update.discount above 0",
        lambda config: config.update.discount > 0,
        "update.gae_lambda",
    ),
    _Condition(
        "an environment, tools or examples",
        # A resumed run may have longer prompts, and keeps the length that followed from them.
        lambda config: config.many_turns or config.examples is not None or config.resume != "never",
        "rollout.max_episode_tokens",
    ),
    _Condition(
        "a server.url",
        lambda config: config.server.url is not None,
        "server.served_name server.shared_dir server.timeout server.tolerance server.seeded "
        "server.patience server.overlap",
    ),
    _Condition(
        "sampling in this process, without server.url",
        lambda config: config.server.url is None,
        "rollout.slots evaluation.slots",
    ),
    _Condition("tools", lambda config: config.tools is not None, "rollout.tools_in"),
    _Condition(
        "an environment that is no server",
        lambda config: not (config.environment or "openenv:").startswith("openenv:"),
        "rollout.environment_in",
    ),
    _Condition(
        "tools or an environment in processes",
        lambda config: (
            (config.tools is not None and config.rollout.tools_in == "process")
            or config.rollout.environment_in == "process"
        ),
        "rollout.process_megabytes",
    ),
    _Condition(
        "an update.advantage that has a scale, such as grpo or rloo",
        lambda config: (
            make_estimator(config.update.advantage, config.update.advantage_options).has_scale
        ),
        "update.scale",
    ),
    _Condition(
        "an update.kl_beta above 0", lambda config: config.update.kl_beta > 0, "update.kl_in"
    ),
    _Condition(
        "an update.correction",
        lambda config: config.update.correction != "none",
        "update.correction_cap",
    ),
    _Condition(
        "several updates a step, for trainer",
        lambda config: (
            config.update.replay_routing == "sampler"
            or config.update.epochs * config.update.mini_batches > 1
        ),
        "update.replay_routing",
    ),
    _Condition(
        "a task from files",
        lambda config: config.task not in ("arithmetic", "environment"),
        "evaluation.path",
    ),
    _Condition(
        "evaluation.path for a task from a file",
        lambda config: config.evaluation.path is not None or has_held_out(config.task),
        "evaluation.pass_k evaluation.reward evaluation.slots",
    ),
    _Condition(
        "evaluation.path for a task from a file",
        lambda config: (
            config.evaluation.path is not None
            or has_held_out(config.task)
            or config.evaluation.every == 0
        ),
        "evaluation.every",
    ),
    _Condition(
        "an update.loss that clips",
        lambda config: not isinstance(make_loss(config), SAPOLoss | DPPOLoss | VESPOLoss),
        "update.epsilon update.epsilon_high",
    ),
    _Condition(
        "an update.loss with a lower bound, or without update.epsilon_high",
        lambda config: (
            config.update.epsilon_high is None or not isinstance(make_loss(config), CISPOLoss)
        ),
        "update.epsilon",
    ),
    _Condition(
        "a teacher.model",
        lambda config: config.teacher.model is not None,
        "teacher.url teacher.weight teacher.reward_weight",
    ),
    _Condition(
        "a teacher.url",
        lambda config: config.teacher.url is not None,
        "teacher.served_name teacher.timeout teacher.patience",
    ),
    _Condition(
        "a teacher.reward_weight above 0, or no teacher",
        lambda config: config.compares_rewards,
        "update.advantage_options update.scale update.credit update.discount update.gae_lambda "
        "update.dynamic_sampling update.kl_in reward_weights",
    ),
    _Condition(
        "a teacher.reward_weight above 0, or no teacher",
        lambda config: config.compares_rewards or config.update.advantage in ("grpo", "maxrl"),
        "update.advantage",
    ),
    _Condition(
        "sampled completions, which examples replace",
        lambda config: config.examples is None,
        "rollout.num_samples rollout.temperature update.advantage_options update.scale "
        "update.epsilon update.epsilon_high update.kl_beta update.mask_truncated "
        "update.top_entropy update.dynamic_sampling update.correction update.correction_cap "
        "update.replay_routing update.on_mismatch update.max_logp_diff update.max_outside_band",
    ),
    _Condition(
        "sampled completions, which examples replace",
        lambda config: config.examples is None or config.logging.samples_every == 0,
        "logging.samples_every",
    ),
    _Condition(
        "sampled completions, which examples replace",
        lambda config: config.examples is None or config.update.advantage in ("grpo", "maxrl"),
        "update.advantage",
    ),
    _Condition(
        "evaluation.path, since with examples a task is only evaluated",
        lambda config: (
            config.examples is None
            or config.task == "examples"
            or config.evaluation.path is not None
            or has_held_out(config.task)
        ),
        "task",
    ),
    _Condition(
        "a task whose problems are completed, such as gsm8k",
        lambda config: config.task != "examples",
        "reward reward_weights reward_timeout rollout.max_prompt_tokens rollout.max_new_tokens "
        "rollout.slots rollout.repetition_penalty rollout.top_k rollout.top_p rollout.min_p "
        "evaluation.pass_k evaluation.reward evaluation.slots",
    ),
    _Condition("the arithmetic task", lambda config: config.task == "arithmetic", "level"),
    _Condition(
        "the built-in policy and the arithmetic task of one turn",
        # Demonstrations of an environment are learned from to their end, whatever the share.
        lambda config: (config.model is None and not config.many_turns) or config.warm_start == 0,
        "warm_start",
    ),
)


def check_effects(config: TrainConfig) -> None:
    """Raise for the first setting that would have no effect on a run, by its name."""
    settings, defaults = (flat(dataclasses.asdict(x)) for x in (config, TrainConfig()))
    automatic = dataclasses.replace(config.rollout, max_episode_tokens=AUTO).resolved()
    defaults["rollout.max_episode_tokens"] = automatic.max_episode_tokens
    defaults["update.scale"] = automatic_scale(config)
    defaults["rollout.max_new_tokens"] = automatic_new_tokens(config)
    limit = automatic_logp_diff(config.dtype, overlap=config.server.overlap)
    defaults["update.max_logp_diff"] = limit
    for condition in _CONDITIONS:
        for name in condition.names.split():
            if settings[name] != defaults[name] and not condition.holds(config):
                raise ValueError(
                    f"{name} must go with {condition.needed}, without which it has no effect, "
                    f"got {settings[name]!r}"
                )
