"""Answers of a hub that are not what they should be: malformed, endless, packed, or pointing elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from bitnet.core.hub import remote, transport
from bitnet.core.hub.errors import HubError, HubUnreachableError, ModelNotFoundError, WrongHashError
from bitnet.core.hub.names import parse
from bitnet.core.hub.pull import locate

if TYPE_CHECKING:
    from .conftest import Hub, Repo

Bitnet = Callable[..., Any]
NAME = "some-org/model"
PAGE = f"/api/models/{NAME}/revision/main"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOOD = {"rfilename": "m-i2_s.gguf", "size": 134, "blobId": COMMIT, "lfs": {"sha256": "0" * 64, "size": 9}}


def listing(*siblings: Any, **fields: Any) -> bytes:
    return json.dumps({"sha": COMMIT, "siblings": list(siblings)} | fields).encode()


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


MALFORMED = {
    "nothing": b"",
    "a page": b"<html>Welcome to the hotel's network</html>",
    "cut short": listing(GOOD)[:-9],
    "not UTF-8": b'{"sha": "\xff"}',
    "null": b"null",
    "an array": b"[1]",
    "a text": b'"text"',
    "nested deeply": b"[" * 100_000,
    "a long number": b'{"sha": ' + b"9" * 10_000 + b"}",
    "no commit": listing(GOOD, sha=None),
    "a number as the commit": listing(GOOD, sha=7),
    "a path as the commit": listing(GOOD, sha="../" * 12 + "main"),
    "no files": json.dumps({"sha": COMMIT}).encode(),
    "files as an object": listing(siblings={"a": GOOD}),
    "files as a number": listing(siblings=3),
    "a file that is null": listing(None),
    "a file that is a text": listing("m.gguf"),
    "a file without a name": listing(without("rfilename")),
    "a number as a name": listing(GOOD | {"rfilename": 5}),
    "a text as the size": listing(GOOD | {"lfs": {"sha256": "0" * 64, "size": "9"}}),
    "a negative size": listing(GOOD | {"lfs": {"sha256": "0" * 64, "size": -9}}),
    "a fraction as the size": listing(GOOD | {"lfs": {"sha256": "0" * 64, "size": 0.5}}),
    "a size beyond every disk": listing(GOOD | {"lfs": {"sha256": "0" * 64, "size": 10**30}}),
    "a size that is no number": listing(GOOD | {"lfs": {"sha256": "0" * 64, "size": float("inf")}}),
    "a list as LFS": listing(GOOD | {"lfs": [1]}),
    "a text as LFS": listing(GOOD | {"lfs": "sha256"}),
    "no name and no hash": listing({"lfs": {}}),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_listing_is_an_error_about_the_hub(hub: Hub, bitnet: Bitnet, body: bytes) -> None:
    hub.answers[PAGE] = (200, body, {})
    ran = bitnet("pull", NAME)
    assert (ran.status, ran.out) == (4, ""), ran
    assert ran.err.startswith(f"bitnet: error: {hub.url}: the listing of {NAME} "), ran
    assert ran.err.count("\n") == 1, ran


UNUSABLE = {
    "no hash": GOOD | {"lfs": {"size": 9}},
    "a hash of another length": GOOD | {"lfs": {"sha256": "0" * 63, "size": 9}},
    "a number as a hash": GOOD | {"lfs": {"sha256": 5, "size": 9}, "blobId": 5},
    "a hash that is a path": GOOD | {"lfs": {"sha256": "../../../../etc/passwd", "size": 9}},
    "a name of 300 bytes": GOOD | {"rfilename": "x" * 295 + ".gguf"},
    "a long path": GOOD | {"rfilename": "x/" * 2000 + "m.gguf"},
    "a name outside": GOOD | {"rfilename": "../m.gguf"},
    "a lone surrogate": GOOD | {"rfilename": "\ud800.gguf"},
}


@pytest.mark.parametrize("sibling", UNUSABLE.values(), ids=UNUSABLE)
def test_a_file_that_cannot_be_had(hub: Hub, sibling: dict[str, Any]) -> None:
    hub.answers[PAGE] = (200, listing(sibling), {})
    with pytest.raises(HubError) as raised:
        locate(parse(NAME))
    assert isinstance(raised.value, (ModelNotFoundError, WrongHashError, HubUnreachableError))


@cache
def gzip(size: int) -> bytes:
    """A gzip stream that unpacks to so many zeros."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    piece = bytes(1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(size >> 20)), packer.flush()])


PACKED = {"Content-Encoding": "gzip"}
ERRORS = {
    "a listing": (PAGE, 200, PACKED),
    "an error's message": (PAGE, 500, PACKED),
    "a missing model's message": (PAGE, 404, PACKED | {"X-Error-Code": "RepoNotFound"}),
    "a redirect": (PAGE, 307, PACKED | {"Location": PAGE}),
    "a file": ("/lfs/" + "0" * 64, 200, PACKED | {"Accept-Ranges": "bytes"}),
}


PEAK = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""
"""Runs a command and prints the most memory that it held. On Linux, that of a program includes what the process held
that started it, so a small one does."""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell a child's memory in this way")
@pytest.mark.parametrize(("page", "status", "headers"), ERRORS.values(), ids=ERRORS)
def test_a_gzip_bomb_takes_little_memory(
    hub: Hub, script_path: str, page: str, status: int, headers: dict[str, str]
) -> None:
    hub.answers[PAGE] = (200, listing(GOOD), {})
    hub.answers[f"/{NAME}/resolve/{COMMIT}/m-i2_s.gguf"] = (302, b"", {"Location": f"{hub.url}/lfs/" + "0" * 64})
    hub.answers[page] = (status, gzip(600 << 20), headers)
    done = subprocess.run([sys.executable, "-c", PEAK, script_path, "pull", NAME], capture_output=True, check=False)
    said = done.stderr.decode()
    assert (done.returncode, "bitnet: error: " in said, "Traceback" in said) == (4, True, False), said
    peak = int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert peak < 250e6, f"{peak / 1e6:.0f} MB"


def test_a_packed_listing_is_read(hub: Hub, make_repo: Callable[..., Repo]) -> None:
    """Some mirrors pack whatever they send."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    hub.answers[PAGE] = (200, packer.compress(listing(*[GOOD] * 1000)) + packer.flush(), PACKED)
    assert [file.size for file in remote.listing(NAME).files] == [9] * 1000


@pytest.mark.parametrize(
    ("headers", "body", "said"),
    [
        ({"Content-Encoding": "br"}, b"x", "is sent packed as 'br'"),
        ({"Content-Encoding": "gzip, gzip"}, b"x", "is sent packed as"),
        (PACKED, b"no gzip", "cannot be unpacked"),
    ],
)
def test_what_cannot_be_unpacked(hub: Hub, headers: dict[str, str], body: bytes, said: str) -> None:
    hub.answers[PAGE] = (200, body, headers)
    with pytest.raises(HubUnreachableError, match=said):
        locate(parse(NAME))


def test_a_large_listing_and_a_slow_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answers[PAGE] = (200, b" " * (remote.MAX_LISTING + 1), {})
    with pytest.raises(HubUnreachableError, match="has more than 8"):
        locate(parse(NAME))
    hub.answers[PAGE] = (200, listing(GOOD), {})
    monkeypatch.setattr(transport, "MAX_SECONDS", -1.0)
    with pytest.raises(HubUnreachableError, match="took more than"):
        locate(parse(NAME))


def test_redirects(hub: Hub) -> None:
    """A renamed model is found; a circle, another scheme and a broken address are errors."""
    moved = "/api/models/some-org/renamed/revision/main"
    hub.answers |= {PAGE: (307, b"", {"Location": moved}), moved: (200, listing(GOOD), {})}
    assert remote.listing(NAME).files[0].path == "m-i2_s.gguf"
    for place in (PAGE, "ftp://example.org/", "http://[::1", "http://127.0.0.1:1/"):
        hub.answers[PAGE] = (307, b"", {"Location": place})
        with pytest.raises(HubUnreachableError):
            remote.listing(NAME)


@pytest.mark.parametrize("body", [b"[1]", b"null", b'{"errors": [3]}', b'{"error": {"a": 1}}', b"\xff"])
def test_the_body_of_an_error_is_not_trusted(hub: Hub, body: bytes) -> None:
    hub.answers[PAGE] = (503, body, {"Content-Type": "application/json"})
    with pytest.raises(HubUnreachableError, match="answers with status 503"):
        remote.listing(NAME)
