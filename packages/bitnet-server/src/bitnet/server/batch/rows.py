"""Rows of a batch: requests that are read from a file, and answers that were written to one before."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet.core.cli.console import read_text
from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.support.files import replacing

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Paths that a row may ask."""
EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}'


@dataclass(frozen=True, slots=True)
class Row:
    """A request.

    Attributes:
        id: The row's ``custom_id``, which no other row has.
        body: The request's body, without ``model``.
    """

    id: str
    path: str
    body: dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    """The requests of a file of JSON lines in the format of OpenAI's batches.

    Raises:
        InvalidInputError: It cannot be read, has no row, or a line is no request; the error names the line.
    """
    rows: dict[str, Row] = {}
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if line.strip():
            row = _row(line, f"line {number} of {file}")
            if row.id in rows:
                same = f"line {number} of {file} has the custom_id {brief(row.id)} of an earlier line."
                raise InvalidInputError(same, hint="Give each row one of its own, by which answers are told apart.")
            rows[row.id] = row
    if not rows:
        raise InvalidInputError(f"{file} has no rows.", hint=f"Write one on each line: {EXAMPLE}")
    return list(rows.values())


def _row(line: str, where: str) -> Row:
    def wrong(what: str) -> InvalidInputError:
        return InvalidInputError(f"{where} {what}.", hint=f"A row is: {EXAMPLE}")

    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise wrong("is not JSON") from None
    if not isinstance(found, dict):
        raise wrong("is not a JSON object")
    id, path, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(id, str) or not id:
        raise wrong("has no custom_id, a text that tells rows apart")
    if found.get("method", "POST") != "POST":
        raise wrong(f"has the method {brief(found['method'])}; it must be POST")
    if path not in PATHS:
        raise wrong(f"has the url {brief(path)}; it must be one of {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise wrong("has no body, the JSON object to send")
    if body.get("stream"):
        raise wrong("asks for a stream, which a file cannot hold: leave stream out")
    return Row(id, path, {name: value for name, value in body.items() if name != "model"})


def keep_answered(file: Path, wanted: Collection[str]) -> set[str]:
    """The ids of the rows that a file of answers holds already. Those that failed in the server, and a last line that
    was cut short, are taken out of the file: their rows are asked again.

    Raises:
        InvalidInputError: The file is not one of answers, or has rows that are not ``wanted``.
    """
    lines = read_text(file).split("\n")
    kept: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            id, status = found["custom_id"], found["response"]["status_code"]
            failed = not isinstance(id, str) or not isinstance(status, int) or status >= 500
        except (ValueError, RecursionError, TypeError, KeyError):
            if number == len(lines):  # it has no end of line
                continue
            raise InvalidInputError(
                f"line {number} of {file} is not an answer of a batch.", hint="Name another file with -o."
            ) from None
        if not failed:
            kept[id] = line
    if strange := set(kept) - set(wanted):
        raise InvalidInputError(
            f"{file} has the answer to {brief(min(strange))}, which the batch does not ask.",
            hint="Name another file with -o.",
        )
    with replacing(file) as output:
        output.write("".join(f"{line}\n" for line in kept.values()).encode())
    return set(kept)


class Answers:
    """A file that answers are added to. Whatever ends this process, an answer that :meth:`add` has added stays.

    Raises:
        InvalidInputError: The file cannot be written.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._file = file.open("ab")
        except OSError as error:
            raise InvalidInputError(f"{file} cannot be written: {error.strerror}.") from None

    def add(self, row: Row, status: int, body: dict[str, Any]) -> None:
        response = {"status_code": status, "request_id": body.get("id", ""), "body": body}
        line = {"id": f"batch_req_{os.urandom(12).hex()}", "custom_id": row.id, "response": response, "error": None}
        self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
