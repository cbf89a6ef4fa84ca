"""The binding of ``libamd_comgr`` on the real library, which needs no GPU: Debian's and Ubuntu's package has one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.clc.amd import architecture
from bitnet.rocm import comgr_process
from bitnet.rocm.comgr import ComgrError
from bitnet.rocm.comgr_process import ComgrProcess
from bitnet.rocm.compiler import SOURCES, options

Require: TypeAlias = Callable[[str, str | None], None]
Patch = pytest.MonkeyPatch
EMBED = KernelSpec("embed", "embed", (("WG", 256), ("WEIGHT_F16", 1)))
SAMPLE = KernelSpec("sample", "sample", (("WG", 1024),))
MACHINES = {"gfx906": 0x2F, "gfx90a": 0x3F, "gfx1030": 0x36}
"""Bits of the ELF header's flags that name the architecture (LLVM's "User Guide for AMDGPU Backend")."""


@pytest.fixture(scope="module")
def comgr(require_device: Require) -> ComgrProcess:
    try:
        return ComgrProcess("libamdhip64.so.7")
    except ComgrError as error:
        require_device("libamd-comgr", f"libamd_comgr does not open: {error} (Debian: apt install libamd-comgr2)")
        raise


def compiled(comgr: ComgrProcess, spec: KernelSpec, name: str) -> bytes:
    kind = architecture(name)
    assert kind is not None
    device = kind.abilities(compute_units=64, group=1024, local_bytes=65536)
    flags = (*options(device), *(f"-D{constant}={value}" for constant, value in spec.defines))
    return comgr.compile(SOURCES.text(spec.file), f"{spec.file}.cl", name, flags, "rocm:0")


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("spec", [EMBED, SAMPLE], ids=lambda spec: spec.file)
def test_it_compiles(comgr: ComgrProcess, spec: KernelSpec, name: str) -> None:
    code = compiled(comgr, spec, name)
    assert code.startswith(b"\x7fELF")
    assert code[48] == MACHINES[name]
    assert f"{spec.entry}.kd\0".encode() in code


def test_what_does_not_compile_says_why(comgr: ComgrProcess) -> None:
    with pytest.raises(KernelCompileError) as raised:
        compiled(comgr, KernelSpec("row_sums", "row_sums", (("WG", 64), ("COLS", "no_number"))), "gfx90a")
    assert "row_sums.cl does not compile" in str(raised.value)
    assert "no_number" in raised.value.log


def test_an_architecture_it_does_not_know(comgr: ComgrProcess) -> None:
    assert "gfx90a" in comgr.architectures
    with pytest.raises(KernelCompileError) as raised:
        comgr.compile("", "x.cl", "gfx9999", [], "rocm:0")
    assert "does not know gfx9999" in raised.value.log


def test_nothing_of_the_current_folder_is_run(comgr: ComgrProcess, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('of the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, Path(tmp_path)])  # a Path, as some programs leave there
    assert ComgrProcess("libamdhip64.so.7").version == comgr.version


def stand_in(monkeypatch: Patch, folder: Path, code: str) -> None:
    """Let the processes run ``code`` in place of the compiler."""
    lines = f"def prepare(*_): pass\ndef answer(request):\n    {code}\n"
    (folder / "stand_in.py").write_text(lines, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(comgr_process, "MODULE", "stand_in")


def test_a_compiler_that_hangs_is_given_up(monkeypatch: Patch, tmp_path: Path) -> None:
    stand_in(monkeypatch, tmp_path, "import time; time.sleep(1000)")
    monkeypatch.setattr(comgr_process, "SECONDS", 0.3)
    with pytest.raises(ComgrError, match=r"did not answer within 0\.3 s$"):
        ComgrProcess("libamdhip64.so.7")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import os; os.write(2, b'LLVM ERROR: twice\\n in  it\\n'); os.abort()",
            r"crashed \(SIGABRT: Aborted\): in it",
        ),
        ("import os; os._exit(3)", r"ended the process \(exit status 3\): It said nothing\."),
    ],
)
def test_a_compiler_that_ends_its_process_is_quoted(monkeypatch: Patch, tmp_path: Path, code: str, said: str) -> None:
    stand_in(monkeypatch, tmp_path, code)
    with pytest.raises(ComgrError, match=f"^libamd_comgr {said}$"):
        ComgrProcess("libamdhip64.so.7")
