"""The helper processes that render templates: how they start, that they outlive no parent, and what disturbs them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.support.helper import job, memory, program
from bitnet.core.text import sandbox
from bitnet.core.text.chat import ChatTemplate
from bitnet.core.text.sandbox import pool, renderer

posix = pytest.mark.skipif(sys.platform == "win32", reason="forks and signals are POSIX's")
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

FIND = """
import os, sys, time, signal, threading
from pathlib import Path
from bitnet.core.text import sandbox
def helpers():
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found[int(path.parent.name)] = fields[0]
    return found
def endless():
    try:
        sandbox.render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", [{}])
    except sandbox.TemplateError:
        pass
def gone(pid):
    for _ in range(2000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # the container's init reaps it, or not
        except OSError:
            return True
        time.sleep(0.01)
    return False
"""


def run(program: str, *options: str, **settings: Any) -> str:
    command = [sys.executable, *options, "-c", FIND + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **settings)
    assert done.stderr == ""
    return str(done.stdout)


def test_nothing_starts_before_it_is_needed() -> None:
    program = """
import bitnet.core.api, bitnet.core.text.chat, bitnet.core.text.prompt
print(threading.active_count(), "jinja2" in sys.modules, "multiprocessing" in sys.modules, end=" ")
print(sandbox.render("{{ a }}", [{"a": 1}]), threading.active_count(), "jinja2" in sys.modules)
"""
    assert run(program) == "1 False False ['1'] 2 False\n"


@linux
def test_one_helper_serves_and_is_replaced() -> None:
    program = f"""
for _ in range(20):
    sandbox.render("a", [{{}}])
(first,) = helpers()
try:
    sandbox.render({ENDLESS!r}, [{{}}])
except sandbox.TemplateError:
    pass
print(gone(first), sandbox.render("b", [{{}}]), first not in helpers(), set(helpers().values()) <= {{"S", "R"}})
(second,) = helpers()
os.kill(second, signal.SIGKILL)  # by whoever kills what takes memory
assert gone(second)
print(sandbox.render("c", [{{}}]), second not in helpers())
"""
    assert run(program) == "True ['b'] True True\n['c'] True\n"


@linux
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()", "os._exit(0)"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_helper_does_not_outlive_its_parent(end: str, busy: bool) -> None:
    program = f"""
sandbox.render("a", [{{}}])
(pid,) = helpers()
print(pid, flush=True)
if {busy}:
    threading.Thread(target=endless, daemon=True).start()
    time.sleep(0.2)
{end}
"""
    pid = int(run(program))
    assert run(f"print(gone({pid}))") == "True\n"


@posix
@pytest.mark.parametrize(
    "where", ["subprocess.Popen.__init__", "threading.Thread.start", "process.HelperProcess._next"]
)
def test_an_interrupt_while_a_helper_starts_leaves_nothing(where: str) -> None:
    program = f"""
import subprocess
from bitnet.core.support.helper import process

def left():
    return threading.active_count(), len(process._living), len(os.listdir("/dev/fd"))

before, meant = left(), {where}
def interrupted(*arguments, **options):
    meant(*arguments, **options)
    raise KeyboardInterrupt
{where} = interrupted
try:
    sandbox.render("a", [{{}}])
except KeyboardInterrupt:
    {where} = meant
end = time.monotonic() + 10
while left() != before and time.monotonic() < end:
    time.sleep(0.01)
print(left() == before, sandbox.render("b", [{{}}]))
"""
    assert run(program) == "True ['b']\n"


@posix
def test_an_interrupt_of_the_terminal_spares_the_helper() -> None:
    """Ctrl-C goes to all processes of the terminal's group."""
    program = """
sandbox.render("a", [{}])
(first,) = helpers() or [0]
try:
    os.killpg(0, signal.SIGINT)
    time.sleep(9)
except KeyboardInterrupt:
    pass
time.sleep(0.1)
print(sandbox.render("b", [{}]), list(helpers() or [0]) == [first])
"""
    assert run(program, start_new_session=True) == "['b'] True\n"


@linux
def test_a_fork_has_helpers_of_its_own() -> None:
    program = """
sandbox.render("a", [{}])
(first,) = helpers()
threading.Thread(target=endless, daemon=True).start()
time.sleep(0.1)
child = os.fork()
if child == 0:
    print(sandbox.render("b", [{}]), len(helpers()), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(sandbox.render("c", [{}]))
print(*helpers(), flush=True)
if os.fork() == 0:  # lives on, and holds no end of the parent's pipes
    os.close(1), os.close(2)
    time.sleep(30)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Python 3.12 and later warn of any fork beside threads; the helper's is one.
    first, second, pids = run(program, "-W", "ignore::DeprecationWarning").splitlines()
    assert (first, second) == ("['b'] 1", "['c']")
    assert pids
    assert run(f"print(*map(gone, {[*map(int, pids.split())]}))").split() == ["True"] * len(pids.split())


def test_many_at_once_with_harm_among_them() -> None:
    template, harm = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"), ChatTemplate(ENDLESS)
    wrong: list[object] = []
    answered: list[float] = []
    ended: list[float] = []
    together = threading.Barrier(61)

    def ask(n: int) -> None:
        together.wait()
        for i in range(20):
            if template.render([{"role": "user", "content": f"{n} {i} " * 99}]) != f"{n} {i} " * 99:
                wrong.append((n, i))
            if i == 0:
                answered.append(time.perf_counter())
                together.wait()

    def harmful() -> None:
        try:
            harm.render([])
            wrong.append("it ended")
        except InvalidInputError:
            ended.append(time.perf_counter())

    threads = [threading.Thread(target=harmful) for _ in range(3)]
    threads += [threading.Thread(target=ask, args=(n,)) for n in range(61)]
    for thread in threads[:3]:
        thread.start()
    end = time.monotonic() + 60
    while len(sandbox._pool._all) - len(sandbox._pool._idle) < 3:  # the harm has its helpers before the others ask
        assert time.monotonic() < end
        time.sleep(0.001)
    for thread in threads[3:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(answered) == 61
    assert sorted(answered)[61 // 2] < min(ended)  # they did not wait for the harm's end, however slow both are


@pytest.mark.skipif(sys.platform == "win32", reason="processes are stopped by signals, and processor time is limited")
def test_a_template_may_wait_for_a_processor() -> None:
    """As on a machine that other work keeps busy: the helper stands still for longer than it may compute."""
    sandbox.render("", [{}])
    running = [one._helper._running for one in sandbox._pool._idle if isinstance(one, renderer.Renderer)]
    for helper in running:
        if helper is not None and helper.alive:
            os.kill(helper.pid, signal.SIGSTOP)
            threading.Timer(2 * sandbox.CPU_SECONDS, os.kill, (helper.pid, signal.SIGCONT)).start()
    begin = time.monotonic()
    assert sandbox.render("{{ a }}", [{"a": 1}]) == ["1"]
    assert time.monotonic() - begin > sandbox.CPU_SECONDS  # it was one of those


def test_the_environment_and_the_working_folder_have_no_say(tmp_path: Path) -> None:
    for name in ("json", "jinja2", "sitecustomize", "datetime"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')")
    program = "print(sandbox.render('{{ a }}', [{'a': 1}]))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "json.py")}
    assert run(program, "-I", cwd=tmp_path, env=environment) == "['1']\n"


def test_a_helper_writes_to_nobodys_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    nested = "{% for j in range(2) %}{% for i in range(99999) %}{% set ns.t = (ns.t,) %}{% endfor %}{% endfor %}"
    crash = "{% set ns = namespace(t=()) %}" + nested + "{% set d = {ns.t: 1} %}"
    for source in (crash, "{{ 1 // 0 }}", "{{ 'a' * 10 ** 12 }}"):
        with pytest.raises(InvalidInputError):
            ChatTemplate(source).render([])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("value", [{1, 2}, b"a", object(), {(1, 2): 3}])
def test_values_that_json_cannot_hold(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="JSON cannot represent"):
        ChatTemplate("a").render([{"role": "user", "content": value}])


def test_values_of_other_kinds() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidInputError, match="JSON cannot represent"):
        ChatTemplate("a").render([{"role": "user", "content": deep}])
    message = MappingProxyType({"role": "user", "content": ("a", range(2)), "lone": "\ud800", "nan": float("nan")})
    source = "{{ messages[0].content }}{{ messages[0].lone == '\ud800' }}{{ messages[0].nan }}"
    assert ChatTemplate(source).render([message]) == "['a', [0, 1]]Truenan"


@pytest.mark.parametrize(
    ("executable", "frozen", "reason"),
    [
        (sys.executable, True, "it is a frozen program"),
        ("/nowhere/python", False, "No such file|cannot find"),
        ("", False, "the path of this interpreter is unknown"),
        pytest.param("/bin/true", False, r"it ended the process \(exit status 0\)", marks=posix),
        pytest.param("/bin/cat", False, r"it ended the process \(exit status 1\)", marks=posix),
    ],
)
def test_where_no_python_is(executable: str, frozen: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import spawn

    monkeypatch.setattr(spawn, "get_executable", lambda: executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    with pytest.raises(BitNetError, match=rf"does not start \(.*\): .*({reason})") as caught:
        renderer.Renderer().ask(b"")
    assert "multiprocessing.set_executable()" in str(caught.value)


class Kernel32:
    """Stands for Windows' library: keeps what it is given."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            plain = [
                argument.value if isinstance(argument, ctypes._SimpleCData) else argument for argument in arguments
            ]
            if name == "SetInformationJobObject":
                plain[2] = bytes(arguments[2]._obj)
            self.calls.append((name, tuple(plain)))
            return 0 if name == self.refuses else 77 if name == "CreateJobObjectW" else 1

        setattr(self, name, function)
        return function


def test_the_job_object_of_windows() -> None:
    kernel32 = Kernel32()
    held = job.Job(kernel32, 1234, 5 << 20)
    (created, _), (limited, limits), (put, process_in_it) = kernel32.calls
    assert (created, limited, put) == ("CreateJobObjectW", "SetInformationJobObject", "AssignProcessToJobObject")
    assert process_in_it == (77, 1234)
    handle, kind, data, size = limits
    assert (handle, kind, size) == (77, 9, len(data))
    if sys.maxsize > 1 << 32:  # offsets as winnt.h has them for 64 bits
        assert len(data) == 144
        assert int.from_bytes(data[16:20], "little") == 0x2000 | 0x400 | 0x100 | 0x8
        assert int.from_bytes(data[40:44], "little") == 1  # processes
        assert int.from_bytes(data[112:120], "little") == 5 << 20
    held.close()
    held.close()
    assert kernel32.calls[3:] == [("CloseHandle", (77,))]


@pytest.mark.parametrize("refuses", ["CreateJobObjectW", "SetInformationJobObject", "AssignProcessToJobObject"])
def test_a_job_object_that_is_refused(refuses: str) -> None:
    kernel32 = Kernel32(refuses)
    with pytest.raises(OSError, match="job object"):
        job.Job(kernel32, 1234, 5 << 20)
    closed = [name for name, _ in kernel32.calls].count("CloseHandle")
    assert closed == (refuses != "CreateJobObjectW")


def test_the_memory_that_macos_tells() -> None:
    class Libc:
        def proc_pid_rusage(self, pid: Any, flavour: Any, usage: Any) -> int:
            assert (pid.value, flavour.value) == (42, 0)
            ctypes.memmove(ctypes.byref(usage._obj, 72), (123 << 20).to_bytes(8, sys.byteorder), 8)  # ri_phys_footprint
            return self.status

        status = 0

    libc = Libc()
    assert memory.footprint(libc, 42) == 123 << 20
    libc.status = -1
    assert memory.footprint(libc, 42) == 0


def test_a_helper_that_is_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system bounds no memory, its parent does."""
    helper = renderer.Renderer()
    assert helper.ask(b'["a", [{}]]') == ["a"]
    monkeypatch.setattr(memory, "taken", lambda pid: 1 << 40)
    with pytest.raises(sandbox.TemplateError, match="takes more than 256 MiB of memory"):
        helper.ask(sandbox.as_json([ENDLESS, [{}]]).encode())


def test_helpers_are_started_ahead() -> None:
    """As many as asked for; those that there are count."""
    ahead = pool.Pool()
    for count, there in ((3, 3), (2, 3), (4, 4)):
        ahead.warm(count)
        for thread in [thread for thread in threading.enumerate() if thread.name == "bitnet-warm"]:
            thread.join(60)
        assert len(ahead._idle) == len(ahead._all) == there
    assert ahead.render("{{ a }}", [{"a": 1}]) == ["1"]


def test_where_there_are_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a browser, which tests/browser tries: this process renders, and starts neither process nor thread."""
    monkeypatch.setattr(pool, "NO_PROCESSES", True)
    monkeypatch.setattr(program, "NO_PROCESSES", True)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread} started"))
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail(f"{args} started"))
    here = pool.Pool()
    here.warm()
    here.check("")
    assert here.render("{{ a }}{{ 1 / a }}", [{"a": 1}, {"a": 0}]) == ["11.0", None]
    for source, reason in (
        ("{% for %}", "fails: "),
        ("{{ 'x' * 17000000 }}", "writes more than 16,777,216 characters"),
    ):
        with pytest.raises(sandbox.TemplateError, match=reason):
            here.render(source, [{}])
    monkeypatch.setattr("bitnet.core.text.sandbox.program._template", no_memory)
    with pytest.raises(sandbox.TemplateError, match="takes more memory than there is"):
        here.render("a", [{}])
    assert not program.possible()


def no_memory(source: str) -> None:
    raise MemoryError
