"""A program on a GPU: uploads the step, replays the recording of its bucket, and downloads the tokens."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import DeviceError, InvalidInputError, UnsupportedProgramError
from bitnet.core.gpu.adjusting import count_chosen
from bitnet.core.gpu.context import MAX_COUNT, Bucket, Context
from bitnet.core.gpu.driver import Driver, Fetching
from bitnet.core.gpu.logprobs import history, logprobs
from bitnet.core.gpu.ops import advance
from bitnet.core.gpu.plan import Lowering, lower
from bitnet.core.gpu.scaled import in_groups, norms_heads
from bitnet.core.gpu.tables import check_tables
from bitnet.core.hal import (
    AddBias,
    CenterRows,
    DeviceInfo,
    ExecutableStats,
    HeaderWord,
    Logprobs,
    Program,
    Step,
    StepLayout,
)
from bitnet.core.hal.check import SlotCheck, StepCheck, TensorCheck, check_features, check_program
from bitnet.core.hal.program import NUMPY_DTYPES

MIN_CONTEXT_BUCKET = 512
_NONE_DONE, _DONE_AT = np.zeros(1, np.int32), HeaderWord.DONE * 4
# Looked up once: steps are run thousands of times a second
_LOGITS, _ADJUST, _LOGPROBS = HeaderWord.LOGITS.value, HeaderWord.ADJUST.value, HeaderWord.LOGPROBS.value


def coarse_size(n: int, most: int) -> int:
    """The power of eight that holds ``n``, capped at ``most``."""
    return min(1 << (max(n - 1, 0).bit_length() + 2) // 3 * 3, most)


class _Flight(NamedTuple):
    """Submitted passes: the arrays for their tokens and log-probabilities, and the functions that wait for these."""

    tokens: npt.NDArray[np.int32]
    told: npt.NDArray[np.int32] | None
    waits: tuple[Callable[[], None], ...]


def _refuse(program: Program, lowering: Lowering, device: str) -> None:
    """Refuse programs with operations for which the backend has no kernels.

    Raises:
        UnsupportedProgramError: The program has such an operation.
    """
    lacking = {
        "weights with a scale for each group of columns": lambda op: not lowering.scaled and in_groups(program, op),
        "heads of q and k that are normalised": lambda op: not lowering.scaled and norms_heads(op),
        "biases": lambda op: not lowering.rowwise and isinstance(op, AddBias),
        "LayerNorms": lambda op: not lowering.rowwise and isinstance(op, CenterRows),
    }
    for what, lacks in lacking.items():
        if any(map(lacks, program.ops)):
            hint = "Use --device cpu, or another backend."
            raise UnsupportedProgramError(f"{what} do not run on this backend yet.", device=device, hint=hint)


def bucket_size(n: int, most: int) -> int:
    """The power of two that holds ``n``, capped at ``most``."""
    return min(1 << max(n - 1, 0).bit_length(), most)


class GpuExecutable:
    """Implements :class:`~bitnet.core.hal.Executable` over a :class:`Driver` and a backend's lowering.

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
        self._driver, self._info, self._program = driver, info, program
        self._lowering, self._on_close = lowering, on_close
        self._lock = threading.RLock()
        self._recordings: dict[Bucket, tuple[object, tuple[str, ...], int]] = {}
        self._stand_ins: set[Bucket] = set()
        self._missed: dict[Bucket, None] = {}  # buckets that were needed but ran as a larger one
        self._kernels: dict[str, None] = {}
        self._closed = False
        self._dispatches = 0
        self._told: npt.NDArray[np.int32] | None = None
        self._flying: deque[_Flight] = deque()
        self._started: tuple[Step, int] | None = None  # the step, and the number of passes begun
        check_program(program)
        check_features(program, info)
        _refuse(program, lowering, info.name)
        check_tables(program, info)
        self._check_step = StepCheck(program)
        self._tensors, self._check_slot = TensorCheck(program), SlotCheck(program)
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

    def stats(self) -> ExecutableStats:
        with self._lock:
            self._check_open()
            return ExecutableStats(self.context.weight_bytes, self._dispatches)

    def start(self, step: Step, count: int = 1) -> None:
        """Implements :class:`~bitnet.core.hal.GoesOn`, like the next two methods, for drivers that are
        :class:`Fetching`."""
        with self._lock:
            self._check_open()
            self._check_idle()
            self._check(step, count)
            recording, names, self._dispatches = self._serving(self._bucket(step, count))
            self._driver.upload(self.context.step, step.data)
            self._submit(step, recording, names, count)
            self._started = (step, count)

    def go_on(self, count: int) -> None:
        with self._lock:
            self._check_open()
            if self._started is None:
                raise InvalidInputError("no step was started; call start before go_on.")
            step, done = self._started
            self._check(step, done + count)
            recording, names, self._dispatches = self._serving(self._bucket(step, done + count))
            self._driver.upload(self.context.step, _NONE_DONE, _DONE_AT)
            self._submit(step, recording, names, count)
            self._started = (step, done + count)

    def _submit(self, step: Step, recording: object, names: tuple[str, ...], count: int) -> None:
        """Submit ``count`` passes, and the copies of their results."""
        if not 1 <= count <= MAX_COUNT:
            raise InvalidInputError(f"count is {count}; at most {MAX_COUNT} passes can be started at a time.")
        assert isinstance(self._driver, Fetching), "the device lists the feature"
        for _ in range(count):
            self._driver.submit(recording)
        self._kernels.update(dict.fromkeys(names))
        rows, words = step.rows if self._check_step.samples else 0, 2 * int(step.data[_LOGPROBS]) - 1
        out, told = np.empty((count, rows), np.int32), None
        waits = [self._driver.fetch(self.context.history, out)] if rows else []
        if words > 0 and rows:
            told = np.empty((count, rows, words), np.int32)
            waits.append(self._driver.fetch(history(self.context), told))
        self._flying.append(_Flight(out, told, tuple(waits)))

    def collect(self) -> npt.NDArray[np.int32]:
        with self._lock:
            self._check_open()
            if not self._flying:
                raise InvalidInputError("there are no tokens to collect; call start or go_on before collect.")
            flight = self._flying.popleft()
            for wait in flight.waits:
                wait()
            self._told = flight.told
            if not self._flying:
                self._started = None
            return flight.tokens

    def run(self, step: Step, count: int = 1) -> npt.NDArray[np.int32]:
        with self._lock:
            self._check_open()
            self._check_idle()
            self._check(step, count)
            rows = step.rows if self._check_step.samples else 0
            out = np.empty((count, rows), np.int32)
            words = 2 * int(step.data[_LOGPROBS]) - 1
            told = np.empty((count, rows, words), np.int32) if words > 0 and rows else None
            recording, names, self._dispatches = self._serving(self._bucket(step, count))
            self._driver.upload(self.context.step, step.data)
            for start in range(0, count, MAX_COUNT):
                now = min(MAX_COUNT, count - start)
                if start:
                    self._driver.upload(self.context.step, _NONE_DONE, _DONE_AT)
                for _ in range(now):
                    self._driver.submit(recording)
                if rows:
                    self._driver.download(self.context.history, out[start : start + now])
                if told is not None:
                    self._driver.download(history(self.context), told[start : start + now])
            self._kernels.update(dict.fromkeys(names))
            self._told = told
            return out

    def prepare(self, step: Step, count: int = 1, *, stands_in: bool = False) -> None:
        """Implements :class:`~bitnet.core.hal.Preparing`: records a missed bucket first, if any, then the step's
        bucket."""
        with self._lock:
            self._check_open()
            self._check(step, count)
            bucket = self._bucket(step, count)
            for wanted in (*itertools.islice(self._missed, 1), bucket):
                self._recording(wanted)
            if stands_in:
                self._stand_ins.add(bucket)

    def logprobs(self) -> Logprobs:
        """Implements :class:`~bitnet.core.hal.TellsLogprobs`."""
        with self._lock:
            self._check_open()
            if self._told is None:
                raise InvalidInputError("the last step did not request log-probabilities.")
            return Logprobs.of_words(self._told)

    def fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        """Implements :class:`~bitnet.core.hal.Adjusting`."""
        with self._lock:
            self._check_open()
            self._check_has_kernels()
            self._check_slot(slot, marks, biases)
            for buffer, array in zip(self.context.slots(), (marks, biases), strict=True):
                self._driver.upload(buffer, np.ascontiguousarray(array), slot * array.nbytes)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        with self._lock:
            self._check_open()
            self._tensors.write(name, array)
            if array.size:
                self._driver.upload(self.context.tensors[name], np.ascontiguousarray(array))

    def read(self, name: str, rows: int | None = None) -> npt.NDArray[Any]:
        with self._lock:
            self._check_open()
            shape = self._tensors.read(name, rows)
            out = np.empty(shape, NUMPY_DTYPES[self._program.tensors[name].dtype])
            if out.size:
                self._driver.download(self.context.tensors[name], out)
            return out

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._recordings.clear()
                self.context.close()
                self._on_close(self)

    def _bucket(self, step: Step, count: int) -> Bucket:
        """The bucket of the recording that runs a step."""
        if self._program.deterministic:
            return self._largest(adjusted=bool(step.data[_ADJUST]), logprobs=bool(step.data[_LOGPROBS]))
        lengths = step.data[self._layout.offsets["seq_len"] :][: step.seqs]
        longest = int(lengths.max(initial=1)) + count - 1
        limits = self._program.limits
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
        limits, kv = self._program.limits, self._program.kv
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
            launches = lower(self.context, bucket, self._lowering.table, fuses_scaled=self._lowering.fuses_scaled)
            if bucket.rows and self._check_step.samples:
                if bucket.logprobs and not self._lowering.tells(self.context, bucket):
                    launches += logprobs(self.context, bucket, self._lowering.group)
                if bucket.adjusted:
                    launches.append(count_chosen(self.context))
                launches.append(advance(self.context))
            names = tuple(dict.fromkeys(f"{launch.kernel.entry}_{self._info.backend}" for launch in launches))
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
        kv = self._program.kv
        if step.tokens == 1 or kv is None or step.tokens != step.seqs:
            return step.tokens == 1
        data, at, width = step.data, self._layout.offsets, self._program.limits.max_blocks
        table = data[at["block_table"] :][: step.seqs * width].reshape(step.seqs, width)
        lengths = data[at["seq_len"] :][: step.seqs, None]
        place = np.arange(width)
        used = place * kv.block_size < lengths + (count - 1)
        written = used & (place >= (lengths - 1) // kv.block_size)
        return bool((np.bincount(table[used])[table[written]] == 1).all())

    def _context_bucket(self, longest: int) -> int:
        kv = self._program.kv
        if kv is None:
            return 0
        return bucket_size(max(longest, MIN_CONTEXT_BUCKET), self._program.limits.max_blocks * kv.block_size)

    def _check(self, step: Step, count: int) -> None:
        """Raise if this executable cannot run the step."""
        self._check_step(step, count)
        if step.data[_ADJUST] or step.data[_LOGPROBS]:
            self._check_has_kernels()

    def _check_idle(self) -> None:
        if self._flying:
            raise InvalidInputError("a started step is not collected yet; call collect first.")

    def _check_has_kernels(self) -> None:
        if not self._lowering.group:
            what = "this backend neither adjusts logits nor reports log-probabilities."
            raise UnsupportedProgramError(what, device=self._info.name)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("this executable is closed.", device=self._info.name)
