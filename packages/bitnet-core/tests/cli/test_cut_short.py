"""A model file that is truncated or overwritten while in use gives an error that names it; no process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import ModelFileError
from bitnet.core.cpu.native import library
from bitnet.core.gguf import GGUFFile
from bitnet.core.model.convert import convert_model
from bitnet.core.model.inspect import inspect_tensors

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows lets nobody cut a mapped file short"),
    pytest.mark.skipif(library().handle is None, reason="what answers SIGBUS is in the native library"),
]


@pytest.fixture
def large(random_model: Any, tmp_path: Path) -> Path:
    """A model whose embedding is large enough to stay where it is mapped."""
    path = tmp_path / "large.gguf"
    shape = random_model.Shape(
        layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=9000, context=4096
    )
    random_model.write_gguf(path, random_model.metadata(shape), dict(random_model.tensors(shape, 1)))
    return path


def python(code: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("device", ["cpu", "cpu:scalar", "cpu:numpy"])
@pytest.mark.parametrize("left", [0, 4097])
def test_while_an_answer_is_written(script_path: str, large: Path, device: str, left: int) -> None:
    command = [script_path, "run", "-m", str(large), "Hello", "-n", "-1", "--device", device, "-t", "2"]
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout
    assert running.stdout.read(1)
    os.truncate(large, left)
    _, err = running.communicate(timeout=60)
    if device == "cpu:numpy" and running.returncode == 0:
        return  # it had copied what it reads
    error = err.decode().splitlines()[-1]
    assert (running.returncode, f"error: {large}: was cut short" in error) == (4, True), err


LIBRARY = """
import os, sys
from contextlib import suppress
from bitnet.core import ModelFileError, guard_model_files, load_model

def caught():
    status = open("/proc/self/status").read()
    return int(status.partition("SigCgt:")[2].split()[0], 16) >> (7 - 1) & 1

path, guarded = sys.argv[1], sys.argv[2] == "guarded"
if guarded:
    guard_model_files()
assert not caught()
with load_model(path, device="cpu", threads=2) as model:
    assert caught() == guarded
    stream = model.stream("Hello", max_tokens=100)
    next(stream)
    os.truncate(path, 5000)
    for _ in range(2):  # and from then on
        try:
            model.generate("Hello again", max_tokens=20)
            print("no error")
        except ModelFileError as error:
            print(error)
    with suppress(ModelFileError):  # unless it had ended before
        stream.close()
del model, stream
import gc; gc.collect()
assert not caught()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which signals are caught")
def test_a_library_installs_nothing_unless_it_is_asked_to(large: Path) -> None:
    data = large.read_bytes()
    ran = python(LIBRARY, large, "unguarded")
    assert ran.returncode == -signal.SIGBUS, ran
    large.write_bytes(data)
    ran = python(LIBRARY, large, "guarded")
    assert ran.returncode == 0, ran
    wanted = f"{large}: was cut short while it was in use: 5000 of {len(data)} bytes are left. Load it again; to"
    assert [line.startswith(wanted) for line in ran.stdout.splitlines()] == [True, True], ran.stdout


FOREIGN = """
import faulthandler, mmap, os, sys
if sys.argv[2] == "chained":
    faulthandler.enable()
from bitnet.core import guard_model_files, load_model
guard_model_files()
model = load_model(sys.argv[1], device="cpu")
with open("other", "wb") as file:
    file.write(bytes(10000))
with open("other", "rb") as file:
    other = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
if sys.argv[2] == "sent":
    os.kill(os.getpid(), 7)
os.truncate("other", 0)
other[5000]
print("survived")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="7 is SIGBUS on Linux")
@pytest.mark.parametrize("how", ["default", "chained", "sent"])
def test_every_other_bus_error_is_left_alone(large: Path, how: str) -> None:
    ran = python(FOREIGN, large, how)
    assert (ran.returncode, ran.stdout) == (-signal.SIGBUS, "")
    assert ("Bus error" in ran.stderr) == (how == "chained")


WHILE = """
import os, sys
from bitnet.core import ModelFileError, guard_model_files, loading
from bitnet.core.model.convert import convert_model
from bitnet.core.model.inspect import inspect_tensors
from bitnet.core.gguf import GGUFFile

guard_model_files()
path, what, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
cut = lambda *_: os.truncate(path, left)
try:
    if what == "load":
        opened = loading.open_engine
        loading.open_engine = lambda *args, **more: (cut(), opened(*args, **more))[1]
        loading.load_model(path, device="cpu")
    elif what == "convert":
        convert_model(path, "out.gguf", progress=cut)
    elif what == "inspect":
        for report in inspect_tensors(GGUFFile(path)):
            cut()
    elif what == "hash":
        file = GGUFFile(path)
        cut()
        file.sha256()
    elif what == "data":
        file = GGUFFile(path)
        cut()
        info = file.tensors["token_embd.weight"]
        file.data(info).sum()
        file.release(info)
except ModelFileError as error:
    print(error)
"""


@pytest.mark.parametrize("left", [0, 4097, 1_000_000])
@pytest.mark.parametrize("what", ["load", "convert", "inspect", "hash", "data"])
def test_while_it_is_read(large: Path, tmp_path: Path, what: str, left: int) -> None:
    ran = python(WHILE, large, what, str(left))
    assert ran.returncode == 0, ran
    assert ran.stdout.startswith(f"{large}: was cut short while it was in use: {left} of "), ran
    assert [p.name for p in tmp_path.iterdir()] == ["large.gguf"]


def test_what_is_written_to_while_it_is_read(random_model: Any, tmp_path: Path) -> None:
    """It is not believed, though all of its pages are there."""
    path = tmp_path / "model.gguf"
    shape = random_model.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512)
    random_model.write_gguf(path, random_model.metadata(shape), dict(random_model.tensors(shape, 1)))

    def write(*_: int) -> None:
        with path.open("r+b") as file:
            file.write(b"GGUF")
        os.utime(path, ns=(1, 1))  # a clock that has stood still would hide it

    uses: list[Callable[[GGUFFile], object]] = [
        lambda file: file.sha256(),
        lambda file: list(inspect_tensors(file)),
        lambda file: convert_model(path, tmp_path / "out.gguf", progress=write),
    ]
    for use in uses:
        file = GGUFFile(path)
        write() if use is not uses[-1] else None
        with pytest.raises(ModelFileError, match=r"model\.gguf: was written to while it was in use"):
            use(file)
        os.utime(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
