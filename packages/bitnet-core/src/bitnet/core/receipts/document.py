"""The receipt as a document: canonical bytes, digest, reading and writing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bitnet.core.errors import InvalidInputError, ReceiptError, brief
from bitnet.core.support.files import read_bytes, replacing

SCHEMA_VERSION = "2.0.0"

LARGEST = 1 << 22
"""Maximum bytes of a receipt; typical are 4,000, plus about 8 per token of the answer."""

_LONGEST_NUMBER = 40  # digits; a seed has up to 20
_SEALS = ("digest", "signature")
_NUMBERS = re.compile(r"\[\n\s+(\d+(?:,\n\s+\d+)*)\n\s+\]")  # JSON strings contain no raw newlines


def canonical(receipt: Mapping[str, Any]) -> bytes:
    """The bytes that are digested and signed: the receipt without digest and signature, as ASCII JSON with sorted keys
    and no blanks."""
    rest = {name: value for name, value in receipt.items() if name not in _SEALS}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(receipt: Mapping[str, Any]) -> str:
    """The digest a receipt must carry."""
    return f"sha256:{hashlib.sha256(canonical(receipt)).hexdigest()}"


def text_sha256(text: str) -> str:
    """Hexadecimal SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def tokens_sha256(tokens: Sequence[int]) -> str:
    """Hexadecimal SHA-256 of token ids, each as 4 little-endian bytes."""
    return hashlib.sha256(np.asarray(tokens, "<u4").tobytes()).hexdigest()


def write(path: str | Path, receipt: Mapping[str, Any]) -> None:
    """Write a receipt as JSON, with lists of numbers on one line. If that fails, an existing file is left unchanged.

    Raises:
        BitNetError: The file cannot be written.
    """
    with replacing(Path(path)) as out:
        text = json.dumps(receipt, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        text = _NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
        out.write(text.encode("utf-8", "surrogatepass"))  # a path may contain bytes that are not valid text


def load(path: str | Path) -> Any:
    """Read a receipt's JSON without checking its contents.

    Raises:
        InvalidInputError: The file cannot be read.
        ReceiptError: It is not JSON.
    """
    try:
        data = read_bytes(Path(path), LARGEST)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"{path} cannot be read: {reason}.", hint="Check the path.") from None
    if len(data) > LARGEST:
        raise ReceiptError(f"{path} is not a receipt: it has more than {LARGEST} bytes.")
    try:
        return json.loads(data, parse_int=_integer, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except RecursionError:
        raise ReceiptError(f"{path} is not a receipt: it is nested too deeply.") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError too
        raise ReceiptError(f"{path} is not a receipt: {error}.") from None


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"the name {brief(name)} occurs twice in one object")
        made[name] = value
    return made
