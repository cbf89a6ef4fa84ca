"""What Windows gives to the platform layer, given to it here: no Python for Windows is at hand. Where these run on
Windows, they see the real thing; the native library is run under Wine (``tests/cpu/test_other_systems.py``).
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bitnet.core import cli
from bitnet.core.cli import console
from bitnet.core.errors import BitNetError
from bitnet.core.support import gpus, system
from bitnet.core.support.cache import KernelCache
from bitnet.core.support.files import replacing

SHARING_VIOLATION = 32
"""``ERROR_SHARING_VIOLATION``: another process has the file open."""


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """``sys.platform``, and no function that Windows' Python lacks."""
    monkeypatch.setattr(sys, "platform", "win32")
    for name in ("geteuid", "getuid", "fchmod", "sched_getaffinity", "sysconf", "fork", "O_TMPFILE"):
        monkeypatch.delattr(os, name, raising=False)
    return monkeypatch


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """``in_use(path)``: someone reads this file, so that Windows does not let it be replaced."""
    replace = Path.replace
    held: set[Path] = set()

    def refused(path: Path, target: Any) -> Path:
        if Path(target) in held:
            error = PermissionError(13, "The process cannot access the file because it is being used", str(path))
            error.winerror = SHARING_VIOLATION  # type: ignore[attr-defined, unused-ignore]
            raise error
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused)
    return held.add


def test_a_file_in_use_is_not_replaced_and_nothing_is_left(
    windows: pytest.MonkeyPatch, in_use: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "Modell größer.gguf"
    path.write_bytes(b"old")
    in_use(path)
    with pytest.raises(BitNetError, match=r"größer\.gguf cannot be written: .*being used"), replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_closed_before_it_takes_its_name(windows: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows renames no open file."""
    replace, path = Path.replace, tmp_path / "model.gguf"
    files: list[Any] = []

    def only_closed(temporary: Path, target: Any) -> Path:
        assert all(file.closed for file in files)
        return replace(temporary, target)

    windows.setattr(Path, "replace", only_closed)
    with replacing(path) as file:
        files.append(file)
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_an_entry_that_another_process_reads_is_kept(
    windows: pytest.MonkeyPatch, in_use: Callable[[Path], None], said: Callable[[int], list[str]]
) -> None:
    kernels = KernelCache()
    key = kernels.key(source="s", device="d", driver="1", options="", compiler="c")
    kernels.put(key, b"payload", label="embed", seconds=1.0)
    assert kernels.folder is not None
    (entry,) = kernels.folder.iterdir()
    in_use(entry)
    kernels.put(key, b"payload", label="embed", seconds=1.0)  # as a process does that compiled it at the same time
    assert kernels.get(key) == b"payload"
    assert list(kernels.folder.iterdir()) == [entry]
    assert said(logging.WARNING) == []


def test_rights_are_left_to_the_users_folder(windows: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows has neither owners nor modes as POSIX does; its folder for local data is this user's alone."""
    windows.delenv("BITNET_CACHE_DIR")
    windows.setenv("LOCALAPPDATA", str(tmp_path / "Jürgen Ω" / "AppData" / "Local"))
    kernels = KernelCache()
    assert kernels.folder == tmp_path / "Jürgen Ω" / "AppData" / "Local" / "bitnet" / "kernels"
    key = kernels.key(source="s", device="d", driver="1", options="", compiler="c")
    kernels.put(key, b"payload", label="embed", seconds=1.0)
    assert KernelCache().get(key) == b"payload"


@pytest.mark.parametrize("narrow", ["cp437", "cp1252", "cp932", "utf-16-le"])
def test_answers_are_utf8_whatever_the_code_page(narrow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    raw = {name: io.BytesIO() for name in ("stdin", "stdout", "stderr")}
    for name, stream in raw.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding=narrow))
    cli._use_utf8()
    sys.stdout.write("42 → 四十二 🙂")
    sys.stderr.write("größer")
    sys.stdout.flush()
    sys.stderr.flush()
    assert raw["stdout"].getvalue().decode() == "42 → 四十二 🙂"
    assert raw["stderr"].getvalue().decode() == "größer"


def test_a_code_page_that_was_asked_for_replaces_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "cp437")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp437"))
    cli._use_utf8()
    sys.stdout.write("ü 四")
    sys.stdout.flush()
    assert raw.getvalue() == b"\x81 ?"


def test_a_byte_order_mark_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' editors and shells begin UTF-8 files with one, and the model would read it."""
    path = tmp_path / "prompt.txt"
    path.write_bytes("\ufeffWas ist größer?".encode())
    assert console.read_text(path) == "Was ist größer?"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfhi\r\n")))
    assert console.read_text(None) == "hi\r\n"
    path.write_bytes("hi".encode("utf-16"))  # `echo hi > prompt.txt` of Windows PowerShell
    with pytest.raises(BitNetError, match="is not UTF-8"):
        console.read_text(path)


def test_memory(windows: pytest.MonkeyPatch) -> None:
    """``GlobalMemoryStatusEx`` refuses a structure that does not say its size; total and free stand at 8 and 16."""

    def status(reference: Any) -> int:
        memory = (ctypes.c_uint64 * 8).from_address(ctypes.addressof(reference._obj))
        assert memory[0] == ctypes.sizeof(memory) == 64
        memory[1], memory[2] = 17 << 30, 5 << 30
        return 1

    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=status)
    windows.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    system.memory_total.cache_clear()
    try:
        assert (system.memory_total(), system.memory_available()) == (17 << 30, 5 << 30)
    finally:
        system.memory_total.cache_clear()


def test_the_processors_name(windows: pytest.MonkeyPatch) -> None:
    class Key:
        def __enter__(self) -> str:
            return "key"

        def __exit__(self, *_: object) -> None: ...

    def open_key(hive: int, path: str) -> Key:
        assert (hive, path) == (7, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0")
        return Key()

    registry = ModuleType("winreg")
    names = {("key", "ProcessorNameString"): ("  Intel(R) Core(TM) i7  ", 1)}
    vars(registry).update(HKEY_LOCAL_MACHINE=7, OpenKey=open_key, QueryValueEx=lambda *of: names[of])
    windows.setitem(sys.modules, "winreg", registry)
    system.cpu_model.cache_clear()
    try:
        assert system.cpu_model() == "Intel(R) Core(TM) i7"
    finally:
        system.cpu_model.cache_clear()


def test_gpus_are_seen(windows: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The adapters that the system lists, each once for every output, and NVIDIA's driver where no output is."""
    listed = [
        ("Microsoft Basic Display Adapter", r"PCI\VEN_1234&DEV_1111&SUBSYS_11001AF4"),
        ("Intel(R) Iris(R) Xe Graphics", r"PCI\VEN_8086&DEV_9A49&SUBSYS_00000000"),
        ("Intel(R) Iris(R) Xe Graphics", r"PCI\VEN_8086&DEV_9A49&SUBSYS_00000000"),
        ("Remote Display", "{2F1E8C2B-4A0E-4C5E-9B1D-0C8B5B6A0E7D}"),
    ]

    def enumerate_(name: None, number: int, adapter: Any, flags: int) -> int:
        if number == len(listed):
            return 0
        found = adapter._obj
        assert found.size == ctypes.sizeof(found) == 8 + (32 + 3 * 128) * ctypes.sizeof(ctypes.c_wchar)
        found.description, found.id = listed[number]
        return 1

    user32 = SimpleNamespace(EnumDisplayDevicesW=enumerate_)
    windows.setattr(ctypes, "windll", SimpleNamespace(user32=user32), raising=False)
    windows.setenv("SYSTEMROOT", str(tmp_path))
    iris = gpus.Gpu("Intel", "Intel(R) Iris(R) Xe Graphics")
    assert gpus.seen() == (iris,)
    (tmp_path / "System32").mkdir()
    (tmp_path / "System32" / "nvcuda.dll").touch()
    assert gpus.seen() == (iris, gpus.Gpu("NVIDIA"))
    listed.append(("NVIDIA GeForce RTX 4090", r"PCI\VEN_10DE&DEV_2684"))
    assert gpus.seen() == (iris, gpus.Gpu("NVIDIA", "GeForce RTX 4090"))


WITHOUT_POSIX = """
import ctypes, importlib, os, pkgutil, sys, types
import click, jinja2, numpy, tokenizers, asyncio, subprocess, tempfile, shutil, multiprocessing, logging.handlers

missing = "fcntl grp posix pty pwd readline resource syslog termios tty winreg".split()
for name in missing:
    sys.modules[name] = None
lacked = "fork geteuid getuid fchmod fchown sched_getaffinity sysconf register_at_fork mkfifo getpgid killpg setsid"
for name in [*lacked.split(), "O_TMPFILE"]:
    if hasattr(os, name):
        delattr(os, name)

def status(reference):
    memory = (ctypes.c_uint64 * 8).from_address(ctypes.addressof(reference._obj))
    memory[1] = memory[2] = 8 << 30
    return 1

sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda handle, mode, count: None)
ctypes.windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(GlobalMemoryStatusEx=status))
sys.platform = "win32"

import bitnet.core

for module in pkgutil.walk_packages(bitnet.core.__path__, "bitnet.core."):
    elsewhere = "bitnet.core.testing", "bitnet.core.__main__", "bitnet.core.support.browser_files"  # of Pyodide
    if not module.name.startswith(elsewhere):
        importlib.import_module(module.name)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows itself lacks them")
def test_nothing_needs_what_windows_python_lacks(python: Callable[..., Any]) -> None:
    """Every module is imported, and the demo model answers, on numpy: the library here is of another system.

    XX
    """
    answered = """
sys.platform = "linux"
from bitnet.core import cli
sys.exit(cli.main(["run", "--device", "cpu:numpy", "What is 17 + 25?"]))
"""
    assert "42" in python(WITHOUT_POSIX + answered).out
