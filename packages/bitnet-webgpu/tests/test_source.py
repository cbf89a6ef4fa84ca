"""Conditions, constants and bindings of WGSL sources, for which WGSL itself has no means."""

import pytest

from bitnet.webgpu.source import SOURCES, bindings, preprocess

TEXT = """one
#if A
two
#if !B
three
#else
four
#endif
#else
five
#endif
six
"""


@pytest.mark.parametrize(
    ("defines", "kept"),
    [
        ({}, ["one", "five", "six"]),
        ({"A": 0, "B": 1}, ["one", "five", "six"]),
        ({"A": 1}, ["one", "two", "three", "six"]),
        ({"A": 7, "B": 1}, ["one", "two", "four", "six"]),
    ],
)
def test_conditions(defines: dict[str, int], kept: list[str]) -> None:
    text = preprocess(TEXT, defines)
    constants = [f"const {name} = {value};" for name, value in defines.items()]
    assert [line for line in text.splitlines() if line] == [*constants, *kept]
    assert text.splitlines().index("six") == len(defines) + TEXT.splitlines().index("six")


def test_bindings_are_those_in_front_of_each_kernel() -> None:
    text = preprocess(SOURCES.text("quantize"), {"WG": 64})
    assert bindings(text, "absmean_partial") == ["storage, read", "storage, read_write", "uniform"]
    assert bindings(text, "absmean_scale") == ["storage, read", "storage, read_write", "uniform"]
    assert bindings(text, "ternary_codes") == ["storage, read", "storage, read", "storage, read_write", "uniform"]
    with pytest.raises(ValueError, match="no kernel nothing"):
        bindings(text, "nothing")


def test_every_kernel_names_its_bindings_in_order() -> None:
    for name in SOURCES.names():
        entry = name.removesuffix("_webgpu")
        file = next(f for f in ("quantize", entry) if _has(f, entry))
        kinds = bindings(preprocess(SOURCES.text(file), {}), entry)
        assert kinds[-1] == "uniform"
        assert len(kinds) - 1 <= 8, "WebGPU's least limit of storage buffers"


def _has(file: str, entry: str) -> bool:
    try:
        return f"fn {entry}(" in SOURCES.text(file)
    except FileNotFoundError:
        return False
