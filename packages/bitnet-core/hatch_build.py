"""Compile `kernels/cpu` into the native library of bitnet-core's wheel.

The compiler is `zig cc`, from the pinned `ziglang` wheel: it needs nothing from the system and builds for every target
from every machine. The library is plain C behind ctypes, so one `py3-none-<platform>` wheel serves all Pythons.

`BITNET_TARGET` names the target (a key of `TARGETS`); without it, wheels are for this machine. `any` makes a wheel
without a native library, which runs on the numpy device. To rebuild the libraries of an editable install in place, run
`python packages/bitnet-core/hatch_build.py`.

Wheels for machines hold the libraries of browsers, too: `bitnet web build` puts them into a site.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "src/bitnet/core/cpu/kernels"
NATIVE = "bitnet/core/cpu/_native"
LIBRARY = {
    "linux": "libbitnet_cpu.so",
    "macos": "libbitnet_cpu.dylib",
    "windows": "bitnet_cpu.dll",
    "wasi": "libbitnet_cpu.wasm",
}
BROWSER = "pyodide-wasm32"
"""The target of Pyodide, the Python of browsers."""


class Target(NamedTuple):
    """A platform: its name for zig, its wheel tag (PEP 425, 600, 656), and its name in `build.toml` if not zig's."""

    zig: str
    tag: str
    family: str = ""

    @property
    def arch(self) -> str:
        return self.family or self.zig.split("-")[0]

    @property
    def system(self) -> str:
        return self.zig.split("-")[1].split(".")[0]

    @property
    def library(self) -> str:
        return LIBRARY[self.system] if self != RELAXED else "libbitnet_cpu_relaxed.wasm"


# Pyodide's C library is Emscripten's. The compiler brings WASI's headers alone, and what we call is the same in both.
# Pyodide's own module exports all of it, and links a side module when it is loaded.
# glibc 2.17 and musl 1.2 are the oldest that pip's manylinux and musllinux tags still name in use.
TARGETS = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64.manylinux2014_x86_64"),
    "linux-aarch64": Target("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64.manylinux2014_aarch64"),
    "musl-x86_64": Target("x86_64-linux-musl", "musllinux_1_2_x86_64"),
    "musl-aarch64": Target("aarch64-linux-musl", "musllinux_1_2_aarch64"),
    "macos-x86_64": Target("x86_64-macos.11.0", "macosx_11_0_x86_64"),
    "macos-arm64": Target("aarch64-macos.11.0", "macosx_11_0_arm64"),
    "windows-amd64": Target("x86_64-windows-gnu", "win_amd64"),
    "windows-arm64": Target("aarch64-windows-gnu", "win_arm64"),
    BROWSER: Target("wasm32-wasi", "pyemscripten_2026_0_wasm32"),
}

RELAXED = TARGETS[BROWSER]._replace(family="wasm32_relaxed")
"""For browsers that have relaxed SIMD; others refuse the library as a whole."""


def host() -> str:
    """The key in `TARGETS` of this machine, or `any` where there is none."""
    machine = platform.machine().lower()
    system = platform.system().lower()
    if system == "linux":
        musl = "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "")
        name = f"{'musl' if musl else 'linux'}-{machine}"
    else:
        name = f"{'macos' if system == 'darwin' else system}-{machine}"
    # A 32-bit Python on a 64-bit processor cannot load a 64-bit library.
    return name if name in TARGETS and sys.maxsize > 2**32 else "any"


def selected() -> str:
    """The target asked for in `BITNET_TARGET`, else this machine's."""
    name = os.environ.get("BITNET_TARGET") or host()
    if name != "any" and name not in TARGETS:
        raise SystemExit(f"BITNET_TARGET={name} is not a target; choose one of: {', '.join(TARGETS)}, any")
    return name


def cache() -> Path:
    """Where zig keeps its compiled runtime and our objects: many megabytes, shared by all checkouts."""
    if folder := os.environ.get("BITNET_BUILD_CACHE"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "bitnet/build"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet/build"


def compiler() -> list[str]:
    return [*zig(), "cc"]


def zig() -> list[str]:
    return [sys.executable, "-m", "ziglang"]


def run(command: list[str]) -> None:
    """Run one compiler command with zig's caches outside the tree; a failure shows the compiler's own message."""
    kept = str(cache() / "zig")
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": kept}
    # From the kernels' folder, with relative names: no path of this machine gets into an object.
    done = subprocess.run(command, cwd=KERNELS, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"compiling the CPU kernels failed\n$ {' '.join(command)}\n{done.stdout}{done.stderr}")


def units(table: dict[str, Any], arch: str) -> Iterator[tuple[str, list[str]]]:
    """(source file, its own flags) for everything that `arch` compiles."""
    listed = table.get("unit", [])
    for unit in listed:
        if unit["arch"] == arch:
            yield unit["source"], unit["flags"]
    named = {unit["source"] for unit in listed}
    yield from ((path.name, []) for path in sorted(KERNELS.glob("*.c")) if path.name not in named)


def settings() -> dict[str, Any]:
    return tomllib.loads((KERNELS / "build.toml").read_text(encoding="utf-8"))


def digest(target: Target) -> str:
    """Digest of everything the library depends on: sources, flags, compiler, target, this script."""
    state = hashlib.sha256(f"{target} {importlib.metadata.version('ziglang')}\0".encode())
    for path in [Path(__file__), *sorted(p for p in KERNELS.iterdir() if p.suffix in {".c", ".h", ".toml"})]:
        data = path.read_bytes()
        state.update(f"{path.name} {len(data)}\0".encode() + data)
    return state.hexdigest()


def builds(name: str) -> Iterator[Path]:
    """The libraries of a target's wheel: its own, and those of browsers."""
    return map(build, dict.fromkeys((TARGETS[name], TARGETS[BROWSER], RELAXED)))


def build(target: Target) -> Path:
    """Compile and link the library for a target; returns its path in the cache, at once if nothing has changed."""
    library = cache() / digest(target) / target.library
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        linked, inputs = Path(scratch, library.name), objects(target, scratch)
        if target.system == "wasi":
            run([*zig(), "wasm-ld", *inputs, "-o", str(linked), *settings()["link"][target.system]])
        else:
            # An optimised link, so that zig compiles no run-time of sanitisers first. The only part
            # of the compiler's own run-time that is used is Windows' stack probe.
            options = ["-shared", "-s", "-O2", *([] if target.system == "windows" else ["-rtlib=none"])]
            link(target, [*options, *inputs], linked)
        linked.replace(library)
    return library


def objects(target: Target, folder: str) -> list[str]:
    """Compile every unit into a folder; returns the objects' paths."""
    table = settings()
    work = list(units(table, target.arch))
    paths = [f"{folder}/{i}.o" for i in range(len(work))]
    flags = [*compiler(), "-target", target.zig, *table["flags"]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(run, [*flags, *own, "-g0", "-c", source, "-o", path])
            for (source, own), path in zip(work, paths, strict=True)
        ]
    for job in jobs:
        job.result()
    return paths


def link(target: Target, inputs: list[str], output: Path) -> None:
    """Link a library, or a program of a test, with what `build.toml` says its system needs."""
    run([*compiler(), "-target", target.zig, *inputs, "-o", str(output), *settings()["link"][target.system]])


def install(library: Path) -> Path:
    """Put a library where an editable install looks for it; a running process keeps the old one."""
    place = ROOT / "src" / NATIVE / library.name
    place.parent.mkdir(parents=True, exist_ok=True)
    copy = place.with_suffix(f".{os.getpid()}")
    shutil.copyfile(library, copy)
    copy.replace(place)
    return place


class NativeLibraryHook(BuildHookInterface[Any]):
    """Gives the wheel its native library and its platform tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name = selected()
        if name == "any" or not any(KERNELS.glob("*.c")):
            self.app.display_warning("no native library for this platform: the model will run on the numpy device")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{TARGETS[name].tag}"
        for library in builds(name):
            if version == "editable":
                install(library)
            else:
                build_data["force_include"][str(library)] = f"{NATIVE}/{library.name}"


if __name__ == "__main__":
    for library in builds(selected()):
        print(install(library))
