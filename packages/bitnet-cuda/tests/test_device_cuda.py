"""When an open device frees its resources: a fake driver counts live objects."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest

from bitnet.core.errors import DeviceError, DeviceLostError
from bitnet.core.gpu import GpuDevice, KernelSpec, Launch, Lowering
from bitnet.core.hal import DeviceInfo, DeviceType, Limits, Op
from bitnet.core.testing.model import TinyModel

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
device = pytest.importorskip("bitnet.cuda.device", reason="NVRTC is not installed")
RESULT = driver.CUresult
INFO = DeviceInfo("cuda", "0", "none", "none", "none", DeviceType.DISCRETE)


class MadeUp:
    """A driver that computes nothing.

    Attributes:
        alive: Objects of each kind that have been made and not destroyed.
        fails: Calls that fail, with what.
        lost: What every call fails with, once it is set; releasing the context does not.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.alive: Counter[str] = Counter()
        self.fails: dict[str, Any] = {}
        self.lost: Any = None
        self.capturing = False
        made = {"cuStreamCreate": "stream", "cuMemAlloc": "memory", "cuDevicePrimaryCtxRetain": "context"}
        made |= {"cuStreamEndCapture": "graph", "cuGraphInstantiate": "executable", "cuModuleLoadData": "module"}
        gone = {"cuStreamDestroy": "stream", "cuMemFree": "memory", "cuDevicePrimaryCtxRelease": "context"}
        gone |= {"cuGraphDestroy": "graph", "cuGraphExecDestroy": "executable", "cuModuleUnload": "module"}
        plain: dict[str, tuple[Any, ...]] = {"cuInit": (), "cuCtxSetCurrent": (), "cuStreamSynchronize": ()}
        plain["cuMemcpyHtoDAsync"] = ()
        plain |= {"cuStreamBeginCapture": (), "cuGraphLaunch": (), "cuLaunchKernelEx": (), "cuFuncSetAttribute": ()}
        plain |= {"cuDeviceGet": (0,), "cuDeviceGetAttribute": (9,), "cuDeviceGetName": (b"Made-up 9000\0",)}
        plain |= {"cuDriverGetVersion": (13000,), "cuModuleGetFunction": (1,)}
        for name, kind in made.items():
            patch.setattr(driver, name, partial(self._call, name, (1,), kind, 1))
        for name, kind in gone.items():
            patch.setattr(driver, name, partial(self._call, name, (), kind, -1))
        for name, values in plain.items():
            patch.setattr(driver, name, partial(self._call, name, values, "", 0))
        patch.setattr(driver, "cuGetErrorString", lambda status: (RESULT.CUDA_SUCCESS, b"made up"))
        patch.setattr(device.Compiler, "cubins", lambda self, specs: dict.fromkeys(specs, b"cubin"))

    def _call(self, name: str, values: tuple[Any, ...], kind: str, by: int, *_: Any) -> tuple[Any, ...]:
        """A call that returns ``values``, and makes or destroys one of a kind."""
        if name in ("cuStreamBeginCapture", "cuStreamEndCapture"):
            self.capturing = name == "cuStreamBeginCapture"
        status = self.fails.get(name) or (None if name == "cuDevicePrimaryCtxRelease" else self.lost)
        if status is not None:
            return status, None
        if by:
            self.alive[kind] += by
            assert self.alive[kind] >= 0, f"{kind} destroyed twice"
        return RESULT.CUDA_SUCCESS, *values


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    return MadeUp(monkeypatch)


def launches(*_: Any) -> list[Launch]:
    return [Launch(KernelSpec("advance", "advance"), (1, 1, 1), (32, 1, 1), (np.int32(1),))]


def opened() -> GpuDevice:
    lowering = Lowering(dict.fromkeys(get_args(Op), launches))
    return GpuDevice(INFO, device.CudaDriver(0, "cuda:0"), lowering)


def program() -> Any:
    return TinyModel(np.random.default_rng(), layers=1).program(Limits(4, 1, 1, 4), 8)


def test_an_executable_gives_its_graphs_back(made_up: MadeUp) -> None:
    one = opened()
    for _ in range(3):
        executable = one.compile(program())
        assert made_up.alive["executable"] == 1
        assert made_up.alive["memory"] > 1
        executable.close()
        assert made_up.alive["executable"] == 0
        assert made_up.alive["memory"] == 0
    one.close()
    assert not +made_up.alive


def test_a_graph_that_nobody_keeps_is_given_back(made_up: MadeUp) -> None:
    """As of a launch that is made once."""
    open_driver = device.CudaDriver(0, "cuda:0")
    open_driver.submit(open_driver.record(launches()))
    open_driver.close()
    assert not +made_up.alive


@pytest.mark.parametrize("call", ["cuLaunchKernelEx", "cuGraphInstantiate"])
def test_a_recording_that_fails_leaves_nothing(made_up: MadeUp, call: str) -> None:
    open_driver = device.CudaDriver(0, "cuda:0")
    made_up.fails[call] = RESULT.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        open_driver.record(launches())
    assert not made_up.capturing
    assert made_up.alive["graph"] == made_up.alive["executable"] == 0
    made_up.fails.clear()
    open_driver.submit(open_driver.record(launches()))
    open_driver.close()
    assert not +made_up.alive


def test_the_error_of_a_launch_is_told_where_the_capture_ends_with_another(made_up: MadeUp) -> None:
    open_driver = device.CudaDriver(0, "cuda:0")
    made_up.fails["cuLaunchKernelEx"] = RESULT.CUDA_ERROR_INVALID_VALUE
    made_up.fails["cuStreamEndCapture"] = RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        open_driver.record(launches())


@pytest.mark.parametrize("name", ["ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "UNKNOWN"])
def test_a_lost_device_can_be_closed(made_up: MadeUp, name: str) -> None:
    one = opened()
    executable = one.compile(program())
    made_up.lost = getattr(RESULT, f"CUDA_ERROR_{name}")
    with pytest.raises(DeviceLostError, match=name):
        executable.read("x")
    executable.close()
    one.close()
    one.close()
    assert made_up.alive["context"] == 0
