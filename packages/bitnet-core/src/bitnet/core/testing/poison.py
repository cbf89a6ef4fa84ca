"""Poisons data that no kernel may read: words of a step, rows, unwritten memory, and what lies behind a buffer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.cpu.device import CpuDevice
from bitnet.core.cpu.lowering import LoweredProgram
from bitnet.core.gpu import GpuDevice
from bitnet.core.hal import Device, HeaderWord, Step
from bitnet.core.testing.arenas import GuardedProgram
from bitnet.core.testing.guard import guarded
from bitnet.core.testing.tails import Tails

WORD = np.int32(0x7FFF7FFF)
"""Not a number as f32 and as two f16, as a token or a block beyond every table, as a count of tokens without an end."""

_ADJUSTED = "slot", "repetition", "presence", "frequency"
"""Fields that mean nothing in a step that adjusts no logits."""

MAX_GUARDED = 1 << 30
"""Bytes of a buffer from which on the driver's own memory is taken, so that a test of too little memory is one."""

UNWRITTEN = "BITNET_CONFORMANCE_UNWRITTEN"
"""Set to 1 where a tool looks for reads of memory that nothing wrote: poison would be a write."""


def wanted() -> bool:
    """Whether to poison memory."""
    return os.environ.get(UNWRITTEN, "") != "1"


def poison_step(step: Step) -> Step:
    """The step, with all words poisoned that belong to none of its tokens, sequences or rows."""
    at, limits = step.layout.offsets, step.layout.limits
    per_row = ("rows", "temperature", "top_k", "top_p", "min_p", "seed_lo", "seed_hi")
    used = {"tokens": step.tokens, "token_seq": step.tokens, "seq_begin": step.seqs + 1, "seq_len": step.seqs}
    used |= {"state_from": step.seqs, "state_to": step.seqs}
    used |= dict.fromkeys(per_row, step.rows)
    used |= dict.fromkeys(_ADJUSTED, step.rows if step.data[HeaderWord.ADJUST] else 0)
    ends = [*list(at.values())[1:], step.layout.words]
    for (name, begin), end in zip(at.items(), ends, strict=True):
        if name in used:
            step.data[begin + used[name] : end] = WORD
    tables = step.data[at["block_table"] : at["state_from"]].reshape(limits.tables, limits.max_seqs, limits.max_blocks)
    tables[:, step.seqs :] = WORD
    return step


Hosted: TypeAlias = Callable[[Any, npt.NDArray[np.uint8]], Any]
"""Makes a buffer of a driver in host memory, which it keeps alive; or gives None where kernels cannot use that."""


def poison_memory(device: Device, hosted: Hosted, largest_binding: int | None = None) -> Tails | None:
    """Poison all memory that a GPU allocates from now on, including its backend's internal scratch memory.

    Where the device computes in host memory, an inaccessible page follows each buffer. So it is with the CPU device.

    Args:
        largest_binding: Maximum bytes of a binding of a device whose driver checks bounds: poison follows its buffers.

    Returns:
        What watches that poison, for such a device.
    """
    if isinstance(device, CpuDevice) and device.lowered is LoweredProgram:
        device.lowered = GuardedProgram  # type: ignore[misc]
    if not isinstance(device, GpuDevice) or not wanted():
        return None
    driver: Any = device._driver
    if largest_binding is not None:
        return Tails(driver, WORD, largest_binding)
    alloc, free, in_host_memory = driver.alloc, driver.free, set[int]()

    def poisoned(nbytes: int) -> Any:
        buffer = hosted(driver, guarded(nbytes)) if nbytes <= MAX_GUARDED else None
        if buffer is None:
            buffer = alloc(nbytes)
        else:
            in_host_memory.add(id(buffer))
        driver.upload(buffer, np.full(-(-nbytes // 4), WORD).view(np.uint8)[:nbytes])
        return buffer

    def freed(buffer: Any) -> None:
        if id(buffer) in in_host_memory:
            in_host_memory.remove(id(buffer))
            driver.download(buffer, np.empty(1, np.uint8))  # waits: a driver keeps its own memory, but not the host's
        free(buffer)

    driver.alloc, driver.free = poisoned, freed
    return None
