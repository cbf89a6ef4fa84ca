"""An open GPU, which compiles programs into :class:`GpuExecutable` objects and frees them when closed."""

from __future__ import annotations

import threading

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.drivers.interface import Driver
from bitnet.core.gpu.executable import GpuExecutable
from bitnet.core.gpu.lowering import Lowering
from bitnet.core.hal import DeviceInfo, MemoryInfo, Program


class GpuDevice:
    """Implements :class:`~bitnet.core.hal.Device` over a backend's driver and its lowering."""

    def __init__(self, info: DeviceInfo, driver: Driver, lowering: Lowering) -> None:
        self.info = info
        self._driver, self._lowering = driver, lowering
        self._open: list[GpuExecutable] = []
        self._lock = threading.RLock()
        self._closed = False

    def compile(self, program: Program, *, keep: bool = False) -> GpuExecutable:
        with self._lock:
            if self._closed:
                raise DeviceError("this device is closed.", device=self.info.name)
            executable = GpuExecutable(self._driver, self.info, program, self._lowering, self._open.remove, keep=keep)
            self._open.append(executable)
            return executable

    def memory(self) -> MemoryInfo:
        total, free = self._driver.memory() if not self._closed else (0, 0)
        return MemoryInfo(total, free, sum(e.context.used for e in self._open))

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                for executable in list(self._open):
                    executable.close()
                self._closed = True
                self._driver.close()
