"""Launches that compute log-probabilities along with the sampled tokens, for backends with these kernels."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Arg, Buffer, KernelSpec, Launch
from bitnet.core.hal import MAX_COUNT, MAX_LOGPROBS, Sample

EACH = 8
"""Minimum logits of a work-item. In a long row it has more, as a work-group has a work-item for each part of a row."""
PART_WORDS = 2 + 2 * MAX_LOGPROBS
MAX_WORDS = 1 + 2 * MAX_LOGPROBS
"""Maximum words of a row's log-probabilities."""


def history(ctx: Context) -> Buffer:
    """The buffer for the log-probabilities of a run's passes: ``int32[passes, R, words]``."""
    return ctx.scratch("history of logprobs", MAX_COUNT * ctx.program.limits.max_rows * MAX_WORDS * 4)


def logprobs(ctx: Context, bucket: Bucket, group: int) -> list[Launch]:
    """The launches after the program's ``Sample``, with work-groups of ``group`` work-items, a power of two."""
    sample = ctx.program.ops[-1]
    assert isinstance(sample, Sample)
    most, vocabulary = ctx.shape(sample.logits)
    each = max(EACH, -(-vocabulary // group**2))
    count = -(-vocabulary // (each * group))
    n, logits = np.int32(vocabulary), ctx.tensors[sample.logits]
    parts = ctx.scratch("parts of logprobs", most * count * PART_WORDS * 4)

    def launch(entry: str, grid: tuple[int, int], args: tuple[Arg, ...]) -> Launch:
        spec = KernelSpec("logprobs", entry, (("WG", group), ("EACH", each)))
        return Launch(spec, (*grid, 1), (group, 1, 1), args, overlaps=True)

    return [
        launch("logprobs_parts", (count, bucket.rows), (ctx.step, logits, parts, n, np.int32(count))),
        launch(
            "logprobs",
            (bucket.rows, 1),
            (ctx.step, logits, parts, ctx.tensors[sample.out], history(ctx), n, np.int32(count)),
        ),
    ]
