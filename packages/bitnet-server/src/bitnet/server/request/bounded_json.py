"""JSON from clients, whose parts are counted in the bytes before anything is made of them.

So the time and memory to parse and read it are bounded: 16 MB of ``{}`` would take seconds and a gigabyte.
"""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

MAX_ITEMS = 1 << 19
"""Maximum commas outside strings: a batch of prompts as token ids fits."""
MAX_ENTRIES = 1 << 17
"""Maximum objects, arrays and members of objects, which cost far more than numbers."""
MAX_DEPTH = 128
"""Maximum levels of objects and arrays in each other."""
MAX_DIGITS = 400
"""Maximum digits of an integer: the time to read one grows with their square. The largest float has 309."""
STRIDE = 1 << 16
"""Maximum bytes to count in one go; this takes about a millisecond."""

_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEP))


class TooComplexError(ValueError):
    """JSON that has more parts than is allowed."""


class Count:
    """Counts the parts of JSON that arrives in pieces.

    What is not valid JSON is left to the parser, which stops at the first error, and so reads no more than was counted.

    Attributes:
        items: Commas outside strings.
        entries: Objects, arrays, and members of objects.
    """

    def __init__(self) -> None:
        self.items = self.entries = 0
        self._depth = 0
        self._inside = 0  # 1 inside a string
        self._left = b""  # a backslash whose character is in the next piece

    def feed(self, piece: bytes) -> None:
        """Count a piece of at most :data:`STRIDE` bytes.

        Raises:
            TooComplexError: There are too many parts.
            ValueError: It is nested too deeply, or not JSON.
        """
        outside = self._outside(self._left + piece)
        self.items += outside.count(b",")
        self.entries += outside.count(b":") + outside.count(b"{") + outside.count(b"[")
        if self.items > MAX_ITEMS:
            raise TooComplexError(f"has more than the {MAX_ITEMS:,} elements that are allowed")
        if self.entries > MAX_ENTRIES:
            raise TooComplexError(f"has more than the {MAX_ENTRIES:,} objects, lists and members that are allowed")
        if brackets := outside.translate(None, _NO_BRACKETS):
            depths = list(accumulate(map(_STEP.__getitem__, brackets), initial=self._depth))
            self._depth = depths[-1]
            if max(depths) > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
            if min(depths) < 0:
                raise ValueError("it closes more brackets than it opens")

    def _outside(self, piece: bytes) -> bytes:
        """The bytes outside strings."""
        self._left = b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, self._left = piece[:-1], b"\\"
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._inside :: 2])
        self._inside ^= (len(parts) - 1) & 1
        return outside


def parse(data: bytes | bytearray) -> Any:
    """The value of JSON that has been counted.

    Raises:
        ValueError: It is not JSON in UTF-8, or has a number with too many digits.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (at byte {error.start:,})") from None
    return _decode(text)


def parse_text(text: str) -> Any:
    """The value of JSON in a string.

    Raises:
        ValueError: It is not JSON, or has too many parts.
    """
    data = text.encode("utf-8", "surrogatepass")
    count = Count()
    for at in range(0, len(data), STRIDE):
        count.feed(data[at : at + STRIDE])
    return _decode(text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"numbers of at most {MAX_DIGITS} digits are allowed, and a value has {len(digits)} digits")
    return int(digits)


_decode = json.JSONDecoder(parse_constant=_no_constant, parse_int=_integer).decode
