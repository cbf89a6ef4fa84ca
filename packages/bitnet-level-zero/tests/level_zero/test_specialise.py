"""A module of the wheel with its words set is the module that the compiler makes for those numbers."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.level_zero.specialise import module, value
from bitnet.level_zero.variants import FAMILIES

CONSTANT, SPEC_CONSTANT, ARRAY, EXECUTION_MODE, LOCAL_SIZE = 43, 50, 28, 16, 17


def instructions(words: array[int]) -> Iterator[tuple[int, array[int]]]:
    at = 5
    while at < len(words):
        size = words[at] >> 16
        yield words[at] & 0xFFFF, words[at : at + size]
        at += size


def sizes(data: bytes) -> tuple[set[int], list[int]]:
    """The lengths of a module's arrays, and its work-group sizes."""
    words = array("I", data)
    numbers = {one[2]: one[3] for code, one in instructions(words) if code == CONSTANT}
    lengths = {numbers[one[3]] for code, one in instructions(words) if code == ARRAY}
    groups = [one[3] for code, one in instructions(words) if code == EXECUTION_MODE and one[2] == LOCAL_SIZE]
    return lengths, groups


def special(data: bytes) -> set[int]:
    """The values of a module's specialisation constants."""
    return {one[3] for code, one in instructions(array("I", data)) if code == SPEC_CONSTANT}


def shapes_of(file: str) -> dict[str, int]:
    """Random shapes of the kind that a launch has."""
    rng = random.Random()
    dim, cols = rng.choice([64, 80, 96, 128, 256]), 4 * rng.randint(200, 3000)
    known = {
        "WG": 256,
        "DIM": dim,
        "BLOCK": rng.choice([16, 32, 48]),
        "HEAD_GROUP": rng.randint(1, 8),
        "COLS": cols,
        "ROW_BYTES": -(-cols // 128) * 32,
        "TOKENS": rng.randint(1, 8),
        "PAIRS": rng.randint(1, 32),
        "TAPS": rng.randint(2, 8),
        "D_K": 4 * rng.randint(1, 40),
        "D_V": 4 * rng.randint(1, 40),
        "HEADS": 12,
        "K_HEADS": rng.choice([2, 3]),
        "TILED": 1,
        "COLUMNS": 32,
        "PARTS": 8,
        "HEAD": rng.choice([128, 256]),
        "SILU": 1,
        "UNTILE": 2,
        "ROWS": 1,
        "SIGNS": 1,
        "PASSES": rng.randint(1, 8),
        "BITS": rng.randint(0, 12),
        "LANES": rng.choice([8, 16, 32]),
        "EACH": rng.choice([1, 4]),
        "GROUP": rng.choice([32, 64, 128, 256]),
        "HELD": rng.choice([1, 2]),
        "EACH_M": rng.randint(1, 4),
        "WINDOW": rng.choice([0, 512]),
        "EXPERTS": rng.choice([1, 16, 256]),
        "TX": 16,
        "TY": 16,
    }
    return {name: known[name] for name in FAMILIES[file].shapes}


@pytest.mark.parametrize("file", sorted(FAMILIES))
def test_lengths_and_groups_are_those_the_compiler_makes(hook: ModuleType, file: str) -> None:
    choices, shapes = dict(FAMILIES[file].choices[-1]), shapes_of(file)
    direct, patches = hook.compile_one(file, (), {**choices, **shapes}, False, optimised=FAMILIES[file].optimised)
    assert patches == []
    made = module(KernelSpec(file, file, tuple({**choices, **shapes}.items())), dot=False, device="level-zero:0")
    assert sizes(made) == sizes(direct)
    assert special(made) <= set(shapes.values())
    assert not any(word >= hook.FIRST and word < hook.FIRST + 100 for group in sizes(made) for word in group)


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("(((DIM / 4) + 32 - 1) / 32) * (DIM % 16 ? 1 : 4)", lambda d: ((d // 4 + 31) // 32) * (1 if d % 16 else 4)),
        ("(256 / (DIM % 32 ? DIM % 16 ? 1 : 4 : 8))", lambda d: 256 // ((4 if d % 16 == 0 else 1) if d % 32 else 8)),
        ("DIM % 16 ? 1 : DIM % 32 ? (4) : (DIM ? 8 : 9)", lambda d: 1 if d % 16 else 4 if d % 32 else 8),
    ],
)
def test_formulas(hook: ModuleType, text: str, exact: Callable[[int], int]) -> None:
    """As C computes them, conditionals within conditionals too."""
    for dim in (64, 80, 100):
        assert value(hook.formula(text), {"DIM": dim}) == exact(dim)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (KernelSpec("nowhere", "nowhere"), "no module of nowhere for no choice"),
        (KernelSpec("norm_quant", "norm_quant", (("WG", 64), ("NORM", 2))), "no module of norm_quant for WG=64 NORM=2"),
        (KernelSpec("norm_quant", "norm_quant", (("NORM", 1), ("OTHER", 1))), "OTHER=1"),
    ],
)
def test_what_the_wheel_has_not_is_an_error(spec: KernelSpec, says: str) -> None:
    with pytest.raises(KernelCompileError, match=says):
        module(spec, dot=False, device="level-zero:0")


def test_a_shape_that_the_preprocessor_asks_about_is_refused(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules would all be made for the answer that an unknown number gives."""
    monkeypatch.setattr(hook, "source", lambda file: "#if COLS % 128 == 0\n#endif\n")
    with pytest.raises(SystemExit, match="asks the preprocessor about COLS"):
        hook.compile_one("row_sums", ("WG", "COLS"), {}, False)


@pytest.mark.parametrize("use", ["sizeof(a)", "sizeof(a) / 4 - 1"])
def test_a_length_that_is_computed_with_is_refused(hook: ModuleType, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """No formula would set the number that the compiler makes of it."""
    text = f"kernel void k(global ulong *o) {{ local int a[WG]; a[0] = 0; o[0] = {use}; }}"
    monkeypatch.setattr(hook, "source", lambda file: text)
    with pytest.raises(SystemExit, match="made of the length"):
        hook.compile_one("k", ("WG",), {}, False)
