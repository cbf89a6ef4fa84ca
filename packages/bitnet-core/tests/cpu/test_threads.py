"""The thread pool: number of threads, results independent of it, forks, and leaks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.cpu import native, threads
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice
from bitnet.core.errors import DeviceError
from bitnet.core.hal import (
    Limits,
    OpenOptions,
    Program,
    SamplingParams,
    SequenceStep,
    TensorSpec,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    run,
)
from bitnet.core.support import system
from bitnet.core.testing.model import TinyModel
from bitnet.core.testing.rig import Rig, ternary

LIMITS = Limits(max_tokens=80, max_seqs=4, max_rows=4, max_blocks=60)


def outputs(library: ctypes.CDLL, seed: int, count: int) -> list[Any]:
    """A prefill, a mixed step and a decode step over a long context, on a device of so many threads."""
    device = CpuDevice(BACKEND.probe().devices[0], library, threads=count)
    model = TinyModel(np.random.default_rng(seed), positions=960)
    program = model.program(LIMITS, 64)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 301, 960).tolist()
    blocks = list(range(60))
    draw = SamplingParams(0.8, 40, 0.9, 0.0, 7)
    out: list[Any] = []
    with Rig(device, program.ops, program.tensors.values(), program.weights, limits=LIMITS, kv=program.kv) as rig:

        def feed(*sequences: SequenceStep) -> None:
            out.append(run(rig.executable, rig.step(sequences)))
            out.extend(rig.executable.read(name) for name in program.tensors)

        for begin in range(0, 900, 75):
            run(rig.executable, rig.step([SequenceStep(ids[begin : begin + 75], begin + 75, blocks)]))
        feed(
            SequenceStep(ids[900:920], 920, blocks, [19], draw),
            SequenceStep(ids[:3], 3, [60], [2]),
            SequenceStep(ids[:30], 30, [61, 62], [0, 29], draw),
        )
        feed(SequenceStep(ids[920:921], 921, blocks, [0], draw))
    device.close()
    return out


def test_bits_do_not_depend_on_the_number_of_threads(library: ctypes.CDLL) -> None:
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    alone = outputs(library, seed, 1)
    assert any(np.any(array) for array in alone)
    for count in (2, 3, 4, 7):
        for one, several in zip(alone, outputs(library, seed, count), strict=True):
            assert one.tobytes() == several.tobytes()


def test_closing_waits_for_what_is_being_compiled(library: ctypes.CDLL) -> None:
    device = CpuDevice(BACKEND.probe().devices[0], library, threads=3)
    codes = np.random.default_rng().integers(-1, 2, (64, 128), np.int8)
    weight = ternary(codes, 1.0)
    closing = threading.Thread(target=device.close)

    def load() -> TernaryData:
        closing.start()
        closing.join(0.5)  # the pool it would delete packs this weight next
        assert closing.is_alive()
        return weight.load()

    tensors = TensorSpec("x", "i8", ("M", 128)), TensorSpec("s", "f32", ("M",)), TensorSpec("y", "f32", ("M", 64))
    product = TernaryMatmul("x", "s", ("w",), "y")
    weights = {"w": TernaryWeight(weight.shape, load)}
    executable = device.compile(Program([product], {t.name: t for t in tensors}, weights, Limits(1)))
    closing.join()
    with pytest.raises(DeviceError, match="is closed"):
        executable.read("y")
    with pytest.raises(DeviceError, match="is closed"):
        device.compile(Program([product], {t.name: t for t in tensors}, {"w": weight}, Limits(1)))


def test_opening_starts_no_thread_and_closing_leaves_none(library: ctypes.CDLL) -> None:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("threads are counted in /proc, which this system lacks")

    def threads_now() -> set[str]:
        return {path.name for path in tasks.iterdir()}

    before = threads_now()  # those of other tests may end meanwhile
    device = CpuDevice(BACKEND.probe().devices[0], library, threads=3)
    assert threads_now() <= before
    model = TinyModel(np.random.default_rng(0))
    executable = device.compile(model.program(LIMITS, 4))
    assert len(threads_now() - before) == 2
    executable.close()
    device.close()
    device.close()
    assert threads_now() <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own(library: ctypes.CDLL) -> None:
    device = CpuDevice(BACKEND.probe().devices[0], library, threads=3)
    model = TinyModel(np.random.default_rng(0))
    program = model.program(LIMITS, 4)
    with Rig(device, program.ops, program.tensors.values(), program.weights, limits=LIMITS, kv=program.kv) as rig:
        step = rig.step([SequenceStep(list(range(9)), 9, [0], [8])])
        expected = run(rig.executable, step).tolist()
        child = os.fork()
        if child == 0:
            os._exit(0 if all(run(rig.executable, step).tolist() == expected for _ in range(3)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run(rig.executable, step).tolist() == expected
    device.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_the_parent_computes_leaves_out_no_work(library: ctypes.CDLL) -> None:
    device = CpuDevice(BACKEND.probe().devices[0], library, threads=3)
    model = TinyModel(np.random.default_rng(0))
    program = model.program(LIMITS, 8)
    parts = device, program.ops, program.tensors.values(), program.weights
    with Rig(*parts, limits=LIMITS, kv=program.kv) as idle, Rig(*parts, limits=LIMITS, kv=program.kv) as busy:
        small = idle.step([SequenceStep(list(range(9)), 9, [0], [8])])
        large = busy.step([SequenceStep(list(range(64)), 64, list(range(4)), [63])])

        def result() -> list[bytes]:
            tokens = run(idle.executable, small)
            return [tokens.tobytes(), *(idle.executable.read(name).tobytes() for name in program.tensors)]

        expected = result()
        done = threading.Event()

        def work() -> None:
            while not done.is_set():
                run(busy.executable, large)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for _ in range(40):  # most of them in the middle of an operation
                child = os.fork()
                if child == 0:
                    os._exit(0 if result() == expected else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            done.set()
            worker.join()
    device.close()


def test_executables_of_one_device_take_turns(library: ctypes.CDLL) -> None:
    device = CpuDevice(BACKEND.probe().devices[0], library, threads=3)
    model = TinyModel(np.random.default_rng(0))
    program = model.program(LIMITS, 4)
    results: dict[int, list[Any]] = {}

    def work(index: int) -> None:
        with Rig(device, program.ops, program.tensors.values(), program.weights, limits=LIMITS, kv=program.kv) as rig:
            step = rig.step([SequenceStep(list(range(9)), 9, [0], [8])])
            results[index] = [run(rig.executable, step).tolist() for _ in range(20)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    assert all(result == results[0][:1] * 20 for result in results.values())
    device.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not tie threads to processors")
def test_threads_that_get_no_processor_are_done_without(library: ctypes.CDLL) -> None:
    """Three threads on one processor would wait for each other at every barrier; they come to compute as one does.

    A long job with few barriers, such as measuring what the processor can do, takes all of them all the same.
    """
    model = TinyModel(np.random.default_rng(0), positions=960)
    program = model.program(LIMITS, 64)
    allowed = os.sched_getaffinity(0)
    times: dict[int, list[float]] = {1: [], 3: []}
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with contextlib.ExitStack() as stack:
            rigs, products = {}, {}
            for count in times:
                device = CpuDevice(BACKEND.probe().devices[0], library, threads=count)
                products[count] = partial(library.bitnet_probe_int8, device.level_handle, device.pool, 100)
                stack.callback(device.close)
                parts = device, program.ops, program.tensors.values(), program.weights
                rigs[count] = stack.enter_context(Rig(*parts, limits=LIMITS, kv=program.kv))
            for _ in range(300):
                for count, rig in rigs.items():
                    step = rig.step([SequenceStep([1], 1, list(range(60)), [0])])
                    begin = time.perf_counter()
                    run(rig.executable, step, count=32)
                    times[count].append(time.perf_counter() - begin)
            assert products[3]() == 3 * products[1]()
    finally:
        os.sched_setaffinity(0, allowed)
    total = {count: sum(took[10:]) for count, took in times.items()}
    print(total)
    assert total[3] < 10 * total[1]  # some hundred times as long, if they stayed


AT_EXIT = """
import threading
import numpy as np
from bitnet.core import TernaryMatrix

matrix = TernaryMatrix(np.ones((4096, 4096), np.int8), device="cpu")
x = np.ones((64, 4096), np.int8)
begun = threading.Event()

def work():
    while True:
        matrix(x)
        begun.set()

threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


def test_a_daemon_thread_may_compute_until_the_process_ends(library: ctypes.CDLL) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", AT_EXIT]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6}, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(system, "_cgroup_cpus", lambda: 0.0)
    assert threads.default_threads() == 5  # a system that does not tell of cores
    for processor, siblings in ((0, "0,4"), (4, "0,4"), (1, "1,5"), (5, "1,5"), (6, "2,6")):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert threads.default_threads() == 3
    monkeypatch.setattr(system, "_cgroup_cpus", lambda: 2.0)
    assert threads.default_threads() == 2
    monkeypatch.setattr(system, "_cgroup_cpus", lambda: 0.4)
    assert threads.default_threads() == 1


def test_a_device_has_the_threads_of_its_options(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the backend reads no variable: that is for who makes the options."""
    monkeypatch.setenv("BITNET_THREADS", "7")
    info = BACKEND.probe().devices[0]
    for count in (3, None):
        device = BACKEND.open(info, OpenOptions(threads=count))
        assert isinstance(device, CpuDevice)
        assert device.threads == (count or threads.default_threads())
        device.close()


def test_threads_that_cannot_start_are_done_without(library: ctypes.CDLL) -> None:
    """A limit on processes is no reason to fail: fewer threads give the same result."""
    resource = pytest.importorskip("resource", reason="this system has no limit on processes")
    model = TinyModel(np.random.default_rng(0))
    program = model.program(LIMITS, 4)
    expected = None
    old = resource.getrlimit(resource.RLIMIT_AS)
    for limit in (False, True):
        device = CpuDevice(BACKEND.probe().devices[0], library, threads=64)
        if limit:  # no address space for 64 stacks of 8 MiB
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20), old[1]))
        try:
            with Rig(
                device, program.ops, program.tensors.values(), program.weights, limits=LIMITS, kv=program.kv
            ) as rig:
                tokens = run(rig.executable, rig.step([SequenceStep(list(range(9)), 9, [0], [8])])).tolist()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, old)
        device.close()
        expected = expected or tokens
        assert tokens == expected


def test_memory_goes_back_to_the_system(library: ctypes.CDLL) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("memory is measured in /proc, which this system lacks")
    device = CpuDevice(BACKEND.probe().devices[0], library, threads=1)
    model = TinyModel(np.random.default_rng(0))
    program = model.program(Limits(80, 4, 4, 60), 60000)  # 60,000 blocks of 8 KiB
    pages = int(statm.read_text().split()[0])
    for close in (True, False):
        executable = device.compile(program)
        held = int(statm.read_text().split()[0])
        assert (held - pages) * os.sysconf("SC_PAGE_SIZE") > 300 << 20
        if close:
            executable.close()
        del executable  # which frees it as well
        assert int(statm.read_text().split()[0]) < pages + (held - pages) // 10
    device.close()
    assert native.library()
