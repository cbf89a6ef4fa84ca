"""The wheels of every platform. By day they are built only where what they are made of has changed."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import release
from changes import BUILDS

pytestmark = pytest.mark.nightly(unless_changed=BUILDS)

Files = Callable[[Path], dict[str, bytes]]
NATIVE = "bitnet/core/cpu/_native/"

# (offset, format, value) of what a library's header says about its processor.
HEADERS = {
    "linux-x86_64": (b"\x7fELF", 18, "<H", 62),
    "linux-aarch64": (b"\x7fELF", 18, "<H", 183),
    "musl-x86_64": (b"\x7fELF", 18, "<H", 62),
    "musl-aarch64": (b"\x7fELF", 18, "<H", 183),
    "macos-x86_64": (b"\xcf\xfa\xed\xfe", 4, "<I", 0x01000007),
    "macos-arm64": (b"\xcf\xfa\xed\xfe", 4, "<I", 0x0100000C),
    "windows-amd64": (b"MZ", None, "<H", 0x8664),
    "windows-arm64": (b"MZ", None, "<H", 0xAA64),
    "pyodide-wasm32": (b"\0asm", 4, "<I", 1),
}
TAGS = {
    "linux-x86_64": "manylinux_2_17_x86_64",
    "linux-aarch64": "manylinux_2_17_aarch64",
    "musl-x86_64": "musllinux_1_2_x86_64",
    "musl-aarch64": "musllinux_1_2_aarch64",
    "macos-x86_64": "macosx_11_0_x86_64",
    "macos-arm64": "macosx_11_0_arm64",
    "windows-amd64": "win_amd64",
    "windows-arm64": "win_arm64",
    "pyodide-wasm32": "pyemscripten_2026_0_wasm32",
}


def test_every_target_is_tested(hatch_build: ModuleType) -> None:
    assert set(HEADERS) == set(TAGS) == set(hatch_build.TARGETS)


@pytest.mark.parametrize("target", TAGS)
def test_wheel_for_every_target(
    root: Path, target: str, hatch_build: ModuleType, target_wheel: Callable[[str], Path], wheel_files: Files
) -> None:
    path = target_wheel(target)
    assert "-py3-none-" in path.name
    assert TAGS[target] in path.name
    native = {n.removeprefix(NATIVE): data for n, data in wheel_files(path).items() if n.startswith(NATIVE)}
    own = hatch_build.TARGETS[target].library
    assert native.keys() == {own, "libbitnet_cpu.wasm", "libbitnet_cpu_relaxed.wasm"}  # for `bitnet web build`
    library = native[own]
    magic, offset, form, machine = HEADERS[target]
    assert library.startswith(magic)
    if offset is None:  # PE: the header's place stands at 0x3c, and the machine follows its four-byte signature.
        offset = struct.unpack_from("<I", library, 0x3C)[0] + 4
    assert struct.unpack_from(form, library, offset) == (machine,)
    exported = re.findall(r"^BN_API [^(]*?(bitnet_\w+)\(", (root / "kernels/cpu/native.c").read_text(), re.MULTILINE)
    assert exported
    assert [name for name in exported if name.encode() not in library] == []
    assert str(Path.home()).encode() not in library, "a path of the machine that built it"
    if target.startswith("linux"):
        needed = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([\d.]+)", library)}
        assert needed
        assert max(needed) <= (2, 17)


def test_a_release_has_every_file_and_no_other(
    dist: Path, target_wheel: Callable[[str], Path], hatch_build: ModuleType, packages: list[str], tmp_path: Path
) -> None:
    made = [target_wheel(target) for target in (*hatch_build.TARGETS, "any")]
    made += [path for path in dist.iterdir() if not path.name.startswith("bitnet_core") or path.suffix == ".gz"]
    for path in made:
        if path.name != ".gitignore":
            shutil.copy(path, tmp_path)
    release.complete(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        path.rename(moved := tmp_path.parent / path.name)
        with pytest.raises(SystemExit, match=r"needs \d+ wheels|has no bitnet_"):
            release.complete(tmp_path)
        moved.rename(path)
    (tmp_path / f"other-{release.version()}-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match=r"no part of the release .*: other-"):
        release.complete(tmp_path)
