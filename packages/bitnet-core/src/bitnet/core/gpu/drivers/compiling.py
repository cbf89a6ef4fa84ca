"""Compiles programs, in parallel and through the kernel cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from bitnet.core.errors import KernelCompileError
from bitnet.core.support.cache import KernelCache
from bitnet.core.support.log import logger
from bitnet.core.support.system import usable_cpus

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Way(Generic[Made]):
    """One way to build a kernel's program.

    Attributes:
        label: Name of the program, for the log and for progress.
        key: Key of its entry in the kernel cache; None: not cached.
        build: Compiles it; returns the program and the bytes to cache. Raises KernelCompileError.
        load: Makes the program from cached bytes; returns None if the driver refuses them.
        name: Name of this way in errors, if there is more than one.
    """

    label: str
    key: str | None
    build: Callable[[], tuple[Made, bytes]]
    load: Callable[[bytes], Made | None]
    name: str = ""


def compiled(kernels: KernelCache, units: Mapping[Key, Sequence[Way[Made]]]) -> dict[Key, Made]:
    """Build the programs of some units, each by the first of its ways that succeeds.

    Cached programs are loaded sequentially, because threads that mostly hold the GIL would only wait for each other.
    The rest is compiled in parallel, as compilers release the GIL.

    Raises:
        KernelCompileError: No way builds one of the programs. Its log has the output of each way.
    """
    kept = {key: _kept(kernels, ways) for key, ways in units.items()}
    made = compile_all(lambda key: _make(kernels, units[key]), [key for key, found in kept.items() if found is None])
    return {key: made[key] if found is None else found for key, found in kept.items()}


def _kept(kernels: KernelCache, ways: Sequence[Way[Made]]) -> Made | None:
    for way in ways:
        payload = kernels.get(way.key) if way.key else None
        made = way.load(payload) if payload is not None else None
        if made is not None:
            return made
    return None


def _make(kernels: KernelCache, ways: Sequence[Way[Made]]) -> Made:
    failed: list[tuple[str, KernelCompileError]] = []
    for way in ways:
        start = time.perf_counter()
        try:
            made, payload = way.build()
        except KernelCompileError as error:
            failed.append((way.name, error))
            continue
        for name, why in failed:
            logger.warning("%s: %s does not compile %s: %s", why.device, way.label, name, why.log)
        if way.key:
            kernels.put(way.key, payload, label=way.label, seconds=time.perf_counter() - start)
        return made
    _, last = failed[-1]
    if not ways[-1].name:
        raise last
    log = "\n".join(f"{name}: {why.log}" for name, why in failed)
    raise KernelCompileError(f"{ways[0].label} does not compile.", device=last.device, log=log, hint=last.hint)


def compile_all(compile_one: Callable[[Key], Made], keys: Collection[Key]) -> dict[Key, Made]:
    """Call ``compile_one`` for each key, in one thread per processor that this process may use.

    For compilers that release the GIL. After an error, no further compilation starts; the error is raised once the
    running ones have ended.
    """
    distinct = list(dict.fromkeys(keys))
    workers = min(len(distinct), usable_cpus())
    if workers <= 1:
        return {key: compile_one(key) for key in distinct}
    with ThreadPoolExecutor(workers, "compile") as pool:
        futures = {key: pool.submit(compile_one, key) for key in distinct}
        try:
            return {key: future.result() for key, future in futures.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
