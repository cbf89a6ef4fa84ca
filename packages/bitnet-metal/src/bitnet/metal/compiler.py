"""Compiles Metal sources to pipelines of one device.

bitnet's kernel cache holds the pipelines (:mod:`bitnet.metal.archive`). macOS caches the intermediate code by itself,
by source and system.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSources, KernelSpec
from bitnet.core.gpu.programs import Compiler, Programs, Source
from bitnet.metal.archive import Archive
from bitnet.metal.objc import Objc

SOURCES = KernelSources(
    "bitnet.metal", "metal", ending=".metal", common="common.metal", entry=r"^\[\[kernel.*\]\] void (\w+)\("
)
LANGUAGE = 2 << 16 | 4
"""MTLLanguageVersion2_4, of macOS 12."""
WIDTH = 32
"""Threads of a simdgroup, on which the kernels rely."""


class Kernel(NamedTuple):
    """What a pipeline is made of: a kernel, its threadgroups' threads, and whether indirect commands may run it."""

    spec: KernelSpec
    threads: int
    indirect: bool


class Pipelines:
    """The kernels of one device, compiled on first use.

    Args:
        device: The MTLDevice.
        name: The device's name in errors.
        archive: The cache of pipelines, owned by the caller.
    """

    def __init__(self, objc: Objc, device: int, name: str, archive: Archive) -> None:
        self._objc, self._device, self._name = objc, device, name
        self._archive = archive
        self._owned: list[int] = []
        self._pipelines: dict[Kernel, int] = {}
        self._programs = Programs(name, SOURCES, [Compiler(self._library, lambda _, kept: None, identity=None)])

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compile the kernels that are not compiled yet.

        Raises:
            KernelCompileError: A source does not compile, or does not support so many threads.
        """
        missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self._pipelines]
        self._programs.prepare([kernel.spec for kernel in missing])
        for kernel in missing:
            self._pipelines[kernel] = self._pipeline(kernel)
        self._archive.save()

    def __getitem__(self, kernel: Kernel) -> int:
        """The prepared MTLComputePipelineState of a kernel."""
        return self._pipelines[kernel]

    def close(self) -> None:
        """Release all objects."""
        for owned in (*self._pipelines.values(), *self._owned):
            self._objc.release(owned)
        self._pipelines.clear()
        self._owned.clear()

    def _library(self, source: Source) -> tuple[int, bytes]:
        """The MTLLibrary of a source with its constants."""
        objc = self._objc
        options = (option.removeprefix("-D").replace("=", " ", 1) for option in source.options)
        text = "".join(f"#define {option}\n" for option in options) + source.text
        error = ctypes.c_void_p()
        with objc.pool():
            wanted = objc.made("MTLCompileOptions")
            try:
                objc.send(wanted, "setFastMathEnabled:", False)
                objc.send(wanted, "setLanguageVersion:", LANGUAGE)
                made = objc.send(
                    self._device, "newLibraryWithSource:options:error:", objc.string(text), wanted, ctypes.byref(error)
                )
            finally:
                objc.release(wanted)
            if not made:
                raise self._failed(f"{source.file}.metal does not compile.", error)
        self._owned.append(made)
        return made, b""

    def _pipeline(self, kernel: Kernel) -> int:
        objc, error, spec = self._objc, ctypes.c_void_p(), kernel.spec
        with objc.pool():
            function = objc.send(self._programs[spec], "newFunctionWithName:", objc.string(spec.entry))
            if not function:
                raise KernelCompileError(f"{spec.file}.metal has no kernel {spec.entry}.", device=self._name, log="")
            wanted = objc.made("MTLComputePipelineDescriptor")
            try:
                objc.send(wanted, "setComputeFunction:", function)
                objc.send(wanted, "setSupportIndirectCommandBuffers:", kernel.indirect)
                made = self._archive.pipeline(wanted, error)
            finally:
                objc.release(wanted)
                objc.release(function)
            if not made:
                raise self._failed(f"{spec.entry} makes no pipeline.", error)
        most, width = (objc.send(made, s) for s in ("maxTotalThreadsPerThreadgroup", "threadExecutionWidth"))
        if most < kernel.threads or width != WIDTH:
            objc.release(made)
            log = f"It takes {most} threads by simdgroups of {width}; {kernel.threads} by {WIDTH} are needed."
            raise KernelCompileError(f"{spec.entry} does not fit this GPU.", device=self._name, log=log)
        return made

    def _failed(self, what: str, error: ctypes.c_void_p) -> KernelCompileError:
        log = self._objc.text(self._objc.send(error.value, "localizedDescription")) if error.value else ""
        return KernelCompileError(what, device=self._name, log=log)
