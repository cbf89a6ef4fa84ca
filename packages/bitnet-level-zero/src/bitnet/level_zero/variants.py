"""The SPIR-V modules of the wheel, and the constants of a kernel that select one of them.

A kernel's constants are of two kinds. A choice is tested by the preprocessor: each of its values needs a module of its
own. A shape is a number that is written into the module when it is loaded, so that a few dozen modules serve every
model (decision 0081). The build hook and the loader share this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

Choices: TypeAlias = Mapping[str, int]


def each(*names: str) -> list[Choices]:
    """Every combination of 0 and 1."""
    return [dict(zip(names, values, strict=True)) for values in product((0, 1), repeat=len(names))]


def crossed(first: Sequence[Choices], second: Sequence[Choices]) -> list[Choices]:
    """Every combination of two tables."""
    return [{**a, **b} for a in first for b in second]


@dataclass(frozen=True, slots=True)
class Family:
    """The modules made of one source.

    Attributes:
        shapes: Constants that are set at load time.
        choices: Values of the others, of each module.
        dots: Whether the source multiplies bytes: then there are modules with the integer dot product and without, but
            for XMX, which takes its place.
        optimised: Whether clang optimises it, which it may where no array's length depends on a shape.
    """

    shapes: tuple[str, ...] = ()
    choices: Sequence[Choices] = ({},)
    dots: bool = False
    optimised: bool = False


_CACHE = ("DIM", "BLOCK", "HEAD_GROUP")
_CACHE_TYPES: list[Choices] = [{"KV_F16": 0, "KV_I8": 1}, {"KV_F16": 0}, {"KV_F16": 1}]
"""The first entry names every constant that distinguishes types; the loader reads the names from it."""
_PRODUCT_ENDS: list[Choices] = [
    {"GLU": 0, "RELU2": 0, "ADD": 0},
    {"GLU": 0, "RELU2": 0, "ADD": 1},
    {"GLU": 1, "RELU2": 0, "ADD": 0},
    {"GLU": 1, "RELU2": 1, "ADD": 0},
]
_ACTIVATIONS: list[Choices] = [{"RELU2": 0, "GELU": 1}, {"RELU2": 0}, {"RELU2": 1}]
"""As of the types, the first entry names every constant."""
_QUANTISED: list[Choices] = [
    *crossed(crossed([{"KIND": 1, "GATES": 0}], each("NORM")), _ACTIVATIONS),
    *crossed([{"KIND": 0, "GATES": 0}, {"KIND": 2, "GATES": 0}], each("NORM")),
    {"KIND": 0, "GATES": 1, "NORM": 1},
]
"""Here, too."""
_ROTATIONS: list[Choices] = [{"ROPE": 0, "NEOX": 0}, {"ROPE": 1, "NEOX": 0}, {"ROPE": 1, "NEOX": 1}]

_XMX: list[Choices] = [{"XMX": 1, "SG": 8}, {"XMX": 1, "SG": 16}]
_SUB_GROUPS: list[Choices] = [{"XMX": 0, "SG": 8}, *_XMX]

FAMILIES: Mapping[str, Family] = {
    "add_bias": Family(("WG",)),
    "adjust": Family(("WG", "EACH")),
    "advance": Family(),
    "attention": Family(("WG", *_CACHE, "WINDOW"), _CACHE_TYPES),
    "attention_decode": Family(("WG", *_CACHE, "WINDOW"), crossed(_CACHE_TYPES, _ROTATIONS)),
    "attention_prefill": Family((*_CACHE, "WINDOW"), _CACHE_TYPES),
    "causal_conv": Family(("WG", "TAPS")),
    "center_rows": Family(("WG",)),
    "delta_gates": Family(("WG",)),
    "delta_rule": Family(("D_K", "D_V", "HEADS", "K_HEADS", "TILED", "COLUMNS", "PARTS")),
    "dense_matmul": Family(("WG", "LANES", "EACH", "TOKENS"), each("WEIGHT_F16")),
    "embed": Family(("WG",), each("WEIGHT_F16")),
    "expert_glu": Family(("WG",), crossed(_ACTIVATIONS, each("NORM"))),
    "expert_matmul": Family(("WG", "COLS", "ROW_BYTES", "GROUP", "EACH", "LANES", "TOKENS"), dots=True),
    "expert_tiles": Family(("WG", "EXPERTS", "TOKENS")),
    "gated_values": Family(("WG", "HEAD", "SILU", "UNTILE"), each("NORM")),
    "glu_norm_quant": Family(("WG",), crossed(_ACTIVATIONS, each("NORM")), dots=True),
    "glu_values": Family(("WG",), _ACTIVATIONS),
    "hadamard": Family(("WG", "BLOCK", "ROWS", "SIGNS")),
    "head_norms": Family(("WG", "DIM")),
    "intel/attention_prefill_xmx": Family(
        ("BLOCK", "HEAD_GROUP"), crossed(_XMX, [{"DIM": 64, "KV_F16": 1}, {"DIM": 128, "KV_F16": 1}]), optimised=True
    ),
    "intel/sub_groups": Family(choices=_SUB_GROUPS, dots=True, optimised=True),
    "intel/ternary_gemm_sg": Family(
        ("COLS", "ROW_BYTES"),
        crossed(_SUB_GROUPS, each("ADD")),
        dots=True,
        optimised=True,
    ),
    "logprobs": Family(("WG", "EACH")),
    "norm_quant": Family(("WG",), each("NORM"), dots=True),
    "norm_rows": Family(("WG",)),
    "norm_values": Family(("WG",), [{"NORM": 1, "ADD": 1}, *each("NORM")]),
    "put_columns": Family(("WG",), each("ADD")),
    "quantize": Family(("WG",)),
    "rope_append": Family(
        ("DIM", "BLOCK", "PAIRS"), crossed(crossed(_CACHE_TYPES, each("NEOX")), [{"NORMS_LAST": 1}, {}])
    ),
    "route": Family(("WG", "LANES", "EXPERTS")),
    "row_sums": Family(("WG", "COLS"), dots=True),
    "sample": Family(("WG",)),
    "table_embed": Family(("COLS", "ROW_BYTES", "GROUP")),
    "table_matmul": Family(("WG", "COLS", "ROW_BYTES", "GROUP", "LANES", "EACH", "TOKENS")),
    "ternary_decode": Family(
        ("WG", "COLS", "ROW_BYTES", "TOKENS", "LANES"),
        crossed([{"INPUT": n} for n in range(3)], _PRODUCT_ENDS),
        dots=True,
    ),
    "ternary_gemm": Family(("COLS", "ROW_BYTES", "TX", "TY", "EACH_M"), each("ADD"), dots=True),
    "ternary_groups": Family(
        ("WG", "COLS", "ROW_BYTES", "GROUP", "EACH", "LANES", "HELD", "TOKENS", "TAPS"),
        [{"PAIR": 1, "INPUT": 0, **_PRODUCT_ENDS[0]}, *crossed([{"INPUT": n} for n in range(3)], _PRODUCT_ENDS)],
        dots=True,
    ),
    "transform_quant": Family(
        ("WG", "DIM", "PASSES", "BITS", "SIGNS", "HEAD", "SILU", "UNTILE", "TOKENS"), _QUANTISED, dots=True
    ),
}
"""By the source's file, without its ending."""


def dots(file: str, choices: Choices) -> tuple[bool, ...]:
    """Whether with the integer dot product, of each module of a source and its choices."""
    return (False, True) if FAMILIES[file].dots and not choices.get("XMX") else (False,)


def module_name(file: str, choices: Choices, dot: bool) -> str:
    """The wheel's name for the module of a source, its choices, and the use of the integer dot product."""
    values = "".join(f"-{name.lower()}{choices[name]}" for name in sorted(choices))
    return f"{file.replace('/', '-')}{values}{'-dot' if dot and True in dots(file, choices) else ''}"


def all_modules() -> Iterator[tuple[str, str, Choices, bool]]:
    """Name, source, choices, and whether with the integer dot product, of every module of the wheel."""
    for file, family in FAMILIES.items():
        for choices in family.choices:
            for dot in dots(file, choices):
                yield module_name(file, choices, dot), file, choices, dot
