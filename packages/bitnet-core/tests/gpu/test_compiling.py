"""Compiling through the cache and side by side: each key once, the first error, and nothing begun after it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu.drivers import compiling
from bitnet.core.gpu.drivers.compiling import Way, compile_all, compiled
from bitnet.core.support import cache
from bitnet.core.support.cache import KernelCache


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "usable_cpus", lambda: 3)


def test_each_key_once_and_side_by_side() -> None:
    """Three at a time wait for one another: one after the other they would wait for ever."""
    together = threading.Barrier(3, timeout=20)
    seen: list[int] = []

    def make(key: int) -> int:
        seen.append(key)
        together.wait()
        return key * key

    assert compile_all(make, [3, 1, 2, 3, 1]) == {3: 9, 1: 1, 2: 4}
    assert sorted(seen) == [1, 2, 3]


def test_nothing_and_one_take_no_thread() -> None:
    here = threading.get_ident()
    assert compile_all(lambda key: threading.get_ident(), []) == {}
    assert compile_all(lambda key: threading.get_ident(), ["a", "a"]) == {"a": here}


def test_the_first_error_ends_it() -> None:
    started: list[int] = []
    wait = threading.Event()

    def make(key: int) -> int:
        started.append(key)
        if key == 0:
            raise ValueError("kernel 0")
        wait.wait(0.2)
        return key

    with pytest.raises(ValueError, match="kernel 0"):
        compile_all(make, range(50))
    assert len(started) < 50
    settled = len(started)
    wait.wait(0.5)
    assert len(started) == settled  # what had begun has ended, and nothing begins any more


class Compiler:
    """Two ways for each unit; those named are refused. What is made is the unit's name with the way's, as bytes."""

    def __init__(self, refuses: Collection[str] = (), refuses_kept: Collection[str] = ()) -> None:
        self.refuses, self.refuses_kept = refuses, refuses_kept
        self.built: list[str] = []

    def ways(self, unit: str, names: Sequence[str] = ("quick", "plain")) -> list[Way[str]]:
        return [self._way(unit, name) for name in names]

    def _way(self, unit: str, name: str) -> Way[str]:
        made = f"{unit} {name}".strip()

        def build() -> tuple[str, bytes]:
            self.built.append(made)
            if made in self.refuses:
                raise KernelCompileError(f"{made} is refused.", device="acme:0", log=f"log of {made}")
            return made, made.encode()

        def load(payload: bytes) -> str | None:
            return None if made in self.refuses_kept else payload.decode()

        return Way(unit, KernelCache.key(source=made, device="", driver="", options="", compiler=""), build, load, name)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("BITNET_NO_KERNEL_CACHE", raising=False)
    return KernelCache()


def test_what_is_made_is_kept_and_told(kernels: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    listened: list[str] = []
    monkeypatch.setattr(cache, "listeners", [lambda label, _: listened.append(label)])
    first, second = Compiler(), Compiler()
    units = ["a", "b", "c"]
    wanted = {unit: f"{unit} quick" for unit in units}
    assert compiled(kernels, {unit: first.ways(unit) for unit in units}) == wanted
    assert sorted(listened) == units
    assert compiled(kernels, {unit: second.ways(unit) for unit in units}) == wanted
    assert second.built == []
    assert sorted(listened) == units


def test_the_next_way_is_tried_once_and_found_again(kernels: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    for refused in (["a quick"], []):  # a compiler that would be refused again is not asked
        compiler = Compiler(refused)
        assert compiled(kernels, {"a": compiler.ways("a")}) == {"a": "a plain"}
        assert compiler.built == (["a quick", "a plain"] if refused else [])
    assert caplog.text.count("acme:0: a does not compile quick: log of a quick") == 1


def test_a_kept_program_that_the_driver_refuses_is_made_again(kernels: KernelCache) -> None:
    compiled(kernels, {"a": Compiler().ways("a")})
    again = Compiler(refuses_kept=["a quick"])
    assert compiled(kernels, {"a": again.ways("a")}) == {"a": "a quick"}
    assert again.built == ["a quick"]


def test_the_error_has_what_every_way_said(kernels: KernelCache) -> None:
    both = Compiler(["a quick", "a plain"])
    with pytest.raises(KernelCompileError, match="a does not compile") as raised:
        compiled(kernels, {"a": both.ways("a")})
    assert raised.value.log == "quick: log of a quick\nplain: log of a plain"
    only = Compiler(["a"])
    with pytest.raises(KernelCompileError, match="a is refused") as raised:
        compiled(kernels, {"a": only.ways("a", [""])})
    assert raised.value.log == "log of a"


def test_what_has_no_key_is_not_kept(kernels: KernelCache) -> None:
    compiler = Compiler()
    for _ in range(2):
        way = replace(compiler.ways("a")[0], key=None)
        assert compiled(kernels, {"a": [way]}) == {"a": "a quick"}
    assert compiler.built == ["a quick"] * 2
