"""Forms with files (``multipart/form-data``), read as they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.message import Message

from bitnet.server.request.errors import RequestError

MAX_PART_HEADERS = 8 << 10
"""Maximum bytes of the headers of a part."""
MAX_PARTS = 16
"""Maximum parts of a form."""
MAX_BOUNDARY = 70
"""Maximum characters of a boundary, as RFC 2046 has it."""


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a field of a form.

    Attributes:
        filename: The name of its file, if it is one.
    """

    name: str
    filename: str | None


async def read_form(content_type: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[Part | bytes]:
    """The fields of a form in order: each begins with a :class:`Part`, and its bytes follow in pieces.

    Args:
        content_type: The request's header, which names the boundary.

    Raises:
        RequestError: It is not a form, or does not end as one.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > MAX_BOUNDARY:
        raise RequestError(415, "The body must be multipart/form-data with a boundary.")
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    body = _Buffer(pieces)
    async for _ in body.until(delimiter):
        pass  # what is before the first part says nothing
    for _ in range(MAX_PARTS):
        if await body.ends_here():
            return
        yield _part(await body.headers())
        async for piece in body.until(delimiter):
            yield piece
    if not await body.ends_here():
        raise RequestError(413, f"The form has more than {MAX_PARTS} parts.")


def _part(headers: bytes) -> Part:
    parsed = Message()
    for line in headers.decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            parsed["content-disposition"] = value.strip()
    name = parsed.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise _broken("has a part without a name")
    return Part(name, parsed.get_filename())


class _Buffer:
    """The body, of which little is kept at a time."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._kept = bytearray(b"\r\n")  # the first boundary may be the body's first bytes

    async def _more(self) -> None:
        async for piece in self._pieces:
            if piece:
                self._kept += piece
                return
        raise _broken("ends before its last boundary")

    async def until(self, mark: bytes) -> AsyncIterator[bytes]:
        """What is before a mark, which is passed over."""
        while (at := self._kept.find(mark)) < 0:
            if (sure := len(self._kept) - len(mark) + 1) > 0:
                piece = bytes(self._kept[:sure])
                del self._kept[:sure]
                yield piece
            await self._more()
        piece = bytes(self._kept[:at])
        del self._kept[: at + len(mark)]
        if piece:
            yield piece

    async def ends_here(self) -> bool:
        """Whether the boundary before this was the last one; the rest of its line is passed over."""
        while len(self._kept) < 2:
            await self._more()
        if self._kept.startswith(b"--"):
            return True
        if (await self._line(b"\r\n")).strip(b" \t"):
            raise _broken("has text after a boundary")
        return False

    async def headers(self) -> bytes:
        """The headers of a part and the empty line after them."""
        self._kept[:0] = b"\r\n"  # a part without headers begins with its empty line
        return await self._line(b"\r\n\r\n")

    async def _line(self, mark: bytes) -> bytes:
        while (at := self._kept.find(mark)) < 0:
            if len(self._kept) > MAX_PART_HEADERS:
                raise _broken(f"has a part whose headers are larger than {MAX_PART_HEADERS:,} bytes")
            await self._more()
        line = bytes(self._kept[:at])
        del self._kept[: at + len(mark)]
        return line


def _broken(why: str) -> RequestError:
    return RequestError(400, f"The form {why}.")
