"""Ports for servers that are told theirs before they listen."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 32_000
"""Below those that systems give to clients and to whoever asks for any port: Linux begins at 32,768, others at 49,152.
Such a port could be another program's by the time a server listens there."""


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens."""
    while True:
        port = random.randrange(FIRST, LAST)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
