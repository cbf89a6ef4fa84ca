"""What a model's process says of the model, and what it is asked besides generations."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from bitnet.core import Load
from bitnet.core.devices.select import Selection
from bitnet.core.hal import DeviceInfo
from bitnet.core.model.pooling import Pooling


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts whose vectors are wanted, as token ids; the rest as for :meth:`~bitnet.core.Model.embed`."""

    tokens: tuple[array[int], ...]
    pooling: Pooling | None
    normalize: bool


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
