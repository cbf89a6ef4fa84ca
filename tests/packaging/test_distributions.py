"""What is in the wheels and sdists."""

from __future__ import annotations

import os
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import release

Files = Callable[[Path], dict[str, bytes]]
NATIVE = "bitnet/core/cpu/_native/"
SPIRV = "bitnet/vulkan/_spirv/"


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, through symbolic links, without what tools leave behind."""
    paths = (Path(top, name) for top, _, names in os.walk(folder, followlinks=True) for name in names)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in paths
        if not re.search(r"/(__pycache__|_native|_spirv|\.\w+)/", path.as_posix())
    }


def links(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink()]


def sdist(dist: Path, package: str) -> Path:
    (path,) = dist.glob(f"{package.replace('-', '_')}-*.tar.gz")
    return path


def test_wheel_holds_the_source_tree(
    root: Path, package: str, wheel: Callable[[str], Path], wheel_files: Files
) -> None:
    files = wheel_files(wheel(package))
    ours = {
        name: data for name, data in files.items() if ".dist-info/" not in name and not name.startswith((NATIVE, SPIRV))
    }
    assert ours == tree(root / "packages" / package / "src")
    assert "bitnet/__init__.py" not in files
    assert any(name.endswith("/py.typed") for name in files)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_sdist_holds_the_source_tree(root: Path, package: str, dist: Path) -> None:
    with tarfile.open(sdist(dist, package)) as archive:
        members = archive.getmembers()
        assert all(member.isfile() for member in members), "a link in an sdist points out of it"
        files = {m.name.partition("/")[2]: archive.extractfile(m).read() for m in members}  # type: ignore[union-attr]
    assert {n[4:]: d for n, d in files.items() if n.startswith("src/")} == tree(root / "packages" / package / "src")


def test_names_are_possible_on_windows(
    package: str, dist: Path, wheel: Callable[[str], Path], wheel_files: Files
) -> None:
    with tarfile.open(sdist(dist, package)) as archive:
        names = [*archive.getnames(), *wheel_files(wheel(package))]
    reserved = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
    for name in names:
        assert len(name) < 150, name  # of 260, with the folder it is installed in
        assert name.isascii(), name
        for part in name.split("/"):
            assert not reserved.fullmatch(part), name
            assert not re.search(r'[<>:"|?*\\]|[. ]$', part), name
    assert len({name.lower() for name in names}) == len(set(names)), "names that differ in case alone"


def test_kernels_travel_with_the_package(
    root: Path, package: str, wheel: Callable[[str], Path], wheel_files: Files
) -> None:
    """Sources live once, in `kernels/`, reached by a relative link; wheel and sdist (above) hold every file of it."""
    source = root / "packages" / package / "src"
    found = links(source)
    assert found, "a package without kernels"
    files = wheel_files(wheel(package))
    for link in found:
        assert not link.readlink().is_absolute()
        assert link.resolve().parent == root / "kernels"
        place = f"{link.relative_to(source).as_posix()}/"
        carried = {name.removeprefix(place): data for name, data in files.items() if name.startswith(place)}
        assert carried == tree(link.resolve()) != {}


def test_wheel_rebuilt_from_the_sdist_is_the_same(
    package: str, rebuilt: Path, wheel: Callable[[str], Path], wheel_files: Files
) -> None:
    """Native library included."""
    first, second = wheel_files(wheel(package)), wheel_files(rebuilt / wheel(package).name)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


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
}


def test_every_target_is_tested(hatch_build: ModuleType) -> None:
    assert set(HEADERS) == set(TAGS) == set(hatch_build.TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("target", TAGS)
def test_wheel_for_every_target(
    root: Path, target: str, hatch_build: ModuleType, target_wheel: Callable[[str], Path], wheel_files: Files
) -> None:
    path = target_wheel(target)
    assert "-py3-none-" in path.name
    assert TAGS[target] in path.name
    native = {n.removeprefix(NATIVE): data for n, data in wheel_files(path).items() if n.startswith(NATIVE)}
    assert list(native) == [hatch_build.LIBRARY[hatch_build.TARGETS[target].system]]
    (library,) = native.values()
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


def test_spirv_is_compiled_for_every_kernel(root: Path, wheel: Callable[[str], Path], wheel_files: Files) -> None:
    """One module a kernel and set of features, none of them in the tree that is committed."""
    files = {n: data for n, data in wheel_files(wheel("bitnet-vulkan")).items() if n.startswith(SPIRV)}
    text = "".join(path.read_text() for path in (root / "kernels/vulkan").glob("*.comp"))
    assert len(files) >= len(re.findall(r"^KERNEL\(", text, re.MULTILINE)) > 10
    assert all(data.startswith(b"\x03\x02\x23\x07") for data in files.values())


def test_pure_wheel_has_no_library(target_wheel: Callable[[str], Path], wheel_files: Files) -> None:
    path = target_wheel("any")
    assert path.name.endswith("-py3-none-any.whl")
    assert not [name for name in wheel_files(path) if name.startswith(NATIVE)]


def test_unknown_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"BITNET_TARGET=amiga .*linux-x86_64.*any"):
        release.wheel("bitnet-core", "amiga", tmp_path)
    assert not list(tmp_path.glob("*.whl"))
