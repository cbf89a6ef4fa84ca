"""What the process of a model says of it."""

from __future__ import annotations

from dataclasses import dataclass

from bitnet.core import Load
from bitnet.core.devices.select import Selection
from bitnet.core.hal import DeviceInfo


@dataclass(frozen=True, slots=True)
class Facts:
    """A model as it was loaded.

    Attributes:
        context: Maximum tokens of prompt and answer.
        cache_bytes: Bytes of its KV caches.
        selection: How its device was chosen.
        load: What runs and waits at the moment.
    """

    context: int
    cache_bytes: int
    devices: tuple[DeviceInfo, ...]
    selection: Selection | None
    load: Load
