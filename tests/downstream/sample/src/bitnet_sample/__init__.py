"""A small library on top of bitnet: a layer that is compressed on a device, and answers from a model."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from bitnet.core import load_model, select_device
from bitnet.core.arrays import TernaryMatrix, quantize

__all__ = ["CompressedLinear", "answer", "best_device"]


class CompressedLinear:
    """A linear layer whose float weights ``[N, K]`` are made ternary and kept on a device."""

    def __init__(self, weights: npt.NDArray[np.float32], device: str | None = None) -> None:
        codes, scale = quantize(weights, device=device)
        self._matrix = TernaryMatrix(codes, scale, device=device)

    @property
    def device(self) -> str:
        return self._matrix.device

    def __call__(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return self._matrix(x)

    def __enter__(self) -> CompressedLinear:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._matrix.close()


def best_device() -> str:
    """The name of the device that would be used."""
    return select_device().info.name


def answer(question: str, device: str | None = None) -> str:
    """The demo model's answer."""
    with load_model(device=device) as model:
        return model.chat([{"role": "user", "content": question}], max_tokens=16).text
