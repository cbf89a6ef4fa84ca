"""``tools/count_amd.py`` counts the launches behind decision 0083's predictions, one for each product of a layer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "count_amd.py"
LAYER = {(3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912)}
"""Rows and columns of the products of BitNet b1.58 2B4T's layers."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(TOOL.stem, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("card", ["gfx942", "gfx1100"])
def test_each_product_is_counted_once(tool: ModuleType, card: str) -> None:
    for tokens, entry in ((1, "ternary_decode"), (tool.PREFILL, "ternary_gemm_matrix")):
        found = tool.products(card, tokens)
        assert {launch.kernel.entry for launch, _, _ in found} == {entry}
        assert sorted((rows, cols) for _, rows, cols in found) == sorted(LAYER)


@pytest.mark.parametrize("card", ["gfx942", "gfx1100"])
def test_products_of_groups_are_counted(tool: ModuleType, card: str) -> None:
    for tokens, entry in ((1, "ternary_groups"), (tool.PREFILL, "ternary_gemm_matrix")):
        found = tool.products(card, tokens, 128)
        assert {launch.kernel.entry for launch, _, _ in found} == {entry}
        assert sorted((rows, cols) for _, rows, cols in found) == sorted(LAYER)


def test_a_row_is_quantised_once_by_each_compute_unit(tool: ModuleType) -> None:
    """With waves of 64, a decode step's products have a work-group for each compute unit at most."""
    groups = [int(np.prod(launch.grid)) for launch, _, _ in tool.products("gfx942", 1)]
    units = tool.CARDS["gfx942"].units
    assert all(units // 2 <= count <= units for count in groups), groups
