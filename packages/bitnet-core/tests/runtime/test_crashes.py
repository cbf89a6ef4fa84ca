"""Backends that crash, hang or print: really installed, and used through the command line.

Long, because each way to fail is one test on the same installed backend.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.devices import crashes, registry
from bitnet.core.support.files import lock

POSIX = sys.platform != "win32"
BITNET = "import sys; from bitnet.core.cli import main; sys.exit(main({args!r}))"

BAD = """
import ctypes, os, signal, sys, time
from bitnet.core.errors import DeviceError

def segfault():
    ctypes.string_at(0)

def exit_quietly():
    os._exit(0)

def exit_loudly():
    sys.exit(9)

def interrupt():
    raise KeyboardInterrupt

def other():
    raise BaseException("neither this nor that")

def hang():
    time.sleep(1000)

def hold_the_lock():
    ctypes.PyDLL(None).sleep(1000)

def end_in_a_second():
    signal.alarm(1)

def say():
    print("from Python")
    sys.stdout.write("written ")
    sys.stdout.flush()
    os.write(1, b"from the system\\n")
    ctypes.CDLL(None).printf(b"from C\\n")

def nothing():
    pass
"""
ENDINGS = {
    "segfault": "crashed (SIGSEGV: Segmentation fault)",
    "os.abort": "crashed (SIGABRT: Aborted)",
    "exit_quietly": "ended the process (exit status 0)",
}
needs_signals = pytest.mark.skipif(not POSIX, reason="Windows has other names for how processes end")


@pytest.fixture(autouse=True)
def alone(site: Any) -> None:
    """The first distribution of a name on the path counts: these hide the backends that are really installed."""
    for name in registry.GPU_ORDER:
        site.install(f"bitnet-{name}", entry_points_txt="[bitnet.backends]\n")


@pytest.fixture
def install(site: Any) -> Callable[..., None]:
    """``install(probe="segfault")``: a backend ``acme`` that does this there, and is good otherwise."""

    def backend(**does: str) -> None:
        calls = {where: f"{does.get(where, 'nothing')}()" for where in ("load", "probe", "open", "compile", "run")}
        tweak = f"""
import dataclasses
from bitnet.core.reference import ReferenceDevice
class Device(ReferenceDevice):
    def compile(self, program, *, keep=False):
        {calls["compile"]}
        executable = super().compile(program)
        collect = executable.collect
        def collect_badly():
            executable.collect = collect  # the first time only
            {calls["run"]}
            return collect()
        executable.collect = collect_badly
        return executable
class Bad(B):
    def probe(self):
        {calls["probe"]}
        return super().probe()
    def open(self, info, options):
        {calls["open"]}
        return Device(info)
BACKEND = Bad()
{calls["load"]}
"""
        site.install_backend("acme", "acme-bitnet", tweak=BAD + tweak)

    return backend


@pytest.fixture
def bitnet(python: Any, site: Any) -> Callable[..., Any]:
    """``bitnet("devices")``: the command as a process of its own, with the backend installed."""

    def call(*args: str, **env: str) -> Any:
        return python(BITNET.format(args=list(args)), site, check=False, **env)

    return call


def backend_of(ran: Any) -> dict[str, Any]:
    assert ran.out.startswith("{"), ran
    return next(found for found in json.loads(ran.out)["backends"] if found["name"] == "acme")


def markers(tmp_path: Path) -> list[str]:
    return sorted(path.name.rpartition("@")[0] for path in (tmp_path / "cache" / "running").glob("*"))


@needs_signals
@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("where", ["load", "probe"])
def test_devices_tells_what_crashes(install: Any, bitnet: Any, where: str, how: str) -> None:
    """The backend is named, with how it ended; the others are listed, and proven, as if it were not there."""
    install(**{where: how})
    ran = bitnet("devices", "--json")
    assert ran.status == 0, ran
    found = backend_of(ran)
    assert (found["status"], found["reason"]) == ("broken", f"It {ENDINGS[how]} while it was probed.")
    assert found["hint"] == "Fix its driver, or remove acme-bitnet."
    document = json.loads(ran.out)
    assert document["selected"].startswith("cpu:")
    assert all(device["proof"]["passed"] for device in document["backends"][-1]["devices"])


@needs_signals
@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("where", ["open", "compile", "run"])
def test_devices_tells_which_device_crashes(install: Any, bitnet: Any, where: str, how: str) -> None:
    install(**{where: how})
    ran = bitnet("devices", "--json")
    assert ran.status == 5, ran
    found = backend_of(ran)
    assert found["status"] == "broken"
    assert found["reason"] == f"acme:0: It {ENDINGS[how]} while a kernel was run on it."
    (device,) = found["devices"]
    assert device["proof"]["error"] == f"It {ENDINGS[how]} while a kernel was run on it."
    assert json.loads(ran.out)["selected"].startswith("cpu:")


@needs_signals
@pytest.mark.parametrize("where", ["load", "probe", "open", "compile", "run"])
@pytest.mark.parametrize("first", ["devices", "run"])
def test_what_has_crashed_is_skipped_with_a_line(
    install: Any, bitnet: Any, tmp_path: Path, where: str, first: str
) -> None:
    """Whoever met the crash first, the next run is not ended by it, nor is any after that."""
    install(**{where: "segfault"})
    before = bitnet(first, *(["Hi"] if first == "run" else []))
    assert (before.status == -signal.SIGSEGV) == (first == "run")
    mark = {"load": "acme@", "probe": "acme@"}.get(where, "acme@0")
    for _ in range(2 if first == "run" else 1):
        assert markers(tmp_path) == [mark]
        ran = bitnet("run", "-n", "3", "Hi")
        assert ran.status == 0, ran
        assert ran.out.strip()
        (line,) = [line for line in ran.err.splitlines() if "acme" in line]
        assert line.startswith("bitnet: warning: The backend acme is broken: ")
        assert "crashed (SIGSEGV: Segmentation fault)" in line
    named = bitnet("run", "--strict", "--device", "acme", "Hi")
    assert named.status == 3
    assert "acme was asked for, but acme is broken: " in named.err


@needs_signals
def test_what_works_again_is_used_again(install: Any, bitnet: Any, site: Any, tmp_path: Path) -> None:
    install(probe="segfault")
    assert bitnet("run", "Hi").status == -signal.SIGSEGV
    for path in site.folder.glob("plugin_*"):
        path.unlink()
    install()
    ran = bitnet("run", "-v", "-n", "3", "Hi")
    assert ran.status == 0, ran
    assert "selected=acme:0" in ran.err
    assert "An earlier process ended in acme; a child tries it first." in ran.err
    assert markers(tmp_path) == []
    assert "An earlier process" not in bitnet("run", "-v", "-n", "3", "Hi").err


@needs_signals
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT] if POSIX else [])
def test_a_killed_process_condemns_nothing(
    install: Any, bitnet: Any, site: Any, tmp_path: Path, number: signal.Signals
) -> None:
    """The next run has a child look, which finds a good backend."""
    install(probe="hang")
    path = os.pathsep.join([str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", BITNET.format(args=["run", "Hi"])]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while markers(tmp_path) != ["acme@"] and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(number)
    said = process.communicate(timeout=10)[1]  # long before the probe is given up
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number), said
    assert markers(tmp_path) == ["acme@"]
    for plugin in site.folder.glob("plugin_*"):
        plugin.unlink()
    install()
    ran = bitnet("run", "-v", "-n", "3", "Hi")
    assert (ran.status, "selected=acme:0" in ran.err) == (0, True), ran
    assert markers(tmp_path) == []


def test_a_marker_of_a_process_that_lives_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path))
    with crashes.watching("acme"), crashes.watching("acme:0"), crashes.watching("acmeover"):
        assert not crashes.left_by("acme")
    assert list((tmp_path / "running").iterdir()) == []


@pytest.mark.skipif(not POSIX, reason="Windows renames no open file")
def test_a_marker_that_is_made_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may look at any moment: before the marker is locked, and just as it is."""
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path))
    seen: list[object] = []

    def looked_at(handle: int) -> None:
        if not seen:
            seen.append(None)
            seen.append(crashes.left_by("acme"))
        lock(handle)

    monkeypatch.setattr(crashes, "lock", looked_at)
    with crashes.watching("acme:0"):
        assert seen == [None, {}]
        assert not crashes.left_by("acme")
        assert [path.name.rpartition("@")[0] for path in (tmp_path / "running").iterdir()] == ["acme@0"]
    assert list((tmp_path / "running").iterdir()) == []


@needs_signals
def test_markers_of_a_process_that_ended(tmp_path: Path, python: Any) -> None:
    code = """
    import os, sys
    from bitnet.core.devices import crashes
    names = ("acme", "acme:0", "acme:x.y-z_1", "acme-2", "other")
    for watching in (kept := [crashes.watching(what) for what in names]):
        watching.__enter__()
    os._exit(0)
    """
    for _ in range(2):
        python(code)
    left = crashes.left_by("acme")
    assert sorted(left.values()) == ["acme", "acme", "acme:0", "acme:0", "acme:x.y-z_1", "acme:x.y-z_1"]
    crashes.forget(left)
    assert crashes.left_by("acme") == {}
    assert len(crashes.left_by("acme-2")) == len(crashes.left_by("other")) == 2


@pytest.mark.skipif(not POSIX, reason="Windows keeps rights in another way")
@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null"])
def test_a_cache_that_cannot_be_written_keeps_no_history_and_fails_nowhere(
    install: Any, bitnet: Any, folder: str
) -> None:
    install()
    ran = bitnet("run", "-v", "-n", "3", "Hi", BITNET_CACHE_DIR=folder)
    assert (ran.status, "selected=acme:0" in ran.err) == (0, True), ran
    assert "cannot be" not in ran.err


@pytest.mark.parametrize("args", [["devices", "--json"], ["run", "--json", "-n", "3", "Hi"], ["run", "-n", "3", "Hi"]])
def test_what_a_plugin_prints_is_not_in_the_answer(install: Any, bitnet: Any, args: list[str]) -> None:
    places = ("load", "probe", "open", "compile", "run")
    install(**dict.fromkeys(places, "say"))
    ran = bitnet(*args)
    assert ran.status == 0, ran
    for text in ("from Python", "written", "from the system", *(["from C"] if POSIX else [])):
        assert ran.err.count(text) >= len(places)
        assert text not in ran.out
    if "--json" in args:
        assert "acme:0" in json.dumps(json.loads(ran.out))
    else:
        assert len(ran.out.splitlines()) <= 3


def test_completions_are_not_mixed_with_what_a_plugin_prints(install: Any, bitnet: Any) -> None:
    install(probe="say")
    completing = {"_BITNET_COMPLETE": "bash_complete", "COMP_WORDS": "bitnet run --device ac", "COMP_CWORD": "3"}
    assert bitnet(**completing).out == "plain,acme\nplain,acme:0\n"


def test_a_library_leaves_the_streams_alone(install: Any, python: Any, site: Any) -> None:
    install(probe="say")
    assert "from Python" in python("from bitnet.core import list_devices; list_devices()", site).out


def test_standard_output_that_is_closed(install: Any, site: Any, tmp_path: Path) -> None:
    """``bitnet devices >&-`` gets through, whatever is printed."""
    install(probe="say", open="say")
    path = os.pathsep.join([str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    for code in (BITNET.format(args=["devices"]), BITNET.format(args=["devices", "--json"])):
        command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, timeout=60, capture_output=True, check=False
        )
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["load", "probe", "open"])
@pytest.mark.parametrize(
    ("how", "said"), [("interrupt", "KeyboardInterrupt"), ("exit_loudly", "SystemExit: 9"), ("other", "BaseException")]
)
def test_a_plugin_does_not_end_the_program(install: Any, bitnet: Any, where: str, how: str, said: str) -> None:
    install(**{where: how})
    ran = bitnet("run", "-n", "3", "Hi")
    assert ran.status == 0, ran
    assert ran.out.strip()
    (line,) = [line for line in ran.err.splitlines() if "acme" in line]
    assert said in line
    assert ("cannot be opened" if where == "open" else "The backend acme is broken") in line
    found = backend_of(bitnet("devices", "--json"))
    assert said in (found["devices"][0]["proof"]["error"] if where == "open" else found["reason"])


@pytest.mark.parametrize("how", ["hang", *(["hold_the_lock"] if POSIX else [])])
def test_a_driver_that_hangs_is_given_up(install: Any, python: Any, site: Any, how: str) -> None:
    install(probe=how)
    code = f"""
    import sys
    from bitnet.core.devices import examine, plugin
    from bitnet.core.cli import main
    plugin.PROBE_SECONDS = 3.0
    sys.exit(main({["devices", "--json"]!r}))
    """
    began = time.monotonic()
    ran = python(code, site)
    assert time.monotonic() - began < 30
    found = backend_of(ran)
    assert (found["status"], found["reason"]) == ("broken", "It did not answer within 3 s while it was probed.")
    assert json.loads(ran.out)["backends"][-1]["status"] == "ok"


@needs_signals
def test_a_device_may_wait_for_its_turn(install: Any, python: Any, site: Any) -> None:
    """The time that a probe has ends with its answer: what other backends take afterwards is not counted."""
    install(probe="end_in_a_second")
    code = """
    import time
    from bitnet.core.devices import examine, registry
    with examine._children([registry.available()["acme"]]) as (child,):
        child.begin()
        time.sleep(4)
        print(child.examine().crashed)
    """
    assert python(code, site).out == "{}\n"


def test_a_device_that_hangs_is_given_up(install: Any, python: Any, site: Any) -> None:
    install(open="hang")
    code = f"""
    import sys
    from bitnet.core.devices import examine, plugin
    from bitnet.core.cli import main
    examine.PROOF_SECONDS = 2.0
    sys.exit(main({["devices", "--json"]!r}))
    """
    ran = python(code, site, check=False)
    assert ran.status == 5
    (device,) = backend_of(ran)["devices"]
    assert device["proof"]["error"] == "It did not answer within 2 s while a kernel was run on it."


@needs_signals
def test_one_device_that_crashes_leaves_the_others(site: Any, bitnet: Any) -> None:
    tweak = """
class Bad(B):
    def probe(self):
        return ProbeResult(ProbeStatus.OK, [board("0"), board("1"), board("2")])
    def open(self, info, options):
        if info.index == "1":
            os.kill(os.getpid(), signal.SIGBUS)
        return super().open(info, options)
BACKEND = Bad()
"""
    site.install_backend("acme", "acme-bitnet", tweak=BAD + tweak)
    ran = bitnet("devices", "--json")
    assert ran.status == 5
    found = backend_of(ran)
    assert found["status"] == "ok"
    assert [device["proof"]["passed"] for device in found["devices"]] == [True, False, True]
    assert "crashed (SIGBUS: Bus error)" in found["devices"][1]["proof"]["error"]
    ran = bitnet("run", "-v", "-n", "3", "Hi")
    assert (ran.status, "selected=acme:0" in ran.err) == (0, True), ran
    assert "The device acme:1 is left out: It crashed (SIGBUS: Bus error) while a kernel was run on it." in ran.err
    assert bitnet("run", "--strict", "--device", "acme:1", "Hi").status == 3


GARBAGE = [
    "None",
    "42",
    "ProbeResult('ok', [board('0')])",
    "ProbeResult(ProbeStatus.OK, [None])",
    "ProbeResult(ProbeStatus.OK, 7)",
    "ProbeResult(ProbeStatus.BROKEN, reason=7)",
    "ProbeResult(ProbeStatus.BROKEN, tried={'a': None})",
    "ProbeResult(ProbeStatus.BROKEN, versions=['a'])",
    "ProbeResult(ProbeStatus.OK, [dataclasses.replace(board('0'), type='discrete')])",
    "ProbeResult(ProbeStatus.OK, [dataclasses.replace(board('0'), memory='much')])",
    "ProbeResult(ProbeStatus.OK, [dataclasses.replace(board('0'), features=(1,))])",
    "ProbeResult(ProbeStatus.OK, [dataclasses.replace(board('0'), description=b'x')])",
    "ProbeResult(ProbeStatus.OK, [dataclasses.replace(board('0'), details={'a': 1})])",
    "ProbeResult(ProbeStatus.OK, [dataclasses.replace(board('0'), index=0)])",
    "type('Evil', (), {'__repr__': lambda self: sys.exit(7)})()",
]


def test_garbage_is_a_broken_backend(site: Any, bitnet: Any) -> None:
    """All of it at once, in this process and in children."""
    for i, result in enumerate(GARBAGE):
        tweak = f"import dataclasses, sys\nB.probe = lambda self: {result}"
        site.install_backend(f"garbage{i}", f"garbage{i}-dist", tweak=tweak)
    ran = bitnet("run", "-n", "3", "Hi")
    assert ran.status == 0, ran
    for i in range(len(GARBAGE)):
        assert ran.err.count(f"The backend garbage{i} is broken: ") == 1
    found = {backend["name"]: backend["status"] for backend in json.loads(bitnet("devices", "--json").out)["backends"]}
    assert found == {"cpu": "ok"} | {f"garbage{i}": "broken" for i in range(len(GARBAGE))}


def test_what_is_opened_has_to_be_a_device(site: Any, bitnet: Any) -> None:
    site.install_backend("acme", "acme-bitnet", tweak="B.open = lambda self, info, options: 'garbage'")
    ran = bitnet("run", "-n", "3", "Hi")
    assert ran.status == 0, ran
    assert "acme:0: it cannot be opened: TypeError: what was opened is 'garbage', which is not a device" in ran.err


def test_nothing_is_imported_from_the_current_folder(install: Any, site: Any, tmp_path: Path) -> None:
    """The child that tries a backend does not run what lies about."""
    install()
    (tmp_path / "here").mkdir()
    for name in ("json.py", "sitecustomize.py", "numpy.py"):
        (tmp_path / "here" / name).write_text("open('RAN', 'w')")
    script = tmp_path / "command.py"
    script.write_text(BITNET.format(args=["devices", "--json"]))
    path = os.pathsep.join([str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path / "here",
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert {found["status"] for found in json.loads(done.stdout)["backends"]} == {"ok"}
    assert not (tmp_path / "here" / "RAN").exists()


@needs_signals
def test_many_at_once(install: Any, site: Any, tmp_path: Path) -> None:
    """Processes that start together, after a crash, all end well and agree."""
    install(probe="segfault")
    path = os.pathsep.join([str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", BITNET.format(args=["run", "-n", "3", "Hi"])]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=60, check=False)
    running = [
        subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    for process in running:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert out.strip()
        assert err.count("The backend acme is broken") == 1
