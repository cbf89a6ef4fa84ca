"""Specialises a module of the wheel for a model's shapes by setting words in it, without compiling."""

from __future__ import annotations

import json
import operator
import sys
from array import array
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.level_zero.variants import FAMILIES, module_name

OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,  # as in C, for non-negative numbers
    "%": operator.mod,
}
MODULES = files("bitnet.level_zero") / "_spirv"


def module(spec: KernelSpec, *, dot: bool, device: str) -> bytes:
    """The SPIR-V of a kernel, for the numbers in its ``defines``.

    Args:
        dot: Whether the device has the integer dot product.
        device: Name for errors.

    Raises:
        KernelCompileError: The wheel has no module for these choices, or lacks its SPIR-V.
    """
    family = FAMILIES.get(spec.file)
    numbers = {name: int(value) for name, value in spec.defines}
    picked = {} if family is None else {name: n for name, n in numbers.items() if name in family.choices[0]}
    shapes = {} if family is None else {name: n for name, n in numbers.items() if name not in picked}
    if family is None or picked not in family.choices or set(shapes) - set(family.shapes):
        wanted = " ".join(f"{name}={value}" for name, value in spec.defines)
        raise KernelCompileError(f"the wheel has no module of {spec.file} for {wanted or 'no choice'}.", device=device)
    name = module_name(spec.file, picked, dot)
    try:
        patches, words = index()[name], array("I", (MODULES / f"{name}.spv").read_bytes())
    except (OSError, KeyError) as error:
        hint = "Install bitnet-level-zero from a wheel, or build its SPIR-V: modules_build.py in its source."
        raise KernelCompileError(f"the module {name} is missing.", device=device, hint=hint) from error
    if sys.byteorder == "big":  # the wheel's words are little-endian
        words.byteswap()
    for at, made in patches:
        words[at] = value(made, shapes)
    return words.tobytes()


def value(formula: Any, shapes: Mapping[str, int]) -> int:
    """Evaluate a formula of the index."""
    if isinstance(formula, int):
        return formula
    if isinstance(formula, str):
        return shapes[formula]
    sign, *operands = formula
    first, *others = (value(operand, shapes) for operand in operands)
    if sign == "?":
        return others[0] if first else others[1]
    return OPERATORS[sign](first, others[0])


@cache
def index() -> Mapping[str, list[tuple[int, Any]]]:
    """By module: the words to set, and their formulas."""
    made: dict[str, list[tuple[int, Any]]] = json.loads((MODULES / "index.json").read_text(encoding="utf-8"))
    return made
