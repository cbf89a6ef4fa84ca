"""Products and quantisation of numpy arrays on devices, against int64 and float64 arithmetic."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from bitnet.core import arrays
from bitnet.core.arrays import Quantized, TernaryMatrix, quantize, ternary_matmul
from bitnet.core.devices.registry import list_devices
from bitnet.core.devices.select import Selection, select_device
from bitnet.core.errors import DeviceError, DeviceLostError, DeviceUnavailableError, InvalidInputError
from bitnet.core.hal import Program
from bitnet.core.reference import ReferenceDevice

CPU_DEVICES = [d.name for r in list_devices() if r.name == "cpu" for d in r.probe.devices]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def ternary(rng: np.random.Generator, n: int, k: int) -> np.ndarray[Any, Any]:
    return rng.integers(-1, 2, (n, k), dtype=np.int8)


def exact(x: Any, w: Any, x_scale: Any, scale: float) -> Any:
    """The contract's product: an exact integer, times the product of both scales, each rounded once to f32."""
    acc = (x.astype(np.int64) @ w.astype(np.int64).T).astype(np.float32)
    return acc * (np.float32(x_scale) * np.float32(scale))[..., None]


@pytest.mark.parametrize("device", CPU_DEVICES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 130), (70, 33, 257), (300, 8, 128)])
def test_int8_product_is_exact(rng: np.random.Generator, device: str, m: int, n: int, k: int) -> None:
    x, w = rng.integers(-128, 128, (m, k), dtype=np.int8), ternary(rng, n, k)
    x_scale, scale = rng.random(m, np.float32), float(rng.random())
    got = ternary_matmul(x, w, scale, x_scale=x_scale, device=device)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, exact(x, w, x_scale, scale))


def test_float_product_is_within_the_rounding_of_int8(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((9, 200)), ternary(rng, 40, 200)
    got = ternary_matmul(x, w, 0.5)
    half_a_unit = (0.5 + 2e-3) * np.abs(x).max(axis=1) / 127
    bound = 0.5 * np.outer(half_a_unit, np.abs(w).sum(axis=1)) + 1e-6
    difference = np.abs(got - x @ w.T * 0.5)
    assert (difference <= bound).all()
    assert difference.max() > 0


def test_a_matrix_is_used_many_times_from_many_threads(rng: np.random.Generator) -> None:
    w = ternary(rng, 37, 96)
    inputs = [rng.integers(-128, 128, (m, 96), dtype=np.int8) for m in (1, 2, 63, 64, 65, 200)]
    results: dict[int, Any] = {}
    with TernaryMatrix(w, 0.25) as matrix:
        assert matrix.shape == (37, 96)
        assert not list(matrix.kernels)

        def multiply(i: int) -> None:
            results[i] = matrix(inputs[i])

        threads = [threading.Thread(target=multiply, args=(i,)) for i in range(len(inputs))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert any("ternary" in name for name in matrix.kernels)
        row = matrix(inputs[0][0])
        empty = matrix(inputs[0][:0])
    for i, x in enumerate(inputs):
        np.testing.assert_array_equal(results[i], exact(x, w, np.ones(len(x)), 0.25))
    np.testing.assert_array_equal(row, results[0][0])
    assert empty.shape == (0, 37)
    with pytest.raises(DeviceError, match="closed"):
        matrix(inputs[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_quantize(rng: np.random.Generator, dtype: type) -> None:
    w: Any = (rng.standard_normal((31, 77)) * 0.02).astype(dtype)
    codes, scale = quantize(w)
    wanted = max(np.abs(w.astype(np.float64)).mean(), 1e-5)
    assert scale == pytest.approx(wanted, rel=1e-6)
    ratio = w.astype(np.float64) / wanted
    clear = np.abs(np.abs(ratio) - 0.5) > 1e-5
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(codes[clear], np.clip(np.rint(ratio), -1, 1)[clear])


def test_what_quantize_gives_multiplies(rng: np.random.Generator) -> None:
    x, w = rng.integers(-128, 128, (4, 64), dtype=np.int8), rng.standard_normal((16, 64))
    quantized = quantize(w, device=ReferenceDevice())
    got = ternary_matmul(x, quantized, device=ReferenceDevice())
    np.testing.assert_array_equal(got, exact(x, quantized.codes, np.ones(4), quantized.scale))


W: Any = np.ones((3, 8), np.int8)
X: Any = np.ones((2, 8), np.int8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ternary_matmul(X[:, :7], W), r"x is int8\[2, 7\]; it must be int8 or float, \[M, 8\]"),
        (lambda: ternary_matmul(X.astype(np.int32), W), r"x is int32\[2, 8\]"),
        (lambda: ternary_matmul(X[None], W), r"x is int8\[1, 2, 8\]"),
        (lambda: ternary_matmul(np.full((2, 8), np.nan), W), "not finite"),
        (lambda: ternary_matmul(X, W * 2), "values from 2 to 2"),
        (lambda: ternary_matmul(X, W.astype(np.float32)), r"w is float32\[3, 8\]"),
        (lambda: ternary_matmul(X, W[:, :0]), r"w is int8\[3, 0\]"),
        (lambda: ternary_matmul(X, W, float("inf")), "scale is inf; it must be a finite number"),
        (lambda: ternary_matmul(X, W, "x"), "scale is 'x'; it must be a finite number"),  # type: ignore[arg-type]
        (lambda: ternary_matmul(X, W, x_scale=np.ones(3)), r"x_scale has shape \[3\]; it must be \[2\]"),
        (lambda: ternary_matmul(X.astype(float), W, x_scale=1.0), "x_scale is only for int8"),
        (lambda: ternary_matmul(X, Quantized(W, 1.0), 2.0), "already has a scale"),
        (lambda: TernaryMatrix(np.zeros((1, 131_073), np.int8)), "the limit is 131072"),
        (lambda: TernaryMatrix(W, rows=0), "rows is 0"),
        (lambda: quantize(W), r"w is int8\[3, 8\]; it must be of a float type"),
        (lambda: quantize(np.ones(8)), r"w has shape \[8\]"),
        (lambda: quantize(np.ones((0, 8))), r"w has shape \[0, 8\]"),
        (lambda: quantize(np.full((2, 2), 1e300)), "not finite in float32"),
    ],
)
def test_what_does_not_fit_is_told(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call()


def test_a_lost_device_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was lost is not kept; a matrix that half fits leaves nothing behind."""
    monkeypatch.setattr(arrays, "_devices", {})
    opened: list[ReferenceDevice] = []

    class Losing(ReferenceDevice):
        def compile(self, program: Program, *, keep: bool = False) -> Any:
            if len(opened) == 1 and program.name == "NormQuant":
                raise DeviceLostError("gone.", device="cpu:numpy")
            return super().compile(program, keep=keep)

    def open_one(self: Selection) -> Any:
        opened.append(Losing())
        return opened[-1]

    monkeypatch.setattr(Selection, "open", open_one)
    with pytest.raises(DeviceLostError):
        TernaryMatrix(W, device="cpu:numpy")
    assert opened[0].memory().used == 0
    with TernaryMatrix(W, device="cpu:numpy") as matrix:
        assert matrix(X).tolist() == [[8.0] * 3] * 2
    assert len(opened) == 2


def test_the_cpu_takes_over_from_a_gpu_that_fails_to_initialise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With nothing named. A device that *was* named fails loudly instead."""
    monkeypatch.setenv("BITNET_GPU_FAKE", "cuda")
    monkeypatch.setattr(arrays, "_devices", {})
    real_open = Selection.open

    def broken_gpu(self: Selection) -> Any:
        if self.info.backend == "cuda":
            raise DeviceError("no context", device=self.info.name)
        return real_open(self)

    monkeypatch.setattr(Selection, "open", broken_gpu)
    assert select_device().info.backend == "cuda"
    codes, scale = quantize(np.array([[2.0, -2.0, 0.1, 0.1]]))
    assert codes.tolist() == [[1, -1, 0, 0]]
    assert "cuda:0 failed to initialise; falling back to the CPU" in caplog.text
    with TernaryMatrix(codes, scale) as matrix:
        assert matrix.device.startswith("cpu:")
    with pytest.raises((DeviceError, DeviceUnavailableError), match="cuda:0"):
        quantize(np.ones((1, 4)), device="cuda")
