"""A file on a web server, read by range requests; a request that is cut is resumed where it ended."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from bitnet.core.errors import InvalidInputError, ModelFileError, brief
from bitnet.core.support.source import AHEAD, SlicedSource

MAX_SLICE = 16 << 20
"""Maximum bytes that are asked for at a time."""
TIMEOUT = 30.0
"""Seconds without data after which a connection counts as broken."""
WAITS = (0.2, 1.0, 3.0)
"""Seconds to wait before each retry after requests that brought no bytes."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Answer(NamedTuple):
    """What a server sent.

    Attributes:
        status: 0 if it cannot be reached.
        headers: By their names in lower case.
        body: As much of it as came, if the status is 206.
        reason: Why nothing came.
    """

    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""
    reason: str = ""


class HttpSource(SlicedSource):
    """A file on a web server that sends parts of files.

    Args:
        url: Its address, by HTTP or HTTPS.

    Raises:
        InvalidInputError: It is not such an address.
        ModelFileError: The server has no such file, does not send parts of files, or cannot be reached.
    """

    def __init__(self, url: str) -> None:
        if re.match("https?://[^/]", url) is None:
            raise InvalidInputError(f"the address is {brief(url)}; it must begin with http:// or https://.")
        self.url = url
        first = self._request(0, AHEAD)
        matched = _RANGE.fullmatch(first.headers.get("content-range", ""))
        if matched is None:
            raise self._error(
                "the server does not say how long the file is.",
                "A server of another site has to expose the header Content-Range (Access-Control-Expose-Headers).",
            )
        self._version = _version(first)
        super().__init__(url, int(matched[3]))
        self._begin = first.body

    def read(self, offset: int, size: int) -> bytes:
        answer = self._request(offset, min(size, MAX_SLICE))
        if _version(answer) != self._version:
            raise self._error("has changed on the server since it was opened.", "Open it again.")
        return answer.body

    def beside(self, name: str) -> HttpSource | None:
        try:
            return HttpSource(urljoin(self.url, name))
        except MissingFileError:
            return None

    def _request(self, offset: int, size: int) -> Answer:
        """A part of the file that has at least a byte."""
        for wait in (*WAITS, None):
            answer = _get(self.url, offset, size)
            if answer.status == 206 and answer.body:
                self._check(answer, offset, size)
                return answer
            if answer.status not in (0, 206, 429) and answer.status < 500:
                raise self._refused(answer)
            if wait is not None:
                time.sleep(wait)
        why = answer.reason or f"the server answers with status {answer.status}."
        raise self._error(f"the download broke off at byte {offset}: {why}", "Try again: it goes on from there.")

    def _check(self, answer: Answer, offset: int, size: int) -> None:
        found = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        packed = answer.headers.get("content-encoding", "identity")
        if packed != "identity":
            raise self._error(f"the server sends its parts packed as {brief(packed)}.", "Turn that off for models.")
        if (found and int(found[1]) != offset) or len(answer.body) > size:
            raise self._error(f"the server sends another part than that from byte {offset} on.", "Check the server.")

    def _refused(self, answer: Answer) -> ModelFileError:
        if answer.status == 200:
            hint = "Download the file, and open it from there, or use a server that supports range requests."
            return self._error("the server sends whole files only, no parts of them.", hint)
        if answer.status == 416:
            return self._error("is empty, or shorter than it was.", "Check the file on the server.")
        if answer.status in (404, 410):
            return MissingFileError("is not on the server.", path=self.url, hint="Check the address.")
        return self._error(f"the server answers with status {answer.status}.", "Check the address, and your access.")

    def _error(self, message: str, hint: str) -> ModelFileError:
        return ModelFileError(message, path=self.url, hint=hint)


class MissingFileError(ModelFileError):
    """The server has no such file."""


def _version(answer: Answer) -> tuple[str, ...]:
    """What differs when the file has changed."""
    length = answer.headers.get("content-range", "").rpartition("/")[2]
    return length, answer.headers.get("etag", ""), answer.headers.get("last-modified", "")


def _get(url: str, offset: int, size: int) -> Answer:
    """Ask for a part of a file, and wait for it."""
    wanted = f"bytes={offset}-{offset + size - 1}"
    if sys.platform == "emscripten":
        from bitnet.core.support.browser_files import request

        return Answer(*request(url, wanted))
    request = Request(url, headers={"Range": wanted, "Accept-Encoding": "identity"})  # the scheme was checked
    try:
        with urlopen(request, timeout=TIMEOUT) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            body = bytearray()
            if response.status == 206:
                with suppress(OSError, HTTPException):  # a part that is cut: what came is kept
                    while len(body) <= size and (piece := response.read(1 << 18)):
                        body += piece
            return Answer(response.status, headers, bytes(body), "the connection was closed.")
    except HTTPError as error:
        error.close()
        return Answer(error.code)
    except (OSError, HTTPException) as error:
        return Answer(0, reason=f"{getattr(error, 'reason', error)}.")
