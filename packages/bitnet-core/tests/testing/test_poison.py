"""The suite's poison is everywhere that no kernel may read, and nowhere else."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu import GpuDevice, Launch
from bitnet.core.gpu.drivers.interface import launch
from bitnet.core.hal import Limits, SamplingParams, SequenceStep, Step, StepLayout
from bitnet.core.testing import poison
from bitnet.core.testing.guard import guarded
from bitnet.core.testing.tails import TAIL


def test_a_step_is_poisoned_past_its_tokens_sequences_and_rows() -> None:
    layout = StepLayout(Limits(max_tokens=9, max_seqs=4, max_rows=5, max_blocks=3))
    parts = [SequenceStep([5, 6], 7, [2], [1], SamplingParams(0.5, seed=9)), SequenceStep([8], 3, [1], [0])]
    plain, step = Step(layout, parts), poison.poison_step(Step(layout, parts))
    changed = np.flatnonzero(plain.data != step.data)
    at = layout.offsets
    spare = {"tokens": 6, "token_seq": 6, "seq_begin": 2, "seq_len": 2, "rows": 3, "block_table": 6}
    spare |= {"state_from": 2, "state_to": 2}
    spare |= dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed_lo", "seed_hi"), 3)
    spare |= dict.fromkeys(("slot", "repetition", "presence", "frequency"), 5)  # the step adjusts no logits
    names = list(at)
    found = dict.fromkeys(names, 0)
    for word in changed:
        found[max((n for n in names if at[n] <= word), key=at.__getitem__)] += 1
    assert {name: count for name, count in found.items() if count} == spare
    assert set(step.data[changed].tolist()) == {int(poison.WORD)}


def test_the_word_is_no_number_and_no_index() -> None:
    bits = np.array([poison.WORD])
    assert np.isnan(bits.view(np.float32)).all()
    assert np.isnan(bits.view(np.float16)).all()
    assert poison.WORD > 2**30


class Memory:
    """A driver that hands out arrays, and notes what would wait for its work and what is freed."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, object]] = []

    def alloc(self, nbytes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return np.zeros(nbytes, np.uint8)

    def upload(
        self, buffer: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], array: np.ndarray, offset: int = 0
    ) -> None:
        buffer[offset : offset + array.nbytes] = array.view(np.uint8)

    def download(self, buffer: object, array: np.ndarray) -> None:
        self.ended.append(("waited", buffer))

    def free(self, buffer: object) -> None:
        self.ended.append(("freed", buffer))


@pytest.mark.parametrize("unwritten", [False, True])
def test_a_gpu_gives_poisoned_memory(monkeypatch: pytest.MonkeyPatch, unwritten: bool) -> None:
    """But where a tool looks for reads of what nothing wrote: poison would be a write."""
    monkeypatch.setenv(poison.UNWRITTEN, str(int(unwritten)))
    driver = Memory()
    poison.poison_memory(GpuDevice(None, driver, None), lambda driver, memory: None)  # type: ignore[arg-type]
    given = driver.alloc(10)
    assert len(given) == 10
    assert given.any() != unwritten
    if not unwritten:
        assert np.isnan(given[:8].view(np.float32)).all()


@pytest.mark.parametrize("nbytes", [1, 10, 20_010, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 64])
def test_guarded_memory_is_aligned_as_its_size_is(nbytes: int) -> None:
    memory = guarded(nbytes)
    assert memory.nbytes == nbytes
    memory[:] = 7
    assert memory.ctypes.data % gcd(nbytes, 64) == 0


def test_a_read_past_the_end_of_guarded_memory_ends_the_process() -> None:
    read = "import ctypes; from bitnet.core.testing.guard import guarded; m = guarded(10); at = m.ctypes.data; "
    read += "print(ctypes.string_at(at, 10) == bytes(10), flush=True); print(ctypes.string_at(at, 11))"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n"
    assert done.returncode not in (0, 1), done.stderr


@dataclass(frozen=True, eq=False)
class Bound:
    """A buffer of a driver that checks bounds."""

    memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    nbytes: int


class Checking(Memory):
    """A driver that checks bounds."""

    def alloc(self, nbytes: int) -> Any:
        return Bound(super().alloc(nbytes), nbytes)

    def upload(self, buffer: Any, array: Any, offset: int = 0) -> None:
        super().upload(buffer.memory, array, offset)

    def download(self, buffer: Any, array: Any, offset: int = 0) -> None:
        array.view(np.uint8)[:] = buffer.memory[offset : offset + array.nbytes]

    def free(self, buffer: Any) -> None:
        del buffer

    def record(self, launches: Sequence[Launch]) -> Any:
        return launches


def test_kernels_reach_a_tail_of_poison_and_a_write_there_is_told() -> None:
    driver: Any = Checking()
    tails = poison.poison_memory(GpuDevice(None, driver, None), lambda driver, memory: None, 1 << 20)  # type: ignore[arg-type]
    assert tails is not None
    given = driver.alloc(10)
    assert given.nbytes == 10
    (recorded,) = driver.record([launch("embed", (1, 1, 1), 64, (given, np.int32(3)))])
    (window,) = recorded.buffers
    assert (window.buffer, window.offset, window.nbytes) == (given, 0, 16 + TAIL)
    assert np.isnan(given.memory.view(np.float32)).all()
    given.memory[9] = 1
    tails.check()
    given.memory[16 + 8] = 1
    with pytest.raises(AssertionError, match="wrote 14 bytes behind a buffer of 10"):
        tails.check()
    tails.check()
    given.memory[-1] = 1
    driver.free(given)
    with pytest.raises(AssertionError, match="wrote 4,098 bytes behind"):
        tails.check()


def test_buffers_are_in_the_memory_that_a_backend_takes() -> None:
    driver, given = Memory(), []

    def hosted(driver: Memory, memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> object:
        given.append(memory)
        return memory

    poison.poison_memory(GpuDevice(None, driver, None), hosted)  # type: ignore[arg-type]
    assert driver.alloc(10) is given[0]
    assert np.isnan(given[0][:8].view(np.float32)).all()


def test_host_memory_stays_until_submitted_work_has_ended() -> None:
    """A driver keeps memory of its own until then, but the host's is unmapped as soon as its buffer is freed."""
    driver, hosts = Memory(), [True, False]
    poison.poison_memory(GpuDevice(None, driver, None), lambda _, memory: memory if hosts.pop(0) else None)  # type: ignore[arg-type]
    host, own = driver.alloc(8), driver.alloc(8)
    driver.free(own)
    driver.free(host)
    assert [(what, buffer is host) for what, buffer in driver.ended] == [
        ("freed", False),
        ("waited", True),
        ("freed", True),
    ]
