"""Matchers in helper processes: a form that is slow, large or crashes ends its own request only."""

from __future__ import annotations

import hashlib
import itertools
import marshal
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from bitnet.core.support.helper import Helper, HelperEnded, Limits, Program
from bitnet.core.text.tokenizer import Tokenizer

HELPERS = 4
"""Maximum helper processes of a model. One of them never compiles a form that nobody has compiled before."""
MEMORY = 96 << 20
"""Bytes of memory that a helper may use beyond its size after startup."""
COMPILE = Limits(seconds=4.0, cpu_seconds=2.0)
"""Maximum time to compile a form."""
MASK = Limits(seconds=2.0, cpu_seconds=1.0)
"""Maximum time to compute a mask."""
PATIENCE = 0.25
"""Seconds that a matcher waits behind the work of others before it moves to another helper."""
KNOWN = 1024
"""Number of forms of which it is known whether they can be compiled."""
STACK = 64 << 20
"""Bytes of a helper's stack: llguidance compiles nested forms by recursion."""

_WHY = {
    "memory": f"takes more than {MEMORY >> 20} MiB of memory",
    "time": "takes longer than {limits.seconds:g} s",
    "processor": "takes more than {limits.cpu_seconds:g} s of processor time",
    "crash": "crashes the compiler ({ended.how})",
}


class FormError(Exception):
    """A form cannot be compiled or enforced. The message continues a sentence that begins with its name."""


class _Killed(FormError):
    """Something else, such as a system that ran out of memory, has ended the process."""


@dataclass(frozen=True, slots=True)
class FormSource:
    """What is compiled: a JSON schema's JSON, a Lark grammar or a regular expression."""

    kind: Literal["json", "lark", "regex"]
    text: str

    @property
    def key(self) -> bytes:
        return hashlib.sha256(self.kind.encode() + b":" + self.text.encode()).digest()

    @property
    def request(self) -> bytes:
        return b"f" + self.key + self.kind[:1].encode() + self.text.encode()


class _Worker:
    """A helper process, and the only thread that asks it."""

    def __init__(self, program: Program) -> None:
        self._helper = Helper(program)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bitnet-form")
        self.sessions = 0
        self.process = 0  # counts the processes
        self.compiling = False

    def submit(self, call: Callable[[], bytes]) -> Future[bytes]:
        return self._thread.submit(call)

    def ask(self, request: bytes, limits: Limits) -> bytes:
        """The answer without its letter. In this worker's thread.

        Raises:
            FormError: It is refused, or reaches a limit.
        """
        if self._helper.fresh:
            self.process += 1
        try:
            answer = bytes(self._helper.ask(request, limits))
        except HelperEnded as ended:
            kind = "memory" if ended.how == "SIGABRT" else ended.kind  # how Rust ends where it gets none
            error = _Killed if ended.how == "SIGKILL" else FormError
            raise error(_WHY[kind].format(limits=limits, ended=ended) + ".") from None
        if answer[:1] == b"?":
            raise KeyError
        if answer[:1] != b"d":
            raise FormError(answer[1:].decode(errors="replace").replace("<non-verbose/>", "").strip())
        return answer[1:]

    @property
    def lost(self) -> bool:
        """Whether the matchers opened so far are gone."""
        return self._helper.fresh

    def compile(self, source: FormSource) -> bytes:
        old = not self._helper.fresh
        try:
            return self.ask(source.request, COMPILE)
        except FormError:
            if not (old and self._helper.fresh):  # it was refused, or the process had compiled nothing else
                raise
        return self.ask(source.request, COMPILE)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._helper.end()


class Matchers:
    """The helper processes of a model.

    Args:
        tokenizer: Has the vocabulary over which masks are computed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._program: Program | None = None
        self._workers: list[_Worker] = []
        self._trials = ThreadPoolExecutor(HELPERS - 1, thread_name_prefix="bitnet-forms")
        self._known: OrderedDict[bytes, Future[None]] = OrderedDict()
        self.numbers = itertools.count(1)

    @cached_property
    def every(self) -> bytes:
        """The mask that allows every token."""
        return np.packbits(np.ones(self._tokenizer.vocab_size, np.uint8), bitorder="little").tobytes()

    @cached_property
    def ordinary(self) -> npt.NDArray[np.uint8]:
        """The mask that allows every token but those that end an answer."""
        found = np.ones(self._tokenizer.vocab_size, np.uint8)
        found[sorted(self._tokenizer.eos_ids)] = 0
        return np.packbits(found, bitorder="little")

    def compile(self, source: FormSource) -> Future[None]:
        """Find out whether a form can be compiled; the same form is compiled once. Its error is a FormError."""
        key = source.key
        with self._lock:
            found = self._known.get(key)
            if found is None or found.cancelled():
                found = self._known[key] = self._trials.submit(self._try, source)
            self._known.move_to_end(key)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return found

    def _try(self, source: FormSource) -> None:
        worker = self.place(compiles=True)
        try:
            worker.submit(partial(worker.compile, source)).result()
        except FormError:  # and always will be
            raise
        except BaseException:  # such as a process that does not start: it may do so the next time
            with self._lock:
                self._known.pop(source.key, None)
            raise
        finally:
            worker.compiling = False
            self.leave(worker)

    def place(self, compiles: bool = False) -> _Worker:
        """The worker with the least to do, for a matcher or a form that is compiled; :meth:`leave` ends its use."""
        with self._lock:
            least = min(self._workers, key=lambda worker: (worker.compiling, worker.sessions), default=None)
            if least is None or ((least.compiling or least.sessions) and len(self._workers) < HELPERS):
                least = _Worker(self._described())
                self._workers.append(least)
            least.sessions += 1
            least.compiling |= compiles
            return least

    def leave(self, worker: _Worker) -> None:
        with self._lock:
            worker.sessions -= 1

    def close(self) -> None:
        """End the processes."""
        self._trials.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for worker in self._workers:
                worker.close()

    def _described(self) -> Program:
        if self._program is None:
            tokenizer = self._tokenizer
            ids = range(tokenizer.vocab_size)
            tokens = [tokenizer.token_bytes(i) for i in ids]
            special = [i for i in ids if tokenizer.is_hidden(i)]
            self._program = Program(
                code=Path(__file__).with_name("program.py"),
                packages=("llguidance",),
                purpose="forms of structured output are compiled",
                memory=MEMORY,
                base=(64 << 20) + 1024 * len(tokens),
                output=4096 + len(tokens),
                stack=STACK,
                question=self._split,
                setup=marshal.dumps((tokens, special, sorted(tokenizer.eos_ids), tokenizer.bos_id)),
            )
        return self._program

    def _split(self, text: bytearray) -> bytes:
        """The tokens of a text that a form forces."""
        ids = self._tokenizer.encode(text.decode(), add_special=False)
        return struct.pack(f">{len(ids)}I", *ids)


class Matcher:
    """The constraint of one continuation, whose matcher is in a helper process.

    The mask of the next token is computed as soon as a token is accepted, while the device computes its logits. If the
    process has ended because of another form, the matcher is opened again in a new one, with the tokens so far.

    Args:
        tokens: Those that have been chosen already.
    """

    def __init__(self, matchers: Matchers, source: FormSource, tokens: Sequence[int] = ()) -> None:
        self._matchers, self._source = matchers, source
        self._number = next(matchers.numbers)
        self._tokens = list(tokens)
        self._worker: _Worker | None = matchers.place()
        self._process = 0
        self._over = False
        self._begin()

    def allowed(self) -> bytes | None:
        """As :meth:`bitnet.core.engine.constraint.Constraint.allowed`."""
        if self._mask.done():
            return self._mask.result()
        if self._worker is not None and time.monotonic() - self._asked > PATIENCE and self._mask.cancel():
            self._leave()
            self._worker, self._process = self._matchers.place(), 0
            self._begin()
            if self._over:  # meanwhile
                self._leave()
        return None

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        self._begin()

    def close(self) -> None:
        """Free the matcher. Closing twice is allowed."""
        self._over = True
        self._leave()

    def _leave(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._mask.cancel()
            worker.submit(partial(self._closed, worker, self._process))
            self._matchers.leave(worker)

    def _begin(self) -> None:
        worker = self._worker
        if worker is None:
            raise FormError("is no longer enforced: its request has ended.")
        self._asked = time.monotonic()
        self._mask = worker.submit(partial(self._computed, worker, len(self._tokens)))

    def _computed(self, worker: _Worker, count: int) -> bytes:
        """The mask after ``count`` tokens, in the worker's thread."""
        try:
            return self._asked_of(worker, count)
        except _Killed:
            return self._asked_of(worker, count)

    def _asked_of(self, worker: _Worker, count: int) -> bytes:
        number = struct.pack(">Q", self._number)
        if self._process and self._process == worker.process and not worker.lost:
            with suppress(KeyError):  # its process has ended since
                return worker.ask(b"n" + number + struct.pack(">I", self._tokens[count - 1]), MASK)
        request = b"o" + number + self._source.key + struct.pack(f">{count}I", *self._tokens[:count])
        try:
            mask = worker.ask(request, COMPILE)
        except KeyError:
            worker.compile(self._source)
            mask = worker.ask(request, COMPILE)
        self._process = worker.process
        return mask

    def _closed(self, worker: _Worker, process: int) -> bytes:
        if process == worker.process and not worker.lost:
            worker.ask(b"c" + struct.pack(">Q", self._number), MASK)
        return b""
