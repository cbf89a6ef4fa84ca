"""Caches compiled pipelines in bitnet's kernel cache, as one MTLBinaryArchive per device and macOS build.

Archives are optional: if anything goes wrong with one, a line is logged and the pipelines are compiled.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from pathlib import Path

from bitnet.core import __version__
from bitnet.core.support.cache import KernelCache
from bitnet.core.support.log import logger
from bitnet.metal.objc import Objc

FAIL_ON_MISS = 1 << 2
"""MTLPipelineOptionFailOnBinaryArchiveMiss."""
MAKE = "newComputePipelineStateWithDescriptor:options:reflection:error:"


class Archive:
    """The archive of one device. Its caller holds a lock.

    Args:
        device: The MTLDevice.
        name: The device's name in the log.
        gpu: The GPU's name.
        system: Version and build of macOS: an archive is valid only for these.
    """

    def __init__(self, objc: Objc, device: int, name: str, *, gpu: str, system: str) -> None:
        self._objc, self._device, self._name = objc, device, name
        self._cache = KernelCache()
        self._key = self._cache.key(
            source="MTLBinaryArchive", device=gpu, driver=system, options=__version__, compiler=""
        )
        self._folder = tempfile.TemporaryDirectory(prefix="bitnet-metal-")
        """Where the archive that Metal reads lies, as long as Metal may."""
        self._array = 0
        """The NSArray that descriptors take; 0 where there is no archive."""
        self._handle, self._new, self._seconds = 0, 0, 0.0
        kept = self._cache.get(self._key)
        with objc.pool():
            if kept:
                Path(self._file("kept")).write_bytes(kept)
                self._open(self._file("kept"))
            if not self._handle:
                self._open(None)
        if self._handle:
            self._array = objc.array([self._handle])

    def pipeline(self, wanted: int, error: ctypes.c_void_p) -> int | None:
        """The new MTLComputePipelineState of a descriptor, the caller's: from the archive, or compiled into it.

        ``error`` is its NSError, in the pool around, where there is none.
        """
        objc, start = self._objc, time.perf_counter()
        if self._array:
            objc.send(wanted, "setBinaryArchives:", self._array)
            found = objc.send(self._device, MAKE, wanted, FAIL_ON_MISS, None, ctypes.byref(error))
            if found:
                return int(found)
            if objc.send(self._handle, "addComputePipelineFunctionsWithDescriptor:error:", wanted, ctypes.byref(error)):
                self._new += 1
            else:
                self._give_up("takes no pipeline", error)
                objc.send(wanted, "setBinaryArchives:", None)
        made = objc.send(self._device, MAKE, wanted, 0, None, ctypes.byref(error))
        self._seconds += time.perf_counter() - start
        return int(made) if made else None

    def save(self) -> None:
        """Save what was compiled since the last call."""
        if not (self._new and self._array):
            return
        objc, error, path = self._objc, ctypes.c_void_p(), self._file("new")
        with objc.pool():
            if not objc.send(self._handle, "serializeToURL:error:", self._url(path), ctypes.byref(error)):
                self._give_up("cannot be written", error)
                return
        payload = Path(path).read_bytes()
        self._cache.put(self._key, payload, label=f"{self._new} pipelines", seconds=self._seconds)
        self._new, self._seconds = 0, 0.0

    def close(self) -> None:
        """Release all objects."""
        self._release()
        self._folder.cleanup()

    def _file(self, name: str) -> str:
        return str(Path(self._folder.name, f"{name}.metallib"))

    def _url(self, path: str) -> int:
        return int(self._objc.send(self._objc.class_named("NSURL"), "fileURLWithPath:", self._objc.string(path)))

    def _open(self, path: str | None) -> None:
        """Open the archive of a file; a new one for None."""
        objc, error = self._objc, ctypes.c_void_p()
        wanted = objc.made("MTLBinaryArchiveDescriptor")
        try:
            if path:
                objc.send(wanted, "setUrl:", self._url(path))
            made = objc.send(self._device, "newBinaryArchiveWithDescriptor:error:", wanted, ctypes.byref(error))
        finally:
            objc.release(wanted)
        if made:
            self._handle = int(made)
        else:
            self._give_up("is not used" if path else "cannot be made", error)

    def _give_up(self, what: str, error: ctypes.c_void_p) -> None:
        objc = self._objc
        said = objc.text(objc.send(error.value, "localizedDescription")) if error.value else "no reason given"
        logger.warning("%s: the archive of compiled pipelines %s: %s", self._name, what, said)
        self._release()

    def _release(self) -> None:
        self._objc.release(self._array)
        self._objc.release(self._handle)
        self._array = self._handle = 0
