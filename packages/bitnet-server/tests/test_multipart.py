"""Forms with files, cut into pieces anywhere; httpx writes them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator

import httpx
import pytest

from bitnet.server.request.errors import RequestError
from bitnet.server.request.multipart import MAX_PART_HEADERS, MAX_PARTS, Part, read_form

TYPE = "multipart/form-data; boundary=b"


def read(content_type: str, data: bytes, sizes: tuple[int, ...] = (1000,)) -> list[tuple[str, str | None, bytes]]:
    """The fields of a form that arrives in pieces of random sizes."""

    async def pieces() -> AsyncIterator[bytes]:
        at = 0
        while at < len(data):
            size = random.choice(sizes)
            yield data[at : at + size]
            at += size

    async def fields() -> list[tuple[str, str | None, bytes]]:
        found: list[tuple[str, str | None, bytes]] = []
        async for one in read_form(content_type, pieces()):
            if isinstance(one, Part):
                found.append((one.name, one.filename, b""))
            else:
                found[-1] = (*found[-1][:2], found[-1][2] + one)
        return found

    return asyncio.run(fields())


@pytest.mark.parametrize("_", range(50))
def test_what_was_written_is_read(_: int) -> None:
    atoms = [b"\r\n", b"--", b"\r", b"\n--", b"\r\n--", b"\0", b"b", os.urandom(5)]
    content = b"".join(random.choices(atoms, k=random.randrange(300)))
    request = httpx.Request(
        "POST", "http://x", files={"file": ("rows 1.jsonl", content)}, data={"purpose": "batch", "a[b]": "ü"}
    )
    found = read(request.headers["content-type"], request.read(), random.choice([(1,), (1, 2, 3, 50), (10_000,)]))
    assert sorted(found) == sorted(
        [("purpose", None, b"batch"), ("a[b]", None, "ü".encode()), ("file", "rows 1.jsonl", content)]
    )


def part(name: str = "x") -> str:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\nvalue\r\n'


def test_text_around_the_form_is_passed_over() -> None:
    assert read(TYPE, f"before\r\n{part()}--b--\r\nafter".encode(), (1, 2)) == [("x", None, b"value")]


@pytest.mark.parametrize(
    ("content_type", "data", "status", "why"),
    [
        ("application/json", "{}", 415, "must be multipart/form-data"),
        ("multipart/form-data", part(), 415, "with a boundary"),
        (f"multipart/form-data; boundary={'b' * 71}", part(), 415, "with a boundary"),
        ("", part(), 415, "must be multipart/form-data"),
        (TYPE, "", 400, "ends before its last boundary"),
        (TYPE, part(), 400, "ends before its last boundary"),
        (TYPE, part()[:-3], 400, "ends before its last boundary"),
        (TYPE, "--b\r\n\r\nvalue\r\n--b--", 400, "a part without a name"),
        (TYPE, "--b\r\nContent-Disposition: form-data\r\n\r\n\r\n--b--", 400, "a part without a name"),
        (TYPE, f"--b\r\nX: {'x' * 2 * MAX_PART_HEADERS}", 400, "headers are larger than"),
        (TYPE, f"--bx\r\n{part()}--b--", 400, "text after a boundary"),
        (TYPE, part() * (MAX_PARTS + 1) + "--b--", 413, "more than 16 parts"),
    ],
)
def test_what_is_no_form_is_refused(content_type: str, data: str, status: int, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        read(content_type, data.encode(), (1, 7, 100))
    assert refused.value.status == status
