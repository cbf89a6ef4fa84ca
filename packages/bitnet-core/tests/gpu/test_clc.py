"""Code shared by drivers of OpenCL C kernels, apart from the launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from bitnet.core.errors import DeviceError
from bitnet.core.gpu import KernelSpec, Launch
from bitnet.core.gpu.checks import self_check
from bitnet.core.gpu.clc import Abilities, device, open_device, tried, values, work_items
from bitnet.core.gpu.clc.abilities import Matrix
from bitnet.core.gpu.clc.amd_products import AmdProducts, Tile
from bitnet.core.gpu.clc.vendors import VENDORS
from bitnet.core.gpu.context import Bucket
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.core.hal import Attention, DeviceInfo, DeviceType, Limits
from bitnet.core.reference import ReferenceDevice

INFO = DeviceInfo("made-up", "0", "id", "Made-up 9000", "Nobody", DeviceType.DISCRETE)
ABILITIES = Abilities(8, 256, 32768, matrix="ptx", resident=8)


def test_matrix_units_whose_trial_does_not_build_are_left_alone() -> None:
    asked: list[KernelSpec] = []

    def builds(spec: KernelSpec) -> bool:
        asked.append(spec)
        return False

    assert tried(ABILITIES, builds) == replace(ABILITIES, matrix="none", resident=0)
    assert tried(ABILITIES, lambda spec: True) == ABILITIES
    assert asked == [KernelSpec("nvidia/warps", "warps")]
    plain = replace(ABILITIES, matrix="none")
    assert tried(plain, builds) == plain
    assert len(asked) == 1
    assert VENDORS.keys() == set(get_args(Matrix))


def test_xmx_that_does_not_build_leaves_dot_products() -> None:
    """By the same kernels, for sub-groups of 8; those for 16 have no other form."""
    asked: list[dict[str, int | str]] = []

    def builds(spec: KernelSpec) -> bool:
        asked.append(dict(spec.defines))
        return not asked[-1]["XMX"]

    assert tried(replace(ABILITIES, matrix="xmx8"), builds).matrix == "intel"
    assert asked == [{"XMX": 1, "SG": 8}, {"XMX": 0, "SG": 8}]
    assert tried(replace(ABILITIES, matrix="xmx16"), builds).matrix == "none"
    assert asked[2:] == [{"XMX": 1, "SG": 16}]


@pytest.mark.parametrize(
    ("matrix", "heads", "dim", "block", "dtype", "launch"),
    [
        ("xmx8", (20, 5), 128, 32, "f16", ("attention_prefill_xmx", 128, (5, 25, 1), (64, 1, 1))),
        ("xmx16", (20, 5), 128, 32, "f16", ("attention_prefill_xmx", 128, (5, 13, 1), (128, 1, 1))),
        ("xmx16", (32, 1), 64, 48, "f16", ("attention_prefill_xmx", 64, (1, 100, 1), (64, 1, 1))),
        ("xmx8", (32, 1), 64, 32, "f16", ("attention_prefill", 64, (1, 100, 1), (256, 1, 1))),
        ("xmx16", (4, 2), 64, 24, "f16", ("attention_prefill", 64, (2, 7, 1), (256, 1, 1))),
        ("xmx16", (4, 2), 64, 32, "f32", ("attention_prefill", 64, (2, 7, 1), (256, 1, 1))),
        ("xmx16", (4, 2), 96, 32, "f16", ("attention_prefill", 96, (2, 7, 1), (256, 1, 1))),
        ("intel", (4, 2), 64, 32, "f16", ("attention_prefill", 64, (2, 7, 1), (256, 1, 1))),
    ],
)
def test_attention_by_xmx(
    matrix: Matrix, heads: tuple[int, int], dim: int, block: int, dtype: str, launch: tuple[Any, ...]
) -> None:
    """The kernel, the dimensions that it is for, its work-groups, and their work-items, of 100 tokens."""
    cache = SimpleNamespace(block_size=block, dtype=dtype)
    ctx: Any = SimpleNamespace(
        cache=cache,
        step=None,
        offset=lambda _: np.int32(0),
        tensors={"qkv": None, "out": None},
        kv=lambda *_: None,
        program=SimpleNamespace(limits=Limits(100)),
    )
    attention = VENDORS[matrix].attention(Abilities(64, 256, 65536, f16=True, matrix=matrix))
    (made,) = attention.lower(ctx, Attention("qkv", "out", 0, *heads, dim), Bucket(100, 1, 100))
    assert (made.kernel.entry, dict(made.kernel.defines)["DIM"], made.grid, made.block) == launch


def test_options() -> None:
    assert Abilities(8, 256, 32768, gpu=False).options("1.2") == ("-cl-std=CL1.2",)
    assert set(Abilities(8, 256, 32768, f16=True, subgroups=True, dot4="khr").options("3.0")) == {
        "-cl-std=CL3.0", "-DFP16=1", "-DSUBGROUPS=1", "-DINT_DOT=1", "-DGPU=1",
    }  # fmt: skip


def test_arguments_have_the_bytes_that_kernels_read() -> None:
    buffer: Any = SimpleNamespace(nbytes=4, address=0x1234_5678_9ABC)
    args = (np.int32(-5), np.uint32(2**32 - 1), np.float32(0.1), buffer)
    launch = Launch(KernelSpec("a", "a"), (3, 4, 5), (32, 2, 1), args)
    found = values(launch, lambda buffer: int(buffer.address))
    expected = [np.int32(-5), np.uint32(2**32 - 1), np.float32(0.1), np.uint64(0x1234_5678_9ABC)]
    assert [bytes(value) for value in found] == [number.tobytes() for number in expected]
    assert isinstance(found[3], ctypes.c_void_p)
    assert work_items(launch) == (96, 8, 5)


def test_a_wrong_product_is_noticed() -> None:
    right = ReferenceDevice(INFO)
    assert self_check.wrong_products(right) == ""
    assert (
        self_check.wrong_products(wrong(lambda out: out + (np.arange(out.size) == 17))) == "1 of 48 products are wrong"
    )
    assert self_check.wrong_products(wrong(np.zeros_like)).endswith("of 48 products are wrong")


def wrong(spoil: Callable[[Any], Any]) -> Any:
    """A device whose results are spoilt as they are read."""

    def compile_(program: Any) -> Any:
        inner = ReferenceDevice(INFO).compile(program)
        return SimpleNamespace(
            write=inner.write,
            lock=inner.lock,
            start=inner.start,
            collect=inner.collect,
            close=inner.close,
            read=lambda name: spoil(inner.read(name)),
        )

    return SimpleNamespace(info=INFO, compile=compile_)


def test_a_device_that_miscomputes_is_closed_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    driver: Any = SimpleNamespace(close=lambda: closed.append(True), memory=lambda: (0, 0))
    monkeypatch.setattr(device, "wrong_products", lambda device, tokens: "3 of 48 products are wrong")
    assert open_device(INFO, driver, ABILITIES).memory().total == 0
    assert closed == []
    with pytest.raises(DeviceError, match="made-up:0: it does not compute correctly: 3 of 48 products are wrong"):
        open_device(INFO, driver, ABILITIES, self_check=True)
    assert closed == [True]


@pytest.mark.parametrize("matrix", ["mfma16", "mfma32", "mfma64", "wmma11", "wmma12"])
def test_tiles_for_amds_matrix_units(matrix: Matrix) -> None:
    def tile(
        units: int, rows: int, tokens: int, group: int = 1024, local: int = 65536, scales: int | None = None
    ) -> Tile | None:
        w: Any = SimpleNamespace(rows=rows, group=scales)
        return AmdProducts(Abilities(units, group, local, matrix=matrix))._tile(w, tokens)

    def size(found: Tile | None) -> tuple[int, int]:
        assert found is not None
        return found.tokens, found.rows

    assert size(tile(304, 13824, 512)) == (128, 128)
    assert size(tile(304, 13824, 512, scales=128)) == ((128, 128) if matrix.startswith("mfma") else (64, 128))
    assert size(tile(304, 3840, 512)) == (64, 128)  # of the largest there are 120
    assert size(tile(304, 2560, 512)) == (64, 64)
    assert size(tile(96, 2560, 512)) == (128, 128)
    assert size(tile(48, 2560, 17)) == (32, 64)
    assert size(tile(304, 2560, 9)) == (16, 64)
    assert size(tile(304, 16, 512)) == (16, 64)  # never enough: the smallest
    assert size(tile(1, 13824, 512, local=32768)) == (64, 128)
    assert tile(1, 13824, 512, local=8192) is None
    assert tile(1, 13824, 512, group=64) is None


@pytest.mark.parametrize(
    ("matrix", "units", "rows", "cols", "times", "lanes"),
    [
        ("mfma32", 304, 3840, 2560, 1, 16),  # 240 work-groups: each quantises the row again
        ("mfma32", 304, 13824, 2560, 2, 8),
        ("mfma32", 304, 2560, 6912, 1, 16),
        ("mfma16", 104, 2560, 2560, 1, 8),
        ("mfma16", 104, 2560, 6912, 1, 16),  # 14 chunks of codes would take the registers of other waves
        ("mfma32", 304, 3840, 64, 1, 1),  # a row of one chunk
        ("wmma11", 304, 3840, 2560, 1, 32),
    ],
)
def test_work_items_of_a_row_on_amds(matrix: Matrix, units: int, rows: int, cols: int, times: int, lanes: int) -> None:
    nowhere: Any = None
    weights = TernaryBuffer(nowhere, nowhere, rows, cols, cols // 4)
    assert AmdProducts(Abilities(units, 1024, 65536, matrix=matrix))._lanes(weights, times) == lanes
