"""``/devices``: the output of ``bitnet devices --json`` on this machine, and the device that the server uses."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from weakref import WeakKeyDictionary

from bitnet.core.devices.document import backend_document, look
from bitnet.server.models.service import Service
from bitnet.server.models.shared import Shared
from bitnet.server.request.call import Call

FRESH_SECONDS = 10.0
"""Seconds for which a result is reused, as each check runs a kernel on every device beside running generations."""


class Looker:
    """Shares one check at a time among all requests."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._found: list[dict[str, Any]] = []
        self._until = 0.0

    async def backends(self, service: Service) -> list[dict[str, Any]]:
        async with self._lock:
            if time.monotonic() >= self._until:
                self._found = await service.shared.in_thread(_backends)
                self._until = time.monotonic() + FRESH_SECONDS
            return self._found


_lookers: WeakKeyDictionary[Shared, Looker] = WeakKeyDictionary()


def _backends() -> list[dict[str, Any]]:
    reports, proofs = look()
    return [backend_document(report, proofs) for report in reports]


async def devices(service: Service, call: Call) -> None:
    """Backends and devices; ``selected`` is the device that the server's model runs on."""
    backends = await _lookers.setdefault(service.shared, Looker()).backends(service)
    model = service.model
    summary = f"The model runs on {model.device.name}." if model.selection is None else model.selection.summary
    await call.reply({"selected": model.device.name, "summary": summary, "backends": backends})
