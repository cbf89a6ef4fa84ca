"""How OpenCL C's products with scales of groups are lowered: launches of a layer, and what work-groups must hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu import Bucket, Context
from bitnet.core.gpu.clc import Abilities, ClcOps
from bitnet.core.gpu.clc.abilities import Matrix
from bitnet.core.gpu.clc.vendors import VENDORS
from bitnet.core.gpu.ops import ceil_div
from bitnet.core.gpu.plan import lower
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import Limits, StepLayout
from bitnet.core.testing.model import TinyModel

LIMITS = Limits(64, 8, 8, 8)
MATRICES: tuple[Matrix, ...] = ("none", "mfma32", "wmma11", "intel", "xmx16")


class NoDevice:
    """What a context needs of a driver, less the device."""

    def alloc(self, nbytes: int) -> Any:
        return SimpleNamespace(nbytes=nbytes)

    def upload(self, buffer: Any, array: Any, offset: int = 0) -> None:
        assert offset + array.nbytes <= buffer.nbytes


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def launches(rng: np.random.Generator, matrix: Matrix, layers: int, group: int | None) -> list[str]:
    """The kernels of a step of one token."""
    model = TinyModel(rng, heads=4, head_dim=64, ffn=768, layers=layers, sub_norms=False, group=group)
    context: Any = Context(NoDevice(), model.program(LIMITS, 8), StepLayout(LIMITS))  # type: ignore[arg-type]
    table = ClcOps(Abilities(16, 1024, 65536, dot4="khr", matrix=matrix, wave=64)).lowering().table
    return [launch.kernel.entry for launch in lower(context, Bucket(1, 1, 256, apart=True), table)]


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("group", [64, 128, 256])
def test_a_layer_has_as_many_launches_as_with_one_scale(rng: np.random.Generator, matrix: Matrix, group: int) -> None:
    """Four products, which norm, quantise and activate, and attention's two parts."""
    one, two = (launches(rng, matrix, layers, group) for layers in (1, 2))
    assert len(two) - len(one) == 6
    assert two.count("ternary_groups") == 8
    assert len(two) == len(launches(rng, matrix, 2, None))


@pytest.mark.parametrize("matrix", MATRICES)
def test_what_a_work_group_holds_fits(rng: np.random.Generator, matrix: Matrix) -> None:
    """The terms, activations and reductions of a fused product fit local memory, and its work-items reach every row."""
    local = 32768
    products = VENDORS[matrix].products(Abilities(40, 1024, local, dot4="khr", matrix=matrix, wave=64))
    fused = 0
    for cols in (4096, 12288, *(int(n) for n in rng.integers(1, 300, 400) * 64)):
        group = int(rng.choice([size for size in (32, 64, 128, 256, 2048, cols) if cols % size == 0]))
        times, nowhere = int(rng.integers(1, 3)), Any
        rows = times * int(rng.integers(1, 20_000))
        weight = TernaryBuffer(nowhere, nowhere, rows, cols, ceil_div(cols, 128) * 32, group)  # type: ignore[arg-type]
        assert products.quantises(weight, 1, times=times) == (products._fused_groups(weight, times) is not None)
        shape = products._fused_groups(weight, times)
        if shape is None:
            continue
        fused += 1
        per_group = shape["WG"] // shape["LANES"] * shape["HELD"]
        terms = per_group * (cols // group | 1) * 4
        assert shape["HELD"] == times
        assert shape["WG"] % shape["LANES"] == 0
        assert terms + 4 * weight.row_bytes + 8 * shape["WG"] <= local, (weight, shape)
    assert fused > 100
