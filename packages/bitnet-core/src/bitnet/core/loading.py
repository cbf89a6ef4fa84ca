"""Loads a model: opens its file and its devices side by side, and makes an engine for each device, or an embedder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.core import hub
from bitnet.core.api import Model, Replica
from bitnet.core.devices import registry
from bitnet.core.devices.opening import opening, side_by_side
from bitnet.core.embedder import Embedder
from bitnet.core.engine import Engine
from bitnet.core.engine.options import integer, truth
from bitnet.core.engine.setup import context_for, open_engine
from bitnet.core.engine.warm import PAUSE, WarmUp, prepare_stand_ins
from bitnet.core.engine.worker import Worker
from bitnet.core.errors import BitNetError, InvalidInputError, UnsupportedProgramError, brief
from bitnet.core.hal import PREPARES, Device, DeviceType, Executable
from bitnet.core.model.default import default_model_path
from bitnet.core.model.draft import open_draft
from bitnet.core.model.file import open_model
from bitnet.core.support import env, system
from bitnet.core.support.log import logger
from bitnet.core.support.mapped import open_file
from bitnet.core.support.source import ByteSource

if TYPE_CHECKING:
    from bitnet.core.devices.select import Selection
    from bitnet.core.gguf.ternary import I2SLayout
    from bitnet.core.hal import KVDtype
    from bitnet.core.model.draft import DraftLayer
    from bitnet.core.model.file import ModelFile


def load_model(
    path: str | Path | None = None,
    *,
    device: str | Device | None = None,
    context: int | None = None,
    kv_dtype: KVDtype = "f16",
    max_seqs: int = 8,
    step_tokens: int | None = None,
    threads: int | None = None,
    strict: bool | None = None,
    i2s_layout: I2SLayout = "official",
    max_queue: int | None = None,
    max_queue_tokens: int | None = None,
    deterministic: bool | None = None,
    prompt_lookup: bool = True,
    draft: str | Path | None = None,
) -> Model:
    """Load a GGUF model onto a device.

    Args:
        path: The file, or a model on the Hugging Face Hub (``hf:ORG/NAME``, ``hf:ORG/NAME:FILE``), which is downloaded
            unless it is in the hub's cache. None: the demo model that comes with bitnet.
        device: ``auto``, ``gpu``, a backend (``cuda``), a device (``cuda:0``, ``cpu:avx2``); None: ``BITNET_DEVICE``,
            else the best available. Several devices, separated by commas (``cuda:0,cuda:1``), or all devices of a
            backend (``cuda:*``) each get a replica of the model. An open device is also accepted; it stays open when
            the model is closed.
        context: Maximum length of a prompt plus its continuation, in tokens. None: the model's own limit, but at most
            4,096, or up to 131,072 if the device has enough memory (docs/models.md, Limits).
        kv_dtype: Type of the KV cache: ``f16``, ``f32``, or ``i8``, which takes half the memory of ``f16`` and needs a
            device with the feature ``kv-i8``.
        max_seqs: Generations that run at the same time (on each device, if there are several); further ones wait. The
            KV cache holds a full context for each if that fits in a quarter of the device's free memory.
        step_tokens: Maximum tokens computed in one step; a longer prompt takes several steps. None: the device's
            preferred step size, else 512.
        threads: CPU threads; None: ``BITNET_THREADS``, else one for each physical core. An open device keeps the
            threads it has.
        strict: If true, a missing ``device`` is an error and ``BITNET_GPU_FAKE`` is refused. If false, the CPU takes
            the device's place, with a warning. None: ``BITNET_STRICT_MODE``, else false.
        i2s_layout: How the file's I2_S tensors are laid out (``bitnet inspect`` warns if it looks wrong).
        max_queue: Maximum number of generations that may wait while others run; further ones are refused. None: no
            limit.
        max_queue_tokens: Maximum number of prompt tokens that may wait; a prompt that would exceed this is refused,
            unless none is waiting. None: no limit.
        deterministic: Whether a request's tokens and log-probabilities depend on the request alone (bit for bit on one
            kind of device), whatever else is computed, cached or interrupted. Prompts take longer. A device that cannot
            do this refuses the model. None: ``BITNET_DETERMINISTIC``, else false.
        prompt_lookup: Whether text that repeats a passage of the prompt or the answer is drafted from that passage and
            verified several tokens at a time, when measurements show that to be faster. The tokens are the same.
        draft: A GGUF file with a layer of the model that predicts further tokens (``blk.N.nextn.*``), perhaps the
            model's own file. Its predictions are verified like those of ``prompt_lookup``, where that is faster. None:
            there is none.

    Raises:
        ModelFileError: The file is not a model bitnet can run, or ``draft`` holds no layer that fits it.
        HubError: The model cannot be downloaded from the hub.
        DeviceUnavailableError: The device is not available.
        OutOfMemoryError, DeviceError: The model does not fit the device, or the device failed.
        InvalidInputError: An argument is out of its range.
    """
    options = LoadOptions(
        device=device,
        context=context,
        kv_dtype=kv_dtype,
        max_seqs=max_seqs,
        step_tokens=step_tokens,
        threads=threads,
        strict=strict,
        i2s_layout=i2s_layout,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        deterministic=env.flag("BITNET_DETERMINISTIC") if deterministic is None else deterministic,
        prompt_lookup=prompt_lookup,
        draft=draft,
    ).checked()
    if not system.THREADS:
        raise InvalidInputError("this Python has no threads.", hint="Write `await load_model_async(...)`.")
    return _load(_local(path), options, Worker)


async def load_model_async(
    path: str | Path | ByteSource | None = None,
    *,
    device: str | Device | None = None,
    context: int | None = None,
    kv_dtype: KVDtype = "f16",
    max_seqs: int = 8,
    step_tokens: int | None = None,
    deterministic: bool = False,
    prompt_lookup: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load a GGUF model that computes in tasks of this event loop, without threads, as in a browser.

    ``completion = await model.stream(prompt)`` or ``async for chunk in model.chat_stream(messages)`` generate.
    ``score_async``, ``perplexity_async`` and ``embed_async`` compute beside them. Methods that wait in a thread
    (``generate``, ``chat``, ``score``, …) are refused. Where the device is the CPU, other
    tasks run between two steps only.

    Args and errors are those of :func:`load_model`, but for two.

    Args:
        path: Also a file that is read in slices, such as an :class:`~bitnet.core.support.ranges.HttpSource`. Its
            weights are read one tensor at a time, so that the file never has to fit into memory.
        progress: Called with the number of kernels that a browser has compiled, and with that of all so far.
    """
    options = LoadOptions(
        device=device,
        context=context,
        kv_dtype=kv_dtype,
        max_seqs=max_seqs,
        step_tokens=step_tokens,
        threads=None,
        strict=None,
        i2s_layout="official",
        deterministic=deterministic,
        prompt_lookup=prompt_lookup,
    ).checked()
    import asyncio  # slow to import, and already imported if a task runs

    from bitnet.core.engine.task_worker import TaskWorker

    if system.THREADS:
        return await asyncio.to_thread(lambda: _load(_local(path), options, TaskWorker))
    await registry.request(device)
    model = _load(_local(path), options, TaskWorker)
    try:
        for replica in model._replicas:
            await replica.executable.arrival(progress)
    except BaseException:
        model.close()
        raise
    return model


def _load(local: Path | ByteSource, options: LoadOptions, worker: type[Worker]) -> Model:
    """Load a model whose engines are stepped by such a worker."""
    while True:
        file, places = _open(local, options)
        try:
            draft = None if options.draft is None else open_draft(_file(options.draft, "draft"), file)
            return _make(file, places, options, worker, draft)
        except BaseException as error:
            for selection, opened in places:
                if selection is not None:
                    opened.close()
            if isinstance(error, BitNetError):  # the cause is a file that changed
                file.gguf.check()
            chosen = [selection.requested for selection, _ in places if selection is not None]
            if not isinstance(error, UnsupportedProgramError) or chosen != ["auto"]:
                raise
            logger.warning("%s The CPU runs it.", error.message)
        options = replace(options, device="cpu")


def load_embedder(
    path: str | Path | None = None,
    *,
    device: str | Device | None = None,
    context: int | None = None,
    kv_dtype: KVDtype = "f16",
    step_tokens: int | None = None,
    threads: int | None = None,
    strict: bool | None = None,
    i2s_layout: I2SLayout = "official",
) -> Embedder:
    """Load a GGUF model onto one device, to compute vectors of texts. Its output head is not loaded.

    Args and errors are those of :func:`load_model`. ``context`` is the maximum length of a text.
    """
    options = LoadOptions(
        device=device,
        context=context,
        kv_dtype=kv_dtype,
        step_tokens=step_tokens,
        threads=threads,
        strict=strict,
        i2s_layout=i2s_layout,
    ).checked()
    file, places = _open(_local(path), options)
    try:
        if len(places) > 1:
            names = ", ".join(opened.info.name for _, opened in places)
            raise InvalidInputError(f"the devices are {names}; vectors are computed on one.", hint="Name one device.")
        ((selection, opened),) = places
        with registry.computing(opened.info)():
            made = Embedder(
                file,
                opened,
                selection=selection,
                context=options.context or context_for(file, [opened], kv_dtype=kv_dtype),
                kv_dtype=kv_dtype,
                step_tokens=options.step_tokens,
            )
        file.gguf.check()
        return made
    except BaseException:
        for selection, opened in places:
            if selection is not None:
                opened.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The arguments of :func:`load_model`, which explains them, but for the path."""

    device: str | Device | None
    context: int | None
    kv_dtype: KVDtype
    max_seqs: int = 1
    step_tokens: int | None
    threads: int | None
    strict: bool | None
    i2s_layout: I2SLayout
    max_queue: int | None = None
    max_queue_tokens: int | None = None
    deterministic: bool = False
    prompt_lookup: bool = False
    draft: str | Path | None = None

    def checked(self) -> LoadOptions:
        """The same, with whole numbers and truth values of numpy's made Python's.

        Raises:
            InvalidInputError: An option is of a wrong kind.
        """
        numbers = ("context", "max_seqs", "step_tokens", "max_queue", "max_queue_tokens")
        truths = ("strict", "deterministic", "prompt_lookup")
        given = {name: value for name in (*numbers, *truths) if (value := getattr(self, name)) is not None}
        checks = {**dict.fromkeys(numbers, integer), **dict.fromkeys(truths, truth)}
        right: dict[str, Any] = {name: checks[name](name, value) for name, value in given.items()}
        return replace(self, **right)


Places = list[tuple["Selection | None", Device]]
"""Open devices, each with how it was selected; None: the caller's own device, which stays open."""


def _local(path: str | Path | ByteSource | None) -> Path | ByteSource:
    """The path of a model's file, downloaded if need be, or where its bytes come from."""
    if isinstance(path, ByteSource):
        return path
    return Path(default_model_path()) if path is None else _file(path, "path")


def _file(path: str | Path, name: str) -> Path:
    """The path of a GGUF file, downloaded if need be; ``name`` is the argument's."""
    if not (isinstance(path, PathLike) or (isinstance(path, str) and path)):
        raise InvalidInputError(f"{name} is {brief(path)}; it must be the path of a GGUF file or a model on the hub.")
    return Path(hub.local_path(path))


def _open(path: Path | ByteSource, options: LoadOptions) -> tuple[ModelFile, Places]:
    """Open the file and the devices, side by side."""
    device = options.device
    if device is None or isinstance(device, str):
        if isinstance(path, Path):
            open_file(path)  # report a missing file before a driver starts
        with opening(device, threads=options.threads, strict=options.strict) as future:
            file = open_model(path, i2s_layout=options.i2s_layout)
            file.tokenizer  # noqa: B018
            return file, [*future.result()]
    if not hasattr(device, "compile"):
        raise InvalidInputError(
            f"device is {brief(device)}; it must be a name or an open device.",
            hint="Write several names with commas: 'cuda:0,cuda:1'.",
        )
    if options.threads is not None or options.strict is not None:
        raise InvalidInputError("threads and strict do not apply to a device that is already open.")
    return open_model(path, i2s_layout=options.i2s_layout), [(None, device)]


def _make(
    file: ModelFile, places: Places, options: LoadOptions, worker_type: type[Worker], draft: DraftLayer | None
) -> Model:
    """Load the weights onto the devices, and start what runs them."""
    context = options.context
    if context is None:
        context = context_for(file, [opened for _, opened in places], kv_dtype=options.kv_dtype)

    def load(opened: Device) -> tuple[Engine, Executable]:
        computing = registry.computing(opened.info)
        with computing():
            return open_engine(
                file,
                opened,
                context=context,
                kv_dtype=options.kv_dtype,
                max_seqs=options.max_seqs,
                step_tokens=options.step_tokens,
                deterministic=options.deterministic,
                lookup=options.prompt_lookup,
                draft=draft,
                first=computing,
            )

    loaded = side_by_side(load, [opened for _, opened in places])
    engines = [engine for engine, _ in loaded]
    replicas = [
        Replica(opened, executable, selection)
        for (selection, opened), (_, executable) in zip(places, loaded, strict=True)
    ]
    worker = worker_type(*engines, max_queue=options.max_queue, max_queue_tokens=options.max_queue_tokens)
    file.gguf.check()
    if draft is not None:
        draft.file.check()
    warm_ups = []
    for replica, engine in zip(replicas, engines, strict=True):
        executable, info = replica.executable, replica.device.info
        steps, pause = engine.usual_steps(), PAUSE
        if info.backend == "cpu" and options.max_seqs == 1:
            steps, pause = islice(steps, 1), IDLE  # packs weights that would else be packed after the first token
        elif PREPARES not in info.features or info.type not in _GPUS:
            continue
        elif options.max_seqs > 1:  # a caller with one generation at a time need not wait for larger steps
            with registry.computing(info)():
                prepare_stand_ins(executable, engine.stand_ins(), engine.device)
        if system.THREADS:
            warm_ups.append(WarmUp(executable, steps, lambda: worker.busy, engine.device, pause=pause))
    return Model(file, worker, replicas, warm_ups, deterministic=options.deterministic)


IDLE = 1.0
"""Seconds until a model on the CPU, for one sequence, packs weights while no request runs: the first request of a
command comes sooner, even on a busy machine, and that of a person later."""
_GPUS = (DeviceType.DISCRETE, DeviceType.INTEGRATED)
"""Device types that are warmed up in the background. Emulated devices are not: warming up would use all CPU cores."""
