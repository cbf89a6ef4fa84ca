"""What is in the wheels and sdists."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import release

Files = Callable[[Path], dict[str, bytes]]
NATIVE = "bitnet/core/cpu/_native/"
SPIRV = "bitnet/vulkan/_spirv/"
MADE = (NATIVE, SPIRV, "bitnet/level_zero/_spirv/")
"""Folders of files that the build hooks make."""


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
    ours = {name: data for name, data in files.items() if ".dist-info/" not in name and not name.startswith(MADE)}
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
    assert found or package == "bitnet-server", "a package without kernels"
    files = wheel_files(wheel(package))
    for link in found:
        assert not link.readlink().is_absolute()
        assert link.resolve().parent == root / "kernels"
        place = f"{link.relative_to(source).as_posix()}/"
        carried = {name.removeprefix(place): data for name, data in files.items() if name.startswith(place)}
        assert carried == tree(link.resolve()) != {}


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
