"""A device that fails, that binds little at once, and that evaluates the demo model as the CPU does."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import DeviceError, DeviceLostError, KernelCompileError, OutOfMemoryError
from bitnet.core.gpu import GpuDevice, KernelSpec, Launch
from bitnet.core.hal import (
    GREEDY,
    DenseMatmul,
    DeviceInfo,
    Embed,
    Limits,
    OpenOptions,
    ProbeStatus,
    SequenceStep,
    TernaryMatmul,
    run,
)
from bitnet.core.testing import oracle
from bitnet.core.testing.answers import assert_same_answers
from bitnet.core.testing.linear import Grouped, check_groups
from bitnet.core.testing.rig import (
    Rig,
    assert_products,
    assert_same_bits,
    dense,
    random_ternary,
    tensor,
    ternary,
    tokens,
)
from bitnet.core.testing.sampling import choose
from bitnet.core.testing.tables import Table, check_embed, check_head
from bitnet.webgpu.backend import BACKEND

wgpu = pytest.importorskip("wgpu")


@pytest.fixture
def info(require_device: Callable[[str, str | None], None]) -> DeviceInfo:
    result = BACKEND.probe()
    require_device("webgpu:0", None if result.status is ProbeStatus.OK else result.reason)
    return result.devices[0]


@pytest.fixture
def device(info: DeviceInfo) -> Iterator[GpuDevice]:
    device = BACKEND.open(info, OpenOptions())
    assert isinstance(device, GpuDevice)
    yield device
    device.close()


def small(device: GpuDevice) -> Rig:
    table = dense(np.arange(40, dtype=np.float32).reshape(5, 8))
    return Rig(device, [Embed("t", "out")], [tensor("out", "f32", "M", 8)], {"t": table}, limits=Limits(2))


def test_a_lost_device_raises_and_does_not_hang(device: GpuDevice) -> None:
    rig = small(device)
    step = rig.step(tokens(1))
    run(rig.executable, step)
    device._driver._device.destroy()  # type: ignore[attr-defined]  # what a driver's reset does to it
    for call in (
        lambda: run(rig.executable, step),
        lambda: rig.executable.read("out"),
        lambda: rig.executable.write("out", np.zeros((1, 8), np.float32)),
        lambda: small(device),
    ):
        with pytest.raises(DeviceLostError, match=device.info.name):
            call()
    rig.executable.close()


def test_a_shader_that_does_not_compile(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitnet.webgpu.source import SOURCES

    text = SOURCES.text
    monkeypatch.setattr(SOURCES, "text", lambda file: text(file).replace("step[STEP_TOKENS]", "nowhere[STEP_TOKENS]"))
    with pytest.raises(KernelCompileError) as caught:
        small(device)
    assert "embed.wgsl" in str(caught.value)
    assert "nowhere" in caught.value.log
    assert device.memory().used == 0


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (lambda: wgpu.GPUOutOfMemoryError("Not enough memory left"), OutOfMemoryError),
        (lambda: wgpu.GPUValidationError("Validation Error\n Not enough memory left."), OutOfMemoryError),
        (lambda: wgpu.GPUValidationError("Parent device is lost"), DeviceLostError),
        (lambda: wgpu.GPUInternalError("something else"), DeviceError),
        (lambda: RuntimeError("Could not map buffer (3 : Parent device is lost)."), DeviceLostError),
    ],
)
def test_errors_are_typed(
    device: GpuDevice, monkeypatch: pytest.MonkeyPatch, raised: Callable[[], Exception], expected: type[Exception]
) -> None:
    def refuse(**_: Any) -> None:
        raise raised()

    monkeypatch.setattr(device._driver._device, "create_buffer", refuse)  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match=device.info.name) as caught:
        small(device)
    assert type(caught.value) is expected


def test_a_device_that_fails_while_a_kernel_compiles(
    info: DeviceInfo, device: GpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not the kernel that is wrong."""
    driver: Any = device._driver
    launch = Launch(KernelSpec("norm_rows", "norm_rows"), (1, 1, 1), (256, 1, 1), ())

    def refuse(**_: Any) -> None:
        raise wgpu.GPUOutOfMemoryError("Not enough memory left")

    with monkeypatch.context() as patch:
        patch.setattr(driver._device, "create_compute_pipeline", refuse)
        with pytest.raises(OutOfMemoryError, match=info.name):
            driver.record([launch])
    driver._device.destroy()
    with pytest.raises(DeviceLostError, match=info.name):
        driver.record([launch])


def test_an_adapter_that_gives_no_device(info: DeviceInfo) -> None:
    """Here since more is asked for than it has; with a lost adapter, or without memory, wgpu-py raises the same."""
    from bitnet.webgpu.backend import _adapters, _usable
    from bitnet.webgpu.device import WebGPUDriver

    adapter = _usable(_adapters())[int(info.index)]

    claims = SimpleNamespace(
        features=adapter.features,
        limits={**adapter.limits, "max-buffer-size": 2**60},
        request_device_sync=adapter.request_device_sync,
    )
    with pytest.raises(DeviceError, match=f"{info.name}: Request device failed"):
        WebGPUDriver(claims, info.name)


def test_weights_larger_than_a_binding(info: DeviceInfo, rng: np.random.Generator, device: GpuDevice) -> None:
    """A device that binds 64 KiB at once: table, head and ternary weights are bound in parts."""
    from bitnet.webgpu.ops import WebGPUOps

    driver = device._driver
    limits = {**driver.limits, "max-storage-buffer-binding-size": 1 << 16}  # type: ignore[attr-defined]
    poor = GpuDevice(info, driver, WebGPUOps(limits).lowering())
    vocabulary, width = 1301, 132
    table = rng.standard_normal((vocabulary, width)).astype(np.float16)
    ids = rng.integers(0, vocabulary, 40).astype(np.int32)
    ids[:2] = [0, vocabulary - 1]
    out = tensor("out", "f32", "M", width)
    with Rig(poor, [Embed("t", "out")], [out], {"t": dense(table)}, limits=Limits(40)) as rig:
        rows = rig.run([SequenceStep(ids, 40)], {}, ["out"])["out"]
        assert (rig.executable.stats().dispatches or 0) > 1
    assert_same_bits("embed", rows, table[ids].astype(np.float32))

    x = rng.standard_normal((3, width)).astype(np.float32)
    specs = [tensor("x", "f32", "R", width), tensor("out", "f32", "R", vocabulary)]
    with Rig(poor, [DenseMatmul("x", "w", "out")], specs, {"w": dense(table)}, limits=Limits(3, max_rows=3)) as rig:
        logits = rig.run(tokens(3, range(3)), {"x": x}, ["out"])["out"]
    assert_products("dense_matmul", logits, x, table)

    for m in (2, 20):
        codes = rng.integers(-127, 128, (m, 256), dtype=np.int8)
        weight = random_ternary(rng, 1300, 256), 0.3
        scale = rng.uniform(0.1, 2, m).astype(np.float32)
        specs = [tensor("x", "i8", "M", 256), tensor("s", "f32", "M"), tensor("out", "f32", "M", 1300)]
        op = TernaryMatmul("x", "s", ("w",), "out")
        with Rig(poor, [op], specs, {"w": ternary(*weight)}, limits=Limits(m)) as rig:
            product = rig.run(tokens(m), {"x": codes, "s": scale}, ["out"])["out"]
        assert_same_bits("ternary_matmul", product, oracle.ternary_matmul(codes, scale, [weight]))
        check_groups(poor, rng, Grouped(m, (1301,), 320, 64))
        check_embed(poor, rng, Table(m, 1301, 512, 128))
        check_head(poor, rng, Table(m, 1301, 512, 128))


@pytest.mark.parametrize("most", [256, 384, 896])
def test_groups_that_are_no_power_of_two(
    info: DeviceInfo, rng: np.random.Generator, device: GpuDevice, most: int
) -> None:
    """What some GPUs allow of a workgroup: the greatest logit is found wherever it stands."""
    from bitnet.webgpu.ops import WebGPUOps

    driver = device._driver
    limits = {**driver.limits, "max-compute-invocations-per-workgroup": most}  # type: ignore[attr-defined]
    odd = GpuDevice(info, driver, WebGPUOps(limits).lowering())
    logits = rng.standard_normal((40, 1000)).astype(np.float32)
    assert choose(odd, logits, [GREEDY] * 40, range(40)) == logits.argmax(axis=1).tolist()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def test_the_demo_model_answers_as_on_the_cpu(info: DeviceInfo, rng: np.random.Generator) -> None:
    assert assert_same_answers(info.name, 2, seed=int(rng.integers(1 << 30))) > 200
