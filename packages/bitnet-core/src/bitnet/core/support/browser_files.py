"""Files of a browser, read in slices by the worker in which Python runs: those that a page is given, and its own."""

from __future__ import annotations

from typing import Any

import js
from pyodide.ffi import JsException, to_js

from bitnet.core.errors import ModelFileError
from bitnet.core.support.source import SlicedSource


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


class OpfsSource(SlicedSource):
    """A file of the page's own (OPFS).

    Args:
        handle: A ``FileSystemSyncAccessHandle``.
        name: The file's name, for errors.
    """

    def __init__(self, handle: Any, name: str) -> None:
        super().__init__(name, int(handle.getSize()))
        self._handle = handle

    def read(self, offset: int, size: int) -> bytes:
        buffer = js.Uint8Array.new(size)
        count = self._handle.read(buffer, to_js({"at": offset}, dict_converter=js.Object.fromEntries))
        return bytes(buffer.subarray(0, count).to_bytes())


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
