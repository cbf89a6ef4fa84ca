"""What a request says about thinking: whether the model may, how hard, and for how many tokens."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import brief
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields

if TYPE_CHECKING:
    from bitnet.core.text.chat import ChatTemplate

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BUDGETS = {"minimal": 512, "low": 2048}
"""Tokens of a thought for efforts that the chat template does not know; greater ones set no limit."""


@dataclass(frozen=True, slots=True)
class ThinkingChoice:
    """A request's choices about thinking.

    Attributes:
        thinks: Whether the model may think; None: as the template has it.
        budget: Maximum tokens of the thought; None: not said.
        effort: One of :data:`EFFORTS`; None: not said.
    """

    thinks: bool | None = None
    budget: int | None = None
    effort: str | None = None

    @property
    def allowed(self) -> bool | None:
        """Whether the model may think, all choices considered; None: as the template has it."""
        if self.budget == 0 or self.effort == "none":
            return False
        return self.thinks

    def or_default(self, budget: int | None) -> ThinkingChoice:
        """With the server's budget where the request says nothing."""
        said = self.budget is not None or self.effort is not None or self.thinks is not None
        return self if said else replace(self, budget=budget)

    def tokens(self, template: ChatTemplate | None) -> int | None:
        """The budget for the engine."""
        if self.budget is not None or self.effort is None:
            return self.budget
        return None if _known(self.effort, template) else BUDGETS.get(self.effort)

    def variables(self, template: ChatTemplate | None) -> Mapping[str, Any]:
        """Variables for the template."""
        word = _known(self.effort, template)
        return {} if word is None else {"reasoning_effort": word}


def _known(effort: str | None, template: ChatTemplate | None) -> str | None:
    """The template's own word for an effort."""
    switch = None if template is None else template.thinking
    return None if switch is None or effort is None else switch.efforts.get(effort)


def openai_thinking(fields: Fields) -> ThinkingChoice:
    """``reasoning_effort``, ``reasoning``, ``thinking``, ``thinking_token_budget`` and ``enable_thinking`` of chats.

    Raises:
        RequestError: A field is not what it must be.
    """
    kwargs = fields.object("chat_template_kwargs") or Fields({}, "chat_template_kwargs")
    holder = fields if "enable_thinking" in fields else kwargs
    thinks = holder.flag("enable_thinking") if "enable_thinking" in holder else None
    given = thinking_object(fields)
    effort = read_effort(fields, "reasoning_effort")
    if effort is None and (reasoning := fields.object("reasoning")) is not None:
        effort = read_effort(reasoning, "effort")
    budget = fields.integer("thinking_token_budget", 0)
    return ThinkingChoice(
        given.thinks if thinks is None else thinks, given.budget if budget is None else budget, effort
    )


def thinking_object(fields: Fields) -> ThinkingChoice:
    """Anthropic's ``thinking``: ``enabled``, with ``budget_tokens``; ``adaptive``; or ``disabled``.

    Raises:
        RequestError: It is none of them.
    """
    given = fields.object("thinking")
    if given is None:
        return ThinkingChoice()
    kind = given.choice("type", ("enabled", "adaptive", "auto", "disabled"), "")
    return ThinkingChoice(kind != "disabled", given.integer("budget_tokens", 0) if kind == "enabled" else None)


def read_effort(fields: Fields, name: str) -> str | None:
    """An effort.

    Raises:
        RequestError: It is no known word.
    """
    return fields.choice(name, EFFORTS, "") if name in fields else None


def ollama_thinking(fields: Fields, template: ChatTemplate | None) -> ThinkingChoice:
    """Ollama's ``think``: true, false, or an effort.

    Raises:
        RequestError: It is neither, or the model does not think.
    """
    value = fields.values.get("think")
    if value is None or value is False:
        return ThinkingChoice(value)
    if value is not True and value not in EFFORTS:
        raise wrong(fields.name("think"), f"is {brief(value)}; it must be true, false, low, medium or high.")
    if template is None or template.thinking is None:
        raise wrong(fields.name("think"), "asks for a thought, but the model does not think apart from its answers.")
    return ThinkingChoice(True) if value is True else ThinkingChoice(None, None, value)


_CARRIED = "bitnet:"


def carried(thought: str) -> str:
    """A thought as a word that clients keep and send back without reading it."""
    return _CARRIED + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def read_carried(word: str | None) -> str:
    """The thought in a word of :func:`carried`; empty for other servers' words."""
    if word is None or not word.startswith(_CARRIED):
        return ""
    try:
        return base64.b64decode(word.removeprefix(_CARRIED), validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""
