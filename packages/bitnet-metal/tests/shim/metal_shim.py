"""Runs Metal kernels, compiled for the CPU (``metal_compile.py``), on numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from metal_compile import compiled


class ShimError(Exception):
    """A kernel did what the shim refuses; ``code`` is one of shim.h."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Library:
    """The kernels of one source.

    Args:
        path: Of :func:`compiled`.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def names(self) -> dict[str, int]:
        """Each kernel with the most threads of a threadgroup."""
        count = self._library.shim_kernels(None, None, 0)
        names, most = (ctypes.c_char_p * count)(), (ctypes.c_uint32 * count)()
        self._library.shim_kernels(names, most, count)
        return {(name or b"").decode(): n for name, n in zip(names, most, strict=True)}

    def launch(
        self,
        kernel: str,
        arguments: Sequence[npt.NDArray[np.generic] | np.generic | None],
        groups: tuple[int, int, int],
        threads: int,
        *,
        threadgroup_bytes: int = 0,
    ) -> None:
        """Run a kernel on arrays, in place, and scalars.

        Raises:
            ShimError: It did what the shim refuses.
        """
        arrays = [None if a is None else np.atleast_1d(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(arrays))(*(None if a is None else a.ctypes.data for a in arrays))
        sizes = (ctypes.c_uint64 * len(arrays))(*(0 if a is None else a.nbytes for a in arrays))
        error = ctypes.create_string_buffer(1024)
        size3 = ctypes.c_uint32 * 3
        code = self._library.shim_launch(
            kernel.encode(), pointers, sizes, len(arrays), size3(*groups), size3(threads, 1, 1),
            threadgroup_bytes, error, len(error),
        )  # fmt: skip
        if code:
            raise ShimError(code, error.value.decode())


def library(source: str, defines: Mapping[str, int | str] | None = None, *, checks: bool = True) -> Library:
    """The kernels of a source, compiled for constants."""
    return Library(compiled(source, [f"{name}={value}" for name, value in (defines or {}).items()], checks=checks))
