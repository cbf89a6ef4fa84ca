"""Work division of the cooperative-matrix kernels, and the devices that run them: those with subgroups of 32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bitnet.core.gpu.ops import ceil_div
from bitnet.vulkan.hardware import Hardware

MATRIX_GROUP = 256
"""Invocations of a work-group of attention_mma and dense_mma, and at most of ternary_mma."""
ENOUGH_MATRICES = 128
"""Work-groups from which ternary_mma may take more tokens and rows each."""
MATRIX_SHAPES = (
    (128, 128, (2, 2, 1)),
    (64, 128, (2, 4, 1)),
    (64, 64, (2, 2, 2)),
    (32, 32, (1, 2, 4)),
    (16, 32, (1, 2, 4)),
    (16, 16, (1, 1, 8)),
)
"""Sizes of ternary_mma: tokens and rows of a work-group, and how many subgroups share the tokens, rows and columns."""
GROUP_SHAPES = (
    (64, 128, (2, 2, 1)),
    (64, 64, (2, 2, 1)),
    (32, 64, (1, 4, 1)),
    (16, 32, (1, 2, 4)),
    (16, 64, (1, 4, 1)),
)
"""The same of ternary_groups_mma, whose products take more registers; the last, where the one before does not fit."""


class Shape(NamedTuple):
    """A work-group of a product on matrices: its tokens and rows, its invocations, and the kernel's constants."""

    tokens: int
    rows: int
    group: int
    defines: Mapping[str, int]

    def grid(self, rows: int, tokens: int) -> tuple[int, int, int]:
        """Work-groups for so many rows and tokens."""
        return ceil_div(rows, self.rows), ceil_div(tokens, self.tokens), 1


def shapes(hardware: Hardware) -> list[Shape]:
    """The shapes that a device supports, from the largest to the smallest."""
    if hardware.int8_tile is None or not _has_groups(hardware):
        return []
    tm, tn, tk = hardware.int8_tile
    found = []
    for tokens, rows, (wm, wn, wk) in MATRIX_SHAPES:
        sm, sn = tokens // (tm * wm), rows // (tn * wn)
        # Shared memory in 16 bytes: 9 for 128 columns of a token or row, and later a product of each subgroup.
        quads = max((tokens + rows) * 9 * wk, 2 * tm * tn)
        if 0 < sm <= 4 and 0 < sn <= 4 and quads * 16 <= hardware.shared:
            tile = {"TM": tm, "TN": tn, "TK": tk, "SM": sm, "SN": sn}
            defines = {**tile, "WM": wm, "WN": wn, "WK": wk, "POOL": quads}
            found.append(Shape(tokens, rows, 32 * wm * wn * wk, defines))
    return found


def group_shapes(hardware: Hardware, group: int, sets: int) -> list[Shape]:
    """The shapes for weights with scales of groups, from the largest to the smallest.

    Args:
        group: Columns of a group, of which a block of 128 columns has ``sets``.
    """
    if hardware.int8_tile is None or not _has_groups(hardware) or hardware.int8_tile[2] > min(group, 128):
        return []
    tm, tn, tk = hardware.int8_tile
    found: list[Shape] = []
    for tokens, rows, (wm, wn, wk) in GROUP_SHAPES:
        if found and found[-1].defines["WK"] > 1:
            break
        sm, sn, subgroups = tokens // (tm * wm), rows // (tn * wn), wm * wn * wk
        shared_sums = wk > 1 and (sm, sn) == (1, 1) and group in (64, 128) and tm * tn <= 256
        terms = wk * sets * wm * wn * tm * tn // 4 if wk > 1 else 1
        quads = max((tokens + rows) * 9 * wk, subgroups * tm * tn // 4)
        space = 16 * (quads + terms + wk * sets * rows // 4)
        if 0 < sm <= 4 and 0 < sn <= 4 and (wk == 1 or shared_sums) and space <= hardware.shared:
            defines = {"TM": tm, "TN": tn, "TK": tk, "WM": wm, "WN": wn, "WK": wk, "SM": sm, "SN": sn}
            found.append(Shape(tokens, rows, 32 * subgroups, {**defines, "POOL": quads, "TERMS": terms}))
    return found


def shape(fitting: Sequence[Shape], rows: int, tokens: int) -> Shape:
    """The first of the shapes that gives enough work-groups and has no more tokens than the step; else the last."""

    def suits(candidate: Shape) -> bool:
        across, along, _ = candidate.grid(rows, tokens)
        return across * along >= ENOUGH_MATRICES and candidate.tokens < 2 * max(tokens, 16)

    return next((candidate for candidate in fitting if suits(candidate)), fitting[-1])


def has_f16(hardware: Hardware) -> bool:
    """Whether a device supports attention_mma and dense_mma, which need up to 46 KiB of shared memory."""
    return hardware.f16_product and _has_groups(hardware) and hardware.shared >= 46 << 10


def _has_groups(hardware: Hardware) -> bool:
    return hardware.subgroup == 32 and hardware.group >= MATRIX_GROUP
