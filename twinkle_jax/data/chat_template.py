"""A tokenizer's own chat template, which turns messages into text."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_jax.data.missing_extra import require

_TEXT = 10_000_000
_SECONDS = 10.0


class ChatTemplate:
    """A chat template, run in a sandbox.

    It cannot reach anything but what it is given, and it ends: loop steps, characters and seconds
    are limited.

    Args:
        source: the template, in Jinja's language, as tokenizers bring it.

    Raises:
        ValueError: if it cannot be parsed.
        ImportError: if jinja2 is not installed.

    Example:
        >>> source = "{% for m in messages %}{{ m.role }}={{ m.content }}{% endfor %}"
        >>> template = ChatTemplate(source)
        >>> template.render([{"role": "user", "content": "Hello"}])
        'user=Hello'
    """

    def __init__(self, source: str) -> None:
        require("jinja2", "data")
        import jinja2

        from twinkle_jax.data.sandbox import budget, environment

        self.source = source
        self._environment, self._budgets = environment, budget
        self._error = jinja2.TemplateError
        self._steps = min(1_000_000, 1_000_000_000 // max(len(source), 1))
        try:
            compiled = environment.compile_within(environment.Sandbox(), source, self._budget())
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(
                f"chat_template must be a Jinja template, got {_said(error)}"
            ) from None
        self._compiled = compiled

    def _budget(self) -> Any:
        return self._budgets.Budget(self._steps, _TEXT, _SECONDS)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation.

        Args:
            messages: dictionaries with `role` and `content`.
            tools: what may be called.
            add_generation_prompt: whether to end where the assistant begins to speak.
            variables: what else the template asks for, `enable_thinking` for one.

        Returns:
            The text, control tokens included.

        Raises:
            ValueError: if the template refuses the messages, reaches for what it must not have,
                or does not end within its limits.
        """
        given = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        from jinja2.exceptions import SecurityError

        try:
            return self._environment.render(self._compiled, given, self._budget)
        except (SecurityError, MemoryError, RecursionError) as error:
            raise ValueError(
                f"chat_template must stay within its sandbox and limits, got {_said(error)}"
            ) from None
        except self._error as error:
            raise ValueError(f"messages must suit the chat template, got {_said(error)}") from None
        except (TypeError, ValueError, OverflowError, ArithmeticError, LookupError) as error:
            raise ValueError(f"chat_template must suit the messages, got {_said(error)}") from None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
