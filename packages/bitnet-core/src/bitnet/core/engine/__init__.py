"""The engine: continuous batching over a paged KV cache, sampling, stop rules, scoring."""

from bitnet.core.engine.engine import Engine
from bitnet.core.engine.options import GenerationOptions
from bitnet.core.engine.results import Chunk, Completion, FinishReason, Timings, Update
from bitnet.core.engine.sampling import TokenLogprob

__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "FinishReason",
    "GenerationOptions",
    "Timings",
    "TokenLogprob",
    "Update",
]
