"""An open device where something goes wrong or is missing: typed errors, no hang, the same results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import DeviceError, DeviceLostError, KernelCompileError, OutOfMemoryError
from bitnet.core.gpu import GpuDevice, Launch
from bitnet.core.gpu.drivers import windows
from bitnet.core.hal import (
    DenseMatmul,
    DeviceInfo,
    KVSpec,
    Limits,
    Op,
    Program,
    Sample,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    TernaryMatmul,
    run,
)
from bitnet.core.support import cache
from bitnet.core.testing.answers import assert_same_answers
from bitnet.core.testing.linear import Grouped, check_groups
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.rig import Rig, dense, random_ternary, tensor, ternary, tokens
from bitnet.core.testing.tables import Table, check_embed, check_head
from bitnet.vulkan import compiler
from bitnet.vulkan.backend import BACKEND
from bitnet.vulkan.device import VulkanDriver
from bitnet.vulkan.driver import Functions, Instance, api, check, loader
from bitnet.vulkan.hardware import Hardware, inspect
from bitnet.vulkan.head import UNDECIDED
from bitnet.vulkan.ops import VulkanOps

LIMITS = Limits(max_tokens=32, max_seqs=2, max_rows=2, max_blocks=4)
Require = Callable[[str, "str | None"], None]
Patch = pytest.MonkeyPatch


@pytest.fixture
def info(require_device: Require) -> DeviceInfo:
    result = BACKEND.probe()
    require_device("vulkan:0", None if result.devices else f"vulkan is {result.status.value}: {result.reason}")
    return result.devices[0]


class Opened:
    """A device with its driver at hand; ``change`` makes another hardware of it."""

    def __init__(self, info: DeviceInfo, change: Callable[[Hardware], Hardware] = lambda h: h, patience: float = 60):
        instance = Instance(info.name)
        hardware = inspect(instance, instance.physical_devices()[int(info.index)], int(info.index))
        assert hardware is not None
        self.driver = VulkanDriver(change(hardware), info.name)
        self.driver._queue.patience = patience
        self.device = GpuDevice(info, self.driver, VulkanOps(self.driver.hardware).lowering())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.close()


@pytest.fixture
def opened(info: DeviceInfo) -> Iterator[Opened]:
    with Opened(info) as device:
        yield device


def program(seed: int = 3, vocab: int = 97) -> Program:
    return TinyModel(np.random.default_rng(seed), layers=2, vocab=vocab).program(LIMITS, 8)


def text(device: GpuDevice, made: Program, count: int = 8) -> list[int]:
    """What the model says: a prompt, a step, and several steps at once."""
    executable = device.compile(made)

    def step(ids: list[int], length: int) -> Step:
        return Step(StepLayout(LIMITS), [SequenceStep(ids, length, [2, 5], [len(ids) - 1])], block_size=BLOCK)

    try:
        said = run(executable, step([5, 6, 7, 8, 9], 5))[0].tolist()
        said += run(executable, step(said, 6))[0].tolist()
        said += run(executable, step(said[-1:], 7), count)[:, 0].tolist()
        return list(map(int, said))
    finally:
        executable.close()


def failing(driver: VulkanDriver, call: str, result: int) -> Callable[..., int]:
    return lambda *args: check(driver._vk.device, f"vk{call}", result)


@pytest.mark.parametrize("call", ["QueueSubmit", "WaitSemaphores"])
def test_a_device_that_is_lost(info: DeviceInfo, monkeypatch: Patch, call: str) -> None:
    """While it works: a typed error that names it, again each time, and it can still be closed without a wait."""
    device = Opened(info)
    executable = device.device.compile(program())
    monkeypatch.setattr(device.driver._vk, call, failing(device.driver, call, -4), raising=False)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match=rf"{info.name}: vk{call} failed with VK_ERROR_DEVICE_LOST"):
            run(executable, Step(StepLayout(LIMITS), [SequenceStep([5], 1, [0], [0])], block_size=BLOCK))
    begin = time.monotonic()
    executable.close()
    device.device.close()
    assert time.monotonic() - begin < 10
    with pytest.raises(DeviceError, match="closed"):
        device.device.compile(program())


@pytest.mark.parametrize("timeline", [True, False])
def test_a_device_that_never_answers(info: DeviceInfo, monkeypatch: Patch, timeline: bool) -> None:
    def change(hardware: Hardware) -> Hardware:
        return hardware if timeline else replace(hardware, features=hardware.features - {"timelineSemaphore"})

    device = Opened(info, change, patience=0.05)
    executable = device.device.compile(program())
    call = "WaitSemaphores" if timeline else "WaitForFences"
    monkeypatch.setattr(device.driver._vk, call, failing(device.driver, call, 2), raising=False)
    with pytest.raises(DeviceLostError, match=r"no answer in 0\.05 s"):
        run(executable, Step(StepLayout(LIMITS), [SequenceStep([5], 1, [0], [0])], block_size=BLOCK))
    executable.close()
    device.device.close()


def test_out_of_memory(opened: Opened, monkeypatch: Patch) -> None:
    """Whether the driver says so or the buffer is larger than any may be; what was allocated before comes back."""
    expected = text(opened.device, program())
    made, given = program(), opened.driver._vk.AllocateMemory
    calls = 0

    def allocate(*args: object) -> int:
        nonlocal calls
        calls += 1
        return given(*args) if calls < 12 else check("vulkan:0", "vkAllocateMemory", -2)

    with monkeypatch.context() as patch:
        patch.setattr(opened.driver._vk, "AllocateMemory", allocate, raising=False)
        with pytest.raises(OutOfMemoryError, match="VK_ERROR_OUT_OF_DEVICE_MEMORY"):
            opened.device.compile(made)
    assert opened.device.memory().used == 0
    assert made.kv is not None
    large = replace(made.kv, num_blocks=2**31 // (made.kv.kv_heads * made.kv.head_dim * BLOCK) + 1)
    with pytest.raises(OutOfMemoryError, match="exceeds the device's largest"):
        opened.device.compile(replace(made, kv=KVSpec(**{n: getattr(large, n) for n in KVSpec.__slots__})))
    assert opened.device.memory().used == 0
    assert text(opened.device, program()) == expected


def test_what_the_driver_refuses_is_raised(opened: Opened) -> None:
    """By the driver itself, not by a stand-in: no device has an exbibyte."""
    with pytest.raises(OutOfMemoryError, match="vkAllocateMemory failed with VK_ERROR_OUT_OF"):
        opened.driver._vk.create("DeviceMemory", allocationSize=1 << 60)


@pytest.mark.parametrize("without", ["nothing", "no-subgroups"])
def test_no_memory_to_submit_with(info: DeviceInfo, monkeypatch: Patch, without: str) -> None:
    """Nothing of what waited is lost, weights on their way to the device neither, and nothing waits in vain."""
    with Opened(info, WITHOUT[without]) as whole:
        expected = text(whole.device, program())
    poor = Opened(info, WITHOUT[without], patience=10)
    given, calls = poor.driver._vk.QueueSubmit, 0

    def submit(*args: object) -> int:
        nonlocal calls
        calls += 1
        return given(*args) if calls > 1 else check(info.name, "vkQueueSubmit", -2)

    monkeypatch.setattr(poor.driver._vk, "QueueSubmit", submit, raising=False)
    with pytest.raises(OutOfMemoryError, match="VK_ERROR_OUT_OF_DEVICE_MEMORY"):
        text(poor.device, program())
    assert text(poor.device, program()) == expected
    executable = poor.device.compile(program())
    calls = 0
    step = Step(StepLayout(LIMITS), [SequenceStep([5], 1, [0], [0])], block_size=BLOCK)
    with pytest.raises(OutOfMemoryError, match="VK_ERROR_OUT_OF_DEVICE_MEMORY"):
        run(executable, step)
    after = run(executable, step).tolist()
    calls = -1000  # from here on there never is any
    with pytest.raises(OutOfMemoryError, match="VK_ERROR_OUT_OF_DEVICE_MEMORY"):
        run(executable, step)
    poor.device.close()
    with Opened(info, WITHOUT[without]) as whole:
        assert run(whole.device.compile(program()), step).tolist() == after


def test_a_shader_that_does_not_compile(opened: Opened, monkeypatch: Patch, tmp_path: Path) -> None:
    def broken(module: object) -> bytes:
        raise compiler.Refused("line 7: no such teapot")

    way = compiler.SpirvCompiler("broken", "broken", broken)
    monkeypatch.setattr(compiler, "ways", lambda: compiler.Ways([way]))
    with pytest.raises(KernelCompileError, match="no such teapot") as raised:
        opened.device.compile(program())
    assert "broken: line 7" in raised.value.log
    assert opened.device.memory().used == 0


def test_a_shader_that_the_driver_refuses(opened: Opened, monkeypatch: Patch) -> None:
    call = "CreateComputePipelines"
    monkeypatch.setattr(opened.driver._vk, call, failing(opened.driver, call, -1000012000), raising=False)
    with pytest.raises(KernelCompileError, match="the driver refuses") as raised:
        opened.device.compile(program())
    assert "VK_ERROR_INVALID_SHADER_NV" in raised.value.log


def test_a_function_that_the_loader_does_not_export(opened: Opened) -> None:
    """It is older than the driver, which is asked then; a function that this does not have either is missing."""

    class Older:
        vkGetDeviceProcAddr = loader().vkGetDeviceProcAddr

        def __getattr__(self, name: str) -> Any:
            raise api().error(f"symbol {name!r} not found")

    vk = Functions("vulkan:0", opened.driver._vk.handle)
    vk._lib = Older()
    assert vk.GetDeviceQueue is not None
    with pytest.raises(AttributeError, match="vkGetPipelineExecutableStatisticsKHR"):
        vk.GetPipelineExecutableStatisticsKHR(None)


WITHOUT = {
    "nothing": lambda h: replace(h, features=frozenset(), subgroup=0),
    "no-subgroups": lambda h: replace(h, subgroup=0),
    "no-dot-product": lambda h: replace(h, features=h.features - {"shaderIntegerDotProduct"}),
    "no-timeline": lambda h: replace(h, features=h.features - {"timelineSemaphore"}),
    "small-groups": lambda h: replace(h, group=128, shared=16 << 10),
    "small-bindings": lambda h: replace(h, largest_binding=64 << 10, alignment=256),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_the_same_without(info: DeviceInfo, what: str) -> None:
    """A feature that a device lacks changes the kernels, not the text. The head of 1,500 rows takes several windows."""
    made = program(vocab=1500)
    with Opened(info) as whole, Opened(info, WITHOUT[what]) as poor:
        assert text(poor.device, made) == text(whole.device, made)


@pytest.mark.parametrize("without", ["nothing", "small-groups", "poorest"])
def test_more_rows_than_a_grid_has_groups(info: DeviceInfo, monkeypatch: Patch, without: str) -> None:
    """A head and a ternary matrix of 530,000 rows: every grid keeps to what every device takes, and every row is there.

    Of the poorest, 128 invocations of which 32 share a row of the head: 262,140 rows are what one grid reaches.
    """
    rng, rows = np.random.default_rng(12), 530_001
    change = WITHOUT.get(without, lambda h: WITHOUT["small-groups"](WITHOUT["nothing"](h)))
    w = rng.integers(-9, 10, (rows, 8)).astype(np.float16)
    with Opened(info, change) as poor:
        grids, record = list[tuple[int, ...]](), poor.driver.record

        def recording(launches: Sequence[Launch]) -> Any:
            grids.extend(launch.grid for launch in launches)
            return record(launches)

        monkeypatch.setattr(poor.driver, "record", recording)
        for few in (1, 3):
            x = rng.integers(-9, 10, (few, 8)).astype(np.float32)
            specs, limits = [tensor("x", "f32", "R", 8), tensor("out", "f32", "R", rows)], Limits(few, max_rows=few)
            with Rig(poor.device, [DenseMatmul("x", "w", "out")], specs, {"w": dense(w)}, limits=limits) as rig:
                out = rig.run(tokens(few, range(few)), {"x": x}, ["out"])["out"]
            assert np.array_equal(out, x @ w.T.astype(np.float32))
        codes, unit = rng.integers(-127, 128, (2, 128), dtype=np.int8), np.ones(2, np.float32)
        weight = random_ternary(rng, rows, 128)
        specs = [tensor("x", "i8", "M", 128), tensor("s", "f32", "M"), tensor("out", "f32", "M", rows)]
        for few in (1, 2):
            op = TernaryMatmul("x", "s", ("w",), "out")
            with Rig(poor.device, [op], specs, {"w": ternary(weight, 1.0)}, limits=Limits(few)) as rig:
                product = rig.run(tokens(few), {"x": codes[:few], "s": unit[:few]}, ["out"])["out"]
            assert np.array_equal(product, codes[:few].astype(np.float32) @ weight.T.astype(np.float32))
    assert max(map(max, grids)) <= 65535, grids


@pytest.mark.parametrize("what", ["no-dot-product", "small-bindings", "small-groups"])
@pytest.mark.parametrize("count", [2, 9])
def test_groups_of_columns_without(info: DeviceInfo, monkeypatch: Patch, what: str, count: int) -> None:
    """Weights, and tables, with a scale for each group: bound in parts too, and grids of two dimensions."""
    monkeypatch.setattr(windows, "MAX_GROUPS", 3)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    with Opened(info, WITHOUT[what]) as poor:
        check_groups(poor.device, rng, Grouped(count, (1301,), 320, 64))
        check_embed(poor.device, rng, Table(count, 1301, 512, 128))
        check_head(poor.device, rng, Table(count, 1301, 512, 128))


def test_filtered_draws_seldom_need_all_logits(opened: Opened) -> None:
    """With top-p 0.95 the compact head decides for about one minus that share, and 3 %, less than all draws."""
    rng, width, vocabulary, draws = np.random.default_rng(), 256, 9001, 24
    w = (rng.standard_normal((vocabulary, width)) / 50).astype(np.float16)
    specs = [tensor("x", "f32", "R", width), tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")]
    limits, undecided = Limits(1, 1, 1), 0
    ops: list[Op] = [DenseMatmul("x", "w", "logits"), Sample("logits", "out")]
    executable = opened.device.compile(Program(ops, {s.name: s for s in specs}, {"w": dense(w)}, limits, name="head"))
    state: Any = executable.context.scratch("head state", 0)
    for turn in range(draws):
        executable.write("x", (rng.standard_normal((1, width)) * 4).astype(np.float32))
        params = SamplingParams(0.8, top_p=0.95, seed=int(rng.integers(1 << 40)))
        steps = [SequenceStep([0], turn + 1, rows=[0], sampling=params)]
        said = [
            run(executable, Step(StepLayout(limits), steps, logits=logits))[0, 0].item() for logits in (False, True)
        ]
        assert said[0] == said[1]
        run(executable, Step(StepLayout(limits), steps, logits=False))
        words = np.zeros(state.nbytes // 4, np.uint32)
        opened.driver.download(state, words)
        undecided += int(words[UNDECIDED])
    assert undecided <= draws / 3


def test_a_buffer_that_no_kernel_can_bind(info: DeviceInfo) -> None:
    with (
        Opened(info, lambda h: replace(h, largest_binding=4 << 10)) as poor,
        pytest.raises(DeviceError, match="the device binds at most 4,096"),
    ):
        poor.device.compile(program())


def test_pipelines_are_kept(info: DeviceInfo, monkeypatch: Patch, tmp_path: Path) -> None:
    """A second process compiles no source again, and the driver gets back what it had compiled."""
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []
    monkeypatch.setattr(cache, "listeners", [lambda label, seconds: compiled.append(label)])
    for _ in range(2):
        with Opened(info) as device:
            said = text(device.device, program())
        first, compiled = compiled, []
    assert any("ternary_decode" in label for label in first) or not compiled
    with Opened(info) as device:
        assert device.driver._pipelines._kept != b""
        assert text(device.device, program()) == said
    assert not [label for label in compiled if "pipelines" not in label]


def test_five_dispatches_a_layer(info: DeviceInfo) -> None:
    """Where one cannot do it; besides, every step has embedding, last norm, head, sample and advance."""
    with Opened(info, lambda hardware: replace(hardware, processors=0)) as opened:
        executable = opened.device.compile(program())
        run(executable, Step(StepLayout(LIMITS), [SequenceStep([5], 1, [0], [0])], block_size=BLOCK))
        assert executable.stats().dispatches == 5 * 2 + 5
        executable.close()


def test_the_demo_model_answers_as_on_the_cpu(info: DeviceInfo) -> None:
    assert assert_same_answers(info.name, 3, seed=int(np.random.default_rng().integers(1 << 30))) > 300
