"""`twinkle_agentic.rollout`: a sampler and tools take turns."""

import itertools
import json
import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle_jax.data import IGNORE, SamplingParams, Template, Trajectory
from twinkle_jax.data.rows import to_lists
from twinkle_jax.data.trajectory import extend_feature
from twinkle_jax.twinkle.data_format import user_data_get
from twinkle_jax.twinkle.names import add_submodules

_ARRAYS = ("input_ids", "labels", "attention_mask", "position_ids", "logprobs")


class Rollout(ABC):
    """Continues conversations with a policy."""

    @abstractmethod
    def __call__(self, trajectories: list[Trajectory], **kwargs: Any) -> list[Trajectory]:
        """Continue trajectories to their end."""


class MultiTurnRollout(Rollout):
    """Samples a turn of each conversation and answers its tool calls, until there are none.

    Sampled tokens are never encoded again. A conversation ends at once when an environment is done,
    according to its [`EnvTool`][twinkle_jax.twinkle.agentic.envs.EnvTool]; Twinkle's continues.

    Args:
        sampler: an object with `sample(features, sampling_params=…)`.
        template: encodes conversations; not with `truncation_strategy="split"`.
        tool_manager: answers calls; may be an argument of each call instead.
        sampling_params: how to sample; one completion.
        max_turns: maximum turns of a conversation.
        max_trajectory_tokens: maximum tokens, from which it is not continued; None for no limit but
            the sampler's `max_length`. Answers of tools that do not fit are left out.
        trace_dir: directory for a JSON file of each conversation; None for no files.
        trace_callback: whether to write a conversation.
        success_callback: whether the name of its file has `ok` instead of `fail`.
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
        if getattr(template, "truncation_strategy", None) == "split":
            raise ValueError("truncation_strategy of template must not be 'split', got 'split'")
        limits = {"max_turns": max_turns, "max_trajectory_tokens": max_trajectory_tokens}
        for name, value in limits.items():
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
        """Continue conversations to their end.

        Args:
            trajectories: conversations in which the assistant is next.
            kwargs: `tool_manager`, one or a list; `sampling_params`; `global_step`, which the names
                of trace files begin with.

        Returns:
            The trajectories with `messages`, the fields of an input feature, `logprobs` (one for
            each label, or None), `turns`, `stop_reason` and `truncated`: whether `max_turns`,
            `max_trajectory_tokens` or an answer without room ended a conversation that would have
            gone on. As in Twinkle, a turn that the sampler cuts off has the `stop_reason`
            `"length"`, and is not `truncated`.

        Raises:
            RuntimeError: if the sampler returns something else than one completion for each.
        """
        if isinstance(trajectories, Mapping):
            raise TypeError("trajectories must be a List[Trajectory], got one: wrap it in a list")
        if not trajectories:
            return []
        managers = self._managers(kwargs.get("tool_manager", self.tool_manager), len(trajectories))
        params = kwargs.get("sampling_params", self.sampling_params)
        conversations = [_Conversation(self.template, trajectory) for trajectory in trajectories]
        for turn in range(1, self.max_turns + 1):
            active = [
                (conversation, m)
                for conversation, m in zip(conversations, managers, strict=True)
                if not conversation.done
            ]
            if not active:
                break
            sequences = self._sample([conversation.feature for conversation, _ in active], params)
            for (conversation, manager), sequence in zip(active, sequences, strict=True):
                conversation.add_turn(sequence, turn)
                self._answer(conversation, manager, sequence)
        results = [conversation.result() for conversation in conversations]
        if self.trace_dir:
            step = kwargs.get("global_step")
            prefix = "" if step is None else f"step{int(step):06d}-"
            self._write_traces(Path(self.trace_dir), prefix, results)
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
        """Sample a turn of each; the last row is repeated until every device has one."""
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

    def _answer(self, conversation: "_Conversation", manager: Any, sequence: Any) -> None:
        """Answer a turn's tool calls, or end the conversation."""
        limit = self.max_trajectory_tokens
        if sequence.stop_reason == "length":
            conversation.done = True
            return
        if limit is not None and len(conversation.feature["input_ids"]) >= limit:
            conversation.done = conversation.truncated = True
            return
        last = (conversation.feature.get("messages") or [{}])[-1]
        calls = last.get("tool_calls") or self.template.parse_tool_call(sequence.decoded or "")
        if not calls:
            conversation.done = True
        elif conversation.turns >= self.max_turns:
            conversation.done = conversation.truncated = True
        else:
            answers = [{"role": "tool", "content": manager(call)} for call in calls]
            # Other tools may be done from an earlier episode of their environment.
            names = [str((x.get("function") or {}).get("name")) for x in calls]
            tools = getattr(manager, "_tools", {})
            if any(getattr(tools.get(name), "done", False) is True for name in names):
                conversation.done = True
                conversation.feature["messages"] = [*conversation.feature["messages"], *answers]
                return
            longer = extend_with_bridge(conversation.feature, answers, self.template)
            rooms = limit, getattr(self.sampler, "max_length", None)
            if len(longer["input_ids"]) >= min((x for x in rooms if x), default=math.inf):
                conversation.done = conversation.truncated = True
            else:
                conversation.feature = longer

    def _write_traces(self, directory: Path, prefix: str, results: Sequence[Any]) -> None:
        """Write conversations; errors are logged."""
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
                name = f"{prefix}{'ok' if success else 'fail'}-{_file_name(result, i)}"
                text = json.dumps(record, ensure_ascii=False, indent=2, default=str)
                # The completions of a prompt share its id, and so do later steps.
                numbered = (f"{name}{f'-{n}' if n else ''}.json" for n in itertools.count())
                free = next(x for x in numbered if not (directory / x).exists())
                (directory / free).write_text(text, encoding="utf-8")
            except Exception:
                logging.getLogger(__name__).warning("a trace was not written", exc_info=True)


class _Conversation:
    """A trajectory that is being continued."""

    def __init__(self, template: Any, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.feature: dict[str, Any] = to_lists(
            template.encode(trajectory, add_generation_prompt=True)
        )
        self.feature.setdefault("messages", list(trajectory.get("messages") or []))
        self.logprobs: list[Any] = []
        self.turns, self.stop_reason = 0, None
        self.done = self.truncated = False

    def add_turn(self, sequence: Any, turn: int) -> None:
        """Append a completion."""
        feature = sequence.new_input_feature
        if feature is None or "input_ids" not in feature:
            raise RuntimeError("sampler must return new_input_feature.input_ids, got none")
        if sequence.logprobs is not None and len(sequence.logprobs) != len(sequence.tokens):
            raise RuntimeError(
                f"logprobs length must be that of the {len(sequence.tokens)} tokens, "
                f"got {len(sequence.logprobs)}"
            )
        self.feature = to_lists(dict(feature))
        self.logprobs += sequence.logprobs or []
        self.turns, self.stop_reason = turn, sequence.stop_reason

    def result(self) -> Any:
        """Return the trajectory with its tokens, log-probabilities and stop reason."""
        labelled = sum(label != IGNORE for label in self.feature.get("labels") or [])
        if self.logprobs and len(self.logprobs) != labelled:
            raise RuntimeError(
                f"logprobs must have one entry a label, {labelled}, got {len(self.logprobs)}"
            )
        return {
            **self.trajectory,
            **self.feature,
            "logprobs": self.logprobs or None,
            "turns": self.turns,
            "stop_reason": self.stop_reason,
            "truncated": self.truncated,
        }


def _file_name(result: Mapping[str, Any], number: int) -> str:
    """Name a file by the id in `user_data`, without special characters, or by the time."""
    for key in ("id", "prompt_id"):
        identity = user_data_get(result.get("user_data"), key)
        if identity not in (None, ""):
            return re.sub(r"[^\w.-]+", "_", str(identity), flags=re.ASCII)[:64]
    return f"{time.time_ns() // 1_000_000}-{number}"


def extend_with_bridge(
    pif: Mapping[str, Any], tool_messages: Sequence[Mapping[str, Any]], template: Any
) -> dict[str, Any]:
    """Append tool messages and the start of an assistant turn to a feature, without labels.

    Its tokens stay as they are. With a [`Template`][twinkle_jax.data.Template] no text becomes a
    control token. Of any other template, the tokenizer's chat template must render the longer
    conversation as a continuation of the shorter one; RuntimeError otherwise.
    """
    before, new = list(pif.get("messages") or []), list(tool_messages)
    count = len(pif["input_ids"])
    labels = pif.get("labels")
    if labels is not None and len(labels) not in (0, count):
        raise RuntimeError(f"labels length must be that of input_ids, {count}, got {len(labels)}")
    if isinstance(template, Template):
        return to_lists(template.extend_input_feature(pif, new))
    render = template.tokenizer.apply_chat_template
    short = render(before, tokenize=False, add_generation_prompt=False)
    longer = render([*before, *new], tokenize=False, add_generation_prompt=True)
    if not longer.startswith(short):
        raise RuntimeError(
            "chat template must render a longer conversation as a prefix-extension of the shorter "
            f"one, got {longer[-80:]!r} after {short[-80:]!r}"
        )
    if longer == short:
        raise RuntimeError("chat template must render messages of tools, got an empty string")
    tokens = template.tokenizer.encode(longer[len(short) :], add_special_tokens=False)
    extended = extend_feature(pif, tokens, labelled=False)
    return to_lists(extended) | {"messages": [*before, *new]}


add_submodules(__name__, "base", "bridge", "multi_turn")
