"""An open CUDA device: memory, and launches captured in graphs, on one stream of the primary context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from bitnet.core.gpu import Arg, KernelSpec, Launch
from bitnet.core.gpu.drivers.graphs import CapturingDriver, Graph
from bitnet.core.gpu.drivers.staging import Staging, StagingPool
from bitnet.core.support.cache import KernelCache
from bitnet.cuda.compiler import Compiler
from bitnet.cuda.driver import check
from bitnet.cuda.tiles import TiledMatrix

CAPTURE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
OVERLAP_CAPABILITY = (9, 0)
"""Programmatic dependent launch came with Hopper."""
SCALARS: dict[type, Any] = {np.int32: ctypes.c_int32, np.uint32: ctypes.c_uint32, np.float32: ctypes.c_float}
SWIZZLES = {
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}
"""Swizzle modes, by the bytes of a tile's row."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaBuffer:
    """Device memory at an address."""

    address: int
    nbytes: int


class CudaDriver(CapturingDriver):
    """Implements :class:`bitnet.core.gpu.Driver` with the driver API."""

    def __init__(self, ordinal: int, name: str) -> None:
        super().__init__()
        self._name = name
        self._check(driver.cuInit(0))
        self._device = self._check(driver.cuDeviceGet(ordinal))
        self._context = self._check(driver.cuDevicePrimaryCtxRetain(self._device))
        with self._entered():
            self._stream = self._check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._modules: dict[bytes, Any] = {}
        self._functions: dict[KernelSpec, Any] = {}
        self._stagings = StagingPool(self._staging, lambda staged: self._check(driver.cuEventSynchronize(staged.event)))
        self.capability = capability_of(self._device, name)
        count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.multiprocessors = int(self._check(driver.cuDeviceGetAttribute(count, self._device)))
        arch = architecture(self.capability)
        self._compiler = Compiler(name, arch, self._text(), self._version(), KernelCache())

    def alloc(self, nbytes: int) -> CudaBuffer:
        with self._entered():
            return CudaBuffer(int(self._check(driver.cuMemAlloc(nbytes))), nbytes)

    def free(self, buffer: CudaBuffer) -> None:
        with self._ended() as alive:
            if alive:
                self._check(driver.cuMemFree(buffer.address))

    def upload(self, buffer: CudaBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._entered():  # from pageable memory: when the call returns, the driver has staged everything
            to = buffer.address + offset
            self._check(driver.cuMemcpyHtoDAsync(to, array.ctypes.data, array.nbytes, self._stream))

    def download(self, buffer: CudaBuffer, array: npt.NDArray[Any], offset: int = 0) -> None:
        with self._entered():
            start = buffer.address + offset
            self._check(driver.cuMemcpyDtoHAsync(array.ctypes.data, start, array.nbytes, self._stream))
            self._check(driver.cuStreamSynchronize(self._stream))

    def fetch(self, buffer: CudaBuffer, array: npt.NDArray[Any]) -> Callable[[], None]:
        """Implements :class:`bitnet.core.gpu.Fetching` with page-locked memory, because copies to other memory
        block."""

        def copy(staged: Staging) -> None:
            self._check(driver.cuMemcpyDtoHAsync(staged.address, buffer.address, array.nbytes, self._stream))
            self._check(driver.cuEventRecord(staged.event, self._stream))

        with self._entered():
            return self._stagings.fetch(array, copy)

    def record(self, launches: Sequence[Launch]) -> Graph:
        with self._entered():
            self._load([launch.kernel for launch in launches])  # before capturing
            graph = self._capture(launches)
            try:
                return Graph(self._check(driver.cuGraphInstantiate(graph, 0)), self._dropped)
            finally:
                driver.cuGraphDestroy(graph)

    def submit(self, recording: Graph) -> None:
        with self._entered():
            self._check(driver.cuGraphLaunch(recording.handle, self._stream))

    def memory(self) -> tuple[int, int]:
        with self._entered():
            free, total = self._check(driver.cuMemGetInfo())
            return int(total), int(free)

    def close(self) -> None:
        with self._ended() as alive:
            if alive:
                for staged in self._stagings.empty():
                    self._check(driver.cuEventDestroy(staged.event))
                    self._check(driver.cuMemFreeHost(staged.address))
                self._check(driver.cuStreamDestroy(self._stream))
                for module in self._modules.values():
                    self._check(driver.cuModuleUnload(module))
            driver.cuDevicePrimaryCtxRelease(self._device)

    def _staging(self, nbytes: int) -> Staging:
        address = int(self._check(driver.cuMemAllocHost(nbytes)))
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return Staging(address, self._check(driver.cuEventCreate(flags)))

    def _capture(self, launches: Sequence[Launch]) -> Any:
        """The launches as a graph."""
        self._check(driver.cuStreamBeginCapture(self._stream, CAPTURE))
        try:
            for launch in launches:
                self._launch(launch, self._functions[launch.kernel])
        except BaseException:
            status, graph = driver.cuStreamEndCapture(self._stream)  # otherwise the stream would accept nothing else
            if status == driver.CUresult.CUDA_SUCCESS:
                driver.cuGraphDestroy(graph)
            raise
        return self._check(driver.cuStreamEndCapture(self._stream))

    def _launch(self, launch: Launch, function: Any) -> None:
        values, types = zip(*(self._argument(a) for a in launch.args), strict=True)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes, config.hStream = launch.shared, self._stream
        if launch.overlaps and self.capability >= OVERLAP_CAPABILITY:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        if launch.shared:  # 48 KiB, including what the source declares, need no opt-in
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(driver.cuFuncSetAttribute(function, limit, launch.shared))
        self._check(driver.cuLaunchKernelEx(config, function, (values, types), 0))

    def _load(self, specs: Sequence[KernelSpec]) -> None:
        """Compile the kernels that are not compiled yet, and load them onto the device."""
        cubins = self._compiler.cubins([spec for spec in specs if spec not in self._functions])
        for spec, cubin in cubins.items():
            if cubin not in self._modules:
                self._modules[cubin] = self._check(driver.cuModuleLoadData(cubin))
            function = self._check(driver.cuModuleGetFunction(self._modules[cubin], spec.entry.encode()))
            if self.capability >= OVERLAP_CAPABILITY:  # for clusters of more than 8 blocks
                allow = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                self._check(driver.cuFuncSetAttribute(function, allow, 1))
            self._functions[spec] = function

    def _argument(self, arg: Arg) -> tuple[Any, Any]:
        if isinstance(arg, CudaBuffer):
            return arg.address, ctypes.c_void_p
        if isinstance(arg, TiledMatrix):
            return self._tensor_map(arg), None
        assert isinstance(arg, np.generic)  # a scalar; every buffer here is this module's own
        return arg.item(), SCALARS[type(arg)]

    def _tensor_map(self, matrix: TiledMatrix) -> Any:
        assert isinstance(matrix.buffer, CudaBuffer)
        size, stride = driver.cuuint64_t, driver.cuuint32_t
        return self._check(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
                2,
                matrix.buffer.address,
                [size(matrix.width), size(matrix.rows)],
                [size(matrix.width)],
                [stride(matrix.tile_width), stride(matrix.tile_rows)],
                [stride(1), stride(1)],
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                SWIZZLES[matrix.tile_width],
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )

    def _enter(self) -> None:
        self._check(driver.cuCtxSetCurrent(self._context))

    def _wait(self) -> None:
        self._check(driver.cuStreamSynchronize(self._stream))

    def _destroy(self, graph: Any) -> None:
        self._check(driver.cuGraphExecDestroy(graph))

    def _text(self) -> str:
        name: bytes = self._check(driver.cuDeviceGetName(128, self._device))
        return name.split(b"\0")[0].decode()

    def _version(self) -> str:
        return str(self._check(driver.cuDriverGetVersion()))

    def _check(self, result: tuple[Any, ...]) -> Any:
        return check(self._name, result)


def capability_of(device: Any, name: str) -> tuple[int, int]:
    """Compute capability, such as ``(9, 0)``."""
    attribute = driver.CUdevice_attribute
    major = check(name, driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = check(name, driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    return int(major), int(minor)


def architecture(capability: tuple[int, int]) -> str:
    """The architecture for NVRTC: the exact one, with its specific instructions (``a``) on Hopper."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if capability == (9, 0) else ''}"
