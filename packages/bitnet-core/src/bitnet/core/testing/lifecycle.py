"""Tests of executables and devices beyond computing: memory, errors, concurrency, threads, closing."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bitnet.core.errors import DeviceError, InvalidInputError, OutOfMemoryError
from bitnet.core.hal import (
    MAX_COUNT,
    Attention,
    DenseMatmul,
    DenseWeight,
    Device,
    DeviceInfo,
    Embed,
    Executable,
    KVSpec,
    Limits,
    NormQuant,
    Op,
    OpenOptions,
    Program,
    RopeAppend,
    SequenceStep,
    Step,
    StepLayout,
    TernaryMatmul,
    TernaryWeight,
    run,
)
from bitnet.core.support import system
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.rig import Array, Rig, dense, random_ternary, tensor, ternary, tokens

LIMITS = Limits(max_tokens=32, max_seqs=2, max_rows=2, max_blocks=4)


class Session:
    """A tiny model on a device, generating a text."""

    def __init__(self, device: Device, seed: int) -> None:
        self.model = TinyModel(np.random.default_rng(seed), layers=1, vocab=97)
        self.program = self.model.program(LIMITS, 8)
        self.executable = device.compile(self.program)

    def step(self, ids: list[int], length: int, blocks: list[int]) -> Step:
        return Step(StepLayout(LIMITS), [SequenceStep(ids, length, blocks, [len(ids) - 1])], block_size=BLOCK)

    def prefill(self, blocks: list[int]) -> int:
        return int(run(self.executable, self.step([5, 6, 7, 8, 9], 5, blocks))[0, 0])

    def text(self, blocks: list[int], count: int = 12) -> list[int]:
        out = [self.prefill(blocks)]
        for i in range(count):
            out += run(self.executable, self.step(out[-1:], 6 + i, blocks))[0].tolist()
        return out


def _tables(op: Embed | RopeAppend) -> tuple[str, ...]:
    """The weights of which an operation reads only one row per token."""
    return (op.table,) if isinstance(op, Embed) else (op.cos, op.sin)


class LifecycleTests(DeviceTests):
    def test_memory_comes_back_at_close(self, device: Device) -> None:
        before = device.memory().used
        session = Session(device, 0)
        matrices = [w.shape for w in session.program.weights.values() if isinstance(w, TernaryWeight)]
        assert device.memory().used >= before + sum(n * k // 5 for n, k in matrices)  # packed five to a byte at best
        session.prefill([0])
        session.executable.close()
        assert device.memory().used == before

    def test_closed_executable_raises(self, device: Device) -> None:
        session = Session(device, 0)
        session.executable.close()
        session.executable.close()
        with pytest.raises(DeviceError):
            session.prefill([0])
        with pytest.raises(DeviceError):
            session.executable.read("x")
        with pytest.raises(DeviceError):
            session.executable.write("x", np.zeros((1, 128), np.float32))

    def test_closing_a_device_closes_its_executables(self, info: DeviceInfo, device: Device) -> None:
        own = self.backend.open(info, OpenOptions())
        sessions = [Session(own, seed) for seed in range(2)]
        sessions[0].prefill([1])
        sessions[1].executable.close()
        own.close()
        own.close()
        with pytest.raises(DeviceError):
            sessions[0].prefill([1])
        with pytest.raises(DeviceError):
            Session(own, 3)
        other = Session(device, 0)
        other.prefill([1])
        other.executable.close()

    def test_kernels_are_recorded_as_they_run(self, device: Device) -> None:
        session = Session(device, 0)
        assert session.executable.kernels == ()
        session.prefill([0])
        names = session.executable.kernels
        assert names
        assert len(set(names)) == len(names)
        assert set(names) <= set(self.backend.kernels())
        session.prefill([1])
        assert session.executable.kernels[: len(names)] == names
        session.executable.close()

    def test_what_a_pass_costs(self, device: Device) -> None:
        """Weights are counted as they are stored, launches as they were made: the same for the same step."""
        session = Session(device, 0)
        assert isinstance(session.executable, Executable)
        weights = session.program.weights
        tables = {name for op in session.program.ops if isinstance(op, Embed | RopeAppend) for name in _tables(op)}
        products = [w.shape for w in weights.values() if isinstance(w, TernaryWeight)]
        dense = [w.shape for name, w in weights.items() if not isinstance(w, TernaryWeight) and name not in tables]
        least = sum(n * k // 5 for n, k in products)  # packed five to a byte at best
        most = 2 * sum(n * k for n, k in products) + 4 * sum(map(math.prod, dense))
        assert session.executable.stats().dispatches in (None, 0)
        session.prefill([0])
        after = session.executable.stats()
        assert least <= after.weight_bytes <= most
        assert after.dispatches is None or after.dispatches > 0
        session.prefill([0])
        assert session.executable.stats() == after
        session.executable.close()
        with pytest.raises(DeviceError):
            session.executable.stats()

    def test_two_executables_at_once(self, device: Device) -> None:
        """Interleaved, each gives what it gives alone."""
        alone = []
        for seed in (1, 2):
            session = Session(device, seed)
            alone.append(session.text([3, 5]))
            session.executable.close()
        first, second = Session(device, 1), Session(device, 2)
        texts = [[first.prefill([3, 5])], [second.prefill([3, 5])]]
        for i in range(12):
            for session, text in zip((first, second), texts, strict=True):
                text.extend(run(session.executable, session.step(text[-1:], 6 + i, [3, 5]))[0].tolist())
        assert texts == alone
        first.executable.close()
        assert second.text([3, 5]) == alone[1]
        second.executable.close()

    def test_threads(self, device: Device) -> None:
        """Executables of their own in several threads, and one executable shared by all, each on blocks of its own."""
        if not system.THREADS:
            pytest.skip("this Python has no threads")
        session = Session(device, 7)
        expected = session.text([0, 1])
        with ThreadPoolExecutor(4) as pool:
            shared = [pool.submit(session.text, [2 * i, 2 * i + 1]) for i in range(4)]
            assert [f.result() for f in shared] == [expected] * 4

            def own(_: int) -> list[int]:
                mine = Session(device, 7)
                try:
                    return mine.text([4, 2])
                finally:
                    mine.executable.close()

            assert list(pool.map(own, range(6))) == [expected] * 6
        session.executable.close()

    def test_bad_steps_are_refused_and_harm_nothing(self, device: Device) -> None:
        session = Session(device, 0)
        executable, good = session.executable, session.step([1], 6, [0])
        token = session.prefill([0])
        after = run(executable, good).tolist()
        other = Step(StepLayout(Limits(16, 2, 2, 4)), [SequenceStep([1], 1, [0], [0])], block_size=BLOCK)
        bad: list[tuple[str, Callable[[], object]]] = [
            ("other limits", lambda: run(executable, other)),
            ("token past the vocabulary", lambda: run(executable, session.step([97], 6, [0]))),
            ("negative token", lambda: run(executable, session.step([-1], 6, [0]))),
            ("block past the cache", lambda: run(executable, session.step([1], 6, [8]))),
            ("negative block", lambda: run(executable, session.step([1], 6, [-1]))),
            ("no tokens", lambda: run(executable, Step(StepLayout(LIMITS), []))),
            ("count 0", lambda: run(executable, good, 0)),
            ("count of a prefill", lambda: run(executable, session.step([1, 2], 6, [0]), 2)),
            ("count past the block table", lambda: run(executable, session.step([1], 63, [0, 1, 2, 3]), 3)),
            ("count past the most", lambda: run(executable, good, MAX_COUNT + 1)),
            ("count past 32 bits", lambda: run(executable, good, 2**31 - 1)),
        ]
        for name, call in bad:
            with pytest.raises(InvalidInputError):
                pytest.fail(f"{name} gave {call()}")
        assert run(executable, good).tolist() == after
        assert session.prefill([0]) == token
        session.executable.close()

    def test_read_and_write(self, device: Device) -> None:
        session = Session(device, 0)
        executable = session.executable
        rows = np.arange(3 * 128, dtype=np.float32).reshape(3, 128)
        executable.write("x", np.full((32, 128), 7, np.float32))
        executable.write("x", rows)
        assert np.array_equal(executable.read("x", 4), np.concatenate([rows, np.full((1, 128), 7, np.float32)]))
        assert executable.read("x").shape == (32, 128)
        assert executable.read("x", 0).shape == (0, 128)
        bad: list[tuple[str, Callable[[], object]]] = [
            ("read of no tensor", lambda: executable.read("nothing")),
            ("read of too many rows", lambda: executable.read("x", 33)),
            ("write of no tensor", lambda: executable.write("nothing", rows)),
            ("write of another width", lambda: executable.write("x", rows[:, :64])),
            ("write of another type", lambda: executable.write("x", rows.astype(np.float64))),
            ("write of too many rows", lambda: executable.write("x", np.zeros((33, 128), np.float32))),
        ]
        for name, call in bad:
            with pytest.raises(InvalidInputError):
                pytest.fail(f"{name} gave {call()}")
        out = executable.read("x", 1)
        out[:] = 0
        assert np.array_equal(executable.read("x", 1), rows[:1]), "read gave the device's own memory"
        executable.close()

    def test_program_without_sample_returns_no_tokens(self, device: Device, rng: np.random.Generator) -> None:
        specs = [tensor("out", "f32", "M", 8)]
        table = dense(rng.standard_normal((5, 8)).astype(np.float32))
        with Rig(device, [Embed("t", "out")], specs, {"t": table}, limits=Limits(2)) as rig:
            assert run(rig.executable, rig.step(tokens(1, [0]))).shape == (1, 0)
            with pytest.raises(InvalidInputError):
                run(rig.executable, rig.step(tokens(1, [0])), 2)

    def test_malformed_programs_are_refused(self, device: Device, rng: np.random.Generator) -> None:
        def compiled(k: int, width: int, name: str) -> Executable:
            weight = ternary(random_ternary(rng, 3, k), 1.0)
            specs = [tensor("x", "f32", "M", k), tensor("q", "i8", "M", k), tensor("s", "f32", "M")]
            specs += [tensor("out", "f32", "M", width)]
            ops: list[Op] = [NormQuant("x", None, 1e-5, "q", "s"), TernaryMatmul("q", "s", (name,), "out")]
            return device.compile(Program(ops, {t.name: t for t in specs}, {"w": weight}, Limits(2)))

        compiled(8, 3, "w").close()
        for k, width, name in ((8, 4, "w"), (6, 3, "w"), (8, 3, "v")):
            with pytest.raises(InvalidInputError):
                compiled(k, width, name)

    def test_dense_weights_that_no_device_takes(self, device: Device, rng: np.random.Generator) -> None:
        """An array that is not as it was declared; a product that would overwrite what it reads."""

        def compiled(loaded: Array, out: str) -> Executable:
            specs = [tensor("x", "f32", "R", 64), tensor("y", "f32", "R", 64)]
            weight = DenseWeight((64, 64), "f16", lambda: loaded)
            return device.compile(
                Program([DenseMatmul("x", "w", out)], {t.name: t for t in specs}, {"w": weight}, Limits(2))
            )

        good = rng.standard_normal((64, 64)).astype(np.float16)
        compiled(good, "y").close()
        for loaded, out in ((good[:4], "y"), (good.astype(np.float32), "y"), (good, "x")):
            with pytest.raises(InvalidInputError, match="'w'" if out == "y" else "'x'"):
                compiled(loaded, out)

    @pytest.mark.parametrize("shape", [(), (3,), (3, 2)], ids=str)
    def test_scales_that_no_device_takes(
        self, device: Device, rng: np.random.Generator, shape: tuple[int, ...]
    ) -> None:
        """Scales of rows and of groups are refused, as a device that took the first for all would be wrong."""
        good = ternary(random_ternary(rng, 3, 8), 1.0)
        data = good.load()._replace(scale=np.ones(shape, np.float32))
        weight = TernaryWeight(good.shape, lambda: data)
        specs = [tensor("q", "i8", "M", 8), tensor("s", "f32", "M"), tensor("out", "f32", "M", 3)]
        ops: list[Op] = [TernaryMatmul("q", "s", ("w",), "out")]
        before = device.memory().used
        with pytest.raises(InvalidInputError, match="'w'"):
            device.compile(Program(ops, {t.name: t for t in specs}, {"w": weight}, Limits(2)))
        assert device.memory().used == before

    def test_out_of_memory(self, device: Device) -> None:
        """A cache beyond any memory: a typed error that names the device, nothing kept, the device as good as new."""
        before = device.memory().used
        cos: Array = np.ones((32, 64), np.float32)
        shape = 8, 8, 128
        ops: list[Op] = [RopeAppend("qkv", 0, *shape, "cos", "sin"), Attention("qkv", "out", 0, *shape)]
        specs = [tensor("qkv", "f32", "M", 24 * 128), tensor("out", "f32", "M", 1024)]
        weights = {"cos": dense(cos), "sin": dense(0 * cos)}
        huge = KVSpec(64, 8, 128, 2**31 - 1)
        program = Program(ops, {t.name: t for t in specs}, weights, Limits(1), huge)
        with pytest.raises(OutOfMemoryError, match=device.info.name):
            device.compile(program)
        assert device.memory().used == before
        session = Session(device, 0)
        session.prefill([0])
        session.executable.close()
