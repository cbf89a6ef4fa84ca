"""Rows of a batch: requests that are read from a file, and answers that are written to one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet.core.cli.console import read_text
from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.support.files import replacing
from bitnet.server.request.bounded_json import TooComplexError, parse_text

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Paths that a row may ask."""
EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}'


MAX_ROWS = 50_000
"""Maximum rows of a batch of the server's, as in OpenAI's API."""


class RowError(InvalidInputError):
    """A line is no request.

    Attributes:
        line: Its number, from 1.
    """

    def __init__(self, line: int, what: str, hint: str) -> None:
        super().__init__(what, hint=hint)
        self.line = line


@dataclass(frozen=True, slots=True)
class Row:
    """A request.

    Attributes:
        id: The row's ``custom_id``, which no other row has.
        body: The request's body.
    """

    id: str
    path: str
    body: dict[str, Any]


def rows_of(lines: Iterable[str], name: object) -> Iterator[tuple[int, Row]]:
    """The requests on lines of JSON in the format of OpenAI's batches, each with its line's number, from 1.

    Args:
        name: What errors call the file.

    Raises:
        RowError: A line is no request, or has the id of an earlier one.
        InvalidInputError: There is no row.
    """
    ids: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = read_row(line, number, name)
            if row.id in ids:
                what = f"line {number} of {name} has the custom_id {brief(row.id)} of an earlier line."
                raise RowError(number, what, "Give each row one of its own, by which answers are told apart.")
            ids.add(row.id)
            yield number, row
    if not ids:
        raise InvalidInputError(f"{name} has no rows.", hint=f"Write one on each line: {EXAMPLE}")


def read_rows(file: Path) -> list[Row]:
    """The requests of a file; errors as for :func:`rows_of`, and an :class:`InvalidInputError` if it cannot be read."""
    return [row for _, row in rows_of(read_text(file).splitlines(), file)]


def read_row(line: str, number: int, name: object) -> Row:
    """The request on a line; errors as for :func:`rows_of`."""

    def wrong(what: str) -> RowError:
        return RowError(number, f"line {number} of {name} {what}.", f"A row is: {EXAMPLE}")

    try:
        found = parse_text(line)
    except TooComplexError as error:
        raise wrong(str(error)) from None
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
    return Row(id, path, body)


@dataclass(frozen=True, slots=True)
class Answered:
    """A row's answer that a file holds."""

    id: str
    status: int
    body: dict[str, Any]


def keep_answered(file: Path, wanted: Collection[str]) -> list[Answered]:
    """The answers that a file holds already. Those that failed in the server, and a last line that was cut short, are
    taken out of the file: their rows are asked again.

    Raises:
        InvalidInputError: The file is not one of answers, or has rows that are not ``wanted``.
    """
    lines = read_text(file).split("\n")
    kept: dict[str, tuple[str, Answered]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            one = Answered(found["custom_id"], found["response"]["status_code"], found["response"].get("body"))
            failed = not isinstance(one.id, str) or not isinstance(one.status, int) or one.status >= 500
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            if number == len(lines):  # it has no end of line
                continue
            raise InvalidInputError(
                f"line {number} of {file} is not an answer of a batch.", hint="Name another file with -o."
            ) from None
        if not failed:
            kept[one.id] = line, one
    if strange := kept.keys() - set(wanted):
        raise InvalidInputError(
            f"{file} has the answer to {brief(min(strange))}, which the batch does not ask.",
            hint="Name another file with -o.",
        )
    with replacing(file) as output:
        output.writelines(f"{line}\n".encode() for line, _ in kept.values())
    return [one for _, one in kept.values()]


class Answers:
    """A file that answers are added to. Whatever ends this process, an answer that was added stays.

    Args:
        take: Called with the bytes that are about to be written; raises an error if there is no room for them.

    Raises:
        InvalidInputError: The file cannot be written.
    """

    def __init__(self, file: Path, take: Callable[[int], None] = lambda count: None) -> None:
        self._take = take
        try:
            self._file = file.open("ab")
        except OSError as error:
            raise InvalidInputError(f"{file} cannot be written: {error.strerror}.") from None

    def add(self, id: str, status: int, body: dict[str, Any]) -> None:
        """Add the answer to a row."""
        response = {"status_code": status, "request_id": body.get("id", ""), "body": body}
        self._add({"custom_id": id, "response": response, "error": None})

    def add_error(self, id: str, code: str, message: str) -> None:
        """Add why a row was not asked."""
        self._add({"custom_id": id, "response": None, "error": {"code": code, "message": message}})

    def _add(self, values: dict[str, Any]) -> None:
        line = {"id": f"batch_req_{os.urandom(12).hex()}", **values}
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._take(len(data))
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        self._file.close()
