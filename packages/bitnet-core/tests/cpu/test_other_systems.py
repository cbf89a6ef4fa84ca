"""The libraries of the Windows and musl wheels, run: Windows' under Wine, musl's under musl's own loader.

Each is the library as the wheel has it, opened by a program of that system (``tools/emulated.py``).
"""

from __future__ import annotations

import atexit
import mmap
import platform
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.cpu import native, structures
from bitnet.core.hal import Limits, OpenOptions, SamplingParams, SequenceStep, run
from bitnet.core.testing import ConformanceSuite
from bitnet.core.testing.model import TinyModel
from bitnet.core.testing.rig import Rig
from emulated import BestByDay, EmulatedBackend, EmulatedLibrary

LIMITS = Limits(max_tokens=80, max_seqs=4, max_rows=4, max_blocks=60)


class OtherSystem(EmulatedBackend):
    shared = True

    def absent(self) -> str | None:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return f"{self.name} is tried on Linux with x86-64 alone"
        return super().absent()


class Wine(OtherSystem):
    package = "wine64"

    def program(self) -> str | None:
        return shutil.which("wine64") or shutil.which("/usr/lib/wine/wine64")

    def absent(self) -> str | None:
        return super().absent() or (None if system32() else "Wine's libraries are not where Debian has them")

    def environment(self) -> dict[str, str]:
        return {"WINEPREFIX": str(prefix()), "WINEDEBUG": "-all"}

    def library(self) -> EmulatedLibrary:
        """Started again if it ends at once: all servers of a user share a folder, which the last one removes as it
        ends, perhaps while one of another process starts."""
        library = super().library()
        try:
            list(native.levels(library))  # type: ignore[arg-type]
        except AssertionError:
            time.sleep(1)
            library = super().library()
        return library


class Musl(OtherSystem):
    package = "musl"

    def program(self) -> str | None:
        return shutil.which("/lib/ld-musl-x86_64.so.1")


def system32() -> Path | None:
    """Wine's own libraries."""
    return next(Path("/usr/lib").glob("*/wine/x86_64-windows"), None)


@cache
def prefix() -> Path:
    """A Windows of a few links, made at once; Wine's own way fills some 700 MB.

    Each process that tests has its own: two that start the server of one at the same moment are in each other's way.
    """
    libraries = system32()
    assert libraries is not None
    folder = Path(tempfile.mkdtemp(prefix="bitnet-wine-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "dosdevices").mkdir()
    (folder / "drive_c/windows").mkdir(parents=True)
    (folder / "dosdevices/c:").symlink_to("../drive_c")
    (folder / "dosdevices/z:").symlink_to("/")
    (folder / "drive_c/windows/system32").symlink_to(libraries)
    (folder / ".update-timestamp").write_text("disable\n")
    return folder


WINE, MUSL = Wine("wine", "windows-amd64"), Musl("musl", "musl-x86_64")


class TestWine(BestByDay, ConformanceSuite):
    backend = WINE
    size = "small"


class TestMusl(BestByDay, ConformanceSuite):
    backend = MUSL
    size = "small"


@pytest.fixture(params=[WINE, MUSL], ids=lambda backend: backend.name)
def system(request: pytest.FixtureRequest, require_device: Any) -> OtherSystem:
    backend: OtherSystem = request.param
    require_device(backend.name, backend.absent())
    return backend


def test_it_has_every_level_of_this_processor(system: OtherSystem) -> None:
    here = list(native.levels(native.library().handle))
    if system is WINE and "amx" in here:  # Windows' way to ask for its registers is not there yet
        here.remove("amx")
    assert [info.index for info in system.probe().devices] == here != []


def outputs(system: OtherSystem, seed: int, count: int) -> list[Any]:
    """Prompts in several steps and a token after them, on a device of so many threads."""
    device = system.open(system.probe().devices[0], OpenOptions(threads=count))
    program = TinyModel(np.random.default_rng(seed), positions=320).program(LIMITS, 20)
    ids = np.random.default_rng(seed).integers(0, 301, 320).tolist()
    draw = SamplingParams(0.8, 40, 0.9, 0.0, 7)
    out: list[Any] = []
    with Rig(device, program.ops, program.tensors.values(), program.weights, limits=LIMITS, kv=program.kv) as rig:
        for begin in range(0, 300, 75):
            part = SequenceStep(ids[begin : begin + 75], begin + 75, list(range(19)), [74], draw)
            out.append(run(rig.executable, rig.step([part])))
        out.append(run(rig.executable, rig.step([SequenceStep(ids[300:301], 301, list(range(19)), [0], draw)])))
        out.extend(rig.executable.read(name) for name in program.tensors)
    device.close()
    return out


def test_bits_do_not_depend_on_the_number_of_threads(system: OtherSystem) -> None:
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    alone = outputs(system, seed, 1)
    assert any(np.any(array) for array in alone)
    for count in (2, 5):
        for one, several in zip(alone, outputs(system, seed, count), strict=True):
            assert one.tobytes() == several.tobytes()


def test_pools_come_and_go(system: OtherSystem) -> None:
    """Threads start with the pool's first work and end with the pool."""
    library = system.library()
    levels = [library.bitnet_level(index) for index in range(len(native.LEVELS))]
    level = next(level for level in levels if level and library.bitnet_level_runs(level))
    for _ in range(50):
        pool = library.bitnet_pool_new(4)
        assert pool
        codes = np.zeros((256, 1, 32), np.uint8)
        packed = library.bitnet_pages_alloc(library.bitnet_packed_bytes(level, 256, 128, 0, False))
        library.bitnet_pack(level, pool, structures.PackJob(codes.ctypes.data, packed, 256, 128))
        library.bitnet_pool_delete(pool)
    library.close()


@pytest.mark.parametrize("size", [1, 4096, 4097, (2 << 20) - 1, 2 << 20, (6 << 20) + 1])
def test_pages(system: OtherSystem, size: int) -> None:
    """Aligned, zeroed, writable to the last byte, apart from each other, and given back."""
    library = system.library()
    one, other = library.bitnet_pages_alloc(size), library.bitnet_pages_alloc(size)
    assert one
    assert other
    assert one % mmap.PAGESIZE == other % mmap.PAGESIZE == 0
    assert abs(one - other) >= size
    assert library.read(one, size) == bytes(size)
    data = np.random.default_rng().bytes(size)
    library.write(one, data)
    assert library.read(other, size) == bytes(size)
    assert library.read(one, size) == data
    library.bitnet_pages_free(one, size)
    library.bitnet_pages_free(other, size)
    library.close()


def test_pages_are_given_back(system: OtherSystem) -> None:
    """A terabyte in all, of which none is left: more than any machine of ours could keep."""
    library = system.library()
    for _ in range(1024):
        address = library.bitnet_pages_alloc(1 << 30)
        assert address
        library.bitnet_pages_free(address, 1 << 30)
    library.close()


def test_memory_that_cannot_be_had(system: OtherSystem) -> None:
    library = system.library()
    assert library.bitnet_pages_alloc(1 << 62) == 0
    assert library.bitnet_pages_alloc(2**64 - 1) == 0
    library.close()
