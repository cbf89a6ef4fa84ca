"""Some helper processes, shared by all threads."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from bitnet.core.errors import BitNetError, InvalidInputError, brief
from bitnet.core.text.sandbox.process import Helper, TemplateError

HELPERS = 4
"""Maximum helper processes: this many templates can run to their bounds before others wait."""
PATIENCE = 0.05
"""Seconds to wait for a helper before another one is started, which takes as long."""


class Pool:
    """Renders templates in helper processes, which are started when they are needed and kept."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Begin anew: in a fork of the process, the helpers are the parent's."""
        self._changed = threading.Condition()
        self._idle: list[Helper] = []
        self._all: weakref.WeakSet[Helper] = weakref.WeakSet()

    def warm(self) -> None:
        """Start a helper in the background, where a template is going to be rendered soon."""
        threading.Thread(target=self._warm, name="bitnet-warm", daemon=True).start()

    def _warm(self) -> None:
        with suppress(BitNetError, TemplateError):  # the caller of render gets the error
            self.check("")

    def check(self, source: str) -> None:
        """Whether a source is a template.

        Raises:
            TemplateError: It is none, or takes too long to parse.
            BitNetError: No helper starts.
        """
        self.render(source, [])

    def render(self, source: str, several: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """The texts a template makes of several sets of values, within one bound.

        Returns:
            One for each; None where the template fails though it does not for the first.

        Raises:
            TemplateError: The template fails or reaches a bound.
            InvalidInputError: JSON cannot hold the values.
            BitNetError: No helper starts.
        """
        request = as_json([source, several])
        helper = self._take()
        try:
            return helper.ask(request.encode("utf-8", "surrogatepass"))
        finally:
            with self._changed:
                self._idle.append(helper)
                self._changed.notify()

    def _take(self) -> Helper:
        begin = time.monotonic()
        with self._changed:
            while not self._idle:
                patient = self._all and time.monotonic() - begin < PATIENCE
                if not patient and len(self._all) < HELPERS:
                    helper = Helper()
                    self._all.add(helper)
                    return helper
                self._changed.wait(PATIENCE)
            return self._idle.pop()


def as_json(value: Any) -> str:
    """JSON of a value.

    Raises:
        InvalidInputError: JSON cannot hold it.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"a chat template is given what JSON cannot hold: {error}.") from error


def _plain(value: Any) -> Any:
    """Mappings and sequences of other kinds as those that JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return list(value)
    raise TypeError(f"{brief(value)} is a {type(value).__name__}")
