"""A model with another chat template than its file's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from bitnet.core.text.chat import ChatTemplate
from bitnet.core.text.prompt import ChatTokens, chat_tokens
from bitnet.server.models.backend import ServedModel


class _Templated:
    def __init__(self, model: ServedModel, template: ChatTemplate) -> None:
        self._model, self.chat_template = model, template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continued: bool = False,
        thinks: bool | None = None,
    ) -> ChatTokens:
        how: dict[str, Any] = {"tools": tools, "variables": variables, "continued": continued, "thinks": thinks}
        return chat_tokens(self.chat_template, self._model.tokenizer, messages, **how)


def with_template(model: ServedModel, template: ChatTemplate) -> ServedModel:
    """A model as it is, but for its chat template."""
    return cast(ServedModel, _Templated(model, template))
