"""The head of a program whose sampling reads compact weights first, and exact ones only where these cannot decide."""

from __future__ import annotations

from typing import NamedTuple

from bitnet.core.hal import DenseMatmul, Program, Sample, TernaryWeight


class CompactHead(NamedTuple):
    """A head that is sampled from compact weights: its input, its matrix, and the tensor for exact logits."""

    x: str
    weight: str
    logits: str

    @classmethod
    def of(cls, program: Program) -> CompactHead | None:
        """The head, if the program ends in a dense product and its sampling, and nothing else reads the logits."""
        if len(program.ops) < 2:
            return None
        *before, dense, sample = program.ops
        if not isinstance(dense, DenseMatmul) or not isinstance(sample, Sample) or sample.logits != dense.out:
            return None
        if isinstance(program.weights[dense.weight], TernaryWeight):
            return None  # it is already compact
        if any(dense.out in (getattr(op, field) for field in op.__slots__) for op in before):
            return None
        return cls(dense.x, dense.weight, dense.out)
