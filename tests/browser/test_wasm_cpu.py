"""The CPU's kernels as WebAssembly: the conformance suite at its small size in Pyodide on Node, and what loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bitnet.core.testing import ConformanceSuite

Run = Callable[[str], Any]
BY_DAY = "LinearTests"
"""The part of the suite that runs by day: ternary products."""


LIBRARIES = {"libbitnet_cpu_relaxed.wasm": "relaxed_simd128", "libbitnet_cpu.wasm": "simd128"}
"""The level of each library, best first."""


def parts() -> list[Any]:
    """All parts of the suite but the one that a CPU skips; most of them at night."""
    names = [part.__name__ for part in ConformanceSuite.__bases__]
    assert BY_DAY in names
    names.remove("LookAheadTests")  # a CPU does not look ahead
    return [name if name == BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("part", parts())
def test_conformance(pyodide_numpy: Run, conform: Callable[..., None], part: str, library: str) -> None:
    before = f"""
from bitnet.core.cpu import native
native.PATHS = tuple(path for path in native.PATHS if path.name == {library!r})
(level,) = {{info.details["level"] for info in BACKEND.probe().devices if info.index != "numpy"}}
assert level == {LIBRARIES[library]!r}, level
"""
    conform(pyodide_numpy, part, "bitnet.core.cpu.backend", before)


PROBE = """
import json
from pathlib import Path
from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND

def devices(*paths):
    native.library.cache_clear()
    native.PATHS = paths
    found = BACKEND.probe()
    return [[info.details.get("level", info.name) for info in found.devices], found.reason]

relaxed, plain = native.PATHS
good, bad = plain.read_bytes(), Path("/tmp/another.wasm")
bad.write_bytes(relaxed.read_bytes().replace(b"\\xfd\\x93\\x02", b"\\xfd\\xff\\x02"))
without_relaxed = devices(bad, plain)
others = []
for data in (b"no library", good[:5000], good.replace(b"\\xfd\\xba", b"\\xfd\\xff")):
    bad.write_bytes(data)
    others.append(devices(bad))
    bad.unlink()
print(json.dumps([without_relaxed, others]))
"""


def test_what_computes_where_a_library_does_not_load(pyodide_numpy: Run) -> None:
    """Without relaxed SIMD the other library; numpy instead of text, of a part of a library, and of one with an
    instruction that this engine does not know."""
    without_relaxed, others = pyodide_numpy(PROBE)
    assert without_relaxed == [["simd128", "cpu:numpy"], ""]
    for names, reason in others:
        assert names == ["cpu:numpy"]
        assert "does not load" in reason


LOAD = """
import ctypes, json
from pathlib import Path
(path,) = [path for folder in folders for path in Path(folder).glob("bitnet/core/cpu/_native/" + LIBRARY)]
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


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_newest_pyodide_loads_the_same_library(pyodide: Run, library: str) -> None:
    """Numpy is not to be had for it here, so nothing is computed. Memory is aligned, and zeroed again."""
    assert pyodide(f"LIBRARY = {library!r}\n{LOAD}") == [LIBRARIES[library], True, 0, False]
