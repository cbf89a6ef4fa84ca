"""How a chat's prompt is made: the template's variables, and whether the last message is continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitnet.core.text.chat import RESERVED
from bitnet.server.chat.thinking import ThinkingChoice, openai_thinking
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The choices of a request about its prompt.

    Attributes:
        variables: Passed to the chat template.
        continued: Whether the answer continues the last message.
        answered: Whether the prompt ends with an answer's beginning.
        thinking: Whether and how long the model may think.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    answered: bool = True
    thinking: ThinkingChoice = field(default_factory=ThinkingChoice)

    @classmethod
    def read(cls, fields: Fields, messages: Sequence[Mapping[str, Any]], *, unanswered: bool = False) -> ChatPrompt:
        """``chat_template_kwargs``, ``enable_thinking``, ``continue_final_message`` and ``add_generation_prompt``.

        Args:
            unanswered: Whether the prompt may lack an answer's beginning, as no answer is generated.

        Raises:
            RequestError: A field is not what it must be, or they contradict each other or the messages.
        """
        given = fields.object("chat_template_kwargs", 100) or Fields({}, "chat_template_kwargs")
        for name in given.values:
            if name in RESERVED:
                raise wrong(given.name(name), "cannot be set; it comes from the request's other fields.")
        variables = dict(given.values)
        if "enable_thinking" in fields:
            variables["enable_thinking"] = fields.flag("enable_thinking")
        continued = fields.flag("continue_final_message")
        begun = fields.flag("add_generation_prompt", not continued)
        if begun == continued and (begun or not unanswered):
            needed = "must be false where the last message is continued" if continued else "is false"
            raise wrong("add_generation_prompt", f"{needed}; continue_final_message continues an answer.")
        if continued:
            check_continued(messages, fields.name("continue_final_message"))
        return cls(variables, continued, begun or continued, openai_thinking(fields))


def check_continued(messages: Sequence[Mapping[str, Any]], field: str) -> None:
    """Check that the last message is an answer's beginning.

    Raises:
        RequestError: It is not.
    """
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        raise wrong(field, "needs a last message of the assistant's, without tool calls.")


PLAIN = ChatPrompt()
