"""A hub of our own, in a thread: the part of the Hugging Face Hub's protocol that downloads use, and its faults."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from bitnet.core.hub import download

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """A model on the hub. Large files are LFS objects, as on the real one; their bytes come from another host."""

    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    claimed: dict[str, int] = field(default_factory=dict)
    """Sizes that the hub tells, where they are not the true ones."""


@dataclass
class Hub:
    """What the server has and does.

    Attributes:
        token: The only one that it knows.
        cuts: For each coming transfer of an LFS object, the bytes after which the connection ends; then whole ones.
        stall: Bytes after which a transfer waits for ``go_on``.
        ranges: Whether ``Range`` is understood.
        flip: Position of a byte that arrives changed.
        answers: Status, body and headers in place of a page, by its path.
        asked: Method, path and ``Range`` of each request so far.
    """

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    token: str = "hf_right"
    cuts: list[int] = field(default_factory=list)
    stall: int | None = None
    go_on: threading.Event = field(default_factory=threading.Event)
    ranges: bool = True
    flip: int | None = None
    answers: dict[str, tuple[int, bytes, dict[str, str]]] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def transfers(self) -> list[str | None]:
        """``Range`` of each request for an LFS object's bytes."""
        return [asked_range for method, path, asked_range in self.asked if method == "GET" and path.startswith("/lfs/")]


def is_lfs(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors", ".bin"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def handle(self) -> None:
        with suppress(ConnectionError):  # the other side may end at any time
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if path in self.hub.answers:
            self._end(*self.hub.answers[path])
        elif self.headers.get("Authorization") == "Bearer hf_revoked":
            self._end(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main)?", path):
            self._listing(found[1])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            self._object(found[1])
        else:
            self._end(404, b"no such page")

    def _repo(self, name: str) -> Repo | None:
        if name not in self.hub.repos:
            self._end(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        return self.hub.repos.get(name)

    def _listing(self, name: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        siblings = []
        for path, data in repo.files.items():
            size = repo.claimed.get(path, len(data))
            sibling: dict[str, Any] = {"rfilename": path, "size": size, "blobId": git_sha1(data)}
            if is_lfs(path):
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 134}
            siblings.append(sibling)
        answer = {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "gated": repo.gated}
        self._end(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        given = self.headers.get("Authorization")
        if repo.gated and given != f"Bearer {self.hub.token}":
            self._end(401 if given is None else 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif revision not in ("main", repo.commit):
            self._end(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path not in repo.files:
            self._end(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
        else:
            data, headers = repo.files[path], {"X-Repo-Commit": repo.commit}
            if not is_lfs(path):
                self._end(200, data, headers | {"ETag": f'"{git_sha1(data)}"'})
                return
            sha256, port = hashlib.sha256(data).hexdigest(), urlsplit(self.hub.url).port
            headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data)), "ETag": f'"{git_sha1(data)}"'}
            self._end(302, b"", headers | {"Location": f"http://localhost:{port}/lfs/{sha256}"})

    def _object(self, sha256: str) -> None:
        """The bytes, from where they are stored; that place must not see the hub's token."""
        if "Authorization" in self.headers:
            self._end(400, b"two ways to authenticate")
            return
        stored = (data for repo in self.hub.repos.values() for data in repo.files.values())
        data = bytearray(next(data for data in stored if hashlib.sha256(data).hexdigest() == sha256))
        if self.hub.flip is not None:
            data[self.hub.flip] ^= 1
        begin, status, headers = 0, 200, {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"}
        if self.hub.ranges and (asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            begin, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._end(status, bytes(data[begin:]), headers, cut=self.hub.cuts.pop(0) if self.hub.cuts else None)

    def _end(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and self.hub.stall is not None and "Accept-Ranges" in (headers or {}):
            self.wfile.write(body[: self.hub.stall])
            self.hub.go_on.wait(60)
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The hub that HF_ENDPOINT names, with an empty cache; in this process and those it starts."""
    from huggingface_hub import constants

    class Bound(Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    url = f"http://127.0.0.1:{server.server_port}"
    Bound.hub = Hub(url)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "hf"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(home))
    # The library reads its variables when it is imported, which another test may have done.
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(download, "WAITS", (0.0, 0.01))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield Bound.hub
    Bound.hub.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    def forbid() -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    return forbid


@pytest.fixture
def cache(hub: Hub, tmp_path: Path) -> Path:
    """Where the cache is."""
    return tmp_path / "hf" / "hub"


@pytest.fixture
def make_repo() -> type[Repo]:
    return Repo


@pytest.fixture
def convert_folder() -> Any:
    """The class of the model folders that tests of conversion make."""
    path = Path(__file__).parents[2] / "convert" / "conftest.py"
    spec = importlib.util.spec_from_file_location("convert_folders", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Folder
