"""Products of weights with scales of groups are launched by kernels that know the scales, whatever the step's size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core.gpu import Bucket
from bitnet.core.gpu.clc import Abilities
from bitnet.core.gpu.clc.vendors import Vendor
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import TernaryMatmul
from bitnet.metal.ops import MATRICES, PLAIN


@pytest.mark.parametrize("tokens", [1, 4, 9, 40])
@pytest.mark.parametrize("vendor", [PLAIN, MATRICES], ids=["plain", "matrices"])
def test_kernels_know_the_scales(vendor: Vendor, tokens: int) -> None:
    memory: Any = SimpleNamespace(nbytes=1)
    weight = TernaryBuffer(memory, memory, 300, 512, 128, 64)
    ctx: Any = SimpleNamespace(
        step=memory,
        tensors=dict.fromkeys(("x", "s", "out"), memory),
        ternary=lambda _: weight,
        program=SimpleNamespace(ops=()),
    )
    products = vendor.products(Abilities(16, 1024, 32768))
    (launch,) = products.ternary_matmul(ctx, TernaryMatmul("x", "s", ("w",), "out"), Bucket(tokens, 1, 64))
    assert dict(launch.kernel.defines)["GROUP"] == 64
    assert len(launch.args) == 7
