"""Numbers of a stream so far, for requests that want them with each event."""

from __future__ import annotations

import time
from typing import Any

from bitnet.core import Chunk
from bitnet.core.engine.results import PromptTimings
from bitnet.server.api.openai import stream_options
from bitnet.server.request.fields import Fields


class Progress:
    """Usage with vLLM's ``continuous_usage_stats``, and timings with llama.cpp's ``timings_per_token``."""

    def __init__(self, fields: Fields) -> None:
        stream = stream_options(fields)
        continuous = stream is not None and stream.flag("continuous_usage_stats")
        self._usage = continuous and stream is not None and stream.flag("include_usage")
        self._timings = fields.flag("timings_per_token")
        self._prompt: PromptTimings | None = None
        self._prompt_tokens = self._tokens = 0
        self._first = 0.0

    def begin(self, prompt_tokens: int) -> None:
        """Note the number of tokens of all prompts."""
        self._prompt_tokens = prompt_tokens

    @property
    def wanted(self) -> bool:
        """Whether events are to carry anything."""
        return self._usage or self._timings

    @property
    def usage(self) -> dict[str, Any]:
        """The usage so far, if events are to carry it."""
        if not self._usage:
            return {}
        total = self._prompt_tokens + self._tokens
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens, "total_tokens": total}
        return {"usage": counts}

    def add(self, chunk: Chunk) -> dict[str, Any]:
        """Count a chunk, and return what its event is to carry besides."""
        if chunk.prompt is not None and self._prompt is None:
            self._prompt, self._first = chunk.prompt, time.monotonic()
        self._tokens += len(chunk.tokens)
        if not self._timings or self._prompt is None:
            return self.usage
        return {**self.usage, "timings": self._so_far(self._prompt)}

    def _so_far(self, prompt: PromptTimings) -> dict[str, Any]:
        seconds, computed = time.monotonic() - self._first, prompt.tokens - prompt.cached_tokens
        later = self._tokens - 1  # the first token is the prompt's
        return {
            "cache_n": prompt.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": prompt.seconds * 1e3,
            "prompt_per_token_ms": prompt.seconds * 1e3 / computed if computed else 0.0,
            "prompt_per_second": computed / prompt.seconds if prompt.seconds else 0.0,
            "predicted_n": self._tokens,
            "predicted_ms": seconds * 1e3,
            "predicted_per_token_ms": seconds * 1e3 / later if later > 0 else 0.0,
            "predicted_per_second": later / seconds if later > 0 and seconds else 0.0,
        }
