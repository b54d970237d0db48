"""Three ways to call an advantage function in a program of your own.

    python examples/inside_your_step.py

1. Inside a jitted train step, where it is compiled together with everything else.
2. Under `vmap`, over a batch of independent batches.
3. Inside `shard_map`, where each device holds its own prompts, and `axis_name` makes the standard
   deviation of `scale='batch'` that of the whole batch.

What it leaves out: a real policy. The "model" is one logit for each of four answers, and the reward
is 1 for answer 2. `examples/policy_gradient.py` is the whole thing.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from twinkle_jax import grpo_advantage, rloo_advantage

ANSWERS, RIGHT, PROMPTS, K = 4, 2, 16, 8
optimizer = optax.sgd(learning_rate=1.0)


# 1. In your own step: sample, score, compare with the group, update. One program, no transfer.
@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(logits, optimizer_state, key):
    """One policy-gradient update; returns the new state and the mean reward."""
    answers = jax.random.categorical(key, logits, shape=(PROMPTS * K,))
    rewards = (answers == RIGHT).astype(jnp.float32)
    advantages = grpo_advantage(rewards, num_generations=K)

    def loss(logits):
        logprobs = jax.nn.log_softmax(logits)[answers]
        return -jnp.mean(advantages * logprobs)

    gradients = jax.grad(loss)(logits)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state)
    return optax.apply_updates(logits, updates), optimizer_state, jnp.mean(rewards)


def learn(steps=20):
    """Run a few steps and return the mean reward of each."""
    logits = jnp.zeros(ANSWERS)
    state, key = optimizer.init(logits), jax.random.key(0)
    history = []
    for step in range(steps):
        logits, state, reward = train_step(logits, state, jax.random.fold_in(key, step))
        history.append(reward)
    return jax.device_get(history)


# 2. Under vmap: rewards of several independent batches, [batches, N].
def over_batches(rewards):
    """Advantages of each batch on its own."""
    return jax.vmap(lambda batch: rloo_advantage(batch, num_generations=K))(rewards)


# 3. In shard_map: groups stay on their device; only the statistics of the batch are exchanged.
def over_devices(rewards):
    """Advantages of rewards that are split over all devices, scaled by the whole batch."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    advantages = split(
        lambda shard: grpo_advantage(shard, K, scale="batch", axis_name="data"),
    )
    return advantages(jax.device_put(rewards, NamedSharding(mesh, P("data"))))


def main():
    """Run all three and show what comes out."""
    history = learn()
    print(f"1. jitted step: mean reward {history[0]:.2f} -> {history[-1]:.2f}")

    rewards = jax.random.bernoulli(jax.random.key(1), 0.3, (3, PROMPTS * K)).astype(jnp.float32)
    print(f"2. vmap: rewards {rewards.shape} -> advantages {over_batches(rewards).shape}")

    prompts = jax.device_count()  # one prompt or more for each device
    rewards = jax.random.normal(jax.random.key(2), (prompts * K,))
    difference = jnp.abs(over_devices(rewards) - grpo_advantage(rewards, K, scale="batch")).max()
    print(f"3. shard_map over {jax.device_count()} device(s): differs by {difference:.0e} from one")
    return history


if __name__ == "__main__":
    main()
