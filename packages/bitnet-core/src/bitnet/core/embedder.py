"""Vectors of texts, from the last norm of a model's layers.

::

    from bitnet.core import load_embedder

    with load_embedder("model.gguf") as embedder:
        vectors = embedder.embed(["a text", "another one"])     # float32[2, d], each of length 1

:func:`~bitnet.core.load_embedder` loads one.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.setup import STEP_TOKENS, check_sizes, compile_model, device_memory, state_entries
from bitnet.core.errors import ContextFullError, DeviceError, InvalidInputError, brief
from bitnet.core.hal import Device, DeviceInfo, KVDtype, Limits, SequenceStep, Step, StepLayout, run
from bitnet.core.model.file import ModelFile
from bitnet.core.model.file_backed import FileBacked
from bitnet.core.model.pooling import POOLINGS, Pooling, pooling_of
from bitnet.core.model.program import BLOCK_SIZE

if TYPE_CHECKING:
    import asyncio

    from bitnet.core.devices.select import Selection

F32 = npt.NDArray[np.float32]
MAX_SEQS = 64
"""Maximum texts in a step."""
DEFAULT_POOLING: Pooling = "mean"
"""Pooling of files that name none."""


class Part(NamedTuple):
    """Tokens ``start … stop - 1`` of a text, computed in one step."""

    text: int
    start: int
    stop: int


def plan(lengths: Sequence[int], step_tokens: int, max_seqs: int) -> Iterator[list[Part]]:
    """The parts of each step. A text longer than a step has steps of its own, in order; the others share steps."""
    step: list[Part] = []
    room = step_tokens
    for text in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[text]
        if length > step_tokens:
            for start in range(0, length, step_tokens):
                yield [Part(text, start, min(start + step_tokens, length))]
            continue
        if length > room or len(step) == max_seqs:
            yield step
            step, room = [], step_tokens
        step.append(Part(text, 0, length))
        room -= length
    if step:
        yield step


class Embedder(FileBacked):
    """A model on a device that computes vectors of texts; :func:`~bitnet.core.load_embedder` makes one.

    Its methods may be called from many threads, which take turns.

    Attributes:
        device: The device.
        selection: How the device was chosen; None if the caller passed an open device.
        context: Maximum tokens of a text.
        pooling: The pooling that the file names, else ``mean``.
        dimensions: Length d of a vector.
    """

    def __init__(
        self,
        file: ModelFile,
        device: Device,
        *,
        selection: Selection | None,
        context: int,
        kv_dtype: KVDtype = "f16",
        step_tokens: int | None = None,
    ) -> None:
        super().__init__(file)
        check_sizes(file.config, context=context, kv_dtype=kv_dtype, step_tokens=step_tokens)
        self.pooling = pooling_of(file) or DEFAULT_POOLING
        self.context, self.dimensions, self.selection = context, file.config.hidden_size, selection
        self.device: DeviceInfo = device.info
        self._opened, self._lock = device, threading.Lock()
        self._turn: asyncio.Lock | None = None
        tokens = step_tokens or device.info.step_tokens or STEP_TOKENS
        most = min(MAX_SEQS, tokens)
        if entries := state_entries(file.config, max_seqs=most, free=max(0, device_memory(device)[1] - file.size)):
            most = min(most, entries)
        limits = Limits(tokens, most, tokens, -(-context // BLOCK_SIZE))
        self._layout = StepLayout(limits)
        _, self._executable = compile_model(
            file,
            device,
            limits=limits,
            num_blocks=max(limits.max_blocks, tokens // BLOCK_SIZE + most),
            kv_dtype=kv_dtype,
            state_entries=max(1, entries),
            head=False,
        )

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        truncate: bool = False,
    ) -> F32:
        """The vectors of texts.

        Args:
            texts: Each a text, to which the model's special tokens are added, or token ids, which are used unchanged.
            pooling: ``mean``, ``cls`` or ``last``; None: the embedder's.
            normalize: Whether each vector is divided by its Euclidean length.
            truncate: Whether a text longer than the context is cut at its end; otherwise it is an error.

        Returns:
            ``float32[len(texts), d]``.

        Raises:
            ContextFullError: A text is longer than the context.
            InvalidInputError: A text has no tokens, or there is no such pooling.
            DeviceError: The device failed, or a vector is not finite.
        """
        work = self._work(texts, pooling, normalize, truncate)
        vectors: F32 | None = None
        while not isinstance(asked := _next(work, vectors), np.ndarray):
            with self._lock:
                run(self._executable, asked.step)
                vectors = self._read(asked)
        return asked

    async def embed_in_task(
        self, texts: Sequence[str | Sequence[int]], *, pooling: Pooling | None, normalize: bool, truncate: bool
    ) -> F32:
        """:meth:`embed` for tasks of one event loop: others run while the device computes, and no thread is needed."""
        import asyncio  # slow to import, and already imported if a task runs

        self._turn = self._turn or asyncio.Lock()
        work = self._work(texts, pooling, normalize, truncate)
        vectors: F32 | None = None
        while not isinstance(asked := _next(work, vectors), np.ndarray):
            async with self._turn:
                self._executable.start(asked.step)
                await self._executable.arrival()
                self._executable.collect()
                vectors = self._read(asked)
        return asked

    def _work(
        self, texts: Sequence[str | Sequence[int]], pooling: Pooling | None, normalize: bool, truncate: bool
    ) -> Generator[_Asked, F32, F32]:
        """Asks for steps, and gets their vectors; returns those of the texts."""
        if isinstance(texts, str):
            raise InvalidInputError(
                f"the texts are the text {brief(texts)}; they must be several.", hint="Put a single one into a list."
            )
        pooling = self.pooling if pooling is None else pooling
        if pooling not in POOLINGS:
            raise InvalidInputError(f"pooling is {brief(pooling)}; it must be one of {', '.join(POOLINGS)}.")
        tokens = [self.tokens(text, truncate=truncate, number=i) for i, text in enumerate(texts)]
        sums = np.zeros((len(tokens), self.dimensions), np.float64)
        for step in plan([len(text) for text in tokens], self._layout.limits.max_tokens, self._layout.limits.max_seqs):
            asked = self._asked(step, tokens, pooling)
            parts = np.split((yield asked), np.cumsum(asked.counts)[:-1])
            for part, vectors in zip(step, parts, strict=True):
                sums[part.text] += vectors.sum(axis=0, dtype=np.float64)
        if pooling == "mean":
            sums /= np.array([[len(text)] for text in tokens]).reshape(-1, 1)
        if not np.isfinite(sums).all():
            which = int(np.flatnonzero(~np.isfinite(sums).all(axis=1))[0])
            raise DeviceError(f"the vector of text {which} is not finite.", device=self.device.name)
        if normalize:
            sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return sums.astype(np.float32)

    def tokens(self, text: str | Sequence[int], *, truncate: bool = False, number: int = 0) -> list[int]:
        """The token ids of a text, cut to the context if ``truncate``; a token that ends every text then stays last.

        Raises:
            ContextFullError, InvalidInputError: As for :meth:`embed`; messages call the text by its ``number``.
        """
        if isinstance(text, str):
            tokens = self.tokenizer.encode(text, add_special=True, parse_special=False)
        else:
            try:
                tokens = [index(token) for token in text]
            except TypeError:
                raise InvalidInputError(f"text {number} is {brief(text)}, neither text nor token ids.") from None
        if not tokens:
            raise InvalidInputError(f"text {number} has no tokens.")
        for token in tokens:
            if not 0 <= token < self.config.vocab_size:
                raise InvalidInputError(f"text {number} has the token {token}; there are {self.config.vocab_size}.")
        if len(tokens) > self.context:
            if not truncate:
                raise ContextFullError(
                    f"text {number} has {len(tokens)} tokens; the context holds {self.context}.",
                    hint="Ask for it to be truncated, or load the model with a longer context.",
                    tokens=len(tokens),
                    context=self.context,
                )
            ends = isinstance(text, str) and tokens[-1] in self.tokenizer.eos_ids
            tokens = [*tokens[: self.context - 1], tokens[-1]] if ends else tokens[: self.context]
        return tokens

    def close(self) -> None:
        """Free the device's memory. Closing twice is allowed."""
        self._executable.close()
        if self.selection is not None:
            self._opened.close()

    def __enter__(self) -> Embedder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, step: Sequence[Part], tokens: Sequence[Sequence[int]], pooling: Pooling) -> _Asked:
        """A step of parts, with the rows of those of their tokens that the pooling takes."""
        sequences, counts, block = [], [], 0
        for entry, (text, start, stop) in enumerate(step):
            blocks = -(-stop // BLOCK_SIZE)
            rows = {
                "mean": range(stop - start),
                "cls": range(1 if start == 0 else 0),
                "last": range(stop - start - (stop == len(tokens[text])), stop - start),
            }[pooling]
            sequences.append(
                SequenceStep(
                    tokens[text][start:stop],
                    stop,
                    blocks=range(block, block + blocks),
                    rows=rows,
                    state_from=entry if start else -1,
                    state_to=entry,
                )
            )
            counts.append(len(rows))
            block += blocks
        return _Asked(Step(self._layout, sequences), counts)

    def _read(self, asked: _Asked) -> F32:
        """The vectors of a step that has run, ``float32[rows, d]``."""
        if self._file.gguf.lost:
            self.check_file()
        rows = sum(asked.counts)
        return self._executable.read("last", rows) if rows else np.empty((0, self.dimensions), np.float32)


class _Asked(NamedTuple):
    """A step to run.

    Attributes:
        counts: Number of rows of each part.
    """

    step: Step
    counts: list[int]


def _next(work: Generator[_Asked, F32, F32], vectors: F32 | None) -> _Asked | F32:
    """Send in the vectors of the last step: the next step, or the result."""
    try:
        return next(work) if vectors is None else work.send(vectors)
    except StopIteration as end:
        return cast(F32, end.value)
