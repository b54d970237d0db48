"""Blackjack by tool calls: draw another card or stand, against a dealer who shows one card.

The policy reads its total and the dealer's card, `hard 13 against 10`; `soft` marks a total in
which an ace counts 11. Two methods of the environment are its tools: it calls `hit` or `stand`, and
the tool answers with the new total, for at most three turns: a hand stands by itself at 21 and with
its fifth card. Over 21 loses at once; otherwise the dealer draws up to 17, and the higher total
wins. The reward is 1, 0 for a draw, or -1; a turn without a call loses. Cards come from an endless
deck; hands of 21 are not dealt. `expected_score` computes the mean reward of a player exactly:
-0.38 at random, -0.24 for always standing, -0.13 for drawing below 14, -0.09 for the best player.

The small policy of this file has one token for each of the two calls, in Hermes' format. It first
imitates players who draw less at high cards: the higher the sum of their total and the dealer's
card, the less often they draw. They score -0.27, and are wrong about the dealer: against a high
card a player has to draw more. In 130 steps the policy learns to draw below 14 whatever the dealer
shows, -0.13.

    python examples/blackjack.py

With a checkpoint that writes tool calls, the same by the command:

    twinkle-jax train --model PATH_OR_ID --environment examples/blackjack.py:Blackjack
"""

import argparse
import dataclasses
import functools
import json
import math
import random
from pathlib import Path

import jax

from twinkle_jax.data import Message, Template, Trajectory, small_tokenizer
from twinkle_jax.model import init_params
from twinkle_jax.rollout import Action, ToolEnvironment
from twinkle_jax.training import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    Policy,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    WarmStart,
    save_policy,
    small_policy,
    train,
    warm_start,
)

CARDS = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}  # an ace is 1
MOST_CARDS, DEALER_STANDS = 5, 17


def add_card(hand, card):
    """Add a card to a hand: a total, and whether an ace counts 11 in it."""
    total, soft = hand
    total, soft = (total + 11, True) if card == 1 and total < 11 else (total + card, soft)
    return (total - 10, False) if total > 21 and soft else (total, soft)


def outcome(total, dealer):
    """Return the reward of two totals."""
    if total > 21 or total < dealer <= 21:
        return -1.0
    return float(total > dealer or dealer > 21)


class Blackjack(ToolEnvironment):
    """A hand of blackjack; `hit` and `stand` are the policy's tools."""

    def __init__(self):
        super().__init__([self.hit, self.stand])

    def reset(self, row, seed):
        """Deal; the same seed gives the same cards, whatever is done before they are drawn."""
        players, self.dealers = random.Random(seed), random.Random(seed + 1)
        self.draw = functools.partial(players.choices, list(CARDS), CARDS.values())
        self.hand, self.count, self.reward = (21, False), 2, None
        while self.hand[0] == 21:
            self.hand = functools.reduce(add_card, self.draw(k=2), (0, False))
        (self.shown,) = self.draw()
        return self._observation()

    def hit(self):
        """Draw another card."""
        if self.reward is None:
            self.hand, self.count = add_card(self.hand, self.draw()[0]), self.count + 1
            if self.hand[0] >= 21 or self.count == MOST_CARDS:
                return self.stand()
        return self._observation()

    def stand(self):
        """Keep the hand; the dealer draws, and the higher total wins."""
        hand = add_card((0, False), self.shown)
        while hand[0] < DEALER_STANDS:
            hand = add_card(hand, self.dealers.choices(list(CARDS), CARDS.values())[0])
        self.reward = outcome(self.hand[0], hand[0]) if self.reward is None else self.reward
        return self._observation()

    def step(self, action):
        """Run the policy's tool calls; a turn without a call loses the hand."""
        observation, _, _, info = super().step(action)
        if not action.calls:
            self.reward = -1.0
        return observation, self.reward or 0.0, self.reward is not None, info

    def _observation(self):
        return f"{'soft' if self.hand[1] else 'hard'} {self.hand[0]} against {self.shown}"

    def final_reward(self):
        """Count a hand that is not played to its end as lost."""
        return 0.0 if self.reward is not None else -1.0

    @staticmethod
    def demonstrations(size, seed):
        """Make conversations of players who draw less at high cards, the dealer's or their own."""
        generator, conversations = random.Random(seed), []
        for _ in range(size):
            game, done = Blackjack(), False
            messages = [Message(role="user", content=game.reset({}, generator.getrandbits(31)))]
            while not done:
                chance = min(max((30 - game.hand[0] - game.shown) / 20, 0.1), 0.9)
                hits = generator.random() < chance
                call = CALL.format("hit" if hits else "stand")
                messages.append(Message(role="assistant", content=call))
                observation, _, done, _ = game.step(Action(call))
                messages += [] if done else observation
            conversations.append(Trajectory(messages=messages))
        return conversations


# The policy.

CALL = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'
WORDS = [CALL.format("hit"), CALL.format("stand"), "hard ", "soft ", " against "]


def make_policy(seed):
    """Make a small policy that reads and calls in few tokens, and imitates the demonstrations."""
    tokenizer = small_tokenizer()  # of bytes
    tokenizer.backend.add_tokens([*WORDS, *map(str, range(10, 22))])
    config = dataclasses.replace(small_policy().config, vocab_size=len(tokenizer))
    policy = Policy(init_params(jax.random.key(seed), config), config, Template(tokenizer))
    settings = WarmStart(accuracy=math.inf, steps=200)
    examples = Blackjack.demonstrations(settings.steps * settings.rows, seed)
    return warm_start(policy, examples, lambda policy: 0.0, settings)


# Exact scores.


@functools.cache
def dealer_totals(hand):
    """Return the probability of each total that the dealer ends with."""
    if hand[0] >= DEALER_STANDS:
        return {hand[0]: 1.0}
    totals = {}
    for card, chance in CARDS.items():
        for total, share in dealer_totals(add_card(hand, card)).items():
            totals[total] = totals.get(total, 0.0) + chance * share
    return totals


def expected_score(choose):
    """Compute the mean reward of a player, over all cards.

    Args:
        choose: given the player's hand, its number of cards, the dealer's card, and what standing
            and drawing are worth, returns the worth of its choice; `max` is the best player.
    """

    @functools.cache
    def worth(hand, count, shown):
        ends = dealer_totals(add_card((0, False), shown)).items()
        stand = sum(chance * outcome(hand[0], total) for total, chance in ends)
        if hand[0] >= 21 or count == MOST_CARDS:
            return stand
        draw = sum(p * worth(add_card(hand, card), count + 1, shown) for card, p in CARDS.items())
        return choose(hand, count, shown, stand, draw)

    dealt = {}
    for first, p in CARDS.items():
        for second, q in CARDS.items():
            hand = add_card(add_card((0, False), first), second)
            dealt[hand] = dealt.get(hand, 0.0) + p * q * (hand[0] < 21)
    hands = sum(dealt.values())
    scores = (
        p * q * worth(h, 2, shown) for h, p in dealt.items() for shown, q in CARDS.items() if p
    )
    return sum(scores) / hands


RANDOM_SCORE = expected_score(lambda hand, count, shown, stand, draw: (stand + draw) / 2)
BEST_SCORE = expected_score(lambda hand, count, shown, stand, draw: max(stand, draw))


def main(arguments=None):
    """Train; return the score of each step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/blackjack")
    options = parser.parse_args(arguments)
    start = f"{options.output}_start"
    save_policy(make_policy(options.seed), start)
    train(
        TrainConfig(
            model=start,
            environment=f"{__file__}:Blackjack",
            steps=options.steps,
            seed=options.seed,
            output_dir=options.output,
            overwrite=True,
            rollout=RolloutConfig(
                prompts=128,
                num_samples=4,
                max_turns=MOST_CARDS - 2,
                max_new_tokens=2,
                max_prompt_tokens=16,
                max_episode_tokens=48,
            ),
            update=UpdateConfig(scale="none", credit="turn", recompute="nothing"),
            optimizer=OptimizerConfig(learning_rate=5e-4, schedule="linear"),
            evaluation=EvaluationConfig(every=0, problems=256),
            logging=LoggingConfig(samples_every=50),
        )
    )
    lines = (Path(options.output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


if __name__ == "__main__":
    scores = main()
    print(f"random {RANDOM_SCORE:.2f}, best {BEST_SCORE:.2f}, last steps {scores[-1]:.3f}")
