"""The CPU's kernels as WebAssembly: the conformance suite at its small size in Pyodide on Node, and what loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bitnet.core.testing import ConformanceSuite

Run = Callable[[str], Any]
BY_DAY = "LinearTests"
"""The part of the suite that runs by day: ternary products."""


def parts() -> list[Any]:
    """All parts of the suite; most of them at night."""
    names = [part.__name__ for part in ConformanceSuite.__bases__]
    assert BY_DAY in names
    return [name if name == BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("part", parts())
def test_conformance(pyodide_numpy: Run, conform: Callable[..., None], part: str) -> None:
    conform(pyodide_numpy, part, "bitnet.core.cpu.backend")


PROBE = """
import json
from pathlib import Path
from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND

def devices():
    found = BACKEND.probe()
    return [[info.name for info in found.devices], found.reason]

as_built = devices()
good, bad = native.PATH.read_bytes(), Path("/tmp/libbitnet_cpu.wasm")
others = []
for data in (b"no library", good[:5000], good.replace(b"\\xfd\\xba", b"\\xfd\\xff")):
    bad.write_bytes(data)
    native.library.cache_clear()
    native.PATH = bad
    others.append(devices())
    bad.unlink()
print(json.dumps([as_built, others]))
"""


def test_numpy_computes_where_the_library_does_not_load(pyodide_numpy: Run) -> None:
    """Text, a part of the library, and one with an instruction that this engine does not know."""
    as_built, others = pyodide_numpy(PROBE)
    assert as_built == [["cpu:simd128", "cpu:numpy"], ""]
    for names, reason in others:
        assert names == ["cpu:numpy"]
        assert "does not load" in reason


LOAD = """
import ctypes, json
from pathlib import Path
(path,) = [path for folder in folders for path in Path(folder).glob("bitnet/core/cpu/_native/*.wasm")]
library = ctypes.CDLL(str(path))
library.bitnet_level.restype = ctypes.c_void_p
library.bitnet_level_name.restype, library.bitnet_level_name.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
used = library.bitnet_pages_alloc(1000)
ctypes.memset(used, 255, 1000)
library.bitnet_pages_free(used, 1000)
address = library.bitnet_pages_alloc(1000)
level = library.bitnet_level_name(library.bitnet_level(0)).decode()
print(json.dumps([level, address == used, address % 64, any(ctypes.string_at(address, 1000))]))
"""


def test_the_newest_pyodide_loads_the_same_library(pyodide: Run) -> None:
    """Numpy is not to be had for it here, so nothing is computed. Memory is aligned, and zeroed again."""
    assert pyodide(LOAD) == ["simd128", True, 0, False]
