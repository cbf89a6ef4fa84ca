"""One loaded model, as endpoints see it."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from bitnet.core import Model, __version__
from bitnet.core.errors import InvalidInputError
from bitnet.core.gguf.split import model_bytes
from bitnet.core.text.chat import ChatTemplate
from bitnet.core.text.prompt import chat_parts
from bitnet.server.chat.prompt import PLAIN, ChatPrompt
from bitnet.server.chat.rendering import as_template_reads
from bitnet.server.chat.thinking import ThinkingChoice
from bitnet.server.chat.tools import Tools
from bitnet.server.models.backend import Backend, InProcess, ServedModel
from bitnet.server.models.presets import NO_PRESET, Preset
from bitnet.server.models.shared import Shared
from bitnet.server.models.templated import with_template
from bitnet.server.request.errors import RequestError

Loaded: TypeAlias = "Model | Backend[Any, Any]"
"""A model in this process, or what computes its answers elsewhere."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from.

    Attributes:
        names: Names by which clients may request it; answers carry the first.
        load: Makes the model. A model of a catalog may also be awaited, as in a Python without threads.
        reloads: Whether ``load`` makes a new model each time, which the server must close.
        preset: What requests get that say nothing else.
    """

    names: tuple[str, ...]
    path: Path
    load: Callable[[], Loaded | Awaitable[Loaded]]
    reloads: bool = True
    preset: Preset = NO_PRESET


class Owner(Protocol):
    """Who loads a model and unloads it."""

    def note_failure(self, service: Service, error: BaseException) -> None:
        """Take a model out of service whose device or file has failed, and try once to reload it."""
        ...

    def unload(self, service: Service) -> None:
        """Unload a model when its last request has ended; a request for it loads it again."""
        ...


class Service:
    """A loaded model that answers requests.

    Attributes:
        shared: What requests of all models share.
        owner: Who unloads it.
        users: Number of requests that use it now.
        reloads: Whether the server loaded it, and may unload it.
        proved: Whether it has answered a request since its device last failed.
        embedding: Held by the request whose vectors of texts are being computed.
        slots: By slot, the tokens of the last request that named it, without the last one of its answer.
        retired: Whether another model has replaced it; it is closed when its last request ends.
        preset: What requests get that say nothing else.
    """

    def __init__(self, loaded: Loaded, source: Source, shared: Shared, owner: Owner) -> None:
        self.backend: Backend[Any, Any] = InProcess(loaded) if isinstance(loaded, Model) else loaded
        self.names, self.shared, self.owner = source.names, shared, owner
        self.reloads = source.reloads
        self.preset = NO_PRESET
        self._under: Service | None = None
        self._templates: dict[str, ChatTemplate] = {}
        self.created = int(time.time())
        self.users = 0
        self.proved, self.retired = True, False
        self.embedding = asyncio.Lock()
        self.slots: dict[int, array[int]] = {}
        model = self.model
        self.size = model_bytes(model.path) + model.cache_bytes

    @property
    def model(self) -> ServedModel:
        model, template = self.backend.model, self.preset.template
        return model if template is None else with_template(model, self._templates[template])

    @property
    def loaded(self) -> Service:
        """The service as it was loaded, which :meth:`named` shows under another name."""
        return self if self._under is None else self._under

    def named(self, names: tuple[str, ...], preset: Preset) -> Service:
        """The same model under other names and with another preset. This is slow: call it outside the event loop.

        Raises:
            InvalidInputError: The preset's template is not valid.
        """
        if (names, preset) == (self.names, self.preset):
            return self
        if (source := preset.template) is not None and source not in self._templates:
            tokenizer = self.backend.model.tokenizer
            made = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
            self._templates[source] = made
        shown = copy(self)
        shown.names, shown.preset, shown._under = names, preset, self.loaded
        return shown

    @property
    def devices(self) -> str:
        """The devices of the model, each of which may compute an answer."""
        return ", ".join(dict.fromkeys(info.name for info in self.model.devices))

    @property
    def fingerprint(self) -> str:
        """Version and devices, as OpenAI's ``system_fingerprint``."""
        return f"bitnet-{__version__}-{self.devices.replace(', ', '+')}"

    def chat_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Tools | None = None, how: ChatPrompt = PLAIN
    ) -> list[int]:
        """The prompt of a conversation. This is slow: call it outside the event loop."""
        made, options = self._template_input(messages, tools, how)
        return self.model.chat_tokens(made, **options)

    def chat_text(self, messages: Sequence[dict[str, Any]], tools: Tools | None, how: ChatPrompt) -> str:
        """The text of a conversation's prompt. This is slow: call it outside the event loop.

        Raises:
            InvalidInputError: The model has no chat template, or it refuses the messages.
        """
        template = self.model.chat_template
        if template is None:
            raise InvalidInputError(f"{self.names[0]} has no chat template.")
        made, options = self._template_input(messages, tools, how)
        if not how.answered:
            return template.render(made, False, tools=options["tools"], variables=options["variables"])
        return "".join(chat_parts(template, self.model.tokenizer, made, **options)[0])

    def _template_input(
        self, messages: Sequence[dict[str, Any]], tools: Tools | None, how: ChatPrompt
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """A conversation as the template reads it, and what else makes the prompt."""
        if self.preset.system is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.preset.system}, *messages]
        made, given = as_template_reads(messages, tools, self.model.chat_template)
        self._check_length(_characters([[(message["content"], message.get("tool_calls")) for message in made], given]))
        thinking = how.thinking.or_default(self.shared.settings.reasoning_budget)
        variables = {**how.variables, **thinking.variables(self.model.chat_template)}
        return made, {
            "tools": given,
            "variables": variables,
            "continued": how.continued,
            "thinks": thinking.allowed,
        }

    async def try_template(self) -> None:
        """Find out, outside the event loop, how the chat template steers thoughts. It is tried once."""
        template = self.model.chat_template
        if template is not None and "thinking" not in vars(template):
            await self.shared.in_thread(lambda: template.thinking)

    def reasoning_budget(self, choice: ThinkingChoice) -> int | None:
        """Maximum tokens of the thought that a request allows; None: no limit."""
        return choice.or_default(self.shared.settings.reasoning_budget).tokens(self.model.chat_template)

    def text_tokens(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The tokens of a text. This is slow: call it outside the event loop."""
        self._check_length(len(text))
        return self.model.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def _check_length(self, characters: int) -> None:
        """Refuse a text that cannot fit the context, however it is tokenized, before spending time on it."""
        context = self.model.context
        if characters > context and characters > (most := self.longest_text):
            raise RequestError(
                400,
                f"The prompt has {characters:,} characters; at most {most:,} fit a context of {context} tokens.",
                code="context_length_exceeded",
            )

    @cached_property
    def longest_text(self) -> int:
        """Upper bound of the characters that fit the context: its tokens, times the bytes of the longest one."""
        tokenizer = self.model.tokenizer
        return self.model.context * max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))

    def close(self) -> None:
        """End what compiles forms, and free the model, unless its owner must do that."""
        self.backend.close()
        if self.reloads:
            self.model.close()


def _characters(value: Any) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
