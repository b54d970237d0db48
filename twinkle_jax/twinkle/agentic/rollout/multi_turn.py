"""`twinkle_agentic.rollout.multi_turn`: a sampler and tools take turns."""

import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle_jax.data import IGNORE, SamplingParams, Trajectory, user_data_get
from twinkle_jax.twinkle.agentic.rollout.bridge import as_lists, extend_with_bridge

_ARRAYS = ("input_ids", "labels", "attention_mask", "position_ids", "logprobs")


class Rollout(ABC):
    """Lets a policy speak, as often as a conversation needs."""

    @abstractmethod
    def __call__(self, trajectories: list[Trajectory], **kwargs: Any) -> list[Trajectory]:
        """Go on with trajectories to their end."""


class MultiTurnRollout(Rollout):
    """Samples a turn of each conversation, answers its tool calls, and goes on while there are any.

    What was sampled is not encoded again. An environment that says `done` through an
    [`EnvTool`][twinkle_jax.twinkle.agentic.envs.EnvTool] ends its conversation at once, which
    Twinkle's does not.

    Args:
        sampler: with `sample(features, sampling_params=…)`.
        template: encodes conversations.
        tool_manager: answers calls; may be given to a call instead.
        sampling_params: how to draw; one sample.
        max_turns: the most turns.
        max_trajectory_tokens: a conversation with so many tokens is not continued; None for any.
        trace_dir: a JSON file for each conversation is written there; None for none.
        trace_callback: says whether to write one.
        success_callback: says whether its name begins with `ok` or with `fail`.

    Raises:
        ValueError: without a template, or for a number out of its range.
    """

    def __init__(
        self,
        sampler: Any,
        template: Any,
        tool_manager: Any = None,
        sampling_params: SamplingParams | None = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        trace_dir: str | None = None,
        trace_callback: Callable[[Any], bool] | None = None,
        success_callback: Callable[[Any], bool] | None = None,
    ) -> None:
        if template is None:
            raise ValueError("template must be a Template, got None")
        for name, value in (
            ("max_turns", max_turns),
            ("max_trajectory_tokens", max_trajectory_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.sampling_params = sampling_params or SamplingParams()
        if self.sampling_params.num_samples != 1:
            raise ValueError(f"num_samples must be 1, got {self.sampling_params.num_samples}")
        self.sampler, self.template, self.tool_manager = sampler, template, tool_manager
        self.max_turns, self.max_trajectory_tokens = max_turns, max_trajectory_tokens
        self.trace_dir, self.trace_callback = trace_dir, trace_callback
        self.success_callback = success_callback
        if trace_dir:
            Path(trace_dir).mkdir(parents=True, exist_ok=True)

    def __call__(self, trajectories: list[Trajectory], **kwargs: Any) -> list[Trajectory]:
        """Go on with conversations to their end.

        Args:
            trajectories: that the assistant speaks in next.
            kwargs: `tool_manager`, one or one for each; `sampling_params`; `global_step`, which is
                not used.

        Returns:
            The same with `messages`, the fields of an input feature, `logprobs` (as many as labels,
            or None), `turns`, `stop_reason` and `truncated`.

        Raises:
            TypeError: for one trajectory that is not in a list.
            ValueError: without a tool manager, or with a list of another length.
            RuntimeError: if the sampler answers something else than was asked for.
        """
        if isinstance(trajectories, Mapping):
            raise TypeError("trajectories must be a List[Trajectory], got one: wrap it in a list")
        if not trajectories:
            return []
        managers = self._managers(kwargs.get("tool_manager", self.tool_manager), len(trajectories))
        params = kwargs.get("sampling_params", self.sampling_params)
        talks = [_Conversation(self.template, trajectory) for trajectory in trajectories]
        for turn in range(1, self.max_turns + 1):
            active = [(talk, m) for talk, m in zip(talks, managers, strict=True) if not talk.done]
            if not active:
                break
            sequences = self._sample([talk.feature for talk, _ in active], params)
            for (talk, manager), sequence in zip(active, sequences, strict=True):
                talk.hear(sequence, turn)
                self._answer(talk, manager, sequence)
        results = [talk.result() for talk in talks]
        if self.trace_dir:
            self._write_traces(Path(self.trace_dir), results)
        return results

    def _managers(self, managers: Any, count: int) -> list[Any]:
        if managers is None:
            raise ValueError("tool_manager is required, got none")
        if not isinstance(managers, list):
            return [managers] * count
        if len(managers) != count:
            raise ValueError(f"tool_manager list length must be {count}, got {len(managers)}")
        return managers

    def _sample(self, features: list[Any], params: SamplingParams) -> list[Any]:
        """Sample a turn of each; rows are repeated where devices need more."""
        mesh = getattr(self.sampler, "device_mesh", None)
        least = getattr(mesh, "data_world_size", None) or 1
        padded = features + features[-1:] * (least - len(features))
        responses = self.sampler.sample(padded, sampling_params=params)
        if not isinstance(responses, list) or len(responses) != len(padded):
            count = len(responses) if isinstance(responses, list) else type(responses).__name__
            raise RuntimeError(f"sampler returned {count} responses for {len(padded)} prompts")
        for response in responses:
            if not response.sequences:
                raise RuntimeError("sampler returned a response with no sequences")
        return [response.sequences[0] for response in responses[: len(features)]]

    def _answer(self, talk: "_Conversation", manager: Any, sequence: Any) -> None:
        """Answer a turn's tool calls, or end the conversation."""
        limit = self.max_trajectory_tokens
        if sequence.stop_reason == "length":
            talk.done = True
            return
        if limit is not None and len(talk.feature["input_ids"]) >= limit:
            talk.done = talk.truncated = True
            return
        last = (talk.feature.get("messages") or [{}])[-1]
        calls = last.get("tool_calls") or self.template.parse_tool_call(sequence.decoded or "")
        if not calls:
            talk.done = True
        elif talk.turns >= self.max_turns:
            talk.done = talk.truncated = True
        else:
            answers = [{"role": "tool", "content": manager(call)} for call in calls]
            if any(getattr(tool, "done", False) is True for tool in _tools_of(manager)):
                talk.done = True
                talk.feature["messages"] = [*talk.feature["messages"], *answers]
                return
            talk.feature = extend_with_bridge(talk.feature, answers, self.template)

    def _write_traces(self, directory: Path, results: Sequence[Any]) -> None:
        """Write conversations; what goes wrong is logged, and ends nothing."""
        for i, result in enumerate(results):
            try:
                if self.trace_callback is not None and not self.trace_callback(result):
                    continue
                success = bool(self.success_callback and self.success_callback(result))
                record = {
                    "trajectory": {k: x for k, x in result.items() if k not in _ARRAYS},
                    "ground_truth": user_data_get(result.get("user_data"), "ground_truth") or "",
                    "stop_reason": result["stop_reason"],
                    "truncated": result["truncated"],
                    "success": success,
                }
                name = f"{'ok' if success else 'fail'}-{_identity(result, i)}.json"
                text = json.dumps(record, ensure_ascii=False, indent=2, default=str)
                (directory / name).write_text(text, encoding="utf-8")
            except Exception:
                logging.getLogger(__name__).warning("a trace was not written", exc_info=True)


class _Conversation:
    """A trajectory while it goes on."""

    def __init__(self, template: Any, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.feature: dict[str, Any] = as_lists(
            template.encode(trajectory, add_generation_prompt=True)
        )
        self.feature.setdefault("messages", list(trajectory.get("messages") or []))
        self.logprobs: list[Any] = []
        self.turns, self.stop_reason = 0, None
        self.done = self.truncated = False

    def hear(self, sequence: Any, turn: int) -> None:
        """Take what was sampled."""
        feature = sequence.new_input_feature
        if feature is None or "input_ids" not in feature:
            raise RuntimeError("sampler must return new_input_feature.input_ids, got none")
        if sequence.logprobs is not None and len(sequence.logprobs) != len(sequence.tokens):
            raise RuntimeError(
                f"logprobs length must be that of the {len(sequence.tokens)} tokens, "
                f"got {len(sequence.logprobs)}"
            )
        self.feature = as_lists(dict(feature))
        self.logprobs += sequence.logprobs or []
        self.turns, self.stop_reason = turn, sequence.stop_reason

    def result(self) -> Any:
        """Return the trajectory with its tokens, log-probabilities and stop reason."""
        labelled = sum(label != IGNORE for label in self.feature.get("labels") or [])
        if self.logprobs and len(self.logprobs) != labelled:
            raise RuntimeError(
                f"logprobs must be as many as labels, {labelled}, got {len(self.logprobs)}"
            )
        return {
            **self.trajectory,
            **self.feature,
            "logprobs": self.logprobs or None,
            "turns": self.turns,
            "stop_reason": self.stop_reason,
            "truncated": self.truncated,
        }


def _tools_of(manager: Any) -> list[Any]:
    return list(getattr(manager, "_tools", {}).values())


def _identity(result: Mapping[str, Any], number: int) -> str:
    """Name a file by the user's id, made harmless, or by the time."""
    for key in ("id", "prompt_id"):
        identity = user_data_get(result.get("user_data"), key)
        if identity not in (None, ""):
            return re.sub(r"[^\w.-]+", "_", str(identity), flags=re.ASCII)[:64]
    return f"{time.time_ns() // 1_000_000}-{number}"
