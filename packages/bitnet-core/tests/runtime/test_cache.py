"""The kernel cache returns the right data or none, whatever happens to its files, folder and users.

Long, because each thing that may happen to the cache is a test of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.support import cache
from bitnet.core.support.cache import KernelCache

POSIX = sys.platform != "win32"
PARTS = {"source": "kernel", "device": "H200", "driver": "550.1", "options": "-O3", "compiler": "nvrtc 12"}


def put(kernels: KernelCache, key: str, payload: bytes) -> None:
    kernels.put(key, payload, label="embed", seconds=0.25)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def key() -> str:
    return KernelCache.key(**PARTS)


def test_what_is_put_is_got(folder: Path, key: str) -> None:
    kernels = KernelCache()
    assert kernels.folder == folder
    assert kernels.get(key) is None
    for payload in (os.urandom(3000), b"", os.urandom(5)):
        put(kernels, key, payload)
        assert KernelCache().get(key) == payload
    if POSIX:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


def test_each_part_of_the_key_counts(key: str) -> None:
    changed = {KernelCache.key(**{**PARTS, name: text + "x"}) for name, text in PARTS.items()}
    assert len(changed | {key}) == 6
    # Parts are held apart: what ends one cannot begin the next.
    moved = {**PARTS, "source": "kernelH", "device": "200"}
    assert KernelCache.key(**moved) != key
    empty = {**PARTS, "options": "", "compiler": "-O3nvrtc 12"}
    assert len({KernelCache.key(**empty), KernelCache.key(**{**empty, "options": "-O3", "compiler": "nvrtc 12"})}) == 2
    in_bytes = {name: text for name, text in PARTS.items() if name != "source"}
    assert KernelCache.key(source=b"kernel", **in_bytes) == key


def test_the_key_holds_the_schema(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    assert KernelCache.key(**PARTS) != key


def test_every_flipped_bit_is_a_miss_that_is_rewritten(folder: Path, key: str, rng_seed: int) -> None:
    rng = random.Random(rng_seed)
    kernels = KernelCache()
    payload = rng.randbytes(200)
    put(kernels, key, payload)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
        assert kernels.get(key) is None, f"byte {at}"
    for bad in (b"", good[:-1], good + b"\0", good[:40], rng.randbytes(len(good)), b"\0" * 10_000):
        path.write_bytes(bad)
        assert kernels.get(key) is None
    put(kernels, key, payload)
    assert kernels.get(key) == payload
    assert path.read_bytes() == good


def test_an_entry_under_another_name_is_a_miss(folder: Path, key: str) -> None:
    kernels = KernelCache()
    other = KernelCache.key(**{**PARTS, "device": "B200"})
    put(kernels, key, b"for the H200")
    (path,) = folder.iterdir()
    path.rename(path.with_name(path.name.replace(key, other)))
    assert kernels.get(other) is None


def test_an_entry_that_claims_to_be_huge_is_not_read(folder: Path, key: str) -> None:
    kernels = KernelCache()
    put(kernels, key, b"small")
    (path,) = folder.iterdir()
    head = cache._HEADER.pack(b"BITNETKC", cache.SCHEMA, bytes.fromhex(key), 2**62, bytes(32))
    path.write_bytes(head)
    assert kernels.get(key) is None


def test_things_in_the_way_are_misses(folder: Path, key: str, said: Any) -> None:
    kernels = KernelCache()
    path = folder / f"{key}.kernel"
    path.mkdir(parents=True)
    assert kernels.get(key) is None
    put(kernels, key, b"x")  # cannot take the name of a folder
    assert kernels.get(key) is None
    assert len(said(logging.WARNING)) == 1
    assert [p.name for p in folder.iterdir()] == [path.name]
    kernels.clear()


KILLED = """
import sys
from bitnet.core.support.cache import KernelCache
key, payload = sys.stdin.readline().strip(), b"x" * (64 << 20)
print("ready", flush=True)
while True:
    KernelCache().put(key, payload, label="k", seconds=0)
"""


def test_a_writer_that_is_killed_leaves_a_whole_entry_or_none(folder: Path, key: str) -> None:
    whole = b"x" * (64 << 20)
    left_behind = attempts = 0
    while left_behind < 3 and attempts < 30:  # a write may end between the look and the kill
        attempts += 1
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin
        assert process.stdout
        process.stdin.write(key + "\n")
        process.stdin.flush()
        process.stdout.readline()
        earlier = set(folder.glob(".tmp-*"))
        while set(folder.glob(".tmp-*")) <= earlier:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.01))
        process.kill()
        process.communicate()
        assert KernelCache().get(key) in (None, whole)
        left_behind += len(list(folder.glob(".tmp-*")))
    assert left_behind, "no attempt was cut short in the middle of a write"
    # What they left behind goes when it is old; what another process may still be writing stays.
    for path in folder.glob(".tmp-*"):
        os.utime(path, (time.time() - 7200,) * 2)
    fresh = folder / ".tmp-fresh"
    fresh.touch()
    put(KernelCache(), KernelCache.key(**{**PARTS, "source": "other"}), b"y")
    assert [p.name for p in folder.glob(".tmp-*")] == [fresh.name]


RACING = """
import hashlib, sys
from bitnet.core.support.cache import KernelCache
keys = [KernelCache.key(source=str(i), device="d", driver="", options="", compiler="") for i in range(4)]
payload = lambda key: hashlib.sha256(key.encode()).digest() * 4000
sys.stdin.readline()
hits = 0
for turn in range(60):
    kernels = KernelCache(limit=450_000)  # room for three of the four, so that entries also vanish under readers
    for key in keys:
        found = kernels.get(key)
        assert found in (None, payload(key)), "a wrong kernel"
        hits += found is not None
        if found is None or turn % 3 == 0:
            kernels.put(key, payload(key), label="k", seconds=0)
print(hits)
"""


def test_processes_that_race_never_see_a_wrong_kernel(folder: Path) -> None:
    command = [sys.executable, "-c", RACING]
    pipe = subprocess.PIPE
    racers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    hits = 0
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        out, err = racer.communicate(timeout=120)
        assert racer.returncode == 0, err
        assert err == ""
        hits += int(out)
    assert hits
    assert not list(folder.glob(".tmp-*"))
    assert KernelCache().stats().size <= 450_000


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT if POSIX else errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_disables_writing_with_one_warning(
    folder: Path, key: str, said: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    put(KernelCache(), key, b"from before")
    other = KernelCache.key(**{**PARTS, "source": "other"})
    real = os.fdopen

    def full(*args: Any, **more: Any) -> Any:
        file = real(*args, **more)

        class Full:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: bytes) -> int:
                file.write(data[:10])
                file.flush()
                raise OSError(code, os.strerror(code))

        return Full()

    monkeypatch.setattr(os, "fdopen", full)
    for _ in range(2):
        kernels = KernelCache()
        put(kernels, other, b"new")
        put(kernels, other, b"new")
        assert kernels.get(other) is None
        assert kernels.get(key) == b"from before"
    (warning,) = said(logging.WARNING)
    assert os.strerror(code) in warning
    assert "Set BITNET_CACHE_DIR" in warning
    assert len(list(folder.iterdir())) == 1


@pytest.mark.skipif(not POSIX, reason="Windows has no limit on a process's files")
def test_a_full_disk_for_real(python: Any, folder: Path, key: str) -> None:
    """The kernel cuts the write short: here by the limit on a process's files."""
    ran = python(
        f"""
        import resource, signal, sys
        from bitnet.core.support.cache import KernelCache
        sys.dont_write_bytecode = True  # compiled modules would be cut off at the limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        kernels = KernelCache()
        for _ in range(3):
            kernels.put({key!r}, b"x" * 100_000, label="k", seconds=0)
            print(kernels.get({key!r}), kernels.stats().entries)
        """
    )
    assert ran.out == "None 0\n" * 3
    assert ran.err.count("Compiled kernels cannot be kept in") == 1
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not POSIX, reason="Windows keeps rights in another way")
def test_a_folder_that_may_not_be_written(python: Any, key: str) -> None:
    """Its entries are used all the same. (Root may write anywhere, so the process gives up being root.)"""
    code = f"""
    import os
    from bitnet.core.support.cache import KernelCache
    kernels = KernelCache()
    kernels.put({key!r}, b"from before", label="k", seconds=0)
    kernels.folder.chmod(0o500)
    if os.geteuid() == 0:
        os.chown(kernels.folder, 65534, 65534)
        os.chown(kernels.folder / ({key!r} + ".kernel"), 65534, 65534)
        os.setuid(65534)
    for _ in range(2):
        kernels = KernelCache()
        kernels.put({"0" * 64!r}, b"new", label="k", seconds=0)
        print(kernels.get({key!r}), kernels.get({"0" * 64!r}))
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        ran = python(code, BITNET_CACHE_DIR=folder)
    assert ran.out == "b'from before' None\n" * 2
    assert ran.err.count("Compiled kernels cannot be kept in") == 1


@pytest.mark.skipif(not POSIX, reason="Windows keeps rights in another way")
def test_a_folder_of_another_user_is_not_trusted(key: str, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(KernelCache(), key, b"planted")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1 if owner else 1000)
    folder = KernelCache().folder
    assert folder
    folder.chmod(0o777)
    kernels = KernelCache()
    assert kernels.get(key) is None
    put(kernels, key, b"new")
    (warning,) = said(logging.WARNING)
    assert "belongs to another user" in warning


@pytest.mark.skipif(not POSIX, reason="Windows keeps rights in another way")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_not_trusted(folder: Path, key: str, said: Any, mode: int) -> None:
    """Whoever may write there may have put an entry of our name: closing the folder afterwards would bless it."""
    put(KernelCache(), key, b"planted")
    folder.chmod(mode)
    for _ in range(2):
        kernels = KernelCache()
        assert kernels.get(key) is None
        put(kernels, key, b"new")
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert (folder / f"{key}.kernel").read_bytes().endswith(b"planted")
    (warning,) = said(logging.WARNING)
    assert f"{folder}: others may write to it (its mode is {mode:o}); remove it." in warning


@pytest.mark.skipif(not POSIX, reason="Windows keeps rights in another way")
def test_a_folder_that_is_opened_to_others_while_it_is_used(folder: Path, key: str, said: Any) -> None:
    kernels = KernelCache()
    put(kernels, "0" * 64, b"x")
    folder.chmod(0o777)
    put(kernels, key, b"new")
    assert [path.stem for path in folder.iterdir()] == ["0" * 64]
    assert len(said(logging.WARNING)) == 1


@pytest.mark.skipif(not POSIX or os.geteuid() != 0, reason="only root can give files away")
def test_an_entry_of_another_user_is_a_miss(folder: Path, key: str) -> None:
    """As one that was put there while the folder was open to others."""
    kernels = KernelCache()
    put(kernels, key, b"planted")
    os.chown(folder / f"{key}.kernel", 65534, 65534)
    assert kernels.get(key) is None
    put(kernels, key, b"new")
    assert kernels.get(key) == b"new"


@pytest.mark.skipif(not POSIX, reason="Windows keeps rights in another way")
def test_a_symlinked_folder_keeps_its_targets_mode(tmp_path: Path, folder: Path, key: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o755)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    put(KernelCache(), key, b"x")
    assert KernelCache().get(key) == b"x"
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


FIFO = """
import os
from bitnet.core.support.cache import KernelCache
kernels = KernelCache()
kernels.folder.mkdir(parents=True, mode=0o700)
path = kernels.folder / ({key!r} + ".kernel")
{make}
print(kernels.get({key!r}))
kernels.put({key!r}, b"new", label="k", seconds=0)
print(kernels.get({key!r}))
"""


@pytest.mark.skipif(not POSIX, reason="Windows has neither")
@pytest.mark.parametrize("make", ["os.mkfifo(path)", "path.symlink_to('/dev/zero')", "path.symlink_to('/dev/stdin')"])
def test_an_entry_that_is_no_file_is_a_miss_that_blocks_nobody(python: Any, key: str, make: str) -> None:
    assert python(FIFO.format(key=key, make=make)).out == "None\nb'new'\n"


def test_a_cache_dir_that_is_a_file(tmp_path: Path, key: str, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "file"))
    kernels = KernelCache()
    put(kernels, key, b"x")
    assert kernels.get(key) is None
    assert kernels.stats().entries == 0
    assert kernels.clear().entries == 0
    assert len(said(logging.WARNING)) == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_least_recently_used_go_first(folder: Path) -> None:
    kernels = KernelCache(limit=4 * 1100)
    keys = [KernelCache.key(**{**PARTS, "source": str(i)}) for i in range(6)]
    now = time.time() - 1000
    for i, key in enumerate(keys[:4]):
        put(kernels, key, bytes(1000))
        os.utime(folder / f"{key}.kernel", (now + i,) * 2)
    assert kernels.get(keys[0]) is not None  # which makes it the newest
    put(kernels, keys[4], bytes(1000))
    assert [kernels.get(key) is not None for key in keys] == [True, False, True, True, True, False]
    put(kernels, keys[5], bytes(5000))  # larger than all there may be
    assert kernels.get(keys[5]) is None
    stats = kernels.stats()
    assert (stats.entries, stats.limit) == (4, 4400)
    assert stats.size == sum(p.stat().st_size for p in folder.iterdir()) <= 4400


def test_clear_removes_entries_and_nothing_else(folder: Path, key: str) -> None:
    kernels = KernelCache()
    put(kernels, key, bytes(10))
    (folder / ".tmp-abandoned").write_bytes(b"half")
    (folder / "README").write_text("mine")
    assert kernels.stats().entries == 1
    removed = kernels.clear()
    assert removed.entries == 2
    assert [p.name for p in folder.iterdir()] == ["README"]
    assert kernels.get(key) is None


def test_no_kernel_cache_reads_and_writes_nothing(
    folder: Path, key: str, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(KernelCache(), key, b"kept")
    monkeypatch.setenv("BITNET_NO_KERNEL_CACHE", "1")
    kernels = KernelCache()
    assert kernels.get(key) is None
    put(kernels, key, b"other")
    assert said(logging.INFO)[-1] == "compiled embed in 0.25 s"
    monkeypatch.setenv("BITNET_NO_KERNEL_CACHE", "0")
    assert KernelCache().get(key) == b"kept"
    monkeypatch.setenv("BITNET_NO_KERNEL_CACHE", "perhaps")
    with pytest.raises(InvalidInputError, match="BITNET_NO_KERNEL_CACHE is 'perhaps'"):
        KernelCache()


@pytest.mark.parametrize(
    ("platform", "env", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/bitnet"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/ann/.cache/bitnet"),
        ("linux", {}, "/home/ann/.cache/bitnet"),
        ("darwin", {}, "/home/ann/Library/Caches/bitnet"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/bitnet"),
        ("win32", {}, "/home/ann/AppData/Local/bitnet"),
        ("linux", {"BITNET_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ("win32", {"BITNET_CACHE_DIR": "~/c"}, "/home/ann/c"),
    ],
)
@pytest.mark.skipif(not POSIX, reason="the paths are written as POSIX has them")
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, platform: str, env: dict[str, str], expected: str) -> None:
    for name in ("BITNET_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/ann", **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache.cache_folder() == Path(expected)


def test_a_user_without_a_home(key: str, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BITNET_CACHE_DIR")

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    kernels = KernelCache()
    put(kernels, key, b"x")
    assert kernels.get(key) is None
    assert kernels.stats() == cache.CacheStats(None, 0, 0, cache.LIMIT)
    assert len(said(logging.WARNING)) == 1
