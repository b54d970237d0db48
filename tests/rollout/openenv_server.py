"""A server of OpenEnv for tests, run by a Python that has `openenv`: guess a number."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A guess."""

    guess: str


class Answer(Observation):
    """An answer."""

    text: str = ""


class Game(Environment):
    """Think of a number from 0 to 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = seed % 10
        return Answer(text="0-9=")

    def step(self, action, timeout_s=None, **kwargs):
        if action.guess == "crash":
            raise OSError("gone")
        if not action.guess.isdecimal():
            return Answer(text="-+", reward=-0.5)
        guess = int(action.guess[:4])
        if guess == self.number:
            return Answer(text="=", reward=1.0, done=True)
        return Answer(text="+" if guess < self.number else "-", reward=0.0)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_app(Game, Guess, Answer, env_name="game", max_concurrent_envs=16)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
