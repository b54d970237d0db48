"""From a run's checkpoint to one in Hugging Face's format."""

import json
from pathlib import Path

import jax

from twinkle_jax.model import train_state
from twinkle_jax.training.checkpoints.progress import Progress, arrays_of
from twinkle_jax.training.checkpoints.run_checkpoints import RunCheckpoints
from twinkle_jax.training.configuration.tasks import make_task
from twinkle_jax.training.configuration.train_config import from_dict
from twinkle_jax.training.policies.text_policy import load_policy, save_policy, small_policy
from twinkle_jax.training.step.recipe import make_recipe


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
    like = arrays_of(Progress(state, jax.random.key(config.seed), 0, {}, {}), recipe.reference)
    found = RunCheckpoints(Path(directory) / "checkpoints").restore(like, step=step)
    save_policy(policy._replace(params=found.arrays["state"].params), str(target))
