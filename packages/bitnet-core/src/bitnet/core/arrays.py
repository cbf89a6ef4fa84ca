"""Ternary matrix products and ternary quantisation of numpy arrays, on any device of this machine.

If no device is named, the best one is used. If it fails to initialise, a warning is logged and the CPU takes over::

    from bitnet.core.arrays import TernaryMatrix, quantize, ternary_matmul

    codes, scale = quantize(w)                      # float[N, K] -> {-1, 0, 1}, absmean
    y = ternary_matmul(x, codes, scale)             # x[M, K] · codes[N, K]ᵀ · scale

    with TernaryMatrix(codes, scale) as matrix:     # packed onto the device once …
        y = matrix(x)                               # … used many times
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from bitnet.core.devices.select import Selection, select_devices
from bitnet.core.errors import DeviceError, DeviceLostError, DeviceUnavailableError, InvalidInputError, brief
from bitnet.core.gguf import pack_ternary
from bitnet.core.hal import (
    Device,
    Executable,
    Limits,
    NormQuant,
    Op,
    Program,
    Quantize,
    SequenceStep,
    Step,
    StepLayout,
    TensorSpec,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    Weight,
    run,
)
from bitnet.core.hal.operands import MAX_K
from bitnet.core.support import log

_T = TypeVar("_T")

_devices: dict[str, Device] = {}
_devices_lock = threading.Lock()


class Quantized(NamedTuple):
    """A ternary matrix: ``codes`` int8[N, K] in {-1, 0, 1}, and ``scale``, the value of a code of +1."""

    codes: npt.NDArray[np.int8]
    scale: float


def quantize(w: npt.NDArray[np.floating[Any]], *, device: str | Device | None = None) -> Quantized:
    """Absmean ternary quantisation (BitNet b1.58, Ma et al. 2024): ``scale = mean|w|``, ``codes = round(w / scale)``.

    Args:
        w: float[N, K]; computed in float32.
        device: A name as printed by ``bitnet devices`` (``cuda:0``, ``cpu``), an open device, or None for the best
            device, replaced by the CPU if it fails to initialise.

    Raises:
        InvalidInputError: ``w`` is not a finite float matrix.
        DeviceUnavailableError, DeviceError: The device that was named cannot be had, or it failed.
    """
    w = _floats(w, "w")
    if w.ndim != 2 or w.size == 0:
        raise InvalidInputError(f"w has shape {list(w.shape)}; it must be a matrix [N, K].")
    shape = w.shape
    program = _program(
        [Quantize("x", "codes", "scale")],
        TensorSpec("x", "f32", shape),
        TensorSpec("codes", "i8", shape),
        TensorSpec("scale", "f32", (1,)),
    )
    executable = _prepare(device, program)
    try:
        executable.write("x", w)
        run(executable, _step(program, 1))
        return Quantized(executable.read("codes"), float(executable.read("scale")[0]))
    finally:
        executable.close()


def ternary_matmul(
    x: npt.NDArray[Any],
    w: npt.NDArray[np.int8] | Quantized | TernaryMatrix,
    scale: float | None = None,
    *,
    x_scale: npt.NDArray[np.floating[Any]] | float | None = None,
    device: str | Device | None = None,
) -> npt.NDArray[np.float32]:
    """``x · wᵀ · scale``: the product of activations with a ternary matrix, accumulated in exact integers.

    If a matrix is used more than once, make a :class:`TernaryMatrix` of it, which packs it only once.

    Args:
        x: ``[M, K]`` or ``[K]``. int8 is used as it is, exactly; float is quantised to int8 row by row (absmax).
        w: int8[N, K] in {-1, 0, 1}, the result of :func:`quantize`, or a :class:`TernaryMatrix`.
        scale: The value of a weight of +1 (1 unless ``w`` has its own scale).
        x_scale: With int8 ``x``: the value of one unit of a row, ``[M]`` or one number (1 by default).
        device: As in :func:`quantize`.

    Returns:
        float32 ``[M, N]``, or ``[N]`` for ``x[K]``.

    Raises:
        InvalidInputError: Shapes, types or codes do not fit.
        DeviceUnavailableError, DeviceError: The device that was named cannot be had, or it failed.
    """
    if isinstance(w, TernaryMatrix):
        if scale is not None or device is not None:
            raise InvalidInputError("a TernaryMatrix already has a scale and a device; pass neither.")
        return w(x, x_scale)
    if isinstance(w, Quantized):
        if scale is not None:
            raise InvalidInputError("w is a Quantized, which already has a scale; pass none.")
        w, scale = w
    rows = len(x) if np.ndim(x) == 2 else 1
    with TernaryMatrix(w, 1.0 if scale is None else scale, device=device, rows=max(1, min(rows, 256))) as matrix:
        return matrix(x, x_scale)


class TernaryMatrix:
    """A ternary matrix that is packed onto a device once and multiplied with many times. Safe to share between threads.

    Args:
        codes: int8[N, K] in {-1, 0, 1}.
        scale: The value of a code of +1.
        device: As in :func:`quantize`.
        rows: Rows of ``x`` computed in one run; more rows take several runs. 1 is best if ``x`` always has one row.

    Attributes:
        shape: ``(N, K)``.
        device: Name of the device that holds the matrix.

    Raises:
        InvalidInputError: ``codes`` is not an int8 matrix of -1, 0 and 1, or another argument is out of its range.
        DeviceUnavailableError, DeviceError: The device that was named cannot be had, or it failed.
    """

    def __init__(
        self,
        codes: npt.NDArray[np.int8],
        scale: float = 1.0,
        *,
        device: str | Device | None = None,
        rows: int = 64,
    ) -> None:
        codes = np.asarray(codes)
        if codes.ndim != 2 or codes.size == 0 or codes.dtype != np.int8:
            raise InvalidInputError(f"w is {_text(codes)}; it must be int8[N, K] of -1, 0 and 1.")
        if codes.min() < -1 or codes.max() > 1:
            raise InvalidInputError(
                f"w holds values from {codes.min()} to {codes.max()}; only -1, 0 and 1 are ternary."
            )
        if codes.shape[1] > MAX_K:
            raise InvalidInputError(f"w has {codes.shape[1]} columns; the limit is {MAX_K}.")
        if np.asarray(scale).dtype.kind not in "biuf" or np.ndim(scale) or not np.isfinite(scale):
            raise InvalidInputError(f"scale is {brief(scale)}; it must be a finite number.")
        if rows < 1:
            raise InvalidInputError(f"rows is {rows}; it must be at least 1.")
        self.shape: tuple[int, int] = codes.shape
        self._rows = rows
        self._columns = n_columns = -(-codes.shape[1] // 4) * 4  # devices take K in multiples of 4; padding is zeros
        data = TernaryData(pack_ternary(codes), np.array([scale], np.float32))
        x, x_scale = TensorSpec("x", "i8", ("M", n_columns)), TensorSpec("x_scale", "f32", ("M",))
        self._program = _program(
            [TernaryMatmul("x", "x_scale", ("w",), "out")],
            x,
            x_scale,
            TensorSpec("out", "f32", ("M", codes.shape[0])),
            rows=rows,
            weights={"w": TernaryWeight((codes.shape[0], n_columns), lambda: data)},
        )
        self._quantizer_program = _program(
            [NormQuant("floats", None, 0.0, "x", "x_scale")],
            TensorSpec("floats", "f32", ("M", n_columns)),
            x,
            x_scale,
            rows=rows,
        )
        self._lock = threading.Lock()
        self._executable, self._quantizer, self.device = _prepare_on(device, self._compile)

    def _compile(self, device: Device) -> tuple[Executable, Executable, str]:
        executable = device.compile(self._program)
        try:
            return executable, device.compile(self._quantizer_program), device.info.name
        except BaseException:
            executable.close()
            raise

    def __call__(
        self, x: npt.NDArray[Any], x_scale: npt.NDArray[np.floating[Any]] | float | None = None
    ) -> npt.NDArray[np.float32]:
        """The product; arguments and result as for :func:`ternary_matmul`."""
        x = np.asarray(x)
        floats = np.issubdtype(x.dtype, np.floating)
        if x.ndim not in (1, 2) or x.shape[-1] != self.shape[1] or not (floats or x.dtype == np.int8):
            raise InvalidInputError(
                f"x is {_text(x)}; it must be int8 or float, [M, {self.shape[1]}] or [{self.shape[1]}]."
            )
        if floats and x_scale is not None:
            raise InvalidInputError("x_scale is only for int8 x; the scales of float x are computed.")
        given = _floats(x, "x") if floats else x
        padded = np.zeros((1 if x.ndim == 1 else len(x), self._columns), given.dtype)
        padded[:, : self.shape[1]] = given
        scales = np.ones(len(padded), np.float32)
        if x_scale is not None:
            values = _floats(np.asarray(x_scale, np.float32), "x_scale")
            if values.shape not in ((), scales.shape):
                raise InvalidInputError(f"x_scale has shape {list(values.shape)}; it must be [{len(scales)}].")
            scales[:] = values
        out = np.empty((len(padded), self.shape[0]), np.float32)
        with self._lock:
            for m in range(0, len(padded), self._rows):
                part = slice(m, m + self._rows)
                out[part] = self._run(padded[part], scales[part])
        return out[0] if x.ndim == 1 else out

    def _run(self, x: npt.NDArray[Any], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        rows = len(x)
        if x.dtype != np.int8:
            self._quantizer.write("floats", x)
            run(self._quantizer, _step(self._quantizer_program, rows))
            x, scales = self._quantizer.read("x", rows), self._quantizer.read("x_scale", rows)
        self._executable.write("x", x)
        self._executable.write("x_scale", scales)
        run(self._executable, _step(self._program, rows))
        product: npt.NDArray[np.float32] = self._executable.read("out", rows)
        return product

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels launched so far."""
        return self._executable.kernels + self._quantizer.kernels

    def close(self) -> None:
        """Free the device's memory. Closing twice is allowed."""
        self._executable.close()
        self._quantizer.close()

    def __enter__(self) -> TernaryMatrix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _prepare(device: str | Device | None, program: Program) -> Executable:
    return _prepare_on(device, lambda d: d.compile(program))


def _prepare_on(request: str | Device | None, prepare: Callable[[Device], _T]) -> _T:
    """Run ``prepare`` on the requested device. If none was requested and the selected one fails to initialise, use the
    CPU."""
    if request is not None and not isinstance(request, str):
        return prepare(request)
    selection = select_devices(request)[0]
    try:
        return prepare(_opened(selection))
    except (DeviceError, DeviceUnavailableError) as error:
        if isinstance(error, DeviceLostError):
            _devices.pop(selection.info.name, None)  # the next call opens it anew
        if selection.requested != "auto" or selection.info.backend == "cpu":
            raise
        log.logger.warning("%s failed to initialise; falling back to the CPU: %s", selection.info.name, error)
        return prepare(_opened(select_devices("cpu")[0]))


def _opened(selection: Selection) -> Device:
    """The device of a selection, opened once per process, because each open device costs a driver context."""
    with _devices_lock:
        device = _devices.get(selection.info.name)
        if device is None:
            device = selection.open()
            _devices[selection.info.name] = device  # only now is it known which device was opened
        return device


def _program(
    ops: list[Op], *tensors: TensorSpec, rows: int = 1, weights: Mapping[str, Weight] | None = None
) -> Program:
    limits = Limits(max_tokens=rows)
    return Program(ops, {t.name: t for t in tensors}, weights or {}, limits, name=type(ops[0]).__name__)


def _step(program: Program, rows: int) -> Step:
    """A step of ``rows`` rows; its token ids are ignored."""
    return Step(StepLayout(program.limits), [SequenceStep([0] * rows, length=rows)])


def _floats(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    array = np.asarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise InvalidInputError(f"{name} is {_text(array)}; it must be of a float type.")
    with np.errstate(over="ignore"):  # overflow becomes infinity, which is reported below
        floats = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(floats).all():
        raise InvalidInputError(f"{name} holds values that are not finite in float32.")
    return floats


def _text(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"
