"""What the host's part of a step waits for: a generator yields it, and a thread or a task waits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import Logprobs


class Result(NamedTuple):
    """A step's results: the sampled tokens, and logits and log-probabilities if they were requested.

    Attributes:
        tokens: ``int32[repeat, rows]``.
        logits: ``float32[rows, vocab]``.
    """

    tokens: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32] | None
    logprobs: Logprobs | None


class Wait(NamedTuple):
    """What the host's part of a step waits for.

    Attributes:
        take: Waits for the device and returns the result.
        meanwhile: Work for the host while the device computes; None: there is none.
    """

    take: Callable[[], Result]
    meanwhile: Callable[[], None] | None


def next_wait(steps: Generator[Wait, Result, None], result: Result | None) -> Wait | None:
    """Send in the result of the last wait; None: the step is over."""
    try:
        return next(steps) if result is None else steps.send(result)
    except StopIteration:
        return None
