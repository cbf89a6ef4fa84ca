"""A model on the cluster's replicas, as the ingress sees it: its tokenizer and template are here, its weights there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from bitnet.core import Chunk, Load
from bitnet.core.engine.blocks import prefix_digests
from bitnet.core.hal import DeviceInfo
from bitnet.core.model.file import open_model
from bitnet.core.model.file_backed import FileBacked
from bitnet.server.forms.structured import Form, InThread
from bitnet.server.forms.token_rules import TokenRules
from bitnet.server.generation.work import Carried, Continuation, Part, carried, work_arguments
from bitnet.server.ray.summary import model_hash, short_hashes
from bitnet.server.ray.work import Facts, State, Work
from bitnet.server.request.errors import RequestError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from bitnet.core.engine.options import OptionArguments
    from bitnet.core.model.pooling import Pooling

MAX_ATTEMPTS = 3
"""Maximum replicas that a request is sent to, if they end before the client has got a part of its answer."""


class RemoteModel(FileBacked):
    """What endpoints ask about a model, answered from its file and from what its replicas say.

    Args:
        path: The file, on this node.
        facts: Of any replica.
    """

    def __init__(self, path: Path, facts: Facts, i2s_layout: Any = "official") -> None:
        super().__init__(open_model(path, i2s_layout=i2s_layout))
        self.facts, self.selection = facts, None
        self.states: Sequence[State] = ()
        self.chat_template  # noqa: B018  # an error in it is one of starting

    @property
    def context(self) -> int:
        return self.facts.context

    @property
    def device(self) -> DeviceInfo:
        return self.devices[0]

    @property
    def devices(self) -> Sequence[DeviceInfo]:
        """The devices of all replicas."""
        return [device for state in self.states for device in state.facts.devices] or self.facts.devices

    @property
    def cache_bytes(self) -> int:
        return sum(state.facts.cache_bytes for state in self.states) or self.facts.cache_bytes

    def load(self) -> Load:
        """The load of all replicas together."""
        loads = [state.load for state in self.states]
        names = ("running", "waiting", "waiting_tokens", "kv_blocks", "kv_used", "kv_cached")
        sums = {name: sum(getattr(load, name) for load in loads) for name in names}
        lost = tuple(name for load in loads for name in load.lost)
        return Load(**sums, block_size=self.facts.block_size, lost=lost)

    def close(self) -> None:
        """Nothing is held that must be freed."""


class Replicas:
    """The back end whose generations are computed by replicas.

    Args:
        handle: The deployment of engines, for calls that stream.
        loop: The event loop in which replicas are called.
    """

    def __init__(self, model: RemoteModel, handle: DeploymentHandle[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.model, self._handle, self._loop = model, handle, loop

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
    ) -> Sequence[RemoteGeneration]:
        facts, model = self.model.facts, self._model_hash()
        digests = prefix_digests(prompts[0], facts.block_size) if prompts else ()
        work = Work(
            **work_arguments(prompts, options, n, restriction, receipt),
            blocks=tuple(short_hashes(digests, model)),
            block_size=facts.block_size,
            model=model,
        )
        stream = _Stream(self._handle, work, whole)
        return [RemoteGeneration(stream, i) for i in range(n * len(prompts))]

    async def embed(
        self, texts: Sequence[Sequence[int]], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Vectors of texts by one replica, or another if it ends."""
        work = Work.embedding(texts, self._model_hash())
        found = asyncio.run_coroutine_threadsafe(self._embedded(work, pooling, normalize), self._loop)
        return await asyncio.to_thread(found.result)

    async def _embedded(self, work: Work, pooling: Pooling | None, normalize: bool) -> npt.NDArray[np.float32]:
        handle, attempt = self._handle.options(stream=False), 1
        while True:
            try:
                found: npt.NDArray[np.float32] | RequestError = await handle.embed.remote(work, pooling, normalize)
            except BackPressureError as full:
                raise _full(full) from None
            except (RayError, RayServeException) as error:
                if attempt == MAX_ATTEMPTS:
                    raise _lost() from error
                attempt += 1
                continue
            if isinstance(found, RequestError):
                raise found
            return found

    def _model_hash(self) -> int:
        """The hash of the model's name, if replicas hold several; 0: they hold this one only."""
        return model_hash(self.model.facts.model) if self.model.facts.model else 0

    def receipt(self, generation: RemoteGeneration) -> dict[str, Any]:
        assert generation.receipt is not None
        return generation.receipt

    def close(self) -> None:
        """Nothing is held that must be freed."""


class RemoteGeneration(Continuation):
    """One continuation of a request that a replica computes."""

    def __init__(self, stream: _Stream, index: int) -> None:
        super().__init__()
        self._stream = stream
        self._queue = stream.queue(index)

    async def _next(self) -> Part | BaseException:
        self._stream.begin()
        return await self._queue.get()

    def cancel(self) -> None:
        self._stream.cancel()


class _Stream:
    """The call of a replica that a request's generations share.

    It begins in the task that first awaits a chunk, so that it is part of the HTTP request in Ray's eyes: its id is in
    the replica's log, and it ends with the request.
    """

    def __init__(self, handle: DeploymentHandle[Any], work: Work, whole: bool) -> None:
        self._handle, self._work, self._whole = handle, work, whole
        self._queues: dict[int, asyncio.Queue[Part | BaseException]] = {}
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def queue(self, index: int) -> asyncio.Queue[Part | BaseException]:
        """The chunks of a continuation."""
        return self._queues.setdefault(index, asyncio.Queue())

    def begin(self) -> None:
        """Call a replica, unless that was done."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.ensure_future(self._run())

    def cancel(self) -> None:
        """End the call; may be called from any thread."""
        if self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _run(self) -> None:
        try:
            await self._call()
        except asyncio.CancelledError:
            for index, queue in self._queues.items():
                queue.put_nowait(Part(index, Chunk("", (), None, "cancelled")))
        except Exception as error:
            for queue in self._queues.values():
                queue.put_nowait(error)

    async def _call(self) -> None:
        begun = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            response = self._handle.generate.remote(self._work)
            try:
                async for parts in response:
                    if isinstance(parts, RequestError):
                        raise parts
                    begun = True
                    for part in parts:
                        self._queues[part.index].put_nowait(part)
                return
            except BackPressureError as full:
                raise _full(full) from None
            except (RayError, RayServeException) as error:
                if (begun and not self._whole) or attempt == MAX_ATTEMPTS:
                    raise _lost() from error
            finally:
                response.cancel()


def _full(full: BackPressureError) -> RequestError:
    """The error of a request for which there is no room."""
    return RequestError(
        429,
        f"The queue is full: {full.args[0]} requests wait for a replica. Try again later.",
        code="queue_full",
        retry_after=1,
    )


def _lost() -> RequestError:
    """The error of an answer whose replica has ended. The client need not know of Ray."""
    return RequestError(
        503,
        "The replica that computed this answer ended before the answer was complete. Send the request again.",
        code="replica_lost",
        retry_after=1,
    )
