"""The Python API of a loaded model.

::

    from bitnet.core import load_model

    with load_model() as model:                     # the demo model, on the best device available
        print(model.generate("What is 17 + 25?").text)
        for chunk in model.chat_stream([{"role": "user", "content": "Tell me a story."}]):
            print(chunk.text, end="", flush=True)

:mod:`bitnet.core.loading` loads one.

Long, because the methods of :class:`Model` carry the documentation that users read in one place.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt

from bitnet.core.embedder import Embedder
from bitnet.core.engine import Completion, GenerationOptions
from bitnet.core.engine.constraint import MakesConstraint
from bitnet.core.engine.perplexity import Perplexity, Running
from bitnet.core.engine.request import Request
from bitnet.core.engine.results import Update
from bitnet.core.engine.warm import WarmUp
from bitnet.core.engine.worker import Load, Worker
from bitnet.core.errors import DeviceError, InvalidInputError, brief
from bitnet.core.hal import Device, DeviceInfo, Executable, ExecutableStats
from bitnet.core.model.cache import attended_bytes
from bitnet.core.model.file import ModelFile
from bitnet.core.model.file_backed import FileBacked
from bitnet.core.model.pooling import Pooling
from bitnet.core.support import env, system

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bitnet.core.devices.select import Selection
    from bitnet.core.engine.options import OptionArguments

Messages = Sequence[Mapping[str, Any]]
"""A conversation: ``{"role": "user", "content": "…"}``, oldest first."""


class Replica(NamedTuple):
    """The model on one device; ``selection`` is None if the caller passed an open device."""

    device: Device
    executable: Executable
    selection: Selection | None


class Model(FileBacked):
    """A model on a device, or on several; :func:`~bitnet.core.load_model` makes one.

    Its methods may be called from many threads. Calls made at the same time run as one batch. A call that is
    interrupted, or a stream that is closed or dropped, ends its generation. After the last device has failed, every
    call raises that device's error.

    Attributes:
        context: Maximum length of a prompt plus its continuation, in tokens.
        selection: How the device (the first of several) was chosen; None if the caller passed an open device.
        deterministic: Whether results depend on the request alone; see :func:`~bitnet.core.load_model`.
    """

    def __init__(
        self,
        file: ModelFile,
        worker: Worker,
        replicas: Sequence[Replica],
        warm_ups: Sequence[WarmUp],
        *,
        deterministic: bool = False,
    ) -> None:
        super().__init__(file)
        self.deterministic = deterministic
        self._worker, self._replicas, self._warm_ups = worker, tuple(replicas), tuple(warm_ups)
        self._variables = env.snapshot()
        self.selection = replicas[0].selection
        self.context = worker.engine.preparer.context
        self._embedding, self._embedders = threading.Lock(), list[Embedder]()
        # Also runs when the model is garbage-collected and at exit: the threads must end before the interpreter does.
        self._finalizer = weakref.finalize(self, _close, worker, self._replicas, self._warm_ups, self._embedders)

    def __repr__(self) -> str:
        where = ", ".join(info.name for info in self.devices)
        return f"<Model {self.config.name!r} on {where}, {'open' if self._finalizer.alive else 'closed'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model cannot be pickled or copied: it is on a device. "
            "Threads may share it; another process loads its own."
        )

    @property
    def device(self) -> DeviceInfo:
        """The device, or the first of several."""
        return self.devices[0]

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """Each replica's device, including failed ones, which ``load().lost`` lists."""
        return tuple(replica.device.info for replica in self._replicas)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all replicas' KV caches together. A device in the host's memory commits them only as used."""
        return sum(replica.engine.kv.bytes for replica in self._worker.replicas)

    def stats(self) -> ExecutableStats:
        """Cost of the (first) device's last step: bytes of weights read, kernels launched.

        Raises:
            DeviceError: The model is closed.
        """
        return self._replicas[0].executable.stats()

    def warm(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until the devices are ready for all usual step sizes; return whether they
        are.

        After :func:`~bitnet.core.load_model`, GPUs are warmed up in the background while no request runs: kernels are
        compiled and recorded for each step size. Otherwise the first step of each size would have to wait for that.
        On a CPU with ``max_seqs=1``, weights are packed that the second step would pack.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        return all(w.wait(None if ends is None else max(0.0, ends - time.monotonic())) for w in self._warm_ups)

    def load(self) -> Load:
        """Running and waiting requests, how full the KV cache is, and which devices have failed."""
        return self._worker.load()

    def cached_blocks(self) -> list[bytes]:
        """What the KV cache holds: digests of its full blocks, as :func:`~bitnet.core.engine.blocks.prefix_digests`
        makes them from a prompt's tokens and ``load().block_size``. A router of requests compares the two."""
        return self._worker.cached_blocks()

    def attended_bytes(self, length: int) -> int:
        """Bytes of KV cache that a decode step reads for a sequence of ``length`` positions."""
        return attended_bytes(self.config, self._worker.engine.kv.dtype, length)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels launched so far, as the devices recorded them."""
        return tuple(dict.fromkeys(name for replica in self._replicas for name in replica.executable.kernels))

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        constraint: MakesConstraint | None = None,
        **options: Unpack[OptionArguments],
    ) -> Completion:
        """Continue a prompt.

        Args:
            prompt: Text, in which special tokens are recognised, or token ids, which are used unchanged. If they come
                from :meth:`~bitnet.core.Model.chat_tokens`, the answer's thought is split off.
            constraint: Called for each continuation to make the object that decides which tokens may come next. None:
                any token may. A thought before the answer is free.
            options: Fields of :class:`~bitnet.core.engine.GenerationOptions`: ``max_tokens``, ``temperature``, ….

        Raises:
            ContextFullError: The prompt leaves no room for a token.
            InvalidInputError: The prompt is empty, or an option is out of its range.
            DeviceError: The device failed.
        """
        return self.stream(prompt, constraint=constraint, **options).result()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        constraint: MakesConstraint | None = None,
        **options: Unpack[OptionArguments],
    ) -> Request:
        """Continue a prompt, chunk by chunk; arguments and errors as for :meth:`generate`."""
        return self.submit(prompt, constraint=constraint, **options)[0]

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        constraint: MakesConstraint | None = None,
        **options: Unpack[OptionArguments],
    ) -> list[Request]:
        """Begin ``n`` continuations of a prompt, which share its KV cache; other arguments as for :meth:`generate`.

        The first continuation uses the given seed, the others use seeds derived from it.

        Raises:
            QueueFullError: More requests or prompt tokens would wait than ``max_queue`` or ``max_queue_tokens`` allows.
            InvalidInputError: The ``n`` continuations exceed these limits even with nothing else running.
        """
        return self.submit_batch([prompt], n=n, constraint=constraint, **options)

    def submit_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        n: int = 1,
        constraint: MakesConstraint | None = None,
        **options: Unpack[OptionArguments],
    ) -> list[Request]:
        """Begin ``n`` continuations of each prompt, as :meth:`submit` does; either all are accepted or none."""
        if isinstance(prompts, str):
            raise InvalidInputError(
                f"the prompts are the text {brief(prompts)}; they must be several.",
                hint="Put a single one into a list.",
            )
        given, prepare = GenerationOptions(**options), self._worker.engine.preparer.prepare
        if given.prediction and isinstance(given.prediction, str):
            given = replace(given, prediction=self.tokenizer.encode(given.prediction, add_special=False))
        tickets = self._worker.submit_all(
            [prepare(self._tokens(p), given, n, constraint, getattr(p, "thinking", None)) for p in prompts]
        )
        return [Request(self, ticket) for ticket in tickets]

    def chat(
        self, messages: Messages, *, constraint: MakesConstraint | None = None, **options: Unpack[OptionArguments]
    ) -> Completion:
        """The model's answer to a conversation; arguments and errors as for :meth:`generate`.

        If the model thinks first, ``reasoning`` has the thought and ``text`` only the answer. ``reasoning_budget=0``
        has it answer at once.

        Raises:
            InvalidInputError: The model has no chat template, or the template refuses the messages.
        """
        return self.chat_stream(messages, constraint=constraint, **options).result()

    def chat_stream(
        self, messages: Messages, *, constraint: MakesConstraint | None = None, **options: Unpack[OptionArguments]
    ) -> Request:
        """The model's answer to a conversation, chunk by chunk; errors as for :meth:`chat`."""
        thinks = _thinks(options.get("reasoning_budget"))
        return self.stream(self.chat_tokens(messages, thinks=thinks), constraint=constraint, **options)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        n: int = 1,
        constraint: MakesConstraint | None = None,
        **options: Unpack[OptionArguments],
    ) -> list[Completion]:
        """``n`` continuations of each prompt, computed ``max_seqs`` at a time and returned in the order of the prompts.

        The first continuation of each prompt uses the given seed. On the CPU's native levels each result is exactly
        what :meth:`generate` gives for that prompt alone. Other devices add numbers in a different order in a batch:
        log-probabilities differ by about 1e-6, or by a few hundredths if an activation is rounded the other way. If two
        tokens are nearly tied, the other one may be chosen, and the text goes on from it.
        """
        requests = self.submit_batch(prompts, n=n, constraint=constraint, **options)
        try:
            return [request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()

    def score(self, text: str | Sequence[int], *, start: int = 1) -> npt.NDArray[np.float64]:
        """Natural log-probabilities of the tokens from index ``start`` on, each given all tokens before it.

        Returns:
            ``float64[len(tokens) - start]``.

        Raises:
            ContextFullError: There are more tokens than the context holds.
            InvalidInputError: ``start`` is not in ``1 … len(tokens) - 1``, or a token is not in the vocabulary.
        """
        return self._score(self._tokens(text), start)

    async def score_async(self, text: str | Sequence[int], *, start: int = 1) -> npt.NDArray[np.float64]:
        """:meth:`score` for a task: others run meanwhile."""
        return await self._score_in_task(self._tokens(text), start)

    def perplexity(self, text: str | Sequence[int], *, context: int = 512) -> Iterator[Perplexity]:
        """The perplexity of a text after each chunk of ``context`` tokens; the last one is the result.

        Raises:
            ContextFullError: ``context`` is longer than the model's.
            InvalidInputError: The text is shorter than one chunk.
        """
        running = self._running(text, context)
        return (running.add(self._score(chunk, running.start)) for chunk in running.chunks)

    async def perplexity_async(self, text: str | Sequence[int], *, context: int = 512) -> AsyncIterator[Perplexity]:
        """:meth:`perplexity` for a task, with ``async for``: others run meanwhile."""
        running = self._running(text, context)
        for chunk in running.chunks:
            yield running.add(await self._score_in_task(chunk, running.start))

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        truncate: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Vectors of texts, ``float32[n, d]``; arguments and errors as for :meth:`Embedder.embed
        <bitnet.core.Embedder.embed>`.

        The first call loads the weights onto the (first) device once more, without the output head. If the model only
        computes vectors, :func:`~bitnet.core.load_embedder` takes half the memory.
        """
        self._worker.check_thread()
        return self._embedder().embed(texts, pooling=pooling, normalize=normalize, truncate=truncate)

    async def embed_async(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        truncate: bool = False,
    ) -> npt.NDArray[np.float32]:
        """:meth:`embed` for a task: others run meanwhile, on the CPU only between steps if there are no threads."""
        if not system.THREADS:
            embedder = self._embedder()
            return await embedder.embed_in_task(texts, pooling=pooling, normalize=normalize, truncate=truncate)
        import asyncio  # slow to import, and already imported if a task runs

        return await asyncio.to_thread(
            lambda: self._embedder().embed(texts, pooling=pooling, normalize=normalize, truncate=truncate)
        )

    def _embedder(self) -> Embedder:
        """What computes vectors, loaded by the first call."""
        with self._embedding:
            if not self._finalizer.alive:
                raise DeviceError("the model is closed.", device=self.device.name)
            if not self._embedders:
                kv_dtype = self._worker.engine.kv.dtype
                self._embedders.append(
                    Embedder(
                        self._file, self._replicas[0].device, selection=None, context=self.context, kv_dtype=kv_dtype
                    )
                )
        return self._embedders[0]

    def receipt(
        self,
        completion: Completion,
        *,
        prompt: str | Sequence[int] | Messages | None = None,
        key: str | Path | None = None,
        file_name: str | None = None,
        replica: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The receipt of a completion, for :func:`bitnet.core.receipts.write`; hashes the model's file.

        Args:
            prompt: The prompt passed to :meth:`generate` or :meth:`chat`. The receipt stores its hash, so that the text
                can be checked; without ``prompt``, it stores only the hash of the prompt's tokens.
            key: File of the private key to sign with; None: ``BITNET_RECEIPT_KEY``. Without either, the receipt is
                unsigned.
            file_name: What the receipt calls the model's file; None: its path.
            replica: ``node`` and ``id`` of the replica that this is, where several machines serve the model.

        Raises:
            InvalidInputError: The completion is of another prompt, several devices computed it (because one failed),
                the key cannot be read, or a key is given and ``cryptography`` is not installed.
        """
        from bitnet.core import receipts

        if prompt is not None:
            of_messages = receipts.is_conversation(prompt)
            tokens: list[int] = (
                self.chat_tokens(cast(Messages, prompt), thinks=_thinks(completion.options.reasoning_budget))
                if of_messages
                else self._tokens(cast("Sequence[int]", prompt))
            )
            if tuple(tokens) != completion.prompt_tokens:
                raise InvalidInputError("the completion does not belong to the prompt given for its receipt.")
        if len(completion.devices) > 1:
            where = ", then ".join(completion.devices)
            raise InvalidInputError(f"the completion was computed by {where}; a receipt can name only one device.")
        which = next((i for i, info in enumerate(self.devices) if info.name in completion.devices), 0)
        engine = self._worker.replicas[which].engine
        device, executable, selection = self._replicas[which]
        made = receipts.build(
            file=self._file,
            file_name=file_name,
            device=device.info,
            selection=selection,
            kernels=executable.kernels,
            completion=completion,
            prompt=prompt,
            variables=self._variables,
            replica=replica,
            setup={
                "context": self.context,
                "kv_dtype": engine.kv.dtype,
                "max_seqs": engine.limits.max_seqs,
                "step_tokens": engine.limits.max_tokens,
                "i2s_layout": self._file.i2s_layout,
                "deterministic": self.deterministic,
                "prompt_lookup": engine.preparer.lookup,
            },
        )
        key = key or env.text("BITNET_RECEIPT_KEY")
        return receipts.sign(made, key) if key else made

    def close(self) -> None:
        """Cancel running requests and free the device's memory. Closing twice is allowed."""
        self._finalizer()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True, parse_special=True)
        try:
            if isinstance(prompt, bytes | bytearray):  # a text that was not decoded: its bytes are no token ids
                raise TypeError
            return [*map(index, prompt)]
        except TypeError:
            several = isinstance(prompt, list | tuple) and any(isinstance(part, str) for part in prompt)
            raise InvalidInputError(
                f"the prompt is {brief(prompt)}, which is neither text nor token ids.",
                hint="generate_batch() takes several prompts." if several else None,
            ) from None

    def _running(self, text: str | Sequence[int], context: int) -> Running:
        tokens = self._tokens(text)
        bos = tokens[0] if tokens and tokens[0] == self.tokenizer.bos_id else None
        return Running(tokens, context=context, bos=bos)

    def _score(self, tokens: Sequence[int], start: int) -> npt.NDArray[np.float64]:
        ticket = self._worker.submit(self._worker.engine.preparer.prepare_score(tokens, start))
        try:
            return _scores(next(ticket))
        finally:
            ticket.cancel()

    async def _score_in_task(self, tokens: Sequence[int], start: int) -> npt.NDArray[np.float64]:
        ticket = self._worker.submit(self._worker.engine.preparer.prepare_score(tokens, start))
        try:
            return _scores(await anext(ticket))
        finally:
            ticket.cancel()


def _scores(update: Update) -> npt.NDArray[np.float64]:
    """The result of a scored text, which comes in a single update."""
    assert isinstance(update.result, np.ndarray)
    return update.result


def _thinks(budget: int | None) -> bool | None:
    """Whether a model may think with this ``reasoning_budget``; None: nothing was said about it."""
    return False if budget == 0 else None


def _close(
    worker: Worker, replicas: Sequence[Replica], warm_ups: Sequence[WarmUp], embedders: Sequence[Embedder]
) -> None:
    if worker.elsewhere:  # forked: the parent may have been in a step; the memory is freed when this process ends
        return
    if worker.runs_this or any(
        w.thread is threading.current_thread() for w in warm_ups
    ):  # garbage collection ran in the middle of a step, which holds the locks that closing waits for
        worker.later(partial(_close, worker, replicas, warm_ups, embedders))
        return
    worker.close()
    for warm_up in warm_ups:
        warm_up.close()
    with ExitStack() as stack:  # close every replica even if a failed device raises
        for device, executable, selection in replicas:
            if selection is not None:
                stack.callback(device.close)
            stack.callback(executable.close)
        for engine in (replica.engine for replica in worker.replicas):
            if engine.drafter is not None:
                stack.callback(engine.drafter.executable.close)
        for embedder in embedders:
            stack.callback(embedder.close)
