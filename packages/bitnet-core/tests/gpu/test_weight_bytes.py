"""The bytes of weights that a GPU reports, with which ``bitnet bench`` judges decode speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from bitnet.core.gpu import Context
from bitnet.core.hal import Limits, StepLayout
from bitnet.core.testing.model import TinyModel


@dataclass
class Memory:
    nbytes: int


class NoDevice:
    """What a context needs of a driver, less the device."""

    def alloc(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def upload(self, buffer: Memory, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        assert offset + array.nbytes <= buffer.nbytes


def test_weights_a_decode_step_reads() -> None:
    """All codes and their rows' scales, norms, biases and the head; not the embeddings, nor the rotation's angles."""
    model = TinyModel(np.random.default_rng(), biased=True)
    program = model.program(Limits(4, 1, 1, 4), 8)
    context = Context(NoDevice(), program, StepLayout(program.limits))  # type: ignore[arg-type]
    codes = sum(w.shape[0] * (-(-w.shape[1] // 128) * 32 + 4) for w, _ in model.ternary.values())
    dense = sum(a.nbytes for name, a in model.dense.items() if name not in ("embd", "cos", "sin"))
    assert context.weight_bytes == codes + dense


def test_each_weight_is_loaded_once() -> None:
    """Decoding a matrix takes longer than uploading it."""
    loads: Counter[str] = Counter()
    model = TinyModel(np.random.default_rng(), biased=True)
    program = model.program(Limits(4, 1, 1, 4), 8)

    def counted(name: str, load: Callable[[], Any]) -> Any:
        loads[name] += 1
        return load()

    weights: Any = dict(program.weights)
    for name, weight in weights.items():
        weights[name] = replace(weight, load=partial(counted, name, weight.load))
    program = replace(program, weights=weights)
    context = Context(NoDevice(), program, StepLayout(program.limits))  # type: ignore[arg-type]
    assert context.weight_bytes
    assert {name: loads[name] for name in model.ternary} == dict.fromkeys(model.ternary, 1)
    assert max(loads.values()) == 1
