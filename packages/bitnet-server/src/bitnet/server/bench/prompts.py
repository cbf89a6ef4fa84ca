"""What a load test sends, and when: prompts from a file or of random tokens, and arrival times."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitnet.core.cli.console import read_text
from bitnet.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or token ids, and the number of tokens to generate."""

    content: str | list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Prompts of random tokens.

    Attributes:
        spread: Fraction by which each length may be smaller or larger.
        prefix: Length of a prefix shared by all prompts, in addition to ``input``.
    """

    input: int
    output: int
    spread: float = 0.0
    prefix: int = 0

    def draw(self, count: int, vocabulary: int, rng: np.random.Generator) -> list[tuple[list[int], int]]:
        """Token ids of each prompt, and the number of tokens to generate."""
        inputs, outputs = (self._lengths(count, length, rng) for length in (self.input, self.output))
        prefix = rng.integers(0, vocabulary, self.prefix).tolist()
        return [(prefix + rng.integers(0, vocabulary, n).tolist(), out) for n, out in zip(inputs, outputs, strict=True)]

    def _lengths(self, count: int, length: int, rng: np.random.Generator) -> list[int]:
        low, high = math.floor(length * (1 - self.spread)), math.ceil(length * (1 + self.spread))
        return [int(n) for n in rng.integers(max(1, low), high + 1, count)]


def read_prompts(path: Path, output: int) -> list[Prompt]:
    """Read prompts from a file of JSON lines: ``{"prompt": "…", "output_tokens": 100}``; ``output`` is the default for
    the latter.

    Raises:
        InvalidInputError: The file cannot be read, or a line is something else.
    """
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            try:
                entry = json.loads(line)
                found.append(_checked(entry["prompt"], entry.get("output_tokens", output)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise InvalidInputError(
                    f"line {number} of {path} is not a prompt.",
                    hint='Write a line as {"prompt": "…", "output_tokens": 100}.',
                ) from None
    if not found:
        raise InvalidInputError(f"{path} contains no prompts.")
    return found


def _checked(text: object, output: object) -> Prompt:
    if not (isinstance(text, str) and text and isinstance(output, int) and output > 0):
        raise ValueError
    return Prompt(text, output)


def arrivals(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which each request is sent.

    The gaps follow a gamma distribution of shape ``burstiness``: 1 is a Poisson process, lower values are burstier,
    higher ones steadier. They are scaled so that the last request is sent after ``count / rate`` seconds, as in vLLM.

    Args:
        rate: Requests per second; infinite: all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), count))
    return [float(t) for t in times * (count / rate / times[-1])]
