"""The launch table of a backend: what each operation, and each group of operations, launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.ops.variants import key
from bitnet.core.hal import Op, Program


@dataclass(frozen=True, slots=True)
class Lowering:
    """The lowering that a backend's ``ops.py`` provides.

    Attributes:
        table: Launches by :func:`key` of an operation and by type of a group, and, for the last ``Sample`` of a
            program, those under ``Logprobs`` (it reports log-probabilities) and ``Adjustment`` (it counts tokens in
            slots). What is not in the table is refused. An operation with a key other than its type takes part in
            groups only if the table has the same entry for both.
        leaves_out: Whether steps whose logits nobody reads are lowered differently.
        filters: Whether logits may also be left out if rows have top-k, top-p or min-p. Only used with `leaves_out`.
    """

    table: Dispatch
    leaves_out: Callable[[Context], bool] = lambda _: False
    filters: Callable[[Context, Bucket], bool] = lambda _, bucket: False

    def supports(self, program: Program, op: Op) -> bool:
        """Whether the backend has kernels for an operation of a program."""
        return key(program, op) in self.table
