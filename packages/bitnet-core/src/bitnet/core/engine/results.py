"""The engine's results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.options import GenerationOptions
from bitnet.core.engine.sampling import TokenLogprob
from bitnet.core.text.thinking import Thinking

FinishReason: TypeAlias = Literal["stop", "length", "context", "cancelled", "failed"]
"""Why a generation ended: stop token or string, ``max_tokens``, full context, cancelled by the caller, failed
constraint."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a generation's events, in seconds since the request was submitted.

    Attributes:
        prompt_tokens: Tokens in the prompt.
        cached_tokens: Prompt tokens that were in the KV cache already, from an earlier request.
        started: When the prompt's first step began, which is also the time spent in the queue.
        token_times: When each generated token arrived, including a stop token.
        total: When the generation ended.
        drafted_tokens: Tokens that prompt look-up drafted and the device verified.
        accepted_tokens: How many of the drafted tokens the model also chose.
        prediction_tokens: How many of the drafted tokens came from the option ``prediction``.
        accepted_prediction_tokens: How many of these the model also chose.
    """

    prompt_tokens: int
    cached_tokens: int
    started: float
    token_times: tuple[float, ...]
    total: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prediction_tokens: int = 0
    accepted_prediction_tokens: int = 0

    @property
    def first_token(self) -> float | None:
        """Seconds to the first token (TTFT), including the time in the queue; None if there was none."""
        return self.token_times[0] if self.token_times else None

    @property
    def prefill_seconds(self) -> float:
        """Seconds from the prompt's first step to the first token; 0 if there was none."""
        return self.token_times[0] - self.started if self.token_times else 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last one; 0 if there was none."""
        return self.token_times[-1] - self.token_times[0] if self.token_times else 0.0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens computed (not cached) per second up to the first token."""
        seconds = self.prefill_seconds
        return (self.prompt_tokens - self.cached_tokens) / seconds if seconds > 0 else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens per second after the first one."""
        seconds = self.decode_seconds
        return (len(self.token_times) - 1) / seconds if seconds > 0 else None

    @property
    def inter_token(self) -> tuple[float, ...]:
        """Seconds between each token and the one before (ITL); tokens of one multi-token step come together."""
        return tuple(b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation.

    Attributes:
        text: The generated text, without the stop string that ended it; in conversations, without the thought.
        tokens: The generated ids, without the stop token that ended it, but including the tokens of a stop string.
        finish_reason: ``stop``, ``length`` (``max_tokens``), ``context`` (full), ``cancelled`` or ``failed``.
        stop_reason: The token id or string that ended it, or how its constraint failed.
        logprobs: One for each of ``tokens``, where they were asked for.
        seed: Seed that draws the same tokens again.
        options: The options of the request.
        devices: Names of the devices that computed it: one, or more if a replica failed meanwhile.
        prompt_logprobs: One for each of ``prompt_tokens`` but the first, where they were asked for.
        reasoning: The thought before the answer, without its marks; empty if there is none.
        reasoning_tokens: Tokens of the thought, which are part of ``tokens``; those of its marks do not count.
        thinking: How a thought was marked; None: none was looked for.
        before_answer: Number of ``tokens`` before the answer's first one: those of the thought and its marks.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_tokens: tuple[int, ...]
    seed: int
    timings: Timings
    options: GenerationOptions
    devices: tuple[str, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    thinking: Thinking | None = None
    before_answer: int = 0


class PromptTimings(NamedTuple):
    """How long a prompt took.

    Attributes:
        tokens: Tokens in the prompt.
        cached_tokens: Those that were in the KV cache already.
        waited: Seconds from submission to the first step.
        seconds: Seconds from the first step to the first token.
    """

    tokens: int
    cached_tokens: int
    waited: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed generation: whole characters, never part of a stop string.

    Attributes:
        text: New text of the answer; empty if the tokens complete no character or could begin a stop string or mark.
        tokens: New token ids; their text may come with a later chunk.
        logprobs: One for each of ``tokens``, where they were asked for.
        finish_reason: Set on the last chunk.
        prompt_logprobs: Set on the first chunk, where they were asked for.
        reasoning: New text of the thought, which comes before all text of the answer.
        prompt: Set on the first chunk, if a step was run for it.
        before_answer: Number of the generation's tokens before the answer's first one; None: that has not come.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    prompt: PromptTimings | None = None
    before_answer: int | None = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of one sequence: a chunk of a generation, and the result together with the last chunk.

    ``result`` is the :class:`Completion` of a generation, or the log-probabilities ``float64[n]`` of a scoring.
    """

    sequence: int
    chunk: Chunk | None = None
    result: Completion | npt.NDArray[np.float64] | None = None
