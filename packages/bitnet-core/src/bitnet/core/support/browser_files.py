"""Files of a browser, read in slices by the worker in which Python runs: those that a page is given, and its own."""

from __future__ import annotations

from typing import Any

import js
import numpy as np
import numpy.typing as npt
from pyodide.ffi import JsException, to_js

from bitnet.core.errors import ModelFileError
from bitnet.core.support.source import SlicedSource
from bitnet.core.support.units import size as in_units


class BlobSource(SlicedSource):
    """A ``Blob`` or a ``File`` of JavaScript, such as one that was chosen in a page.

    Args:
        blob: The file.
        name: Its name, for errors; None: what it calls itself.
    """

    def __init__(self, blob: Any, name: str | None = None) -> None:
        super().__init__(name or str(getattr(blob, "name", "file")), int(blob.size))
        self._blob, self._reader = blob, js.FileReaderSync.new()

    def read(self, offset: int, size: int) -> bytes:
        try:
            data = self._reader.readAsArrayBuffer(self._blob.slice(offset, offset + size))
        except JsException as error:
            raise ModelFileError(
                f"cannot be read any more: {error.message}", path=self.path, hint="Choose the file again."
            ) from None
        return bytes(js.Uint8Array.new(data).to_bytes())


class OpfsStore:
    """A file of the page's own, to be written (:class:`~bitnet.core.support.copying.Store`).

    Args:
        handle: A ``FileSystemSyncAccessHandle``.
        name: The file's name, for errors.
    """

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name

    @property
    def length(self) -> int:
        return int(self._handle.getSize())

    def read(self, offset: int, size: int) -> bytes:
        buffer = js.Uint8Array.new(size)
        count = self._handle.read(buffer, to_js({"at": offset}, dict_converter=js.Object.fromEntries))
        return bytes(buffer.subarray(0, count).to_bytes())

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        at = to_js({"at": offset}, dict_converter=js.Object.fromEntries)
        try:
            self._handle.write(to_js(data.data), at)
            self._handle.flush()
        except JsException as error:
            if error.name != "QuotaExceededError":
                raise
        if self.length < offset + len(data):  # Chromium may count bytes as written for which it had no room
            raise ModelFileError(
                f"the browser grants no more room; {in_units(offset)} are there.",
                path=self._name,
                hint="Remove other models of this page, or free space on the disk.",
            )

    def truncate(self, size: int) -> None:
        self._handle.truncate(size)


class OpfsSource(SlicedSource):
    """A file of the page's own, to be read.

    Args:
        handle: A ``FileSystemSyncAccessHandle``.
        name: The file's name, for errors.
    """

    def __init__(self, handle: Any, name: str) -> None:
        self._store = OpfsStore(handle, name)
        super().__init__(name, self._store.length)

    def read(self, offset: int, size: int) -> bytes:
        return self._store.read(offset, size)


def request(url: str, wanted: str) -> tuple[int, dict[str, str], bytes, str]:
    """Ask a server for a part of a file, and wait, as a browser allows in a worker only.

    Args:
        wanted: The header ``Range``.

    Returns:
        What :class:`~bitnet.core.support.ranges.Answer` has.
    """
    asked = js.XMLHttpRequest.new()
    try:
        asked.open("GET", url, False)
        asked.responseType = "arraybuffer"
        asked.setRequestHeader("Range", wanted)
        asked.send()
    except JsException as error:
        return 0, {}, b"", f"{error.message}."
    lines = (line.partition(":") for line in asked.getAllResponseHeaders().splitlines())
    headers = {name.strip().lower(): value.strip() for name, _, value in lines}
    body = js.Uint8Array.new(asked.response).to_bytes() if asked.status == 206 else b""
    return int(asked.status), headers, bytes(body), ""
