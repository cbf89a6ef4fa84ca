"""A program on a GPU: uploads the step, replays the recording of its bucket, and downloads the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import UnsupportedProgramError
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Arriving, Buffer, Driver, Fetching
from bitnet.core.gpu.lowering import Lowering
from bitnet.core.gpu.ops import advance
from bitnet.core.gpu.ops.logprobs import history
from bitnet.core.gpu.ops.variants import key
from bitnet.core.gpu.plan import lower
from bitnet.core.hal import (
    Adjustment,
    Begun,
    CheckedExecutable,
    DeviceInfo,
    ExecutableStats,
    HeaderWord,
    Logprobs,
    Passes,
    Program,
    Step,
    StepLayout,
)
from bitnet.core.hal.program import NUMPY_DTYPES

MIN_CONTEXT_BUCKET = 512
_NONE_DONE, _DONE_AT = np.zeros(1, np.int32), HeaderWord.DONE * 4
# Looked up once: steps are run thousands of times a second
_LOGITS, _ADJUST, _LOGPROBS = HeaderWord.LOGITS.value, HeaderWord.ADJUST.value, HeaderWord.LOGPROBS.value


def coarse_size(n: int, most: int) -> int:
    """The power of eight that holds ``n``, capped at ``most``."""
    return min(1 << (max(n - 1, 0).bit_length() + 2) // 3 * 3, most)


def bucket_size(n: int, most: int) -> int:
    """The power of two that holds ``n``, capped at ``most``."""
    return min(1 << max(n - 1, 0).bit_length(), most)


class GpuExecutable(CheckedExecutable):
    """A program on a GPU, over a :class:`Driver` and a backend's lowering.

    Args:
        lowering: The backend's ``ops.py``.
        on_close: Called once, with this executable, after it has freed its memory.
        keep: As for :meth:`~bitnet.core.hal.Device.compile`.
    """

    def __init__(
        self,
        driver: Driver,
        info: DeviceInfo,
        program: Program,
        lowering: Lowering,
        on_close: Callable[[GpuExecutable], None],
        *,
        keep: bool = False,
    ) -> None:
        super().__init__(info, program)
        self._driver, self._lowering, self._on_close = driver, lowering, on_close
        self._fetch = driver.fetch if isinstance(driver, Fetching) else self._fetch_later
        self._recordings: dict[Bucket, tuple[object, tuple[str, ...], int]] = {}
        self._stand_ins: set[Bucket] = set()
        self._missed: dict[Bucket, None] = {}  # buckets that were needed but ran as a larger one
        self._kernels: dict[str, None] = {}
        self._dispatches = 0
        for op in program.ops:
            if not lowering.supports(program, op):
                what = f"this backend has no kernels for {key(program, op).__name__}."
                raise UnsupportedProgramError(what, device=info.name, hint="Use --device cpu, or another backend.")
        self._layout = StepLayout(program.limits)
        self.context = Context(driver, program, self._layout, keep)
        try:
            # The bucket of a single decode step uses every weight. Record it now, so that compile() loads the weights
            # and reports anything that does not fit or compile.
            rows = min(1, program.limits.max_rows)
            self._leaves_out = lowering.leaves_out(self.context)
            one = Bucket(1, rows, self._context_bucket(1), logits=not (rows and self._leaves_out), apart=True)
            self._recording(self._largest() if program.deterministic else one)
        except BaseException:
            self.context.close()
            raise

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(self._kernels)

    def on_stats(self) -> ExecutableStats:
        return ExecutableStats(self.context.weight_bytes, self._dispatches)

    def on_begin(self, step: Step, count: int, done: int) -> Begun:
        """Submit the passes, and the copies of their results if the driver can make them while later work runs."""
        recording, names, self._dispatches = self._serving(self._bucket(step, done + count))
        if done:
            self._driver.upload(self.context.step, _NONE_DONE, _DONE_AT)
            if self.program.states:  # which the passes before have moved to where each sequence writes them
                at = self._layout.offsets
                written = step.data[at["state_to"] :][: step.seqs]
                self._driver.upload(self.context.step, written, at["state_from"] * 4)
        else:
            self._driver.upload(self.context.step, step.data)
        for _ in range(count):
            self._driver.submit(recording)
        self._kernels.update(dict.fromkeys(names))
        passes = Passes.room(step, count, samples=self.check_step.samples)
        waits = [self._fetch(self.context.history, passes.tokens)] if passes.tokens.size else []
        if passes.logprobs is not None and passes.logprobs.size:
            waits.append(self._fetch(history(self.context), passes.logprobs))

        def wait() -> Passes:
            for copied in waits:
                copied()
            return passes

        return wait

    async def arrival(self, progress: Callable[[int, int], None] | None = None) -> None:
        if isinstance(self._driver, Arriving):
            await self._driver.arrival(progress)

    def _fetch_later(self, buffer: Buffer, array: npt.NDArray[Any]) -> Callable[[], None]:
        """As :meth:`Fetching.fetch`, for drivers that cannot copy beside later work: it downloads when waited for."""
        return partial(self._driver.download, buffer, array)

    def on_prepare(self, step: Step, count: int, stands_in: bool) -> None:
        """Record a missed bucket first, if any, then the step's bucket."""
        bucket = self._bucket(step, count)
        for wanted in (*itertools.islice(self._missed, 1), bucket):
            self._recording(wanted)
        if stands_in:
            self._stand_ins.add(bucket)

    def on_fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        for buffer, array in zip(self.context.slots(), (marks, biases), strict=True):
            self._driver.upload(buffer, np.ascontiguousarray(array), slot * array.nbytes)

    def on_write(self, name: str, array: npt.NDArray[Any]) -> None:
        if array.size:
            self._driver.upload(self.context.tensors[name], np.ascontiguousarray(array))

    def on_read(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        out = np.empty(shape, NUMPY_DTYPES[self.program.tensors[name].dtype])
        if out.size:
            self._driver.download(self.context.tensors[name], out)
        return out

    def on_close(self) -> None:
        self._recordings.clear()
        self.context.close()
        self._on_close(self)

    def _bucket(self, step: Step, count: int) -> Bucket:
        """The bucket of the recording that runs a step."""
        if self.program.deterministic:
            return self._largest(adjusted=bool(step.data[_ADJUST]), logprobs=bool(step.data[_LOGPROBS]))
        lengths = step.data[self._layout.offsets["seq_len"] :][: step.seqs]
        longest = int(lengths.max(initial=1)) + count - 1
        limits = self.program.limits
        # In steps with prompt chunks, rows take little of the time: coarse sizes mean fewer buckets to prepare.
        rows = bucket_size if step.tokens == step.seqs else coarse_size
        bucket = Bucket(
            bucket_size(step.tokens, limits.max_tokens),
            rows(step.rows, limits.max_rows) if step.rows else 0,
            self._context_bucket(longest),
            apart=self._apart(step, count),
            adjusted=bool(step.data[_ADJUST]),
            logprobs=bool(step.data[_LOGPROBS]),
        )
        if not (step.rows and self._leaves_out) or step.data[_LOGITS] or step.data[_LOGPROBS]:
            return bucket
        unread = replace(bucket, logits=False, filtered=self._filtered(step))
        return bucket if unread.filtered and not self._lowering.filters(self.context, unread) else unread

    def _largest(self, *, adjusted: bool = False, logprobs: bool = False) -> Bucket:
        """The only bucket of a deterministic program (decision 0029): every step uses the same kernels and splits."""
        limits, kv = self.program.limits, self.program.kv
        context = limits.max_blocks * kv.block_size if kv else 0
        return Bucket(limits.max_tokens, limits.max_rows, context, adjusted=adjusted, logprobs=logprobs)

    def _serving(self, bucket: Bucket) -> tuple[object, tuple[str, ...], int]:
        """A bucket's recording or, until it exists, that of the smallest bucket that can stand in for it."""
        if bucket not in self._recordings:
            able = [larger for larger in self._stand_ins if larger.serves(bucket)]
            if able:
                self._missed[bucket] = None
                return self._recordings[min(able, key=lambda b: (b.tokens, b.rows, b.context))]
        return self._recording(bucket)

    def _recording(self, bucket: Bucket) -> tuple[object, tuple[str, ...], int]:
        if bucket not in self._recordings:
            table, last = self._lowering.table, self.program.ops[-1]
            launches = lower(self.context, bucket, table)
            if bucket.rows and self.check_step.samples:
                for kind, wanted in ((Logprobs, bucket.logprobs), (Adjustment, bucket.adjusted)):
                    launches += (wanted and table[kind](self.context, last, bucket)) or []
                launches.append(advance(self.context))
            names = tuple(dict.fromkeys(f"{launch.kernel.entry}_{self.info.backend}" for launch in launches))
            self._recordings[bucket] = (self._driver.record(launches), names, len(launches))
            self._missed.pop(bucket, None)
        return self._recordings[bucket]

    def _filtered(self, step: Step) -> bool:
        """Whether any row is sampled with a filter (top-k, top-p or min-p)."""
        data, at, rows = step.data, self._layout.offsets, step.rows
        top_k, top_p, min_p = (data[at[name] :][:rows] for name in ("top_k", "top_p", "min_p"))
        unfiltered = (top_k == 0) & (top_p.view(np.float32) == 1) & (min_p == 0)
        greedy = data[at["temperature"] :][:rows] == 0
        return not (greedy | unfiltered).all()

    def _apart(self, step: Step, count: int) -> bool:
        """Whether each token is a sequence of its own, whose new cache entries no other sequence reads."""
        kv = self.program.kv
        if step.tokens == 1 or kv is None or step.tokens != step.seqs:
            return step.tokens == 1
        data, at, width = step.data, self._layout.offsets, self.program.limits.max_blocks
        limits = self.program.limits
        shape = limits.tables, limits.max_seqs, width
        tables = data[at["block_table"] :][: limits.tables * limits.max_seqs * width].reshape(shape)[:, : step.seqs]
        lengths = data[at["seq_len"] :][: step.seqs, None]
        place = np.arange(width)
        used = place * kv.block_size < lengths + (count - 1)
        written = used & (place >= (lengths - 1) // kv.block_size)
        return all((np.bincount(table[used])[table[written]] == 1).all() for table in tables)

    def _context_bucket(self, longest: int) -> int:
        kv = self.program.kv
        if kv is None:
            return 0
        return bucket_size(max(longest, MIN_CONTEXT_BUCKET), self.program.limits.max_blocks * kv.block_size)
