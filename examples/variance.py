"""Why an advantage beats the raw return: variance and bias of the policy gradient, measured.

    python examples/variance.py --output runs

Eight prompts, four answers each, and a policy with one logit per prompt and answer: small enough to
know its gradient exactly. One answer of each prompt earns 1 more than the others, and some prompts
score high whatever the answer is. From the same 64 samples (64 / K prompts, K answers each), five
weights of the log-probability make five estimates of the gradient:

* the reward itself (the raw return);
* the reward minus the mean of the batch;
* GRPO: minus the mean of its prompt's K rewards (`scale="none"`);
* GRPO / std: the same, divided by their standard deviation;
* RLOO: minus the mean of the other K - 1.

Over 8,192 batches this measures the variance of each estimate, the ratio of its noise to its signal
(which does not depend on the learning rate), and its distance from the exact gradient. Then each
one trains a policy, from 64 seeds. The picture shows noise, distance and learning curves.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from twinkle_jax import grpo_advantage, rloo_advantage

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install 'twinkle-jax[examples]'") from None

PROMPTS, ANSWERS, SAMPLES, BATCHES = 8, 4, 64, 8192
GROUP_SIZES = (2, 4, 8, 16, 32)
STEPS, SEEDS, LEARNING_RATE = 40, 64, 16.0  # large enough steps for noise to do harm
REWARDS = jnp.linspace(0.0, 3.5, PROMPTS)[:, None] + jnp.eye(ANSWERS)[jnp.arange(PROMPTS) % ANSWERS]
LOGITS = 0.5 * jax.random.normal(jax.random.key(7), (PROMPTS, ANSWERS))

WEIGHTS = {
    "raw return": lambda rewards, k: rewards,
    "batch mean": lambda rewards, k: grpo_advantage(rewards, 1, "none"),
    "GRPO": lambda rewards, k: grpo_advantage(rewards, k, "none"),
    "GRPO / std": lambda rewards, k: grpo_advantage(rewards, k, "group"),
    "RLOO": lambda rewards, k: rloo_advantage(rewards, k, "none"),
}


def expected_reward(logits):
    """Average over all prompts and answers: what training is to raise, with nothing sampled."""
    return jnp.mean(jnp.sum(jax.nn.softmax(logits) * REWARDS, axis=1))


def gradient_estimates(logits, key, k):
    """One batch of samples, and the gradient estimate that each weight makes of it."""
    prompt_key, answer_key = jax.random.split(key)
    prompts = jnp.repeat(jax.random.randint(prompt_key, (SAMPLES // k,), 0, PROMPTS), k)
    answers = jax.random.categorical(answer_key, logits[prompts])
    rewards = REWARDS[prompts, answers]

    def surrogate(logits, weights):
        return jnp.mean(weights * jax.nn.log_softmax(logits)[prompts, answers])

    return {name: jax.grad(surrogate)(logits, f(rewards, k)) for name, f in WEIGHTS.items()}


@partial(jax.jit, static_argnames="k")
def measure(key, *, k):
    """Variance, noise-to-signal ratio, relative bias and its standard error, of each estimate."""
    exact = jax.grad(expected_reward)(LOGITS)
    keys = jax.random.split(key, BATCHES)
    estimates = jax.vmap(lambda key: gradient_estimates(LOGITS, key, k))(keys)

    def describe(gradients):
        mean = jnp.mean(gradients, axis=0)
        variance = jnp.sum(jnp.var(gradients, axis=0))
        bias = jnp.linalg.norm(mean - exact) / jnp.linalg.norm(exact)
        return {
            "variance": variance,
            "noise": variance / jnp.sum(mean**2),
            "bias": bias,
            "bias_error": jnp.sqrt(variance / BATCHES) / jnp.linalg.norm(exact),
            "size": jnp.sum(mean * exact) / jnp.sum(exact**2),
        }

    return {name: describe(gradients) for name, gradients in estimates.items()}


@partial(jax.jit, static_argnames=("name", "k"))
def learning_curves(key, *, name, k=8):
    """Expected reward after each step of gradient ascent, `[seeds, steps]`."""

    def train(key):
        def step(logits, number):
            gradient = gradient_estimates(logits, jax.random.fold_in(key, number), k)[name]
            return logits + LEARNING_RATE * gradient, expected_reward(logits)

        return jax.lax.scan(step, jnp.zeros_like(LOGITS), jnp.arange(STEPS))[1]

    return jax.vmap(train)(jax.random.split(key, SEEDS))


def plot(path, measured, curves):
    """Noise and bias for growing K, and learning curves with their spread over seeds."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    noise, bias, learning = figure.subplots(1, 3)
    for color, name in enumerate(WEIGHTS):
        for axes, quantity in ((noise, "noise"), (bias, "bias")):
            values = [measured[k][name][quantity] for k in GROUP_SIZES]
            # GRPO and RLOO differ by a factor, so in their noise one line hides the other
            axes.plot(GROUP_SIZES, values, f"C{color}o" + ("--" if name == "RLOO" else "-"))
        low, middle, high = np.percentile(curves[name], [10, 50, 90], axis=0)
        learning.plot(middle, f"C{color}", label=name)
        learning.fill_between(np.arange(STEPS), low, high, color=f"C{color}", alpha=0.15)
    errors = [measured[k]["RLOO"]["bias_error"] for k in GROUP_SIZES]
    bias.plot(GROUP_SIZES, errors, "k:", label="what chance alone would show (RLOO)")
    bias.legend()
    for axes in (noise, bias):
        axes.set(xscale="log", yscale="log", xlabel="K, samples per prompt", xticks=GROUP_SIZES)
        axes.set_xticklabels(GROUP_SIZES)
        axes.minorticks_off()
    noise.set(title="noise of one estimate", ylabel="variance / |mean|²")
    bias.set(title="distance from the exact gradient", ylabel="|mean - exact| / |exact|")
    learning.set(title=f"learning, K = 8, {SEEDS} seeds", xlabel="step", ylabel="expected reward")
    learning.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main(argv=None):
    """Measure, train, print and plot."""
    parser = argparse.ArgumentParser(description="Measure what an advantage does to the gradient.")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(), help="directory for variance.png")
    options, started = parser.parse_args(argv), time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    root = jax.random.key(options.seed)

    measured = {k: jax.device_get(measure(jax.random.fold_in(root, k), k=k)) for k in GROUP_SIZES}
    table = Table("K", "weight", "variance", "noise / signal", "bias", "size", title="64 samples")
    for k in GROUP_SIZES:
        for name in WEIGHTS:
            facts = measured[k][name]
            bias = f"{facts['bias']:.3f} ± {facts['bias_error']:.3f}"
            numbers = (f"{facts['variance']:.4f}", f"{facts['noise']:.2f}", bias)
            table.add_row(str(k), name, *numbers, f"{facts['size']:.2f}")
        table.add_section()
    console = Console()
    console.print(table)

    curves = {n: np.asarray(learning_curves(jax.random.fold_in(root, 0), name=n)) for n in WEIGHTS}
    table = Table("weight", "start", "median at the end", "10 % to 90 % of seeds", title="learning")
    for name, curve in curves.items():
        low, middle, high = np.percentile(curve[:, -1], [10, 50, 90])
        table.add_row(name, f"{curve[0, 0]:.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    console.print(table)
    plot(options.output / "variance.png", measured, curves)
    result = {name: round(float(np.median(curve[:, -1])), 3) for name, curve in curves.items()}
    print(json.dumps(result | {"seconds": round(time.perf_counter() - started, 1)}))
    return measured, curves


if __name__ == "__main__":
    main()
