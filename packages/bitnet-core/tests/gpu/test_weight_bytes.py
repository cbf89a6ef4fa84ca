"""The bytes of weights on a GPU: those that it reports, with which ``bitnet bench`` judges decode speed, and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from bitnet.core.gpu import Context
from bitnet.core.gpu.weights import put_ternary
from bitnet.core.hal import Limits, StepLayout, TernaryData, TernaryWeight
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


def test_scales_of_groups_fill_whole_words() -> None:
    """Kernels read the last scale in a word of 4 bytes, also where scales of 2 bytes are odd in number."""
    rng = np.random.default_rng()
    for matrices in (1, 2, 3):
        group = int(rng.choice([32, 64, 128, 256]))
        cols = group * int(rng.integers(1, 4))
        rows = [int(count) for count in rng.integers(1, 9, matrices)]
        scales = [rng.uniform(0.5, 2, (count, cols // group)).astype(np.float16) for count in rows]
        codes = [np.zeros((count, -(-cols // 128) * 32), np.uint8) for count in rows]
        weights = {
            str(i): TernaryWeight((rows[i], cols), partial(TernaryData, codes[i], scales[i]), group=group)
            for i in range(matrices)
        }
        given: list[Memory] = []
        uploaded: dict[int, bytes] = {}

        def alloc(nbytes: int, given: list[Memory] = given) -> Memory:
            given.append(Memory(nbytes))
            return given[-1]

        def upload(buffer: Any, array: Any, offset: int = 0, uploaded: dict[int, bytes] = uploaded) -> None:
            assert offset + array.nbytes <= buffer.nbytes
            uploaded[id(buffer)] = array.tobytes()

        buffer = put_ternary(alloc, upload, lambda array: None, weights, [*weights])
        whole = np.concatenate([scale.reshape(-1) for scale in scales])
        expected = np.append(whole, np.zeros(whole.size % 2, np.float16))
        assert buffer.scales.nbytes == expected.nbytes
        assert uploaded[id(buffer.scales)] == expected.tobytes()
