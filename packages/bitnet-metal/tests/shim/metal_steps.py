"""Steps and buffers for tests of single kernels: everything that a kernel must not read or write holds poison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from metal_shim import Library, library

Array = npt.NDArray[Any]
KERNELS = Path(__file__).resolve().parents[4] / "kernels" / "metal"
OWN = ("kernels/metal", "packages/bitnet-metal")
"""What the long tests run for; for all else that changes, a sample does."""
INCLUDED = {"common", "dense", "draw", "head", "head_offset", "matrix", "table", "ternary_chunk"}
"""Files without kernels of their own."""
POISON = 0x7F7F7F7F
BLOCK = 4


def source(file: str) -> str:
    """A kernel's source as a compiler gets it: ``common.metal`` in front, included files in their places, each once."""
    seen: set[str] = set()

    def read(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (KERNELS / name).read_text(encoding="utf-8")
        return re.sub(r'^#include "([\w./]+)"\n', lambda line: read(line[1]), text, flags=re.MULTILINE)

    return read("common.metal") + read(f"{file}.metal")


@cache
def _made(file: str, defines: tuple[tuple[str, int], ...]) -> Library:
    return library(source(file), dict(defines))


def run(
    file: str, defines: Mapping[str, int], groups: Sequence[int], threads: int, *arguments: Any, kernel: str = ""
) -> None:
    """Launch a kernel of a file; Python's integers are int32, its floats float32."""
    made = [np.int32(a) if isinstance(a, int) else np.float32(a) if isinstance(a, float) else a for a in arguments]
    x, y, z = (*groups, 1, 1)[:3]
    _made(file, tuple(defines.items())).launch(kernel or file, made, (x, y, z), threads)


def poisoned(shape: Sequence[int], dtype: Any = np.float32) -> Array:
    """An array of all ones' bits: NaN, or -1."""
    made: Array = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)
    return made


class Steps:
    """A step's buffer.

    Args:
        sequences: New tokens of each sequence, and its length after the step.
        rows: Tokens that need logits.
        blocks: The cache's; the sequences' are scattered over it.
        spare: Tokens, sequences and rows that the buffer has room for beyond these.
        choice: Words for each row: temperature's bits, top_k, top_p's bits, min_p's bits, seed's halves.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        sequences: Sequence[tuple[int, int]],
        *,
        rows: Sequence[int] = (),
        blocks: int = 0,
        spare: int = 2,
        choice: Mapping[str, Array] | None = None,
    ) -> None:
        self.lengths = [length for _, length in sequences]
        self.tokens = sum(new for new, _ in sequences)
        self.max_blocks = max((-(-length // BLOCK) for length in self.lengths), default=0) + 1
        begin = np.cumsum([0, *(new for new, _ in sequences)])
        table = np.full((len(sequences), self.max_blocks), POISON, np.int32)
        free = rng.permutation(blocks)
        at = 0
        for s, length in enumerate(self.lengths):
            need = -(-length // BLOCK)
            if blocks:
                table[s, :need] = free[at : at + need]
            at += need
        self.table = table
        token_seq = np.repeat(np.arange(len(sequences)), [new for new, _ in sequences])
        self.where = [(int(s), self.lengths[s] - int(begin[s + 1]) + m) for m, s in enumerate(token_seq)]
        """Sequence and position of each token."""
        fields: dict[str, Array] = {
            "tokens": rng.integers(0, 5, self.tokens),
            "token_seq": token_seq,
            "seq_begin": begin,
            "seq_len": np.array(self.lengths),
            "block_table": table.reshape(-1),
            "rows": np.array(rows, np.int64),
            **(choice or {}),
        }
        header = np.array([self.tokens, len(sequences), len(rows), 0, 0, 0, 0, 0])
        self.at: dict[str, int] = {}
        words = [header]
        end = len(header)
        for name, field in fields.items():
            self.at[name] = end
            words += [field, np.full(spare, POISON)]
            end += len(field) + spare
        self.words = np.concatenate(words).astype(np.int64).astype(np.uint32).view(np.int32)

    @property
    def positions(self) -> list[int]:
        """The arguments that tell a kernel where positions and blocks stand."""
        return [self.at[name] for name in ("token_seq", "seq_begin", "seq_len", "block_table")] + [self.max_blocks]

    def place(self, sequence: int, position: int) -> tuple[int, int]:
        """Block of the cache and place in it."""
        return int(self.table[sequence, position // BLOCK]), position % BLOCK


def packed(matrix: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Weights -1, 0, 1 as the two-bit codes of ``TernaryData``; codes beyond a row's end stand for 0."""
    rows, columns = matrix.shape
    blocks = -(-columns // 128)
    codes = np.ones((rows, blocks * 128), np.uint8)
    codes[:, :columns] = matrix + 1
    fields = codes.reshape(rows, blocks, 4, 32)
    out = fields[:, :, 0] << 6 | fields[:, :, 1] << 4 | fields[:, :, 2] << 2 | fields[:, :, 3]
    return np.ascontiguousarray(out.reshape(rows, blocks * 32))
