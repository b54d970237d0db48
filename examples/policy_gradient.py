"""Teach a small transformer to sort six digits, by GRPO or RLOO, in one compiled train step.

    python examples/policy_gradient.py --advantage grpo --scale group --seed 0 --output runs

A prompt is six digits; the right completion is the same digits in ascending order, then the end
token. The same 100,000 parameters learn twice:

* From demonstrations: a warm start of 45 steps on prompts with their answers teaches what an
  answer looks like, and to get a quarter to a third of them right.
* From rewards: the policy samples 8 completions of each of 64 prompts, and each one is worth 1 if
  every token is right and 0 otherwise. Nothing else about the answers reaches the policy.

Held-out prompts are those whose digits sum to a multiple of ten. Neither phase ever draws one, nor
any other prompt with the same answer. `train_step` is the part to reuse: its batch is sharded
over all devices that JAX shows, and nothing crosses to the host between sampling and update.
RLOO's advantages are GRPO's times K / (K - 1), and Adam divides such a constant away: with all
else equal the two curves nearly coincide. `--scale` makes more of a difference.

Left out: a tokenizer and prompts of different lengths; a penalty that holds the policy near a
reference; several updates per batch (with one, the trained policy is the one that sampled, so the
ratio of their probabilities is 1 and PPO would clip nothing); checkpoints; more than one host.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from twinkle_jax import grpo_advantage, rloo_advantage

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install 'twinkle-jax[examples]'") from None

DIGITS, ANSWER = 6, 7  # an answer ends with the end token
CONTEXT = DIGITS + ANSWER  # the end token is never fed back; the token that asks takes its place
ASK, END, VOCABULARY = 10, 11, 12
LETTERS = np.array(list("0123456789=."))
LAYERS, HEADS, WIDTH = 2, 4, 64
DEMONSTRATIONS, HELD_OUT, EVALUATE_EVERY = 128, 1024, 25  # per step, prompts, steps
NUMBERS = {"seed": (0, 0, 2**31 - 1), "steps": (300, 1, 10**6), "warm-start": (45, 0, 10**6)}
NUMBERS |= {"prompts": (64, 1, 512), "num-generations": (8, 2, 64)}  # default, least, most
CURVE = "reward_curve.png"
ESTIMATORS = {"grpo": grpo_advantage, "rloo": rloo_advantage}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-4))

Prompts = Int[Array, "prompts digits"]
Tokens = Int[Array, "rows answer"]
Cache = list[tuple[Array, Array]]  # per layer keys and values, [rows, CONTEXT, HEADS, head width]


def draw_prompts(key: Array, count: int, *, held_out: bool = False) -> Prompts:
    """Draw prompts whose digits sum to a multiple of ten if `held_out`, and never otherwise."""

    def draw(number: Array) -> Array:
        digits_key, remainder_key = jax.random.split(jax.random.fold_in(key, number))
        digits = jax.random.randint(digits_key, (DIGITS,), 0, 10)
        remainder = 0 if held_out else jax.random.randint(remainder_key, (), 1, 10)
        # Five digits are free and the last one completes the sum: both kinds are drawn uniformly.
        return digits.at[-1].set((remainder - jnp.sum(digits[:-1])) % 10)

    return jax.vmap(draw)(jnp.arange(count))


def answers(prompts: Prompts) -> Tokens:
    """Sort the digits and close with the end token."""
    return jnp.pad(jnp.sort(prompts, axis=1), ((0, 0), (0, 1)), constant_values=END)


def exact_match(prompts: Prompts, tokens: Tokens, mask: Array) -> Float[Array, " rows"]:
    """Reward 1 for a completion whose every token is right, and 0 for any other."""
    right = tokens == jnp.repeat(answers(prompts), len(tokens) // len(prompts), axis=0)
    return jnp.all(right & mask, axis=1).astype(jnp.float32)


class Block(nnx.Module):
    """Attention over the cache, then a perceptron, each added to the residual stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query_key_value = linear(WIDTH, 3 * WIDTH)
        self.mix = linear(WIDTH, WIDTH)
        self.perceptron_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.widen = linear(WIDTH, 4 * WIDTH)
        self.narrow = linear(4 * WIDTH, WIDTH)

    def __call__(self, x: Array, cache: tuple[Array, Array], start: Any) -> tuple[Array, Any]:
        """Attend from positions `start`, `start` + 1, ... to themselves and all before them."""
        rows, time, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).reshape(rows, time, 3, HEADS, -1)
        keys = jax.lax.dynamic_update_slice_in_dim(cache[0], heads[:, :, 1], start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(cache[1], heads[:, :, 2], start, axis=1)
        visible = jnp.arange(CONTEXT)[None, :] <= start + jnp.arange(time)[:, None]
        seen = jax.nn.dot_product_attention(heads[:, :, 0], keys, values, mask=visible[None, None])
        x = x + self.mix(seen.reshape(rows, time, WIDTH))
        return x + self.narrow(jax.nn.gelu(self.widen(self.perceptron_norm(x)))), (keys, values)


class Policy(nnx.Module):
    """Embeddings, blocks and a head; one call serves prefill, decoding and training."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Array, cache: Cache, start: Any) -> tuple[Array, Cache]:
        """Extend a cache by tokens; return the logits of the token after each, and the cache."""
        x = self.token(tokens) + self.position(start + jnp.arange(tokens.shape[1]))[None]
        extended = []
        for block, past in zip(self.blocks, cache, strict=True):
            x, past = block(x, past, start)
            extended.append(past)
        return self.head(self.norm(x)), extended


def prefill(policy: Policy, prompts: Prompts, generations: int) -> Cache:
    """Read each prompt once, and hand a copy of its cache to each of its completions."""
    empty = jnp.zeros((prompts.shape[0], CONTEXT, HEADS, WIDTH // HEADS))
    _, cache = policy(prompts, [(empty, empty)] * LAYERS, 0)
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, generations, axis=0), cache)


def sample(
    policy: Policy, prompts: Prompts, generations: int, key: Array, temperature: float = 1.0
) -> tuple[Tokens, Bool[Array, "rows answer"], Float[Array, "rows answer"]]:
    """Complete each prompt `generations` times, side by side: tokens, mask and log-probabilities.

    The noise is folded from row and position, so a row draws the same in any batch. The mask ends
    with the end token, which is sampled like any other; what follows is padding.
    """
    rows = jnp.arange(prompts.shape[0] * generations)
    row_keys = jax.vmap(partial(jax.random.fold_in, key))(rows)

    def decode(carry: tuple[Array, Array, Cache], position: Array) -> tuple[Any, Any]:
        token, unfinished, cache = carry
        logits, cache = policy(token[:, None], cache, DIGITS + position)
        logprobs = jax.nn.log_softmax(logits[:, 0])
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, position)
        noise = jax.vmap(partial(jax.random.gumbel, shape=(VOCABULARY,)))(keys)
        token = jnp.where(unfinished, jnp.argmax(logprobs + temperature * noise, axis=1), END)
        chosen = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
        return (token, unfinished & (token != END), cache), (token, unfinished, chosen)

    first = jnp.full(rows.shape, ASK), jnp.full(rows.shape, True)
    carry = (*first, prefill(policy, prompts, generations))
    _, by_position = jax.lax.scan(decode, carry, jnp.arange(ANSWER))
    return jax.tree.map(jnp.transpose, by_position)


def completion_logprobs(policy: Policy, prompts: Prompts, tokens: Tokens) -> Array:
    """Score given completions, all positions at once; logits exist at these positions only."""
    cache = prefill(policy, prompts, len(tokens) // len(prompts))
    fed = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=ASK)
    logits, _ = policy(fed, cache, DIGITS)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=2)[..., 0]


class Run(NamedTuple):
    """What is fixed when a step is compiled."""

    graph: nnx.GraphDef[Policy]
    mesh: Mesh
    estimator: Any  # grpo_advantage or rloo_advantage
    scale: str
    prompts: int
    generations: int

    def place(self, tree: Any, *axes: str) -> Any:
        """Shard the leading axis over a mesh axis, or keep a copy on every device."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(tree, sharding)

    def draw(self, key: Array, count: int, *, held_out: bool = False) -> Prompts:
        """Draw at least `count` prompts, a multiple of the devices, and shard them."""
        count = -(-count // self.mesh.size) * self.mesh.size
        return self.place(draw_prompts(key, count, held_out=held_out), "data")


class TrainState(NamedTuple):
    """Everything that the next step depends on."""

    params: nnx.State
    optimizer: optax.OptState
    step: Int[Array, ""]
    key: Array


class Rollout(NamedTuple):
    """Prompts, completions and their rewards."""

    prompts: Prompts
    tokens: Tokens
    mask: Bool[Array, "rows answer"]
    logprobs: Float[Array, "rows answer"]
    rewards: Float[Array, " rows"]
    advantages: Float[Array, " rows"]


@jax.jit
def initial_params(key: Array) -> nnx.State:
    """Draw the parameters of an untrained policy."""
    return nnx.state(Policy(nnx.Rngs(key)))


@partial(jax.jit, static_argnames="run")
def begin(params: nnx.State, key: Array, *, run: Run) -> TrainState:
    """Start a phase at step 0, with a fresh optimizer state."""
    return run.place(TrainState(params, OPTIMIZER.init(params), jnp.int32(0), key))


def update(
    state: TrainState, run: Run, prompts: Prompts, tokens: Tokens, mask: Array, advantages: Array
) -> TrainState:
    """Make each kept token likelier in proportion to the advantage of its completion."""

    def loss(params: nnx.State) -> Array:
        logprobs = completion_logprobs(nnx.merge(run.graph, params), prompts, tokens)
        return -jnp.mean(advantages[:, None] * logprobs, where=mask)

    gradient = jax.grad(loss)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # Adam raises a float to its integer step count
        change, optimizer = OPTIMIZER.update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, change)
    return run.place(TrainState(params, optimizer, state.step + 1, state.key))


@partial(jax.jit, static_argnames="run", donate_argnames="state")
def demonstration_step(state: TrainState, *, run: Run) -> TrainState:
    """Learn from answers: a demonstration is a completion with an advantage of 1."""
    prompts = run.draw(jax.random.fold_in(state.key, state.step), DEMONSTRATIONS)
    tokens = answers(prompts)
    everything = jnp.full(tokens.shape, True)
    return update(state, run, prompts, tokens, everything, jnp.ones(len(prompts)))


@partial(jax.jit, static_argnames="run", donate_argnames="state")
def train_step(state: TrainState, *, run: Run) -> tuple[TrainState, Rollout]:
    """Learn from rewards: sample, score, compare the samples of each prompt, update."""
    prompt_key, sample_key = jax.random.split(jax.random.fold_in(state.key, state.step))
    prompts = run.draw(prompt_key, run.prompts)
    policy = nnx.merge(run.graph, state.params)
    sampled = sample(policy, prompts, run.generations, sample_key)
    tokens, mask, logprobs = run.place(sampled, "data")
    rewards = exact_match(prompts, tokens, mask)
    advantages = run.estimator(rewards, run.generations, run.scale)
    state = update(state, run, prompts, tokens, mask, advantages)
    return state, Rollout(prompts, tokens, mask, logprobs, rewards, advantages)


@partial(jax.jit, static_argnames="run")
def held_out_accuracy(params: nnx.State, *, run: Run) -> Float[Array, ""]:
    """Fraction of the held-out prompts that greedy decoding answers exactly."""
    prompts = run.draw(jax.random.key(2**31), HELD_OUT, held_out=True)  # the same for every seed
    policy, key = nnx.merge(run.graph, params), jax.random.key(0)  # temperature 0 drops the noise
    tokens, mask, _ = sample(policy, prompts, 1, key, temperature=0.0)
    return jnp.mean(exact_match(prompts, tokens, mask))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the options; report one that cannot work in one line, before any training."""
    parser = argparse.ArgumentParser(description="Teach a transformer to sort digits by rewards.")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    option = partial(parser.add_argument, help="(default: %(default)s)")
    option("--advantage", choices=ESTIMATORS, default="grpo")
    option("--scale", choices=("group", "batch", "none"), default="group")
    option("--output", type=Path, default=Path(), metavar="DIRECTORY")
    for name, (default, _, _) in NUMBERS.items():
        option(f"--{name}", type=int, default=default, metavar="NUMBER")
    options = parser.parse_args(argv)
    for name, (_, least, most) in NUMBERS.items():
        if not least <= (number := getattr(options, name.replace("-", "_"))) <= most:
            parser.error(f"argument --{name}: expected {least} to {most}, got {number}")
    if options.prompts % (devices := jax.device_count()):
        parser.error(f"argument --prompts: expected a multiple of the {devices} devices")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / CURVE).open("ab").close()
    except OSError as error:
        parser.error(f"argument --output: {error.strerror}: {error.filename}")
    return options


def show(console: Console, title: str, rollout: Rollout) -> None:
    """Print two prompts of a step: where rewards differ the most, and where the least."""
    prompts, tokens, mask, logprobs, rewards, advantages = jax.device_get(rollout)
    groups = np.arange(len(rewards)).reshape(len(prompts), -1)
    order = np.argsort(np.std(rewards[groups], axis=1), kind="stable")
    table = Table("prompt", "completion", "probability", "reward", "advantage", title=title)
    for prompt in dict.fromkeys((order[-1], order[0])):
        for row in groups[prompt][:8]:
            table.add_row(
                "".join(LETTERS[prompts[prompt]]) + "=",
                "".join(LETTERS[tokens[row][mask[row]]]),
                f"{np.exp(np.sum(logprobs[row], where=mask[row])):.3f}",
                f"{rewards[row]:g}",
                f"{advantages[row]:+.3f}",
            )
        table.add_section()
    console.print(table)


def plot(path: Path, title: str, rewards: list[float], accuracy: dict[int, float]) -> None:
    """Draw each step's mean reward, its running mean, and the held-out accuracy."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    steps, window = np.arange(1, len(rewards) + 1), max(1, len(rewards) // 15)
    smooth = np.convolve(rewards, np.full(window, 1 / window), mode="valid")
    axes.plot(steps, rewards, "C0", alpha=0.35, linewidth=1, label="reward, mean of the step")
    centres = steps[window // 2 :][: len(smooth)]
    axes.plot(centres, smooth, "C0", label=f"reward, mean of {window} steps")
    axes.plot(list(accuracy), list(accuracy.values()), "C1o", label="held-out accuracy, greedy")
    axes.set(xlabel="train step", ylabel="exact match (fraction)", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train as the options say, print and plot what happens, and return the numbers."""
    started, options, console = time.perf_counter(), parse(argv), Console()
    graph = nnx.graphdef(nnx.eval_shape(lambda: Policy(nnx.Rngs(0))))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    estimator, sizes = ESTIMATORS[options.advantage], (options.prompts, options.num_generations)
    run = Run(graph, mesh, estimator, options.scale, *sizes)
    policy_key, demonstration_key, reward_key = jax.random.split(jax.random.key(options.seed), 3)

    with Progress(console=console) as progress:
        state = begin(initial_params(policy_key), demonstration_key, run=run)
        for _ in progress.track(range(options.warm_start), description="From demonstrations"):
            state = demonstration_step(state, run=run)
        before = float(held_out_accuracy(state.params, run=run))
        outcome = "{} steps of {}: {:.1%} of held-out prompts right."
        console.print(outcome.format(options.warm_start, "demonstrations", before))
        state, history, accuracy = begin(state.params, reward_key, run=run), [], {0: before}
        task = progress.add_task("From rewards")
        for step in progress.track(range(1, options.steps + 1), task_id=task):
            state, rollout = train_step(state, run=run)
            history.append(rollout.rewards)
            if step == 1:
                show(console, "The first step from rewards alone", rollout)
            else:  # read a step late, so that the device always has the next one to do
                reward = np.mean(np.asarray(history[-2]))
                progress.update(task, description=f"From rewards: {reward:.2f} right")
            if step % EVALUATE_EVERY == 0 or step == options.steps:
                accuracy[step] = float(held_out_accuracy(state.params, run=run))

    show(console, f"Step {step}, the last", rollout)
    console.print(outcome.format(step, "rewards, without answers", accuracy[step]))
    rewards = [float(np.mean(np.asarray(step_rewards))) for step_rewards in history]
    title = f"Sorting six digits: {options.advantage.upper()}, scale {options.scale!r}"
    plot(options.output / CURVE, title, rewards, accuracy)
    result = {"advantage": options.advantage, "scale": options.scale, "steps": step}
    result |= {"accuracy_before": before, "accuracy_after": accuracy[step]}
    result |= {"seconds": round(time.perf_counter() - started, 1)}
    print(json.dumps(result))
    return result | {"rewards": rewards}


if __name__ == "__main__":
    main()
