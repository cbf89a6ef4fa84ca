"""Intel's Level Zero extension that imports host memory, so that an integrated GPU can read it in place."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any

from bitnet.level_zero.loader import LevelZero

IMPORT, RELEASE = b"zexDriverImportExternalPointer", b"zexDriverReleaseImportedPointer"


@dataclass(frozen=True, slots=True)
class HostImports:
    """The extension's functions, for one driver."""

    driver: c_void_p
    importer: Callable[..., int]
    releaser: Callable[..., int]

    def take(self, pointer: c_void_p, nbytes: int) -> bool:
        """Whether kernels may read these bytes from now on."""
        return self.importer(self.driver, pointer, nbytes) == 0

    def give_back(self, pointer: c_void_p) -> None:
        """End what :meth:`take` began."""
        self.releaser(self.driver, pointer)


def host_imports(level_zero: LevelZero, driver: c_void_p) -> HostImports | None:
    """The extension, or None if the driver lacks it."""

    def function(name: bytes, *arguments: Any) -> Any:
        found = c_void_p()
        if level_zero.status("zeDriverGetExtensionFunctionAddress", driver, name, found) or not found.value:
            return None
        return CFUNCTYPE(c_uint32, c_void_p, *arguments)(found.value)

    importer, releaser = function(IMPORT, c_void_p, c_size_t), function(RELEASE, c_void_p)
    return HostImports(driver, importer, releaser) if importer and releaser else None
