"""Vendor-specific kernels, each vendor's in a folder of its own, and the classes that launch them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bitnet.core.gpu.clc.abilities import Abilities, Matrix
from bitnet.core.gpu.clc.amd_attention import AmdAttention
from bitnet.core.gpu.clc.amd_products import AmdProducts
from bitnet.core.gpu.clc.attention import AttentionOps
from bitnet.core.gpu.clc.intel_attention import IntelAttention
from bitnet.core.gpu.clc.intel_products import IntelProducts, trial
from bitnet.core.gpu.clc.nvidia_attention import NvidiaAttention
from bitnet.core.gpu.clc.nvidia_layers import NvidiaLayers
from bitnet.core.gpu.clc.nvidia_products import NvidiaProducts
from bitnet.core.gpu.clc.products import Products
from bitnet.core.gpu.context import Context, Dispatch
from bitnet.core.gpu.drivers.interface import KernelSpec
from bitnet.core.gpu.fusions import Layer


@dataclass(frozen=True, slots=True)
class Vendor:
    """The kernels for one kind of matrix unit.

    Attributes:
        trial: A kernel in the vendor's folder that needs every compiler feature that the others need; None if every
            driver with these units compiles them.
        products: Launches of matrix products.
        attention: Launches of attention.
        groups: Launches of groups of operations that the generic kernels do not support.
        otherwise: The kind of matrix products to use if the trial fails.
        leaves_out: As :class:`~bitnet.core.gpu.Lowering`'s.
        windows: Launches of attention to windows, which most vendors' kernels for matrix units have no variants for.
        transform_passes: Maximum passes over a row of ``transform_quant``, which holds their elements in registers; 0
            if there are no kernels of :mod:`bitnet.core.gpu.clc.recurrent`.
    """

    trial: KernelSpec | None = None
    products: type[Products] = Products
    attention: type[AttentionOps] = AttentionOps
    groups: Callable[[Abilities], Dispatch] = lambda _: {}
    otherwise: Matrix = "none"
    leaves_out: Callable[[Context], bool] = lambda _: False
    windows: type[AttentionOps] = AttentionOps
    transform_passes: int = 8


PLAIN = Vendor()
"""Kernels that every device runs."""
AMD = Vendor(KernelSpec("amd/waves", "waves"), AmdProducts, AmdAttention)
"""Kernels for both MFMA and WMMA."""
VENDORS: Mapping[Matrix, Vendor] = {
    "none": PLAIN,
    "ptx": Vendor(
        KernelSpec("nvidia/warps", "warps"),
        NvidiaProducts,
        NvidiaAttention,
        lambda abilities: {Layer: NvidiaLayers(abilities).launch},
    ),
    "mfma16": AMD,
    "mfma32": AMD,
    "mfma64": AMD,
    "wmma11": AMD,
    "wmma12": AMD,
    # Intel's compilers keep the elements of a second pass in memory (decision 0139).
    "intel": Vendor(trial("intel"), IntelProducts, transform_passes=1),
    "xmx8": Vendor(trial("xmx8"), IntelProducts, IntelAttention, otherwise="intel", transform_passes=1),
    "xmx16": Vendor(trial("xmx16"), IntelProducts, IntelAttention, transform_passes=1),
}
"""Vendor of each kind of matrix unit."""


def tried(abilities: Abilities, builds: Callable[[KernelSpec], bool]) -> Abilities:
    """The abilities without matrix units whose kernels the driver's compiler rejects."""
    while True:
        vendor = VENDORS[abilities.matrix]
        if vendor.trial is None or builds(vendor.trial):
            return abilities
        abilities = replace(abilities, matrix=vendor.otherwise, resident=0)
