"""One loaded model, as endpoints see it, and how a server is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.core import Model, __version__
from bitnet.core.errors import InvalidInputError
from bitnet.server.errors import RequestError
from bitnet.server.structured import Compiler
from bitnet.server.tools import Tools, told

if TYPE_CHECKING:
    from bitnet.server.host import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the server is run.

    Attributes:
        names: Names of the model that ``create_app`` is given, the one that answers carry first; empty: its file's.
        api_keys: Keys, one of which a request must have; empty: none is asked for.
        max_queue: Requests that may wait besides those that run.
        max_seqs: Requests that run at the same time on a device.
        max_body: Bytes of a body at most.
        timeout: Seconds that a request may take; None: any time.
        cors: Origins whose pages may call the server.
        page: Whether the page is served at ``/``.
        max_stored: Responses that are kept for ``previous_response_id``.
        max_memory: Bytes of model files and KV caches that are loaded at the same time; None: any number.

    Raises:
        InvalidInputError: A key is empty, which would let in whoever sends none.
    """

    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_queue: int = 64
    max_seqs: int = 8
    max_body: int = 16 << 20
    timeout: float | None = None
    cors: tuple[str, ...] = ()
    page: bool = True
    max_stored: int = 256
    max_memory: int | None = None

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.api_keys):
            raise InvalidInputError("an API key is empty.", hint="Leave it out to ask for none.")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from.

    Attributes:
        names: Names that clients may call it by, the one that answers carry first.
        reloads: Whether ``load`` makes a new model each time, which is the server's to close.
    """

    names: tuple[str, ...]
    path: Path
    load: Callable[[], Model]
    reloads: bool = True


class Service:
    """A loaded model that answers requests.

    Attributes:
        users: Requests that use it now.
        proved: Whether it has answered one since its device failed.
        retired: Whether another has taken its place; it is closed when its last request ends.
    """

    def __init__(self, model: Model, source: Source, host: Host) -> None:
        self.model, self.names, self.host = model, source.names, host
        self._owned = source.reloads
        self.created = int(time.time())
        self.compiler = Compiler(model.tokenizer)
        self.users = 0
        self.proved, self.retired = True, False
        self.size = (model.path.stat().st_size if model.path.exists() else 0) + model.cache_bytes

    @property
    def devices(self) -> str:
        """The devices of the model, each of which may compute an answer."""
        return ", ".join(info.name for info in self.model.devices)

    @property
    def fingerprint(self) -> str:
        """What computes answers, as OpenAI's ``system_fingerprint``."""
        return f"bitnet-{__version__}-{self.devices.replace(', ', '+')}"

    def chat_tokens(self, messages: Sequence[dict[str, Any]], tools: Tools | None = None) -> list[int]:
        """The prompt of a conversation. It takes its time: call it beside the event loop."""
        made, given = told(messages, tools, self.model.chat_template)
        self._check_length(sum(len(message["content"]) for message in made))
        return self.model.chat_tokens(made, tools=given)

    def text_tokens(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The tokens of a text. It takes its time: call it beside the event loop."""
        self._check_length(len(text))
        return self.model.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def _check_length(self, characters: int) -> None:
        """Refuse a text that cannot fit the context, however it is cut, before time is spent on cutting it."""
        context = self.model.context
        if characters > context and characters > context * self._longest_token:
            most = context * self._longest_token
            raise RequestError(
                400,
                f"The prompt has {characters:,} characters; {most:,} at most fit a context of {context} tokens.",
                code="context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token, which is as many characters at most."""
        tokenizer = self.model.tokenizer
        return max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))

    def close(self) -> None:
        """Free the model, unless that is its caller's to do."""
        if self._owned:
            self.model.close()
