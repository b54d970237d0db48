"""Many turns: episodes of a policy with environments, and their rows to train on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from twinkle_jax.data import Message, PromptBatch, Template, Trajectory
from twinkle_jax.model import Params
from twinkle_jax.reward import RewardFunction, WeightedReward, score_trajectories
from twinkle_jax.rollout import hosts
from twinkle_jax.rollout.engine import Engine, TurnEngine, check_logits
from twinkle_jax.rollout.environment import (
    Action,
    Call,
    CallPool,
    EnvironmentFactory,
    Reply,
    Session,
    describe_failure,
    failure_cause,
)
from twinkle_jax.rollout.episode import Ended, Episode, TokenRow, Turn, lay_out_episodes
from twinkle_jax.rollout.rollout import Rollout, RolloutConfig, weights_of_parts
from twinkle_jax.sampler import LENGTH

History = Literal["append", "template"]
"""How earlier turns are read.

`append`: as they were sampled, even if the chat template would render them differently once other
messages follow; only new messages are encoded. `template`: as the template renders the conversation
now; if that does not extend the tokens that the policy has read, the episode continues in a new
row, and all its rows share the advantage.
"""

_MAX_ATTEMPTS = 2
_NO_TURN = Turn(0, 0, 0)
_THINK_TOKENS = 16  # the most tokens of `<think>` and of line breaks behind it
_MANY_EPISODES = 64  # from which on a CPU takes half the time for half of them


class EnvironmentFailureError(RuntimeError):
    """Too many environments of a rollout failed."""


@dataclass(frozen=True)
class MultiTurn:
    """Plays episodes of a policy with environments, several for each prompt.

    All episodes of a prompt are reset with the same seed, derived from the key of the call. If an
    environment raises, times out, loses its connection or returns something invalid, its episode is
    restarted once with the same seed. Messages that the chat template rejects are invalid, too. If
    it fails again, the episode has no labels and is excluded from statistics. A failure never
    becomes an episode with reward 0.

    With several processes, each plays an equal share of the episodes and sends the others what its
    environments answer. So all processes have all episodes, and ask the engine for the same turns.

    Attributes:
        engine: draws completions.
        environment: makes an environment for an episode.
        settings: of sampling and of episodes; `prompts` is not read. `max_new_tokens` is 512 if it
            is `auto`, `max_episode_tokens` follows from it, and `cohorts` from `default_cohorts`.
        reward: of the whole conversation, added to the environment's; None for none.
        reward_timeout: seconds that the reward may take for the episodes of a call.
        mask_truncated: exclude truncated episodes from statistics and the loss.
        width_multiple: the width of a batch is a multiple of this.
        discount: of rewards of later turns.
    """

    engine: Engine
    environment: EnvironmentFactory
    settings: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardFunction | None = None
    reward_timeout: float = 600.0
    mask_truncated: bool = False
    width_multiple: int = 1
    discount: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self.settings.of_source())

    def with_settings(self, **changes: Any) -> "MultiTurn":
        """Return a copy with other settings."""
        return replace(self, settings=replace(self.settings, **changes))

    def sample(self, params: Params, prompts: PromptBatch, key: jax.Array) -> Rollout:
        """Play episodes, and lay them out to train on.

        Raises:
            EnvironmentFailureError: if too many environments failed.
        """
        prompts, samples = PromptBatch.of(prompts), self.settings.num_samples
        episodes = self.play(params, prompts, key)
        check_failures(episodes, self.settings.max_failed)
        layout = lay_out_episodes(
            episodes,
            rows_each=self.settings.rows_each,
            mask_truncated=self.mask_truncated,
            multiple=self.width_multiple,
        )
        truncated = np.asarray([episode.truncated for episode in episodes])
        failed = np.asarray([episode.failed for episode in episodes])
        return Rollout(
            layout.batch,
            self._trajectories(episodes, prompts),
            [truth for truth in prompts.ground_truths for _ in range(samples)],
            np.asarray([episode.num_sampled for episode in episodes], np.int32),
            layout.row_lengths,
            truncated,
            reward_weights=weights_of_parts(self.reward),
            counted=~(failed | truncated) if self.mask_truncated else ~failed,
            episodes=episodes,
            turns=layout.turns,
            held=_held(len(episodes)),
        )

    def score(self, rollout: Rollout) -> Rollout:
        """Compute the return of each episode; the reward is not called for failed ones.

        The reward is added to the `final_reward` of copies of the episodes. With several processes,
        each calls the reward for the episodes that it has played.
        """
        assert rollout.episodes is not None
        returns, parts, episodes = self._returns(
            rollout.episodes, rollout.trajectories, rollout.ground_truths, rollout.held_rows
        )
        rewards = np.nan_to_num(returns, nan=0.0)
        return rollout._replace(rewards=rewards, reward_parts=parts, episodes=episodes)

    def greedy_rewards(
        self, params: Params, prompts: PromptBatch, key: jax.Array
    ) -> np.ndarray[Any, Any]:
        """Score the most probable episode of each prompt, with the seeds of `sample`.

        Raises:
            EnvironmentFailureError: if an environment failed, since its prompt has no score then.
        """
        greedy = self.with_settings(num_samples=1, temperature=0.0)
        returns, episodes = greedy.play_and_score(params, prompts, key)
        check_failures(episodes, 0.0)
        return returns

    def play_and_score(
        self, params: Params, prompts: PromptBatch, key: jax.Array
    ) -> tuple[np.ndarray[Any, Any], list[Episode]]:
        """Play episodes and compute the return of each; NaN for failed ones."""
        prompts = PromptBatch.of(prompts)
        episodes = self.play(params, prompts, key)
        samples = self.settings.num_samples
        truths = [truth for truth in prompts.ground_truths for _ in range(samples)]
        held, trajectories = _held(len(episodes)), self._trajectories(episodes, prompts)

        def returns() -> dict[str, np.ndarray[Any, Any]]:
            nonlocal episodes
            values, _, episodes = self._returns(episodes, trajectories, truths, held)
            return {"returns": values}

        return hosts.merge_rows("computing rewards", held, returns)["returns"], episodes

    def play(self, params: Params, prompts: Sequence[Trajectory], key: jax.Array) -> list[Episode]:
        """Play episodes to their end.

        Args:
            params: the current trained parameters.
            prompts: rows of the task.
            key: of the seeds of environments, and of the tokens.

        Returns:
            The episodes, including failed ones; those of a prompt are consecutive.

        Raises:
            ValueError: if a prompt is too long, or the chat template rejects it.
        """
        settings = self.settings
        count = len(prompts) * settings.num_samples
        seeds = np.asarray(_seeds(key, len(prompts)))
        keys = _episode_keys(key, count)
        pool = CallPool(settings.environment_threads, settings.environment_timeout)
        running = []
        for i, held in enumerate(_held(count)):
            prompt = i // settings.num_samples
            running.append(
                _RunningEpisode(self, pool, prompts[prompt], int(seeds[prompt]), i, bool(held))
            )
        try:
            engine = self.engine.converse(params, count, settings)
            parts = min(settings.cohorts or default_cohorts(count), count)
            cohorts = [running[i::parts] for i in range(parts)]  # each has rows on all devices
            while any(episode.stage != "ended" for episode in running):
                for cohort in cohorts:
                    self._take_replies([e for e in cohort if e.stage == "in_environment"], pool)
                    if any(episode.stage == "ready" for episode in cohort):
                        self._draw(engine, running, cohort, keys)
            return [episode.record for episode in running]
        finally:
            closing = [call for episode in running for call in episode.close()]
            pool.wait(closing, len(closing))  # asynchronous ones need the loop that now ends
            pool.close()

    def _take_replies(self, running: "list[_RunningEpisode]", pool: CallPool) -> None:
        """Wait for environments, and read what they replied."""
        calls = [episode.call for episode in running if episode.call is not None]
        pool.wait(calls, len(calls))
        replies = _gather("playing environments", running, lambda held: [e.reply() for e in held])
        for episode, reply in zip(running, replies, strict=True):
            episode.take_reply(reply)
        self._read_observations([episode for episode in running if episode.stage == "replied"])

    def _read_observations(self, running: "list[_RunningEpisode]") -> None:
        """Encode the observations of these episodes, all at once."""
        for episode in running:
            episode.join_messages()
        encoded = _gather("encoding observations", running, self._encode_each)
        for episode, tokens in zip(running, encoded, strict=True):
            if isinstance(tokens, str):
                episode.fail("reply", tokens)
            elif self._appends(episode):
                episode.read(tokens)
            else:
                episode.replace_conversation(tokens)

    def _appends(self, episode: "_RunningEpisode") -> bool:
        """Whether the observation is encoded alone, not the whole conversation."""
        return self.settings.history == "append" and bool(episode.record.turns)

    def _encode_each(self, running: "list[_RunningEpisode]") -> list[list[int] | str]:
        """Return the tokens of each episode, or why the chat template rejects what it observed."""
        try:
            return [*self._encode(running)]
        except ValueError as error:
            if len(running) > 1:
                return [x for episode in running for x in self._encode_each([episode])]
            if not running or not running[0].record.turns:
                raise  # about the prompts
            return [describe_failure(error)]

    def _encode(self, running: "list[_RunningEpisode]") -> list[list[int]]:
        """Return the tokens of whole conversations, or of the observation after a turn."""
        template = self.engine.template
        appended = [episode for episode in running if self._appends(episode)]
        rendered = [episode for episode in running if not self._appends(episode)]
        turns = [
            {
                "messages": e.record.messages,
                "new": e.observation,
                "tools": e.tools,
                "last": e.record.rows[-1].tokens[-1],
            }
            for e in appended
        ]
        tokens = dict(zip([e.number for e in appended], template.continuations(turns), strict=True))
        encoded = _encode_conversations(template, rendered)
        for episode, row in zip(rendered, encoded, strict=True):
            if not episode.record.turns:
                self._check_prompt(len(row))
            tokens[episode.number] = row
        return [tokens[episode.number] for episode in running]

    def _check_prompt(self, length: int) -> None:
        settings, limit = self.settings, ""
        if length > settings.max_prompt_tokens:
            limit = f"at most rollout.max_prompt_tokens={settings.max_prompt_tokens}"
        elif length >= settings.max_episode_tokens:
            limit = f"fewer than rollout.max_episode_tokens={settings.max_episode_tokens}"
        if limit:
            raise ValueError(
                f"the conversation before the first turn must have {limit} tokens, got {length}"
            )

    def _draw(
        self,
        engine: TurnEngine,
        running: "list[_RunningEpisode]",
        cohort: "list[_RunningEpisode]",
        keys: jax.Array,
    ) -> None:
        """Draw a turn of each episode of a cohort that is ready for one."""
        settings = self.settings
        ready = {episode.number: episode for episode in cohort if episode.stage == "ready"}
        rows = {i: episode.record.rows[-1].tokens for i, episode in ready.items()}
        limits = {
            i: min(settings.max_new_tokens, settings.max_episode_tokens - len(row))
            for i, row in rows.items()
        }
        turns = np.asarray([len(episode.record.turns) for episode in running], np.int32)
        drawn = engine.go_on(rows, _turn_keys(keys, turns), limits)
        not_finite = np.any(np.isnan(drawn.logprobs) & drawn.mask, axis=1)
        check_logits(np.asarray(not_finite)[list(ready)])
        for i, episode in ready.items():
            length = drawn.lengths[i]
            tokens = drawn.tokens[i, :length].tolist()
            text = self.engine.template.tokenizer.decode(tokens)
            truncated = bool(drawn.finish_reasons[i] == LENGTH)
            routing = None if drawn.routing is None else np.asarray(drawn.routing[i])
            logprobs = drawn.logprobs[i, :length].tolist()
            episode.act(tokens, logprobs, routing, text, truncated=truncated)

    def _trajectories(
        self, episodes: Sequence[Episode], prompts: Sequence[Trajectory]
    ) -> list[Trajectory]:
        samples = len(episodes) // len(prompts)
        lengths = [turn.end - turn.start for e in episodes for turn in e.turns[-1:] or [_NO_TURN]]
        return [
            Trajectory(
                {
                    **prompts[i // samples],
                    "messages": episode.messages,
                    "completion_length": length,
                }
            )
            for i, (episode, length) in enumerate(zip(episodes, lengths, strict=True))
        ]

    def _returns(
        self,
        episodes: Sequence[Episode],
        trajectories: Sequence[Trajectory],
        ground_truths: Sequence[Any],
        held: hosts.RowMask,
    ) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]], list[Episode]]:
        """Compute returns, each of several rewards by its name, and copies of scored episodes.

        Returns and rewards are NaN for failed episodes, and for those that another process has
        played.
        """
        scored = list(episodes)
        played = [i for i in np.flatnonzero(held).tolist() if not episodes[i].failed]
        # A process that has played no episode has the same names: processes merge their arrays.
        names = self.reward.rewards if isinstance(self.reward, WeightedReward) else ()
        parts = {name: np.full(len(episodes), np.nan, np.float32) for name in names}
        if self.reward is not None and played:
            scores = score_trajectories(
                self.reward,
                [trajectories[i] for i in played],
                [ground_truths[i] for i in played],
                timeout=self.reward_timeout,
            )
            for i, reward in zip(played, scores.rewards, strict=True):
                final_reward = scored[i].final_reward + reward
                scored[i] = replace(scored[i], final_reward=final_reward)
            for name, part in parts.items():
                part[played] = np.asarray(scores.components[name], np.float32)
        returns = np.full(len(episodes), np.nan, np.float32)
        for i in played:
            returns[i] = scored[i].returns(self.discount)[0]
        return returns, parts if len(parts) > 1 else {}, scored


def default_cohorts(episodes: int) -> int:
    """Choose the number of cohorts: two on CPUs with 64 episodes or more, otherwise one.

    While the environments of one cohort run, a turn of the other is drawn. On a CPU that costs
    nothing with many rows, since half of them take half the time. A GPU or TPU reads all weights
    for each token, so half of the rows take nearly as long as all, as do few rows on a CPU. Times
    are not measured: log-probabilities would then differ in the last bit from run to run.
    """
    return 2 if jax.default_backend() == "cpu" and episodes >= _MANY_EPISODES else 1


def check_failures(episodes: Sequence[Episode], share: float) -> None:
    """Raise if more than a share of episodes failed.

    Raises:
        EnvironmentFailureError: with the number of failures and the first of them.
    """
    failed = [episode for episode in episodes if episode.failed]
    if len(failed) > share * len(episodes):
        allowed = f"at most rollout.max_failed={share:g} of the environments"
        message = (
            f"{allowed if share else 'no environment'} may fail, got {len(failed)} of "
            f"{len(episodes)}; the first ({failed[0].cause}): {failed[0].error}"
        )
        hosts.fail(EnvironmentFailureError(message))


def _held(count: int) -> hosts.RowMask:
    """Mark the episodes that this process plays."""
    held = np.zeros(count, bool)
    held[hosts.deal(count)] = True
    return held


def _gather(
    call: str,
    running: "list[_RunningEpisode]",
    compute: "Callable[[list[_RunningEpisode]], list[Any]]",
) -> list[Any]:
    """Compute a value for each episode in the process that plays it, and gather all values."""
    held = [episode for episode in running if episode.held]
    # Processes play consecutive episodes, so their parts are in order.
    return [x for part in hosts.share(call, lambda: compute(held)) for x in part]


class _EnvironmentReply(NamedTuple):
    """The reply of an environment, in a form that can be sent to other processes."""

    seconds: float
    value: Any = None  # a `Reply` as a list, or the final reward
    cause: str = ""  # of a failure
    error: str = ""


@dataclass
class _RunningEpisode:
    """An episode while it is played.

    Its stage is `in_environment` during a call of the environment, `replied` until the observation
    is encoded, then `ready` for a turn of the policy, and at last `ended`.
    """

    source: MultiTurn
    pool: CallPool
    row: Trajectory
    seed: int
    number: int
    held: bool  # whether this process plays it; otherwise another process sends the replies
    stage: Literal["in_environment", "replied", "ready", "ended"] = "in_environment"
    call: Call | None = None
    observation: list[Message] = field(default_factory=list)  # that the policy has not read yet
    closing: list[Call] = field(default_factory=list)  # of environments, one call for each
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._start(1)

    def _start(self, attempt: int) -> None:
        source = self.source
        self.record = Episode(list(self.row["messages"]), self.seed, attempts=attempt)
        self._end_reason: Ended = ""
        self.session = Session(source.environment, source.settings.max_observation, self.pool.run)
        self._is_closing = False
        self._call(self.session.reset, self.row, self.seed)

    def _call(self, function: Any, *args: Any) -> None:
        self.stage = "in_environment"
        self.call = self.pool(function, *args) if self.held else None

    @property
    def tools(self) -> list[Any]:
        """Tools of the row and of the environment."""
        return [*(self.row.get("tools") or []), *self.session.tools]

    def reply(self) -> _EnvironmentReply:
        """Return the result of the call that has ended."""
        call, self.call = self.call, None
        assert call is not None
        if call.error is None:
            return _EnvironmentReply(call.seconds, call.value)
        error = call.error
        return _EnvironmentReply(call.seconds, None, failure_cause(error), describe_failure(error))

    def take_reply(self, reply: Sequence[Any]) -> None:
        """Continue with a reply of the environment; a list if another process has sent it."""
        reply = _EnvironmentReply(*reply)
        self.seconds += reply.seconds
        self.record.seconds = self.seconds
        if reply.cause:
            self.fail(reply.cause, reply.error)
        elif self._end_reason:
            self.record.final_reward = reply.value
            self.record.ended, self.stage = self._end_reason, "ended"
            self.close()
        else:
            self._take_observation(Reply(*reply.value))

    def _take_observation(self, reply: Reply) -> None:
        record = self.record
        self.observation = reply.messages
        if record.turns:
            last = record.turns[-1]
            errors = int(reply.info.get("tool_errors", last.tool_errors))
            record.turns[-1] = last._replace(reward=reply.reward, tool_errors=errors)
            record.info = {k: x for k, x in reply.info.items() if k != "tool_errors"}
            if reply.done or len(record.turns) == self.source.settings.max_turns:
                record.messages += reply.messages  # for display: the policy does not read them
                self._end("done" if reply.done else "max_turns")
                return
        self.stage = "replied"

    def _end(self, reason: Ended) -> None:
        self._end_reason = reason
        self._call(self.session.final_reward)

    def fail(self, cause: str, error: str) -> None:
        """Restart the episode once; the second failure ends it."""
        self.close()
        if self.record.attempts < _MAX_ATTEMPTS:
            self._start(self.record.attempts + 1)
            return
        self.record.ended, self.stage = "failed", "ended"
        self.record.cause, self.record.error = cause, error

    def close(self) -> list[Call]:
        """Begin to close the environment, and return the calls that close those of this episode."""
        if not self._is_closing:
            self._is_closing = True
            self.closing.append(self.pool(self.session.close))
        return self.closing

    def join_messages(self) -> None:
        """Append the first observation to the user's last message."""
        record = self.record
        if record.messages and self.observation and not record.turns:
            record.messages, self.observation = _joined(record.messages, self.observation)

    def replace_conversation(self, tokens: list[int]) -> None:
        """Read the tokens of the whole conversation: in a new row unless they extend the last."""
        rows = self.record.rows
        if rows and tokens[: len(rows[-1].tokens)] == rows[-1].tokens:
            tokens = tokens[len(rows[-1].tokens) :]
        else:
            rows.append(TokenRow())
        self.read(tokens)

    def read(self, tokens: list[int]) -> None:
        """Read the tokens that follow, until the policy's turn."""
        record = self.record
        record.messages, self.observation = [*record.messages, *self.observation], []
        if len(record.rows[-1].tokens) + len(tokens) >= self.source.settings.max_episode_tokens:
            if not record.rows[-1].tokens:  # nothing would be sampled in this row
                record.rows.pop()
            self._end("length")
            return
        record.rows[-1].append(tokens)
        self.stage = "ready"

    def act(
        self,
        tokens: list[int],
        logprobs: list[float],
        routing: np.ndarray[Any, Any] | None,
        text: str,
        *,
        truncated: bool,
    ) -> None:
        """Pass a turn of the policy to the environment."""
        record, row = self.record, self.record.rows[-1]
        template, tool_format = self.source.engine.template, self.source.settings.tool_format
        formats = template.tool_formats if tool_format == "any" else tool_format
        action = Action(text, formats, _opens_thinking(template, row.tokens))
        start = len(row.tokens)
        row.append(tokens, logprobs, routing)
        record.turns.append(
            Turn(
                len(record.rows) - 1,
                start,
                len(row.tokens),
                tool_calls=len(action.calls),
                tool_errors=len(action.errors),
            )
        )
        record.messages = [*record.messages, Message(role="assistant", content=text)]
        if truncated:
            self._end("length")
        else:
            self._call(self.session.step, action)


def _opens_thinking(template: Template, prompt: list[int]) -> bool:
    """Whether a chat template has written `<think>` before the policy's turn."""
    end = template.tokenizer.decode(prompt[-_THINK_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith("<think>")


def _encode_conversations(
    template: Template, running: Sequence[_RunningEpisode]
) -> list[list[int]]:
    conversations: list[Mapping[str, Any]] = []
    for episode in running:
        messages = [*episode.record.messages, *episode.observation]
        if not messages:
            raise ValueError(
                "an episode must begin with a message, got none from its row and from reset"
            )
        conversations.append({"messages": messages, "tools": episode.tools or None})
    features = template.batch_encode(conversations, add_generation_prompt=True)
    return [[int(token) for token in feature["input_ids"]] for feature in features]


def _joined(messages: list[Message], new: list[Message]) -> tuple[list[Message], list[Message]]:
    """Append the first new message to the last one, if both are the user's."""
    last, first = messages[-1], new[0]
    if last["role"] != "user" or first["role"] != "user" or not isinstance(last["content"], str):
        return messages, new
    text = f"{last['content']}\n{first['content']}"
    return [*messages[:-1], Message(role="user", content=text)], new[1:]


@partial(jax.jit, static_argnums=1)
def _seeds(key: jax.Array, count: int) -> Int[Array, " prompts"]:
    bits = jax.random.bits(jax.random.fold_in(key, 0), (count,), jnp.uint32)
    return (bits >> 1).astype(jnp.int32)


@partial(jax.jit, static_argnums=1)
def _episode_keys(key: jax.Array, count: int) -> jax.Array:
    numbers = jnp.arange(count, dtype=jnp.int32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, 1), numbers)


@jax.jit
def _turn_keys(keys: jax.Array, turns: Int[Array, " episodes"]) -> jax.Array:
    return jax.vmap(jax.random.fold_in)(jax.random.clone(keys), turns)
