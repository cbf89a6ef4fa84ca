"""The logs of a replica's process."""

from __future__ import annotations

import logging


def share_log() -> None:
    """Have bitnet's messages, the access log's among them, go where Serve's go: there, each has its request's id."""
    serve, ours = logging.getLogger("ray.serve"), logging.getLogger("bitnet")
    ours.handlers[:] = serve.handlers
    ours.propagate = False
    ours.setLevel(logging.INFO)
