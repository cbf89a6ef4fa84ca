"""How long a layer of 2B4T's shape takes on one GPU with its weights in shared memory: the chain of its phases.

    python tools/bench_chain.py
    python tools/bench_chain.py cuda:1

One launch computes the same layer again and again for one token, behind 511 cached positions, in a block on each
multiprocessor. Weights and cache are in shared memory before the first layer begins and stay there, so what is left is
the time of dependent work and of waiting. There are two schedules: bench_chain_grid.cu and bench_chain_clusters.cu.

Each is launched with a trace first, and every operation of every layer is compared with numpy (chain_layer.py). The
launches that are timed must then end with the same bits. A wait inside a kernel is given up after about a second, and
its place reported. Needs compute capability 9.0 and a GPU that nobody else uses. Prints tables in Markdown: the time of
a layer, from launches of two lengths, and of each phase, from stamps of the clock in a launch of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import chain_layer
from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.gpu.sources import INCLUDE
from bitnet.core.hal import ProbeStatus
from bitnet.cuda.backend import CudaBackend
from chain_layer import CLUSTER, HIDDEN, Floats, Layer
from running import run_tool

TOOLS, KERNELS = Path(__file__).parent, Path(__file__).parents[1] / "kernels" / "cuda"
HEADERS = ("common.cuh", "hopper.cuh", "attention.cuh", "cache.cuh", "attention_split.cuh")
WARPS, SHORT, LONG, ROUNDS = 16, 30, 90, 20
TIMED, STAMPED, TRACED = 0, 1, 2
STAMPS = 17
NAN = 0x7FC00000
STOP = 9.0
"""µs a layer at a context of 512 above which a persistent step is not built."""
MAX_CLUSTERS, MIN_CLUSTERS = 8, 6
FAILURE = 32 * (1 + chain_layer.KV_HEADS)
"""Index of the counter that has a bit for the place of each wait that was given up."""


class WrongResult(DeviceError):
    """A kernel computes something else than the layer, or waits for what does not come."""


@dataclass(frozen=True)
class Schedule:
    """One way to compute the layer.

    Attributes:
        phases: What lies between a stamp and the next one. A name that begins with "wait" is time for which the last
            block waits; of the others, the slowest block counts.
    """

    name: str
    cluster: int
    phases: tuple[str, ...]


GRID = Schedule(
    "grid",
    0,
    (
        "norm and codes of x",
        "qkv",
        "wait for all blocks",
        "q and k turned, attention to a share of the positions",
        "wait for the head's blocks",
        "shares merged",
        "wait for all blocks",
        "attention read, norm and codes",
        "o",
        "wait for all blocks",
        "o read and added, norm and codes",
        "gate and up",
        "wait for all blocks",
        "gated values read, norm and codes",
        "down",
        "wait for all blocks",
        "down read and added",
    ),
)
CLUSTERS = Schedule(
    "clusters",
    CLUSTER,
    (
        "norm and codes of x",
        "qkv, q and k turned and sent",
        "wait for q, k and v of the cluster",
        "attention to 32 positions, sent",
        "wait for the cluster's parts",
        "merged and sent, scalars stored",
        "wait for all blocks, scalars read",
        "codes of attention",
        "o, sums added",
        "wait for all blocks",
        "sums read and added, norm and codes",
        "gate and up, sent, scalars stored",
        "wait for all blocks, scalars read",
        "codes of gated values",
        "down, sums added",
        "wait for all blocks",
        "sums read and added",
    ),
)


def source(schedule: Schedule) -> str:
    """The schedule's kernel behind all that it includes."""
    own = ("bench_chain.cuh", f"bench_chain_{schedule.name}.cu")
    files = [*(KERNELS / name for name in HEADERS), *(TOOLS / name for name in own)]
    return "".join(INCLUDE.sub("", file.read_text(encoding="utf-8")) for file in files)


def flags(schedule: Schedule, blocks: int, watch: int) -> list[str]:
    """Options of the compiler for a grid of so many blocks; ``watch`` is TIMED, STAMPED or TRACED."""
    shape = {"HEADS": chain_layer.HEADS, "KV_HEADS": chain_layer.KV_HEADS, "DIM": chain_layer.DIM, "WARPS": WARPS}
    cache = {"KV_F16": 1, "KV_I8": 0, "BLOCK": 1, "SPLITS": 1, "RING": 0}
    use = {"CLUSTER": schedule.cluster, "BLOCKS": blocks, "WATCH": watch, "STAMPS": STAMPS, "RELU2": 1, "BOUND": 0}
    defines = [f"-D{name}={value}" for name, value in (shape | cache | use).items()]
    return ["--gpu-architecture=sm_90a", "--std=c++17", *defines]


class Gpu:
    """A GPU of compute capability 9.0 with the driver API.

    Raises:
        DeviceUnavailableError: There is none of that name.
        DeviceError: It is of another generation.
    """

    def __init__(self, name: str) -> None:
        found = CudaBackend().probe()
        if found.status is not ProbeStatus.OK:
            raise DeviceUnavailableError(f"{name} cannot be used: {found.reason}", hint=found.hint or None)
        names = [info.name for info in found.devices]
        if name not in names:
            raise DeviceUnavailableError(f"There is no device {name!r}.", hint=f"There are: {', '.join(names)}.")
        from cuda.bindings import driver

        from bitnet.cuda.device import capability_of
        from bitnet.cuda.driver import check

        self.name, self.driver, self._check = name, driver, check
        self.info = found.devices[names.index(name)]
        self.call(driver.cuInit(0))
        self._device = self.call(driver.cuDeviceGet(int(self.info.index)))
        self.call(driver.cuCtxSetCurrent(self.call(driver.cuDevicePrimaryCtxRetain(self._device))))
        capability = capability_of(self._device, name)
        if capability != (9, 0):
            raise DeviceError(
                f"compute capability 9.0 is needed; this is {'.'.join(map(str, capability))}.", device=name
            )
        attribute = driver.CUdevice_attribute
        self.blocks = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.max_shared = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    def call(self, result: tuple[Any, ...]) -> Any:
        return self._check(self.name, result)

    def attribute(self, which: Any) -> int:
        return int(self.call(self.driver.cuDeviceGetAttribute(which, self._device)))

    def upload(self, array: NDArray[Any]) -> int:
        """Address of a copy of the array, which stays until the tool ends."""
        address = int(self.call(self.driver.cuMemAlloc(array.nbytes)))
        self.call(self.driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return address

    def download(self, address: int, array: NDArray[Any]) -> None:
        self.call(self.driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))


class Kernel:
    """A schedule compiled for a number of blocks and a use, with as much shared memory as a block may have."""

    def __init__(self, gpu: Gpu, schedule: Schedule, blocks: int, watch: int) -> None:
        from bitnet.cuda.compiler import compile_source

        driver, call = gpu.driver, gpu.call
        self.gpu, self.schedule, self.blocks = gpu, schedule, blocks
        name = f"bench_chain_{schedule.name}.cu"
        cubin = compile_source(source(schedule), name, flags(schedule, blocks, watch), gpu.name)
        self._function = call(driver.cuModuleGetFunction(call(driver.cuModuleLoadData(cubin)), b"chain"))
        kinds = driver.CUfunction_attribute
        declared = call(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self._function))
        shared = gpu.max_shared - int(declared)
        call(driver.cuFuncSetAttribute(self._function, kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))
        attribute, ids = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
        if schedule.cluster:
            allow = kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call(driver.cuFuncSetAttribute(self._function, allow, 1))
            attribute.id, size = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, attribute.value.clusterDim
            size.x, size.y, size.z = schedule.cluster, 1, 1
        else:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        self._config = config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = WARPS * 32, 1, 1
        config.sharedMemBytes, config.attrs, config.numAttrs = shared, [attribute], 1

    def fits(self) -> bool:
        """Whether all its clusters run at once. Of a grid without clusters the driver checks it when it is launched."""
        driver = self.gpu.driver
        most = int(self.gpu.call(driver.cuOccupancyMaxActiveClusters(self._function, self._config)))
        return most * self.schedule.cluster >= self.blocks

    def launch(self, inputs: tuple[int, ...], layers: int, out: int, watched: int) -> None:
        """Addresses of images, residual, gains, angles, units, memory and counters; then of what comes out."""
        values = (*inputs, layers, out, watched)
        kinds = (*[ctypes.c_void_p] * 7, ctypes.c_int, *[ctypes.c_void_p] * 2)
        self.gpu.call(self.gpu.driver.cuLaunchKernelEx(self._config, self._function, (values, kinds), 0))


class Bench:
    """A layer on the GPU, for one schedule's kernels."""

    def __init__(self, gpu: Gpu, schedule: Schedule, layer: Layer, blocks: int) -> None:
        self.gpu, self.schedule, self._layer, self.blocks = gpu, schedule, layer, blocks
        images = chain_layer.images(layer, clusters=bool(schedule.cluster), blocks=blocks)
        inputs = (images, layer.first, layer.gains, layer.angles, layer.units)
        self._memory, self._counters = np.zeros(1 << 18, np.float32), np.zeros(256, np.uint32)
        self._inputs = tuple(gpu.upload(array) for array in (*inputs, self._memory, self._counters))
        self._out = gpu.upload(layer.first)
        self._events = [gpu.call(gpu.driver.cuEventCreate(0)) for _ in range(2)]

    def run(self, kernel: Kernel, layers: int, watched: int = 0) -> tuple[Floats, float]:
        """The residual behind the last layer, and the µs of the launch.

        Raises:
            WrongResult: A wait did not end.
        """
        driver, call, (start, end) = self.gpu.driver, self.gpu.call, self._events
        memory, counters = self._inputs[-2:]
        call(driver.cuMemsetD32(memory, NAN, self._memory.size))
        if self.schedule.cluster:
            call(driver.cuMemsetD32(memory, 0, 2 * HIDDEN))  # sums, which are added to
        call(driver.cuMemsetD32(counters, 0, self._counters.size))
        call(driver.cuMemsetD32(self._out, NAN, HIDDEN))
        call(driver.cuEventRecord(start, 0))
        kernel.launch(self._inputs, layers, self._out, watched)
        call(driver.cuEventRecord(end, 0))
        call(driver.cuEventSynchronize(end))
        self.gpu.download(counters, self._counters)
        if failed := int(self._counters[FAILURE]):
            places = ", ".join(str(i) for i in range(32) if failed >> i & 1)
            raise self._wrong(f"waits did not end within a second, by their number in the source: {places}")
        out = np.empty(HIDDEN, np.float32)
        self.gpu.download(self._out, out)
        return out, float(call(driver.cuEventElapsedTime(start, end))) * 1000

    def _wrong(self, what: str) -> WrongResult:
        return WrongResult(f"schedule {self.schedule.name}: {what}.", device=self.gpu.name)

    def verify(self) -> dict[int, Floats]:
        """The right residual behind SHORT and behind LONG layers.

        Raises:
            WrongResult: An operation of a layer is wrong.
        """
        trace = np.full((LONG, chain_layer.TRACE_WORDS), np.nan, np.float32)
        watched = self.gpu.upload(trace)
        out, _ = self.run(Kernel(self.gpu, self.schedule, self.blocks, TRACED), LONG, watched)
        self.gpu.download(watched, trace)
        try:
            chain_layer.check(self._layer, trace, out)
        except ValueError as error:
            raise self._wrong(str(error)) from None
        return {SHORT: trace[SHORT, :HIDDEN].copy(), LONG: out}

    def time(self, kernel: Kernel, right: dict[int, Floats], watched: int = 0) -> list[float]:
        """µs a layer of each round: the difference of a long and a short launch, whose results have to be right."""
        times: list[float] = []
        for _ in range(ROUNDS + 1):
            took = {}
            for layers, expected in right.items():
                out, took[layers] = self.run(kernel, layers, watched)
                if out.tobytes() != expected.tobytes():
                    raise self._wrong(f"a launch of {layers} layers ends with other bits than the one that was checked")
            times.append((took[LONG] - took[SHORT]) / (LONG - SHORT))
        return times[1:]  # the first one warms the GPU up

    def phases(self, right: dict[int, Floats]) -> tuple[float, list[float]]:
        """µs of a layer with stamps, and of each of its phases."""
        stamps = np.zeros((self.blocks, LONG, STAMPS), np.int64)
        kernel = Kernel(self.gpu, self.schedule, self.blocks, STAMPED)
        layer_time = min(self.time(kernel, right, self.gpu.upload(stamps)))
        watched = self.gpu.upload(stamps)
        self.run(kernel, LONG, watched)
        self.gpu.download(watched, stamps)
        return layer_time, phase_times(self.schedule, stamps, layer_time)


def phase_times(schedule: Schedule, stamps: NDArray[np.int64], layer_time: float) -> list[float]:
    """µs of each phase: a wait of the block that waits least, work of the slowest; the median of layers.

    Args:
        stamps: Cycles, each block's by a clock of its own, [blocks, layers, STAMPS]; 0 where a block skips a phase.
        layer_time: µs a layer, which says how long a cycle is.
    """
    ends = np.concatenate([stamps[:, :-1], stamps[:, 1:, :1]], axis=2)
    cycles = np.diff(ends, axis=2).astype(np.float64)
    cycles[(ends[:, :, 1:] == 0) | (ends[:, :, :-1] == 0)] = np.nan
    whole = float(np.median(np.diff(stamps[:, :, 0], axis=1)))
    pick = [np.nanmin if name.startswith("wait") else np.nanmax for name in schedule.phases]
    return [float(np.median(f(cycles[:, :, i], axis=0))) / whole * layer_time for i, f in enumerate(pick)]


def timed_kernel(gpu: Gpu, schedule: Schedule) -> Kernel:
    """The schedule for the whole GPU: a block on each multiprocessor, or as many clusters as run at once.

    Raises:
        DeviceError: Fewer clusters than the layer's weights need run at once.
    """
    if not schedule.cluster:
        return Kernel(gpu, schedule, gpu.blocks, TIMED)
    for count in range(MAX_CLUSTERS, MIN_CLUSTERS - 1, -1):
        kernel = Kernel(gpu, schedule, count * schedule.cluster, TIMED)
        if kernel.fits():
            return kernel
    what = f"{MIN_CLUSTERS} clusters of {schedule.cluster} blocks have to run at once, and do not."
    raise DeviceError(what, device=gpu.name, hint="See whether another program uses this GPU.")


def main() -> int:
    """Exit status: 0 where both schedules were right and were timed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cuda:0", help="such as cuda:1 (default: cuda:0)")
    name = parser.parse_args().device
    if not re.fullmatch(r"cuda:\d+", name):
        parser.error(f"device is {name!r}: only CUDA devices can be measured, such as cuda:0.")
    gpu = Gpu(name)
    layer = chain_layer.random_layer(np.random.default_rng())
    print(f"{gpu.info.description}, driver {gpu.info.driver_version}, {gpu.blocks} multiprocessors\n")
    best: dict[str, float] = {}
    for schedule in (GRID, CLUSTERS):
        try:
            kernel = timed_kernel(gpu, schedule)
            bench = Bench(gpu, schedule, layer, kernel.blocks)
            right = bench.verify()
            times = bench.time(kernel, right)
            stamped, phases = bench.phases(right)
        except (WrongResult, DeviceError) as error:
            print(f"{error}\n", flush=True)
            continue
        best[schedule.name] = min(times)
        print(f"| schedule {schedule.name}, {bench.blocks} blocks | µs a layer |\n| --- | --- |")
        for name, time in zip(schedule.phases, phases, strict=True):
            print(f"| {name} | {time:.2f} |")
        print(f"| sum of these | {sum(phases):.2f} |\n| with stamps | {stamped:.2f} |")
        print(
            f"| **without** | **{min(times):.2f}**, median {statistics.median(times):.2f} of {ROUNDS} |\n", flush=True
        )
    if best:
        fastest = min(best, key=lambda name: best[name])
        print(f"Best: {fastest}, {best[fastest]:.2f} µs a layer. Above {STOP:g}, a persistent step is not built.")
    return 0 if len(best) == 2 else 1


if __name__ == "__main__":
    run_tool(main)
