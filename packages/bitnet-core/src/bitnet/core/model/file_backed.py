"""What a model answers from its file alone, wherever its weights are: shape, tokenizer, chat template, prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.model.file import ModelFile

if TYPE_CHECKING:
    from bitnet.core.model.config import ModelConfig
    from bitnet.core.text.chat import ChatTemplate
    from bitnet.core.text.prompt import ChatTokens
    from bitnet.core.text.tokenizer import Tokenizer


class FileBacked:
    """A model of an open file.

    Attributes:
        config: Shape of the model.
        tokenizer: Text to token ids and back.
        chat_template: Renders conversations as prompts for this model; None if the model has no template.
        path: The model file.
    """

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._checked = float("-inf")  # when the file was found unchanged, on the clock of time.monotonic

    @property
    def config(self) -> ModelConfig:
        return self._file.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._file.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._file.chat_template

    @property
    def path(self) -> Path:
        return self._file.path

    def check_file(self, *, within: float = 0.0) -> None:
        """Check that the model's file is as it was when the model was loaded; this takes microseconds. If it is not,
        answers since then may be wrong, as weights can be read from the file while they are used.

        Args:
            within: Seconds for which an earlier check is enough. Callers that check often so spare the system a call
                each time.

        Raises:
            ModelFileError: It was cut short or written to.
        """
        now = time.monotonic()
        if now - self._checked >= within:
            self._file.gguf.check()
            self._checked = now

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continued: bool = False,
        thinks: bool | None = None,
    ) -> ChatTokens:
        """The token ids that :meth:`~bitnet.core.Model.chat` makes from a conversation, to pass to
        :meth:`~bitnet.core.Model.generate` and similar methods.

        Only the template produces control tokens: one that is spelled out in a message stays text.

        Args:
            messages: The conversation. A message may have other keys that the template reads, such as ``tool_calls``,
                or ``reasoning_content`` for the thought before an answer.
            tools: Functions the model may call, as JSON schemas, for templates that support tools.
            variables: What the template may read besides, such as ``enable_thinking``.
            continued: End with the text of the last message, for the model to continue it.
            thinks: Whether the model may think before its answer; None: as the template and ``variables`` have it.

        Raises:
            InvalidInputError: The model has no chat template, or the template refuses the messages.
        """
        from bitnet.core.text.prompt import chat_tokens

        several = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not several or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidInputError(
                f"the messages are {brief(messages)}; they must be a list of mappings.",
                hint='Write [{"role": "user", "content": "…"}].',
            )
        if self.chat_template is None:
            raise InvalidInputError(
                f"{self.config.name} has no chat template.", hint="Write the prompt yourself and call generate()."
            )
        return chat_tokens(
            self.chat_template,
            self.tokenizer,
            messages,
            tools=tools,
            variables=variables,
            continued=continued,
            thinks=thinks,
        )
