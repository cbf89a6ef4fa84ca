"""Chat templates: Jinja2 with the conventions of Hugging Face's ``apply_chat_template``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from bitnet.core.errors import InvalidInputError
from bitnet.core.text import sandbox
from bitnet.core.text.thinking import marks_of
from bitnet.core.text.thinking_switch import ThinkingSwitch, switch_of

MAX_SOURCE = 100_000
"""Maximum characters of a template; several times the largest in use."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""Variables of a template that are always set; others may be given."""

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat template of a model.

    Args:
        source: Jinja2 source, as in ``tokenizer.chat_template``. It comes from a model file and is not trusted: it runs
            in Jinja2's sandbox, in a process of its own with limits on time, memory and output.
        bos_token: Text of the begin token.
        eos_token: Text of the end token.

    Raises:
        InvalidInputError: The source is not a valid template.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if len(source) > MAX_SOURCE:
            raise InvalidInputError(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed."
            )
        try:
            sandbox.check(source)
        except sandbox.TemplateError as error:
            raise _refused(error) from error

    @cached_property
    def thinking(self) -> ThinkingSwitch | None:
        """How the template's thoughts are marked and steered; None: its model does not think apart from its answers."""
        try:
            return switch_of(self.source, self.render_each)
        except InvalidInputError:  # it refuses a conversation of one message, so nothing can be tried
            marks = marks_of(self.source)
            return None if marks is None else ThinkingSwitch(marks, None, {}, opens=False)

    @cached_property
    def alternates(self) -> bool:
        """Whether the template refuses or drops messages unless turns alternate between user and assistant."""
        orders = (("user",), ("user", "user", "assistant", "user"), ("user", "system", "assistant", "user"))
        shown = [self._shown(orders, tools) for tools in (None, _TOOLS)]
        return shown[0][0] and not all(map(all, shown))

    @cached_property
    def lacks_system(self) -> bool:
        """Whether the template refuses or drops a system message at the start."""
        return self._shown((("user",), ("system", "user")), None) == [True, False]

    @cached_property
    def drops_results(self) -> bool:
        """Whether the template drops the results of tools where it is given no tools."""
        return not all(self._shown([("user", "assistant", "tool", "user")], None))

    @cached_property
    def texts_arguments(self) -> bool:
        """Whether the template takes a call's arguments only as JSON text, not as an object, as DeepSeek's own do."""
        both: tuple[Any, Any] = ("{}", {})
        said = [[_trial("user", 0, True), _trial("assistant", 1, True, given)] for given in both]
        try:
            texts = self.render_each([(messages, _TOOLS, {}) for messages in said])
        except InvalidInputError:  # it refuses the text
            return False
        return texts[1] is None

    def _shown(self, orders: Sequence[Sequence[str]], tools: Sequence[Mapping[str, Any]] | None) -> list[bool]:
        """Whether the template shows every message of each conversation, given by its roles."""
        given: Any = "{}" if any("tool" in roles for roles in orders) and self.texts_arguments else {}
        conversations = [[_trial(role, i, "tool" in roles, given) for i, role in enumerate(roles)] for roles in orders]
        try:
            texts = self.render_each([(messages, tools, {}) for messages in conversations])
        except InvalidInputError:  # it refuses the first
            return [False] * len(orders)
        both = zip(conversations, texts, strict=True)
        return [text is not None and all(str(m["content"]) in text for m in messages) for messages, text in both]

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt for a conversation, as text.

        :func:`~bitnet.core.text.prompt.chat_tokens` gives its tokens safely.

        Args:
            messages: Each with ``role`` (``system``, ``user``, ``assistant``, …) and ``content``, and other keys that
                the template reads, such as ``tool_calls``. All values must be representable in JSON.
            add_generation_prompt: End with the text that begins the assistant's answer.
            tools: Functions the model may call, as JSON schemas.
            variables: What the template may read besides, such as ``enable_thinking``.

        Raises:
            InvalidInputError: The template refuses the messages, fails, or exceeds its limits.
        """
        text = self.render_each([(messages, tools, variables or {})], add_generation_prompt)[0]
        assert text is not None
        return text

    def render_each(self, conversations: Sequence[Any], add_generation_prompt: bool = True) -> list[str | None]:
        """Render the prompts for several conversations (each messages, tools and variables), within the limits of one.

        Returns:
            One prompt for each. None for a conversation after the first that the template refuses.

        Raises:
            InvalidInputError: As for :meth:`render`.
        """
        common = {"documents": None, "add_generation_prompt": add_generation_prompt, **self._tokens}
        several = [
            {**variables, "messages": said, "tools": tools, **common} for said, tools, variables in conversations
        ]
        try:
            return sandbox.render(self.source, several)
        except sandbox.TemplateError as error:
            raise _refused(error) from error


_TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


def _trial(role: str, place: int, calls: bool, arguments: Any = None) -> Message:
    """A message that is recognised in a prompt."""
    message: dict[str, Any] = {"role": role, "content": f"message {place}"}
    if role == "tool":
        message["tool_call_id"] = "call"
    elif role == "assistant" and calls:
        function = {"name": "f", "arguments": {} if arguments is None else arguments}
        message |= {"content": "", "tool_calls": [{"id": "call", "type": "function", "function": function}]}
    return message


def _refused(error: sandbox.TemplateError) -> InvalidInputError:
    return InvalidInputError(f"the chat template {str(error)[:200].rstrip('.')}.")
