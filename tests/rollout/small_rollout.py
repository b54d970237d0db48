"""Four completions of each of four prompts, by the built-in policy."""

import jax

from twinkle_jax.data import ArithmeticTask, PromptBatch
from twinkle_jax.rollout import LocalEngine, RolloutConfig
from twinkle_jax.training import small_policy

POLICY = small_policy(0)
ENGINE = LocalEngine(POLICY.config, POLICY.template)
PROMPTS = PromptBatch(ArithmeticTask(6, size=3)[:] + ArithmeticTask(1, size=1)[:])
SAMPLES = 4
SETTINGS = RolloutConfig(num_samples=SAMPLES, max_new_tokens=6, max_prompt_tokens=64)


def draw(settings=SETTINGS):
    return ENGINE.draw(POLICY.params, PROMPTS, jax.random.key(3), settings)
