"""A pool of helper processes, shared by all threads."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from bitnet.core.errors import BitNetError, InvalidInputError, brief
from bitnet.core.support.helper import NO_PROCESSES
from bitnet.core.text.sandbox.renderer import LocalRenderer, Renderer, TemplateError

HELPERS = 4
"""Maximum helper processes: so many templates can run up to their limits before others wait."""
PATIENCE = 0.05
"""Seconds to wait for a free helper before another is started."""


class Pool:
    """Renders templates in helper processes, which are started on demand and kept.

    A helper that gets free goes to whoever has waited longest: a thread that takes it again at once would leave the
    others waiting until they start helpers, each of which takes longer to start than to render a hundred prompts.

    Where the platform has no processes, this one renders them.
    """

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Start with an empty pool: in a fork, the helpers belong to the parent."""
        self._lock = threading.Lock()
        self._idle: list[Renderer | LocalRenderer] = []
        self._all: weakref.WeakSet[Renderer | LocalRenderer] = weakref.WeakSet()
        self._turns: deque[SimpleQueue[Renderer | LocalRenderer]] = deque()
        self._starting = False

    def warm(self, count: int = 1) -> None:
        """Start helpers in the background, so that there are ``count``, for templates that will be rendered soon."""
        if NO_PROCESSES:  # and no threads
            return
        threading.Thread(target=self._warm, args=(count,), name="bitnet-warm", daemon=True).start()

    def _warm(self, count: int) -> None:
        with suppress(BitNetError, TemplateError):  # the caller of render gets the error
            self.check("")
        for _ in range(count - 1):
            if (helper := self._another(count)) is not None:
                self._start(helper)

    def check(self, source: str) -> None:
        """Check that a source is a valid template.

        Raises:
            TemplateError: It is not, or takes too long to parse.
            BitNetError: No helper starts.
        """
        self.render(source, [])

    def render(self, source: str, several: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """The texts that a template makes from several sets of values, within the limits of one rendering.

        Returns:
            One for each; None for a set after the first for which the template fails.

        Raises:
            TemplateError: The template fails or reaches a limit.
            InvalidInputError: JSON cannot represent the values.
            BitNetError: No helper starts.
        """
        request = as_json([source, several])
        helper = self._take()
        try:
            return helper.ask(request.encode("utf-8", "surrogatepass"))
        finally:
            self._give(helper)

    def _take(self) -> Renderer | LocalRenderer:
        """A helper that nobody else uses; the caller starts the first one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if not self._all:
                return self._new()
            turn = SimpleQueue[Renderer | LocalRenderer]()
            self._turns.append(turn)
        try:
            while True:
                with suppress(Empty):
                    return turn.get(timeout=PATIENCE)
                self._start_another()
        except BaseException:  # an interrupt
            with self._lock:
                if turn in self._turns:
                    self._turns.remove(turn)
            with suppress(Empty):
                self._give(turn.get_nowait())
            raise

    def _give(self, helper: Renderer | LocalRenderer) -> None:
        """Let somebody else use a helper."""
        with self._lock:
            if self._turns:
                self._turns.popleft().put(helper)
            else:
                self._idle.append(helper)

    def _new(self) -> Renderer | LocalRenderer:
        """Another helper, which its first request starts. The caller holds the lock."""
        helper = LocalRenderer() if NO_PROCESSES else Renderer()
        self._all.add(helper)
        return helper

    def _start_another(self) -> None:
        """Start a helper in the background, unless there are enough: one that gets free meanwhile comes sooner."""
        if (helper := self._another(HELPERS)) is not None:
            threading.Thread(target=self._start, args=(helper,), name="bitnet-template", daemon=True).start()

    def _another(self, most: int) -> Renderer | LocalRenderer | None:
        """A helper that the caller starts; None: one is being started, or there are ``most``."""
        with self._lock:
            if self._starting or len(self._all) >= most:
                return None
            self._starting = True
            return self._new()

    def _start(self, helper: Renderer | LocalRenderer) -> None:
        try:
            helper.ask(as_json(["", []]).encode())
        except (BitNetError, TemplateError):  # the others go on, and another is tried soon
            with self._lock:
                self._all.discard(helper)
        else:
            self._give(helper)
        finally:
            with self._lock:
                self._starting = False


def as_json(value: Any) -> str:
    """A value as JSON.

    Raises:
        InvalidInputError: JSON cannot represent it.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"JSON cannot represent a value passed to a chat template: {error}.") from error


def _plain(value: Any) -> Any:
    """Convert other mappings and sequences to JSON's types."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return list(value)
    raise TypeError(f"{brief(value)} is a {type(value).__name__}")
