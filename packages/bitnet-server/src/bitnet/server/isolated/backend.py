"""The parent's side: the back end of a model in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hmac import compare_digest
from multiprocessing.connection import Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.core import Load
from bitnet.core.errors import BitNetError, DeviceLostError
from bitnet.core.hal import DeviceInfo
from bitnet.core.model.file import open_model
from bitnet.core.model.file_backed import FileBacked
from bitnet.core.support import log
from bitnet.core.support.helper import HelperEnded, HelperProcess, Program
from bitnet.core.support.helper.values import dumped, loaded
from bitnet.server.forms.structured import Form, InThread
from bitnet.server.forms.token_rules import TokenRules
from bitnet.server.generation.work import Carried, Continuation, Part, Work, carried, work_arguments
from bitnet.server.isolated.facts import Facts, Texts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bitnet.core.devices.select import Selection
    from bitnet.core.engine.options import OptionArguments
    from bitnet.core.model.pooling import Pooling

LOAD_SECONDS = 3600.0
"""Maximum seconds to load a model."""
TOKEN_BYTES = 32


def load_isolated(path: Path, **options: Any) -> Isolated:
    """Load a model in a process of its own; arguments and errors as for :func:`~bitnet.core.load_model`.

    Raises:
        BitNetError: The process cannot be connected.
        DeviceLostError: It crashed.
        HelperStartError: It does not start.
    """
    program = Program(
        "bitnet.server.isolated.child", "this model is run", setup=log.level(), patience=5.0, stderr="shown"
    )
    process = HelperProcess(program)
    try:
        with Listener() as listener:
            token = secrets.token_bytes(TOKEN_BYTES)
            process.send(dumped((listener.address, token, path, options)))
            found = loaded(process.answer(LOAD_SECONDS))
            if not isinstance(found, Facts):
                raise found
            connection: Any = listener.accept()  # it has connected
        if not compare_digest(connection.recv_bytes(TOKEN_BYTES), token):
            raise HelperEnded("crash", "was replaced by another program")
        return Isolated(IsolatedModel(path, options.get("i2s_layout", "official"), found, process), connection)
    except BaseException as error:
        process.end()
        if isinstance(error, HelperEnded | EOFError):
            device, how = str(options.get("device") or "auto"), str(error) or "ended"
            raise DeviceLostError(f"the process that was to load the model {how}.", device=device) from None
        if isinstance(error, OSError):
            what = f"the model's process cannot be connected: {error.strerror or error}."
            hint = "Check the folder for temporary files (TMPDIR), whose path must be short."
            raise BitNetError(what, hint=hint) from None
        raise


class IsolatedModel(FileBacked):
    """What endpoints ask about a model, answered from its file and from what its process says.

    Attributes:
        latest: What ran and waited when the process last sent something.
        lost: How the process has ended, if it has, as the end of a sentence.
    """

    def __init__(self, path: Path, i2s_layout: Any, facts: Facts, process: HelperProcess) -> None:
        super().__init__(open_model(path, i2s_layout=i2s_layout))
        self._facts, self._process = facts, process
        self._closed = False
        self.latest = facts.load
        self.lost: str | None = None

    @property
    def context(self) -> int:
        return self._facts.context

    @property
    def device(self) -> DeviceInfo:
        return self.devices[0]

    @property
    def devices(self) -> Sequence[DeviceInfo]:
        return self._facts.devices

    @property
    def selection(self) -> Selection | None:
        return self._facts.selection

    @property
    def cache_bytes(self) -> int:
        return self._facts.cache_bytes

    def check_file(self, *, within: float = 0.0) -> None:
        """Check that the file is as it was, and that the process runs.

        Raises:
            ModelFileError: The file was cut short or written to.
            DeviceLostError: The process has ended.
        """
        super().check_file(within=within)
        self.check_process()

    def check_process(self) -> None:
        """Check that the process runs.

        Raises:
            DeviceLostError: It has ended.
        """
        if self.lost is not None:
            raise DeviceLostError(f"the model's process {self.lost}.", device=self.device.name)

    def load(self) -> Load:
        return self.latest

    def lose(self) -> None:
        """Note that the process has ended, and how."""
        how = "was ended"
        if not self._closed:
            try:
                self._process.exchange(b"")
                how = "closed its connection"
            except HelperEnded as error:
                how = str(error)
        self.lost = how

    def close(self) -> None:
        """End the process. What runs ends with an error."""
        self._closed = True
        self._process.end(wait=True)


class Isolated:
    """The back end whose generations are computed by the model's process."""

    def __init__(self, model: IsolatedModel, connection: Any) -> None:
        self.model, self._connection = model, connection
        self._numbers = itertools.count()
        self._running: dict[int, _Answer | _Vectors] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="bitnet-isolated", daemon=True).start()

    async def restrict(self, form: Form | None, rules: TokenRules | None, in_thread: InThread) -> Carried:
        return await carried(form, rules, in_thread)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        options: OptionArguments,
        *,
        n: int = 1,
        restriction: Carried | None = None,
        receipt: bool = False,
        whole: bool = False,
    ) -> Sequence[IsolatedGeneration]:
        work = Work(**work_arguments(prompts, options, n, restriction, receipt))
        number = next(self._numbers)
        answer = _Answer(n * len(prompts), lambda: self._send(number, None))
        self._begin(number, answer, work)
        answer.begun.result()
        return answer.generations

    async def embed(
        self, texts: Sequence[Sequence[int]], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        tokens = tuple(array("i", text) for text in texts)
        return await asyncio.to_thread(self._vectors, Texts(tokens, pooling, normalize))

    def _vectors(self, texts: Texts) -> npt.NDArray[np.float32]:
        vectors = _Vectors()
        self._begin(next(self._numbers), vectors, texts)
        return vectors.rows.result()

    def receipt(self, generation: IsolatedGeneration) -> dict[str, Any]:
        assert generation.receipt is not None
        return generation.receipt

    def close(self) -> None:
        """The model's end closes the connection."""

    def _begin(self, number: int, answer: _Answer | _Vectors, work: Work | Texts) -> None:
        with self._lock:
            self.model.check_process()
            self._running[number] = answer
        self._send(number, work)

    def _send(self, number: int, work: Work | Texts | None) -> None:
        with self._lock, suppress(OSError):  # the process has ended: the reading thread notices, too
            if number in self._running:
                self._connection.send((number, work))

    def _read(self) -> None:
        """Hand on what the process sends, until it ends."""
        try:
            while True:
                number, value, self.model.latest = self._connection.recv()
                answer = self._running[number]
                if not isinstance(value, list):
                    with self._lock:
                        del self._running[number]
                answer.take(value)
        except (EOFError, OSError):
            self.model.lose()
        with self._lock:  # a request may be under way to it
            self._connection.close()
        with self._lock:
            left = [*self._running.values()]
            self._running.clear()
        for answer in left:
            answer.take(DeviceLostError(f"the model's process {self.model.lost}.", device=self.model.device.name))


class _Answer:
    """The generations of one request.

    Attributes:
        begun: Done when they have begun, or cannot be begun.
    """

    def __init__(self, count: int, cancel: Callable[[], None]) -> None:
        self.begun: Future[None] = Future()
        self.generations = [IsolatedGeneration(cancel) for _ in range(count)]

    def take(self, value: list[Part] | BaseException | None) -> None:
        """Take parts, or the end: None or an error."""
        if not self.begun.done():
            if isinstance(value, BaseException):
                self.begun.set_exception(value)
            else:
                self.begun.set_result(None)
        if isinstance(value, list):
            for part in value:
                self.generations[part.index].put(part)
        elif value is not None:
            for generation in self.generations:
                generation.put(value)


class _Vectors:
    """The vectors of one request's texts.

    Attributes:
        rows: Done when they are there, or an error is.
    """

    def __init__(self) -> None:
        self.rows: Future[npt.NDArray[np.float32]] = Future()

    def take(self, value: Any) -> None:
        """Take the vectors, or an error."""
        if isinstance(value, BaseException):
            self.rows.set_exception(value)
        else:
            self.rows.set_result(value)


class IsolatedGeneration(Continuation):
    """One continuation of a request that the model's process computes."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        super().__init__()
        self._cancel = cancel
        self._parts: deque[Part | BaseException] = deque()
        self._lock = threading.Lock()
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, part: Part | BaseException) -> None:
        """Add a part, or an error, after which nothing comes; from another thread."""
        with self._lock:
            self._parts.append(part)
            wake = self._wake
        if wake is not None:
            with suppress(RuntimeError):  # the loop has ended
                wake[0].call_soon_threadsafe(wake[1].set)

    async def _next(self) -> Part | BaseException:
        while True:
            with self._lock:
                if self._parts:
                    return self._parts.popleft()
                if self._wake is None:
                    self._wake = asyncio.get_running_loop(), asyncio.Event()
                arrived = self._wake[1]
                arrived.clear()
            await arrived.wait()

    def cancel(self) -> None:
        self._cancel()
