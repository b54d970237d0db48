"""How a policy does on the problems that its run is judged by."""

from collections.abc import Callable

from twinkle_jax.model.decoder.parameters import Params
from twinkle_jax.training.configuration.tasks import Task
from twinkle_jax.training.configuration.train_config import TrainConfig
from twinkle_jax.training.policies.devices import run_mesh
from twinkle_jax.training.policies.text_policy import Policy
from twinkle_jax.training.step.evaluation import evaluate


def held_out_accuracy(
    config: TrainConfig,
    task: Task,
    policy: Policy,
    params: Params | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Evaluate a policy, or its parameters of now, on the task's held-out problems."""
    if not task.held_out:
        return {}
    assert config.rollout.max_new_tokens is not None
    return evaluate(
        policy,
        task.held_out,
        task.judge or task.reward,
        params=params,
        max_new_tokens=config.rollout.max_new_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        pass_k=config.evaluation.pass_k,
        temperature=config.rollout.temperature,
        seed=config.seed,
        compute_dtype=config.dtype,
        reward_timeout=config.reward_timeout,
        mesh=run_mesh(config),
        check=check,
    )
