"""Programs: each source once for each set of constants, by the first compiler that takes it, kept for the next time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSources, KernelSpec
from bitnet.core.gpu.programs import Compiler, Identity, Programs, Source

ONE = KernelSpec("one", "first", (("WG", 64), ("KIND", "x")))
IDENTITY = Identity("a device", "driver 1", "compiler 1")


class Made:
    """A made-up compiler, which keeps count and refuses what it is told to."""

    def __init__(self, refuses: str = "nothing") -> None:
        self.built: list[Source] = []
        self.loaded: list[bytes] = []
        self.refuses, self.takes_kept = refuses, True

    def build(self, source: Source) -> tuple[str, bytes]:
        if self.refuses in source.options:
            raise KernelCompileError("no.", device="made-up:0", log=f"{self.refuses} is unknown")
        self.built.append(source)
        return f"{source.file} built", b"kept of " + source.file.encode()

    def load(self, source: Source, kept: bytes) -> str | None:
        self.loaded.append(kept)
        return f"{source.file} loaded" if self.takes_kept else None

    def way(self, *options: str, identity: Identity | None = IDENTITY, name: str = "") -> Compiler[str]:
        return Compiler(self.build, self.load, identity, options, name)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("BITNET_NO_KERNEL_CACHE", raising=False)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelSources:
    folder = tmp_path / "acme_programs_of_a_test" / "kernels"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    for name in ("all.h", "one.k", "two.k"):
        (folder / name).write_text(f"{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return KernelSources("acme_programs_of_a_test", "acme", ending=".k", common="all.h", entry="x")


def programs(sources: KernelSources, *compilers: Compiler[str], plain: Compiler[str] | None = None) -> Programs[str]:
    return Programs("made-up:0", sources, compilers, plain=plain)


def test_kernels_of_a_source_share_a_program(sources: KernelSources) -> None:
    made = Made()
    found = programs(sources, made.way("-fast"))
    specs: Sequence[KernelSpec] = [
        ONE,
        replace(ONE, entry="second"),
        replace(ONE, file="two"),
        replace(ONE, defines=()),
    ]
    found.prepare(specs)
    found.prepare(specs)
    assert sorted((source.text, source.options) for source in made.built) == [
        ("all.h\none.k\n", ("-fast",)),
        ("all.h\none.k\n", ("-fast", "-DWG=64", "-DKIND=x")),
        ("all.h\ntwo.k\n", ("-fast", "-DWG=64", "-DKIND=x")),
    ]
    assert [found[spec] for spec in specs] == ["one built", "one built", "two built", "one built"]


def test_what_was_made_is_kept_for_the_same_device_driver_compiler_and_options(sources: KernelSources) -> None:
    made = Made()
    programs(sources, made.way()).prepare([ONE])
    again = programs(sources, made.way())
    again.prepare([ONE])
    assert (again[ONE], made.loaded, len(made.built)) == ("one loaded", [b"kept of one"], 1)
    others = [made.way(identity=IDENTITY._replace(**{field: "another"})) for field in Identity._fields]
    for number, other in enumerate([*others, made.way("-fast")], 2):
        programs(sources, other).prepare([ONE])
        assert len(made.built) == number


def test_what_a_driver_refuses_of_the_kept_is_made_again(sources: KernelSources) -> None:
    made = Made()
    programs(sources, made.way()).prepare([ONE])
    made.takes_kept = False
    again = programs(sources, made.way())
    again.prepare([ONE])
    assert (again[ONE], len(made.built)) == ("one built", 2)


def test_what_is_at_hand_is_not_kept(sources: KernelSources) -> None:
    made = Made()
    for _ in range(2):
        programs(sources, made.way(identity=None)).prepare([ONE])
    assert (len(made.built), made.loaded) == (2, [])


def test_the_plain_way_is_the_last_resort_and_no_trial(
    sources: KernelSources, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made(refuses="-fast")
    found = programs(sources, made.way("-fast", name="fast"), plain=made.way(name="plainly"))
    assert not found.builds(ONE)
    assert made.built == []
    found.prepare([ONE])
    assert found[ONE] == "one built"
    assert "one does not compile fast: -fast is unknown" in caplog.text
    assert found.builds(replace(ONE, file="two")) is False
    assert programs(sources, made.way()).builds(ONE)


def test_where_no_way_is_left_each_says_why(sources: KernelSources) -> None:
    first, second = Made(refuses="-DWG=64"), Made(refuses="-DKIND=x")
    with pytest.raises(KernelCompileError) as raised:
        programs(sources, first.way(name="one way"), second.way(name="another")).prepare([ONE])
    assert raised.value.log == "one way: -DWG=64 is unknown\nanother: -DKIND=x is unknown"
