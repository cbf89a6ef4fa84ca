"""Installed distributions, fresh processes, and made-up machines."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.devices import registry
from bitnet.core.devices.plugin import Plugin
from bitnet.core.errors import DeviceError
from bitnet.core.hal import HAL_API, Device, DeviceInfo, DeviceType, OpenOptions, ProbeResult, ProbeStatus
from bitnet.core.reference import ReferenceDevice
from bitnet.core.support import gpus, log

GOOD_BACKEND = """
from bitnet.core.hal import HAL_API, DeviceInfo, DeviceType, ProbeResult, ProbeStatus

def board(index, backend=NAME):
    return DeviceInfo(backend, index, NAME + "-board", "a board", "nobody", DeviceType.DISCRETE)

class B:
    name, hal_api = NAME, HAL_API
    def probe(self):
        return ProbeResult(ProbeStatus.OK, [board("0")])
    def open(self, info, options):
        from bitnet.core.reference import ReferenceDevice
        return ReferenceDevice(info)
    def kernels(self):
        return ["embed_" + NAME]

BACKEND = B()
"""
"""Source of a backend that works; ``NAME`` has to be defined before it."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a process that has just started, with no variable of ours set and a cache of its own."""
    for name in [name for name in os.environ if name.startswith("BITNET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "cache"))
    handlers, level = list(log.logger.handlers), log.logger.level
    log._said.clear()
    registry.installed.cache_clear()
    yield
    log.logger.handlers[:] = handlers
    log.logger.setLevel(level)
    log._said.clear()
    registry.installed.cache_clear()


@pytest.fixture
def rng_seed() -> int:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return seed


@dataclass
class Site:
    """A folder of installed distributions, to be put on a process's path."""

    folder: Path
    made: int = 0

    def install(
        self,
        name: str,
        version: str = "1.0",
        modules: Mapping[str, str] = {},
        entry_points: Mapping[str, str] = {},
        *,
        entry_points_txt: str | None = None,
        requires: Sequence[str] = (),
    ) -> None:
        """Build a wheel and install it, which for pure Python is to unpack it."""
        self.made += 1
        stem = f"{name.replace('-', '_')}-{version}"
        lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
        members = {path: textwrap.dedent(text) for path, text in modules.items()}
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        members[f"{stem}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        members[f"{stem}.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        members[f"{stem}.dist-info/entry_points.txt"] = entry_points_txt or f"[bitnet.backends]\n{lines}"
        record = [
            f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
            for path, text in members.items()
        ]
        members[f"{stem}.dist-info/RECORD"] = "\n".join([*record, f"{stem}.dist-info/RECORD,,", ""])
        wheel = self.folder.parent / f"{self.made}-{stem}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in members.items():
                archive.writestr(path, text)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.folder)

    def install_backend(
        self,
        name: str,
        distribution: str,
        version: str = "1.0",
        *,
        tweak: str = "",
        source: str = GOOD_BACKEND,
        requires: Sequence[str] = (),
    ) -> None:
        """Install a distribution with one backend, in a module of its own; ``tweak`` is run after its source."""
        module = f"plugin_{distribution.replace('-', '_')}"
        text = f"NAME = {name!r}\n{textwrap.dedent(source)}\n{tweak}\n"
        self.install(distribution, version, {f"{module}.py": text}, {name: f"{module}:BACKEND"}, requires=requires)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    return Site(folder)


@dataclass
class Ran:
    """How a process ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Ran]:
    """``python(code, *folders, VARIABLE=...)``: run code in a new process that has the folders on its path."""

    def run(code: str, *folders: Path | Site, check: bool = True, **env: str) -> Ran:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("BITNET_") or k == "BITNET_CACHE_DIR"}
        paths = [str(f.folder if isinstance(f, Site) else f) for f in folders]
        kept["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [kept.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**kept, **env}, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
        )  # fmt: skip
        if check:
            assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@dataclass
class MadeUp:
    """A backend with the devices a test wants."""

    name: str
    devices: Sequence[DeviceInfo] = ()
    result: ProbeResult | None = None
    broken: frozenset[str] = frozenset()
    probes: int = 0
    opened: list[str] = field(default_factory=list)
    hal_api: int = HAL_API

    def probe(self) -> ProbeResult:
        self.probes += 1
        return self.result or ProbeResult(ProbeStatus.OK, self.devices)

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        self.opened.append(info.name)
        if info.name in self.broken:
            raise DeviceError("no context.", device=info.name, hint="Reboot.")
        return ReferenceDevice(info)

    def kernels(self) -> Sequence[str]:
        return [f"embed_{self.name}"]


def device(name: str, kind: DeviceType | str = DeviceType.DISCRETE, **more: Any) -> DeviceInfo:
    """A device of this name; ``cpu:…`` is a CPU."""
    backend, index = name.split(":")
    fields = {"id": f"id-of-{name}", "description": name, "vendor": "made up", **more}
    return DeviceInfo(backend, index, type=DeviceType("cpu" if backend == "cpu" else kind), **fields)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, MadeUp]]:
    """``machine(backend, ...)``: a process that has these backends installed, and a CPU unless they bring one."""

    def have(*backends: MadeUp) -> dict[str, MadeUp]:
        cpus = MadeUp("cpu", [device("cpu:avx2"), device("cpu:scalar"), device("cpu:numpy")])
        named = {"cpu": cpus, **{b.name: b for b in backends}}
        plugins = {
            name: Plugin(name, f"bitnet-{name}", "1.0", partial(named.__getitem__, name), registry._retry)
            for name in sorted(named, key=registry.rank)
        }
        monkeypatch.setattr(registry, "installed", cache(lambda: plugins))
        monkeypatch.setattr(gpus, "seen", tuple)
        return named

    return have


@pytest.fixture
def make_device() -> Callable[..., DeviceInfo]:
    return device


@pytest.fixture
def backend() -> type[MadeUp]:
    return MadeUp


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """``said(level)``: what has been logged at this level so far."""
    caplog.set_level(logging.DEBUG, logger="bitnet")
    return lambda level: [record.getMessage() for record in caplog.records if record.levelno == level]
