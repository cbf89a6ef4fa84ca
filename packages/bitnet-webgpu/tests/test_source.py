"""Conditions, constants and bindings of WGSL sources, for which WGSL itself has no means."""

import re

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


def test_repeats() -> None:
    text = """#repeat i 2
#if A
#repeat j N
a[i][j] = j;  // a note on j
#end
#else
nothing();
#end
after(i);
"""
    text = text.replace("nothing();\n", "nothing();\n#endif\n")
    lines = preprocess(text, {"A": 1, "N": 3}).splitlines()
    made = [
        "a[0u][0u] = 0u;",
        "a[0u][1u] = 1u;",
        "a[0u][2u] = 2u;",
        "a[1u][0u] = 0u;",
        "a[1u][1u] = 1u;",
        "a[1u][2u] = 2u;",
    ]
    assert [line.strip() for line in re.split("[{}]", lines[2]) if line.strip()] == made
    assert lines.index("after(i);") == 2 + text.splitlines().index("after(i);")
    assert not any(lines[3 : lines.index("after(i);")])
    assert "nothing" in preprocess(text, {"N": 1})


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
        file = next(f for f in ("quantize", "adjust", "logprobs", "route", entry) if _has(f, entry))
        text = SOURCES.text(file)
        counts = dict.fromkeys(re.findall(r"#repeat \w+ ([A-Z_]+)", text), 1)
        kinds = bindings(preprocess(text, counts), entry)
        assert kinds[-1] == "uniform"
        assert len(kinds) - 1 <= 8, "WebGPU's least limit of storage buffers"


def _has(file: str, entry: str) -> bool:
    try:
        return f"fn {entry}(" in SOURCES.text(file)
    except FileNotFoundError:
        return False
