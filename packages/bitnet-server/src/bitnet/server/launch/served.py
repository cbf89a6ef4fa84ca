"""A server of its own for one client: a process that ends with the client."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import httpx

from bitnet.core.errors import BitNetError
from bitnet.server.launch.clients import KEY, Endpoint

_READY = re.compile(r"Serving .* at (\S+)$")
_KEPT_LINES = 20
_END_SECONDS = 10.0


class ServerOutput:
    """What a server writes: shown until it is ready, then kept.

    Attributes:
        last: Its last lines.
        address: Where it listens; None: nowhere yet.
    """

    def __init__(self, stream: IO[str], show: Callable[[str], None]) -> None:
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)
        self.address: str | None = None
        self._stream, self._show = stream, show
        self._known = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> str | None:
        """Where the server listens; None: it ended before it did."""
        self._known.wait()
        return self.address

    def _read(self) -> None:
        for line in self._stream:
            self.last.append(line.rstrip())
            if self.address is None:
                self._show(self.last[-1])
                if found := _READY.search(self.last[-1]):
                    self.address = found[1]
                    self._known.set()
        self._known.set()


@contextmanager
def served(arguments: Sequence[str], show: Callable[[str], None]) -> Iterator[Endpoint]:
    """In this context, ``bitnet serve`` runs with these arguments, at a free port of this machine, behind a new key.

    Ctrl-C does not reach it, as the client answers that.

    Args:
        show: Shows a line of the server while it starts, and its last lines if it ends before the client.

    Raises:
        BitNetError: The server ended before it listened; it has said why.
    """
    key = secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "bitnet.core", "serve", *arguments, "--port", "0", "--any-model"]
    windows = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", None)
    apart: dict[str, Any] = {"start_new_session": True} if windows is None else {"creationflags": windows}
    process = subprocess.Popen(
        command,
        env={**os.environ, KEY: key},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        **apart,
    )
    try:
        assert process.stderr is not None
        output = ServerOutput(process.stderr, show)
        address = output.wait()
        if address is None:
            raise BitNetError("the server has not started; the lines above say why.")
        yield _described(address, key)
        if process.poll() is not None:
            for line in output.last:
                show(line)
            raise BitNetError(f"the server ended before the client, with status {process.returncode}.")
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _described(address: str, key: str) -> Endpoint:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=address, headers=headers, timeout=60, trust_env=False) as client:
        (model, *_) = client.get("/v1/models").raise_for_status().json()["data"]
    return Endpoint(address, key, model["id"], model["max_model_len"])
