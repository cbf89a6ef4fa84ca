"""Finds stop strings in streamed text, also across pieces. They are never shown, and no other text is held back."""

from __future__ import annotations

from collections.abc import Sequence

from bitnet.core.text.thinking import overlap


class StopMatcher:
    """Passes text on, except for the longest suffix that could still become a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; text after it is dropped."""

    def push(self, text: str) -> str:
        """Text that may be shown now. Of several stop strings, the one completed first wins, then the longest."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self._held = ""
            return text[:at]
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back; call it after the last piece."""
        held, self._held = self._held, ""
        return held
