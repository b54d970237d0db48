"""A game of several turns: guess a number from 1 to 7 in three guesses, using earlier answers.

Each turn the policy writes a digit, and the environment answers `+` (the number is higher) or `-`
(it is lower), until the guess is right, which gives reward 1, or the run's limit of three turns is
reached. Bisection
always finds it: the best score is 1. Random guesses, whatever the answers are, score
1 - (6/7)^3 = 0.37; without repeating a number, 3/7 = 0.43. So a score above that needs the answers.

The small built-in policy of 114,000 parameters first imitates players, of whom some use the answers
and more do the opposite: it starts with the score of a random player. From the reward it learns
which of them are right:

    python examples/guessing_game.py

or by the command, with its default settings:

    twinkle-jax train --environment examples/guessing_game.py:GuessingGame --rollout.max_turns 3
"""

import argparse
import json
import random
from pathlib import Path

from twinkle_jax.data import Message, Trajectory
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    train,
)

LARGEST, GUESSES = 7, 3
RANDOM_SCORE, BEST_SCORE = 1 - (1 - 1 / LARGEST) ** GUESSES, 1.0


class GuessingGame:
    """Think of a number, and say whether it is higher or lower than a guess."""

    def reset(self, row, seed):
        """Think of a number: the same seed gives the same one."""
        self.number = random.Random(seed).randint(1, LARGEST)
        return f"(1-{LARGEST})="

    def step(self, action):
        """Answer a guess."""
        if not (action.isascii() and action.isdecimal()):
            return "*", 0.0, False, {"readable": 0.0}
        guess = int(action[:4])
        if guess == self.number:
            return "=", 1.0, True, {"readable": 1.0}
        return "+" if self.number > guess else "-", 0.0, False, {"readable": 1.0}

    def close(self):
        """Nothing to release."""

    @staticmethod
    def demonstrations(size, seed):
        """Make conversations of players: two in five use the answers, the others do the opposite.

        So a policy that imitates them scores like a random player, and has seen what answers mean.
        """
        generator = random.Random(seed)
        return [_demonstration(generator) for _ in range(size)]


def _demonstration(generator):
    game, uses_answers = GuessingGame(), generator.random() < 0.4
    messages = [Message(role="user", content=game.reset({}, generator.getrandbits(31)))]
    possible, done = set(range(1, LARGEST + 1)), False
    while not done and len(messages) < 2 * GUESSES:
        excluded = set(range(1, LARGEST + 1)) - possible
        guess = generator.choice(sorted(possible if uses_answers or not excluded else excluded))
        answer, _, done, _ = game.step(str(guess))
        messages.append(Message(role="assistant", content=str(guess)))
        messages.append(Message(role="user", content=answer))
        possible &= set(range(guess + 1, LARGEST + 1) if answer == "+" else range(1, guess))
    return Trajectory(messages=messages[:-1])


def main(arguments=None):
    """Train; return the score of each step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--credit", default="episode", choices=["episode", "turn", "mixed"])
    parser.add_argument("--output", default="runs/guessing_game")
    options = parser.parse_args(arguments)
    train(
        TrainConfig(
            environment=f"{__file__}:GuessingGame",
            steps=options.steps,
            seed=options.seed,
            output_dir=options.output,
            overwrite=True,
            rollout=RolloutConfig(
                prompts=64,
                num_samples=8,
                max_turns=GUESSES,
                max_new_tokens=3,
                max_prompt_tokens=16,
                max_episode_tokens=32,
            ),
            update=UpdateConfig(credit=options.credit),
            optimizer=OptimizerConfig(learning_rate=1e-3),
            evaluation=EvaluationConfig(every=20),
            logging=LoggingConfig(samples_every=50, traces_every=50),
        )
    )
    lines = (Path(options.output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


if __name__ == "__main__":
    scores = main()
    print(f"random {RANDOM_SCORE:.2f}, best {BEST_SCORE:.2f}, last steps {scores[-1]:.3f}")
