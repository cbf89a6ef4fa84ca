"""Runs the application in uvicorn, with signal handling and a graceful shutdown."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from bitnet.core.cli.console import note
from bitnet.core.errors import BitNetError
from bitnet.core.support.turns import short_turns
from bitnet.server.http.app import App, access_log
from bitnet.server.http.connection import Connection
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.service import Service, Source
from bitnet.server.models.settings import Settings
from bitnet.server.models.state import State
from bitnet.server.request.errors import RequestError

BACKLOG = 1024
IDLE_SECONDS = 75
"""Seconds after which an idle connection is closed; longer than proxies keep theirs open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where to listen, and how to shut down.

    Attributes:
        drain: Seconds within which running requests must end after a signal.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    uds: Path | None = None
    root_path: str = ""
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    log_format: str = "text"
    drain: float = 30.0

    @property
    def beyond_this_machine(self) -> bool:
        if self.uds is not None or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return True

    def warn_if_open(self, settings: Settings) -> None:
        """Warn if other machines can use the server without a key."""
        if self.beyond_this_machine and not settings.api_keys:
            note(
                f"Warning: listening on {self.host} without an API key: anyone who can reach it can use it (--api-key)."
            )


class Server(uvicorn.Server):
    """A server with two-stage shutdown: the first signal lets requests finish for a while, the second ends them at
    once."""

    def __init__(self, config: uvicorn.Config, state: State, listen: Listen) -> None:
        super().__init__(config)
        self._state, self._listen = state, listen

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._listen.uds is not None:  # before requests end: another server may listen there meanwhile
            self._listen.uds.unlink(missing_ok=True)
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            for service in self._state.pool.services():
                note(_context(service))
            note(f"Serving {self._what()} at {self._address()}")
            if hasattr(signal, "SIGHUP") and not (sys.stdin is not None and sys.stdin.isatty()):
                # on a terminal, SIGHUP means that the terminal has closed, and ends the server
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._state.pool.reload_soon)

    def _what(self) -> str:
        """The models and their devices; those of a catalog are counted, as there may be many."""
        pool = self._state.pool
        catalog, loaded = pool.listing.catalog, pool.services()
        devices = ", ".join({service.devices: None for service in loaded})
        if catalog is None:
            return f"{', '.join(pool.listing.names)} on {devices}"
        count = len(pool.models)
        of = f"{count} model{'' if count == 1 else 's'} of {catalog.folder} and of the hub's cache"
        return f"{of}, {', '.join(service.names[0] for service in loaded)} on {devices}" if loaded else of

    def _address(self) -> str:
        if self._listen.uds is not None:
            return f"unix:{self._listen.uds}"
        port = self.servers[0].sockets[0].getsockname()[1]
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        return f"http{'s' if self._listen.ssl_certfile else ''}://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal, in the event loop's thread."""
        if self._state.admission.draining:
            self.force_exit = True
            self._state.shared.end_all(RequestError(503, "The server ends.", code="shutting_down"))
        else:
            self._state.admission.draining = True
            asyncio.get_running_loop().call_later(self._listen.drain, self._end_what_runs)
        self.should_exit = True

    def _end_what_runs(self) -> None:
        self._state.shared.end_all(RequestError(503, "The server is shutting down.", code="shutting_down"))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the process exits with status 0, as a requested shutdown is not an error."""
        ours = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]
        before = {number: signal.signal(number, self.handle_exit) for number in ours}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve_models(sources: Sequence[Source], settings: Settings, listen: Listen, catalog: Catalog | None = None) -> None:
    """Serve until a signal ends it.

    Meanwhile threads take short turns: those that encode prompts and the event loop would else keep the engine's
    thread, which waits for the device after each burst, from beginning the next one.

    Args:
        sources: Models that stay; the first is the default for requests that name none.
        catalog: Models that come and go; None: there are none.

    Raises:
        BitNetError: The first model cannot be loaded, listening on the address fails, or a certificate cannot be read.
    """
    _log_access(listen.log_format)
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not isinstance(record.msg, OSError)
    )  # the BitNetError says it
    listen.warn_if_open(settings)
    state = State(sources, settings, catalog)
    state.pool.open()
    try:
        config = uvicorn.Config(
            App(state, local=listen.uds is None and not listen.beyond_this_machine),
            host=listen.host,
            port=listen.port,
            uds=None if listen.uds is None else str(listen.uds),
            root_path=listen.root_path,
            ssl_certfile=listen.ssl_certfile,
            ssl_keyfile=listen.ssl_keyfile,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=int(listen.drain) + 5,
        )
        config.load()
        server = Server(config, state, listen)
        with short_turns():
            server.run()
    except OSError as error:
        raise BitNetError(f"cannot serve: {error}.", hint="Check --ssl-certfile and --ssl-keyfile.") from None
    except SystemExit as end:  # how uvicorn ends where it cannot listen
        where, option = (listen.uds, "--uds") if listen.uds else (f"{listen.host}:{listen.port}", "--host or --port")
        raise BitNetError(f"cannot listen on {where}: {_reason(end)}.", hint=f"Choose another {option}.") from None
    finally:
        state.close()


def _reason(end: SystemExit) -> str:
    """Why uvicorn could not listen: the error that it handled when it ended."""
    error = end.__context__
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    # Numbers below 0 are those of looking up a host's name, which strerror() does not know.
    return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(record.args, tuple)
        names = ("method", "path", "status", "duration")
        return json.dumps({"time": time.time(), **dict(zip(names, record.args, strict=True))})


def _log_access(style: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if style == "json" else logging.Formatter("%(asctime)s %(message)s"))
    access_log.handlers[:] = [handler]
    access_log.propagate = False
    access_log.setLevel(logging.INFO)


def _context(service: Service) -> str:
    """How long a conversation with a model may be, and how long it could be."""
    context, longest = service.model.context, service.model.config.context_length
    rest = f" of the model's {longest:,} tokens (--context sets another number)" if context < longest else " tokens"
    return f"Context of {service.names[0]}: {context:,}{rest}."
