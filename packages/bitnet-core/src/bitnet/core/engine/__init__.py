"""The engine: continuous batching over a paged KV cache, sampling, stop rules, scoring."""

from bitnet.core.engine.constraint import Constraint
from bitnet.core.engine.engine import Engine
from bitnet.core.engine.options import GenerationOptions
from bitnet.core.engine.request import Request
from bitnet.core.engine.results import Chunk, Completion, FinishReason, Timings, Update
from bitnet.core.engine.sampling import TokenLogprob
from bitnet.core.engine.worker import Load

__all__ = [
    "Chunk",
    "Completion",
    "Constraint",
    "Engine",
    "FinishReason",
    "GenerationOptions",
    "Load",
    "Request",
    "Timings",
    "TokenLogprob",
    "Update",
]
