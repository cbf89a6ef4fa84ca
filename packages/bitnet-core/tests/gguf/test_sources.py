"""Model files that are read in slices: the values of a mapped file, from a server, and after faults."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import InvalidInputError, ModelFileError, load_model, load_model_async
from bitnet.core.gguf import GGUFFile
from bitnet.core.model.default import default_model_path
from bitnet.core.support import ranges, source
from bitnet.core.support.mapped import LFS_POINTER, SlicedFile
from bitnet.core.support.ranges import HttpSource
from bitnet.core.support.source import SlicedSource

DEMO = default_model_path()
DATA = DEMO.read_bytes()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print("seed", seed)
    return np.random.default_rng(seed)


class Short(SlicedSource):
    """Gives fewer bytes than it is asked for, and notes what was read."""

    def __init__(self, data: bytes, rng: np.random.Generator, size: int | None = None) -> None:
        super().__init__("short.gguf", len(data) if size is None else size)
        self.data, self.rng, self.asked = data, rng, list[tuple[int, int]]()

    def read(self, offset: int, size: int) -> bytes:
        self.asked.append((offset, size))
        return self.data[offset : offset + int(self.rng.integers(1, size + 1))]


class Server(http.server.ThreadingHTTPServer):
    """Serves files by ranges, and has the faults that a test asks for."""

    files: dict[str, bytes]
    requests: list[tuple[str, str | None]]
    tag = "one"
    ranges = True
    cut: list[int]
    """Bytes after which the next answers end."""
    statuses: list[int]
    """Statuses of the next answers."""
    extra: dict[str, str]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that needs no more has closed the connection."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted, server = self.headers["Range"], self.server
        server.requests.append((self.path, wanted))
        data = server.files.get(self.path)
        if data is None or server.statuses:
            self.send_response(404 if data is None else server.statuses.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, last = (int(text) for text in wanted.removeprefix("bytes=").split("-"))
        body = data[first : last + 1]
        headers = {"ETag": server.tag, "Content-Length": str(len(body)), **server.extra}
        if server.ranges:
            self.send_response(206)
            headers = {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(data)}"} | headers
        else:
            self.send_response(200)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: server.cut.pop(0)] if server.cut else body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(ranges, "WAITS", (0.0, 0.0))
    running.files, running.requests, running.cut, running.statuses = {"/demo.gguf": DATA}, [], [], []
    running.tag, running.ranges, running.extra = "one", True, {}
    return running


def address(server: Server, name: str = "demo.gguf") -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/{name}"


def check_same(found: GGUFFile, expected: GGUFFile) -> None:
    assert found.version == expected.version
    assert found.metadata.keys() == expected.metadata.keys()
    for key, value in expected.metadata.items():
        np.testing.assert_array_equal(found.metadata[key], value)
    assert found.tensors == expected.tensors
    for tensor in expected.tensors.values():
        np.testing.assert_array_equal(found.data(tensor), expected.data(tensor))
        begin, end = tensor.nbytes // 3, tensor.nbytes // 2
        np.testing.assert_array_equal(found.data(tensor, begin, end), expected.data(tensor)[begin:end])
    assert found.sha256() == expected.sha256()


def test_a_file_that_is_not_mapped(tmp_path: Path) -> None:
    """As in a browser."""
    path = tmp_path / "demo.gguf"
    path.write_bytes(DATA)
    file = GGUFFile(SlicedFile(path))
    check_same(file, GGUFFile(DEMO))
    file.check()
    path.write_bytes(DATA[:-1])
    with pytest.raises(ModelFileError, match="was cut short while it was in use"):
        file.check()
    (tmp_path / "empty").touch()
    with pytest.raises(ModelFileError, match="is empty"):
        SlicedFile(tmp_path / "empty")
    with pytest.raises(ModelFileError, match="is a folder"):
        SlicedFile(tmp_path)
    (tmp_path / "pointer").write_bytes(LFS_POINTER)
    with pytest.raises(ModelFileError, match="Git LFS pointer"):
        SlicedFile(tmp_path / "pointer")


@pytest.mark.parametrize("ahead", [1, 100, 1 << 20])
def test_short_reads(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, ahead: int) -> None:
    """The header is read further and further, whatever is cut by the end of what is there."""
    monkeypatch.setattr(source, "AHEAD", ahead)
    short = Short(DATA, rng)
    check_same(GGUFFile(short), GGUFFile(DEMO))
    largest = max(GGUFFile(DEMO).tensors.values(), key=lambda tensor: tensor.nbytes).nbytes
    assert max(size for _, size in short.asked) <= max(largest, source.PIECE)


def test_the_header_is_read_without_the_weights(rng: np.random.Generator) -> None:
    short = Short(DATA, rng)
    first = min(tensor.offset for tensor in GGUFFile(short).tensors.values())
    assert max(offset + size for offset, size in short.asked) <= max(2 * first, source.AHEAD) < len(DATA)


@pytest.mark.parametrize("size", [3, 20, 5000, 100_000, len(DATA) - 1])
def test_a_file_that_was_cut(tmp_path: Path, rng: np.random.Generator, size: int) -> None:
    """It is refused with the same field, offset and words as when it is mapped."""
    path = tmp_path / "short.gguf"
    path.write_bytes(DATA[:size])
    with pytest.raises(ModelFileError) as mapped:
        GGUFFile(path)
    with pytest.raises(ModelFileError) as sliced:
        GGUFFile(Short(DATA[:size], rng))
    assert str(sliced.value) == str(mapped.value).replace(str(path), "short.gguf")


def test_damaged_files_are_refused_alike(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "AHEAD", 1000)
    path, refused = tmp_path / "short.gguf", 0
    begin = min(tensor.offset for tensor in GGUFFile(DEMO).tensors.values())
    for _ in range(60):
        data = bytearray(DATA)
        for at in rng.integers(0, begin, 3):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        said = []
        for file in (path, Short(bytes(data), rng)):
            try:
                GGUFFile(file)
                said.append("")
            except ModelFileError as error:
                said.append(str(error).replace(str(path), "short.gguf"))
        assert said[0] == said[1]
        refused += bool(said[0])
    print(f"{refused} of 60 were refused")


def test_the_file_ends_early(rng: np.random.Generator) -> None:
    file = GGUFFile(Short(DATA[:-50], rng, size=len(DATA)))
    last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(ModelFileError, match=rf"short\.gguf: ends at byte {len(DATA) - 50}"):
        file.data(last)


def test_a_server(server: Server, rng: np.random.Generator) -> None:
    """Parts that are cut are gone on with where they ended."""
    server.cut = [*rng.integers(1, 200_000, 5).tolist()]
    print("cut after", server.cut)
    check_same(GGUFFile(HttpSource(address(server))), GGUFFile(DEMO))
    assert not server.cut
    assert None not in {wanted for _, wanted in server.requests}


def test_the_demo_model_from_a_server(server: Server) -> None:
    """By slices of which none is much larger than a tensor."""

    async def ask(path: Any) -> Any:
        with await load_model_async(path, device="cpu", context=256) as model:
            return (await model.chat_stream([{"role": "user", "content": "What is 17 + 25?"}], max_tokens=12)).text

    assert asyncio.run(ask(HttpSource(address(server)))) == "17 + 25 = 42."
    sizes = [int(b) - int(a) + 1 for _, w in server.requests for a, b in [str(w).removeprefix("bytes=").split("-")]]
    largest = max(GGUFFile(DEMO).tensors.values(), key=lambda tensor: tensor.nbytes).nbytes
    assert max(sizes) <= max(largest, source.AHEAD) < len(DATA)


def test_parts_beside_each_other(server: Server) -> None:
    found = HttpSource(address(server)).beside("demo.gguf")
    assert found is not None
    assert found.sha256() == hashlib.sha256(DATA).hexdigest()
    assert HttpSource(address(server)).beside("other.gguf") is None


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ({"ranges": False}, r"whole files only, no parts.*Download the file"),
        ({"statuses": [403]}, r"status 403\..*your access"),
        ({"statuses": [500] * 9}, r"broke off at byte 0: the server answers with status 500\..*goes on from there"),
        ({"cut": [0] * 9}, r"broke off at byte 0: the connection was closed"),
        ({"extra": {"Content-Range": ""}}, r"does not say how long.*Access-Control-Expose-Headers"),
        ({"extra": {"Content-Encoding": "gzip"}}, r"packed as 'gzip'"),
        ({"extra": {"Content-Range": "bytes 5-9/10"}}, r"another part"),
        ({"files": {}}, r"demo\.gguf: is not on the server\. Check the address"),
    ],
)
def test_faults_of_servers(server: Server, fault: dict[str, Any], match: str) -> None:
    for name, value in fault.items():
        setattr(server, name, value)
    with pytest.raises(ModelFileError, match=match) as raised:
        HttpSource(address(server))
    assert address(server) in str(raised.value)


def test_a_server_that_is_not_there(server: Server) -> None:
    with pytest.raises(ModelFileError, match="broke off at byte 0"):
        HttpSource("http://127.0.0.1:9/demo.gguf")
    with pytest.raises(InvalidInputError, match="must begin with http"):
        HttpSource("file:///etc/passwd")


def test_a_server_that_recovers(server: Server) -> None:
    server.statuses = [503, 429]
    assert HttpSource(address(server)).sha256() == hashlib.sha256(DATA).hexdigest()


def test_a_file_that_changes_on_the_server(server: Server) -> None:
    file = HttpSource(address(server))
    server.tag = "two"
    with pytest.raises(ModelFileError, match="has changed on the server"):
        file.sha256()


def test_an_empty_source() -> None:
    with pytest.raises(ModelFileError, match="is empty"):
        Short(b"", np.random.default_rng())


def test_a_path_and_a_source_give_the_same_tokens(rng: np.random.Generator) -> None:
    with load_model(device="cpu", context=128) as model:
        expected = model.generate("Once", max_tokens=8).tokens

    async def ask() -> Any:
        with await load_model_async(Short(DATA, rng), device="cpu", context=128) as model:
            return (await model.stream("Once", max_tokens=8)).tokens

    assert asyncio.run(ask()) == expected
