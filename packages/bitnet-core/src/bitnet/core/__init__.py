"""Run 1.58-bit language models on whatever processor this machine has.

::

    from bitnet.core import load_model

    with load_model() as model:
        print(model.generate("What is 17 + 25?").text)

Names are imported when they are first used: ``import bitnet.core`` alone opens no driver and starts no thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet.core.api import Model
    from bitnet.core.arrays import Quantized, TernaryMatrix, quantize, ternary_matmul
    from bitnet.core.cpu.guard import guard_model_files
    from bitnet.core.devices.plugin import BackendReport
    from bitnet.core.devices.registry import list_devices
    from bitnet.core.devices.select import Selection, select_device
    from bitnet.core.embedder import Embedder
    from bitnet.core.engine import Chunk, Completion, Load, Request
    from bitnet.core.errors import (
        BitNetError,
        ContextFullError,
        DeviceError,
        DeviceLostError,
        DeviceUnavailableError,
        InvalidInputError,
        KernelCompileError,
        ModelFileError,
        OutOfMemoryError,
        QueueFullError,
        ReceiptError,
    )
    from bitnet.core.hub.errors import HubError
    from bitnet.core.loading import load_embedder, load_model, load_model_async

    __version__: str

__all__ = [
    "BackendReport",
    "BitNetError",
    "Chunk",
    "Completion",
    "ContextFullError",
    "DeviceError",
    "DeviceLostError",
    "DeviceUnavailableError",
    "Embedder",
    "HubError",
    "InvalidInputError",
    "KernelCompileError",
    "Load",
    "Model",
    "ModelFileError",
    "OutOfMemoryError",
    "Quantized",
    "QueueFullError",
    "ReceiptError",
    "Request",
    "Selection",
    "TernaryMatrix",
    "__version__",
    "guard_model_files",
    "list_devices",
    "load_embedder",
    "load_model",
    "load_model_async",
    "quantize",
    "select_device",
    "ternary_matmul",
]

_HOMES = {
    "api": ("Model",),
    "arrays": ("Quantized", "TernaryMatrix", "quantize", "ternary_matmul"),
    "embedder": ("Embedder",),
    "engine": ("Chunk", "Completion", "Load", "Request"),
    "cpu.guard": ("guard_model_files",),
    "devices.plugin": ("BackendReport",),
    "devices.registry": ("list_devices",),
    "devices.select": ("Selection", "select_device"),
    "hub.errors": ("HubError",),
    "loading": ("load_embedder", "load_model", "load_model_async"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from bitnet.core.support.system import core_version

        value: Any = core_version()
    elif name in __all__:
        value = getattr(import_module(f"bitnet.core.{_MODULE_OF.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module 'bitnet.core' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
