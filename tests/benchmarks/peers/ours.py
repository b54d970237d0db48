"""One contestant, by `twinkle_jax.training`.

`python -m tests.benchmarks.peers.ours CHECKPOINT ROOM [UPDATE]`, where UPDATE are settings as JSON.
"""

import json
import sys
import tempfile

from tests.benchmarks.peers.task import LEARNING_RATE, PROMPTS, SAMPLES, STEPS
from tests.benchmarks.peers.turns import Turns
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    train,
)


def main(checkpoint, room, options="{}"):
    """Train until nobody gives the go-ahead any more; options are of the update."""
    turns = Turns(int(room))

    def reward(trajectories, ground_truths):
        return turns([trajectory["messages"][-1]["content"] for trajectory in trajectories])

    config = TrainConfig(
        model=checkpoint,
        task=f"{checkpoint}/prompts.jsonl",
        output_dir=tempfile.mkdtemp(),
        overwrite=True,
        steps=STEPS,
        rollout=RolloutConfig(prompts=PROMPTS, num_samples=SAMPLES, max_new_tokens=int(room)),
        update=UpdateConfig(advantage="grpo", mini_batches=1, **json.loads(options)),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=0),
        evaluation=EvaluationConfig(every=0),
        logging=LoggingConfig(checkpoint_every=STEPS, samples_every=0),
    )
    train(config, reward=reward)


if __name__ == "__main__":
    main(*sys.argv[1:])
