"""Reading the environment, logging, opening libraries, facts about the machine, and what an import costs."""

from __future__ import annotations

import ast
import logging
import os
import platform
import re
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from numpy.linalg import _umath_linalg as umath_linalg

import bitnet.core
from bitnet.core.errors import InvalidInputError
from bitnet.core.support import dynlib, env, log, system
from bitnet.core.support.dynlib import file_of, open_library, stamp

SOURCES = Path(bitnet.core.__file__).parent


class TestEnv:
    @pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
    def test_yes(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("BITNET_STRICT_MODE", value)
        assert env.flag("BITNET_STRICT_MODE")

    @pytest.mark.parametrize("value", ["0", "False", "no", "OFF", "", "  "])
    def test_no(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("BITNET_STRICT_MODE", value)
        assert not env.flag("BITNET_STRICT_MODE")
        monkeypatch.delenv("BITNET_STRICT_MODE")
        assert not env.flag("BITNET_STRICT_MODE")

    @pytest.mark.parametrize("value", ["maybe", "2", "-1", "10", "y e s", "true;false"])
    def test_neither(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("BITNET_STRICT_MODE", value)
        with pytest.raises(InvalidInputError, match=f"BITNET_STRICT_MODE is '{value}'; it must be 1 or 0."):
            env.flag("BITNET_STRICT_MODE")

    def test_every_variable_the_core_reads_is_listed(self) -> None:
        """Any string in the core's code that is the name of one, those of its test suite aside."""
        listed = {variable.name for variable in env.VARIABLES}
        found = set()
        for path in SOURCES.rglob("*.py"):
            if "testing" not in path.parts:
                strings = (
                    n.value
                    for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                    if isinstance(n, ast.Constant)
                )
                found |= {text for text in strings if isinstance(text, str) and re.fullmatch("BITNET_[A-Z_]+", text)}
        assert found == listed


class TestLog:
    CODE = """
    import logging
    {setting_up}
    from bitnet.core.support import log
    from bitnet.core import select_device
    select_device("cpu")
    for level in ("debug", "info", "warning", "error"):
        getattr(log.logger, level)("this is %s", level)
    """

    def said(self, python: Any, setting_up: str = "", **env: str) -> list[str]:
        lines = python(self.CODE.format(setting_up=setting_up), **env).err.splitlines()
        return [line for line in lines if "this is" in line]

    def test_a_program_that_sets_up_nothing(self, python: Any) -> None:
        assert self.said(python) == ["this is warning", "this is error"]
        assert self.said(python, BITNET_LOG="info") == [
            "this is info",
            "bitnet: warning: this is warning",
            "bitnet: error: this is error",
        ]
        assert self.said(python, BITNET_LOG="error") == ["bitnet: error: this is error"]
        assert self.said(python, BITNET_LOG=" DEBUG ")[0] == "bitnet: debug: this is debug"

    def test_a_program_with_its_own_logging(self, python: Any) -> None:
        own = "logging.basicConfig(format='own %(message)s', level=logging.WARNING)"
        assert self.said(python, own) == ["own this is warning", "own this is error"]
        assert self.said(python, own, BITNET_LOG="info")[0] == "own this is info"
        silent = "logging.getLogger('bitnet').addHandler(logging.NullHandler())"
        assert self.said(python, silent) == []

    def test_levels_that_are_none(self, python: Any) -> None:
        ran = python("from bitnet.core import select_device; select_device('cpu')", BITNET_LOG="loud", check=False)
        assert "InvalidInputError: BITNET_LOG is 'loud'; it must be one of debug, info, warning, error." in ran.err
        with pytest.raises(InvalidInputError, match="the log level is 'x'"):
            log.setup("x")

    def test_setting_up_again_changes_the_level_only(self, capsys: pytest.CaptureFixture[str]) -> None:
        for level in ("debug", "error", "info"):
            log.setup(level)
        log.logger.debug("unheard")
        log.logger.info("heard")
        assert capsys.readouterr().err == "heard\n"

    def test_once(self, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(3):
            log.once(logging.WARNING, "100 % the same")
        log.once(logging.WARNING, "another")
        assert [record.getMessage() for record in caplog.records] == ["100 % the same", "another"]


ELF = (
    bytes.fromhex("7f454c4602010100")
    + bytes(8)
    + struct.pack("<HHI", 3, 183 if platform.machine() == "x86_64" else 62, 1)
)


@pytest.mark.skipif(sys.platform != "linux", reason="the loader's messages are those of Linux")
class TestDynlib:
    def test_the_first_that_opens(self) -> None:
        library = open_library(["libno-such-thing.so.9", "libc.so.6", "libm.so.6"])
        assert library
        assert library.name == "libc.so.6"
        assert library.handle is not None
        assert library.handle.abs(-3) == 3
        assert list(library.tried) == ["libno-such-thing.so.9", "libc.so.6"]
        assert "No such file" in library.tried["libno-such-thing.so.9"]
        assert library.tried["libc.so.6"] == ""
        assert library.failure == ""

    def test_by_platform(self) -> None:
        assert open_library({"linux": ["libc.so.6"], "win32": ["nvcuda.dll"]}).name == "libc.so.6"
        nothing = open_library({"win32": ["nvcuda.dll"]})
        assert (bool(nothing), nothing.tried, nothing.failure) == (False, {}, "missing")

    @pytest.mark.parametrize(
        ("content", "failure"),
        [
            (b"", "broken"),
            (b"not a library", "broken"),
            (b"/* GNU ld script */", "broken"),
            (ELF + bytes(100), "broken"),
        ],
    )
    def test_files_that_are_no_library(self, tmp_path: Path, content: bytes, failure: str) -> None:
        path = tmp_path / "libcuda.so.1"
        path.write_bytes(content)
        library = open_library(str(path))
        assert (library.handle, library.failure) == (None, failure)
        assert str(path) in library.tried[str(path)]

    @pytest.mark.parametrize(
        "name", ["", "a\0b", "/", "x" * 5000, "/" + "x" * 5000, "lib\udcff.so", "/no/such/folder/lib.so", "✗.so"]
    )
    def test_names_that_are_odd(self, name: str) -> None:
        library = open_library(name)
        assert not library
        assert library.tried[name]

    def test_a_library_whose_dependency_is_missing_is_broken(self, tmp_path: Path) -> None:
        """The loader says "No such file" of the dependency; the library itself is there."""
        path = tmp_path / "libouter.so"
        compiled = Path(umath_linalg.__file__).read_bytes()  # any library that needs the C library
        assert b"\0libc." in compiled
        path.write_bytes(compiled.replace(b"\0libc.", b"\0libQ."))
        library = open_library(["libabsent.so", str(path)])
        assert library.failure == "broken"
        assert "libQ." in library.tried[str(path)]

    def test_a_library_that_may_not_be_read(self, python: Any, tmp_path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            path = Path(folder) / "libcuda.so.1"
            shutil.copy("/proc/self/exe", path)
            path.chmod(0)
            ran = python(
                f"""
                import os
                from bitnet.core.support.dynlib import open_library
                if os.geteuid() == 0:
                    os.setuid(65534)
                print(open_library(["libabsent.so", {str(path)!r}]).failure)
                """
            )
        assert ran.out == "no-permission\n"

    def test_a_library_is_told_from_itself_after_an_update(self, tmp_path: Path) -> None:
        path = tmp_path / "libany.so"
        shutil.copy(umath_linalg.__file__, path)
        library = open_library(str(path))
        assert library.handle is not None
        assert Path(file_of(library.handle, "PyInit__umath_linalg")).samefile(path)
        before = stamp(str(path))
        path.with_suffix(".new").write_bytes(path.read_bytes() + b"more")
        path.with_suffix(".new").replace(path)
        assert before.startswith(str(path))
        assert stamp(str(path)) != before
        assert stamp(str(tmp_path / "gone")) == str(tmp_path / "gone")

    @pytest.mark.parametrize(
        ("message", "failure"),
        [
            ("libx.so: cannot open shared object file: No such file or directory", "missing"),
            ("libx.so: cannot open shared object file: Permission denied", "no-permission"),
            ("libdep.so.2: cannot open shared object file: No such file or directory", "broken"),
            ("libx.so: wrong ELF class: ELFCLASS32", "broken"),
            ("/lib/libx.so: undefined symbol: foo", "broken"),
            ("libx.so: failed to map segment from shared object: Operation not permitted", "broken"),
            ("Error loading shared library libx.so: No such file or directory", "missing"),  # musl
            ("Error loading shared library libx.so: Permission denied", "no-permission"),
            ("dlopen(libx.so, 0x0006): tried: 'libx.so' (no such file), '/usr/lib/libx.so' (no such file)", "missing"),
        ],
    )
    def test_what_loaders_say(self, message: str, failure: str) -> None:
        assert dynlib._failure("libx.so", OSError(message)) == failure

    @pytest.mark.parametrize(("code", "failure"), [(126, "missing"), (5, "no-permission"), (193, "broken")])
    def test_what_windows_says(self, code: int, failure: str) -> None:
        error = OSError("what Windows calls it, in any language")
        error.winerror = code  # type: ignore[attr-defined, unused-ignore]
        assert dynlib._failure("x.dll", error) == failure


class TestSystem:
    def test_this_machine(self) -> None:
        assert system.cpu_model()
        assert 1 <= system.usable_cpus() <= (os.cpu_count() or 1)
        assert system.memory_total() > 2**28
        if sys.platform in ("linux", "win32"):
            assert 2**26 < system.memory_available() <= system.memory_total()

    @pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
    @pytest.mark.parametrize(
        ("files", "available"),
        [
            ({}, 8000 * 1024),
            ({"memory.max": "5000000\n", "memory.current": "4000000\n", "memory.stat": "inactive_file 700\n"}, 1000700),
            ({"memory.max": "5000\n", "memory.current": "6000\n"}, 1),
            ({"memory.max": "max\n", "memory.current": "4000000\n"}, 8000 * 1024),
            ({"memory.max": "99000000\n", "memory.current": "1\n"}, 8000 * 1024),
            ({"memory/memory.limit_in_bytes": "3000\n", "memory/memory.usage_in_bytes": "1000\n"}, 2000),
        ],
    )
    def test_available_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], available: int
    ) -> None:
        for name, text in {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n", **files}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(system, "CGROUP", tmp_path)
        monkeypatch.setattr(system, "MEMINFO", tmp_path / "meminfo")
        assert system.memory_available() == available
        monkeypatch.setattr(system, "MEMINFO", tmp_path / "absent")
        assert system.memory_available() == 0

    @pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
    @pytest.mark.parametrize(
        ("files", "cpus"),
        [
            ({"cpu.max": "150000 100000\n"}, 1.5),
            ({"cpu.max": "max 100000\n"}, 0),
            ({"cpu.max": "50000 100000\n"}, 0.5),
            ({"cpu.max": "x y\n"}, 0),
            ({"cpu.max": "100000 0\n"}, 0),
            ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
            ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0),
            ({}, 0),
        ],
    )
    def test_a_containers_quota(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: float
    ) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(system, "CGROUP", tmp_path)
        assert system._cgroup_cpus() == cpus
        allowed = len(os.sched_getaffinity(0))
        assert system.usable_cpus() == (max(1, min(allowed, round(cpus))) if cpus else allowed)

    @pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
    @pytest.mark.parametrize("unified", [True, False], ids=["v2", "v1"])
    @pytest.mark.parametrize("shown", ["/a/b", "/"], ids=["own", "root"])
    def test_limits_of_a_group_and_of_those_around_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool, shown: str
    ) -> None:
        """The least counts, wherever it is. A container whose root is the group itself sees the host's path of it."""
        own = tmp_path / "own"
        own.write_text("0::/a/b\n" if unified else "7:cpu,cpuacct:/a/b\n5:memory:/a/b\n1:name=systemd:/other\n")
        monkeypatch.setattr(system, "OWN_CGROUPS", own)
        monkeypatch.setattr(system, "CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(system, "MEMINFO", tmp_path / "meminfo")
        (tmp_path / "meminfo").write_text("MemAvailable: 9000 kB\n")

        def write(folder: str, cpus: float, memory: int) -> None:
            texts = {"cpu/cpu.cfs_quota_us": f"{cpus * 1e5:.0f}", "cpu/cpu.cfs_period_us": "100000"}
            texts |= {"memory/memory.limit_in_bytes": str(memory), "memory/memory.usage_in_bytes": "100"}
            if unified:
                texts = {"cpu.max": f"{cpus * 1e5:.0f} 100000", "memory.max": str(memory), "memory.current": "100"}
            for name, text in texts.items():
                controller, _, file = name.rpartition("/")
                path = tmp_path / "cgroup" / controller / folder.lstrip("/") / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n")

        write(shown, 1.5, 3000)
        assert (system._cgroup_cpus(), system.memory_available()) == (1.5, 2900)
        write("/a", 0.5, 2000)
        assert (system._cgroup_cpus(), system.memory_available()) == (0.5, 1900)
        write("/other", 0.1, 1000)  # of other processes
        assert (system._cgroup_cpus(), system.memory_available()) == (0.5, 1900)


class TestImport:
    def test_every_name_is_there_and_typed_as_it_is(self) -> None:
        """What type checkers are told agrees with what is imported."""
        tree = ast.parse((SOURCES / "__init__.py").read_text(encoding="utf-8"))
        (block,) = [node for node in tree.body if isinstance(node, ast.If)]
        imports = {
            alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        assert set(imports) | {"__version__"} == set(bitnet.core.__all__)
        for name, module in imports.items():
            assert getattr(bitnet.core, name) is getattr(__import__(str(module), fromlist=[name]), name)
        assert set(bitnet.core.__all__) <= set(dir(bitnet.core))
        assert re.match(r"\d+\.\d+", bitnet.core.__version__)
        with pytest.raises(AttributeError, match=r"module 'bitnet\.core' has no attribute 'nonsense'"):
            _ = bitnet.core.nonsense

    def test_it_opens_nothing_and_starts_nothing(self, python: Any) -> None:
        ran = python(
            """
            import signal, sys, threading
            before = {n: signal.getsignal(n) for n in signal.valid_signals()}
            import bitnet.core
            assert threading.active_count() == 1
            assert {n: signal.getsignal(n) for n in before} == before
            print([m for m in ("numpy", "ctypes", "click", "tokenizers", "importlib.metadata") if m in sys.modules])
            """
        )
        assert ran.out == "[]\n"
