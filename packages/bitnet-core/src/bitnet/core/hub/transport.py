"""Requests to the hub, over the library's session, with bounds on what a server may send.

The library reads whole bodies, those of errors and redirects among them, however large they become when unpacked.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bitnet.core.hub.errors import HubUnreachableError
from bitnet.core.support.units import size

TIMEOUT = 30.0
"""Seconds without data after which a connection counts as broken."""
MAX_SECONDS = 120.0
"""Seconds that a whole document may take."""
MAX_REDIRECTS = 10
_PIECE = 1 << 20
"""Maximum bytes that are unpacked at a time."""


@contextmanager
def opened(url: str, headers: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The response to a GET request, whose body has not been read; :func:`body` reads it.

    Raises:
        HubUnreachableError: There are too many redirects.
        Exception: The library's error for another status, or its HTTP client's for a broken connection
            (:func:`bitnet.core.hub.remote.answering` turns both into a HubError).
    """
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    session = get_session()
    sent = build_hf_headers() | {"Accept-Encoding": "identity"} | dict(headers or {})
    request = session.build_request("GET", url, headers=sent, timeout=TIMEOUT)
    for _ in range(MAX_REDIRECTS):
        response = session.send(request, stream=True, follow_redirects=False)
        try:
            if response.next_request is None:
                # Without its body, so that the library does not read it in search of a message.
                names = {name: value for name, value in response.headers.items() if name.lower().startswith("x-error-")}
                hf_raise_for_status(type(response)(response.status_code, headers=names, request=response.request))
                yield response
                return
            request = response.next_request
        finally:
            response.close()
    raise HubUnreachableError(f"{url} redirects more than {MAX_REDIRECTS} times.", hint="Check HF_ENDPOINT.")


def body(response: Any) -> Iterator[bytes]:
    """The body, unpacked, in pieces of a bounded size.

    Raises:
        HubUnreachableError: It is packed in a way that was not asked for, or cannot be unpacked.
    """
    packing = response.headers.get("Content-Encoding", "identity").lower()
    if packing not in ("identity", "gzip", ""):
        raise HubUnreachableError(f"{response.url} is sent packed as {packing!r}.", hint="Check HF_ENDPOINT.")
    if packing != "gzip":
        yield from response.iter_raw()
        return
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        for raw in response.iter_raw():
            yield unpacker.decompress(raw, _PIECE)
            while unpacker.unconsumed_tail:
                yield unpacker.decompress(unpacker.unconsumed_tail, _PIECE)
        yield unpacker.flush(_PIECE)
    except zlib.error as error:
        raise HubUnreachableError(f"{response.url} cannot be unpacked: {error}.", hint="Check HF_ENDPOINT.") from None


def document(url: str, most: int) -> bytes:
    """The body of a document of at most ``most`` bytes; errors as for :func:`opened` and :func:`body`.

    Raises:
        HubUnreachableError: It is larger, or takes more than :data:`MAX_SECONDS`.
    """
    end = time.monotonic() + MAX_SECONDS
    found = bytearray()
    with opened(url) as response:
        for piece in body(response):
            found += piece
            if len(found) > most:
                raise HubUnreachableError(f"{url} has more than {size(most)}.", hint="Check HF_ENDPOINT.")
            if time.monotonic() > end:
                raise HubUnreachableError(f"{url} took more than {MAX_SECONDS:g} s.", hint="Try again later.")
    return bytes(found)
