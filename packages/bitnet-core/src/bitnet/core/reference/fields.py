"""The fields of a step, for the numpy device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import HeaderWord, Step

_COUNTS = HeaderWord.TOKENS, HeaderWord.SEQS, HeaderWord.ROWS


class SequenceFields(NamedTuple):
    """One sequence of a step: tokens ``begin … end``, the first one's position, blocks, and entries of its states."""

    begin: int
    end: int
    position: int
    blocks: npt.NDArray[np.int32]
    state_from: int
    state_to: int


class Fields:
    """A step buffer unpacked into fields; ``advance`` turns it into the next step."""

    def __init__(self, step: Step) -> None:
        self.data = step.data.copy()
        self.at = step.layout.offsets
        limits = step.layout.limits
        self.max_blocks, self.max_seqs, self.tables = limits.max_blocks, limits.max_seqs, limits.tables
        self.tokens, self.seqs, self.rows = (int(self.data[word]) for word in _COUNTS)

    def field(self, name: str, count: int) -> npt.NDArray[np.int32]:
        words: npt.NDArray[np.int32] = self.data[self.at[name] : self.at[name] + count]
        return words

    def positions(self) -> npt.NDArray[np.int32]:
        """Position of each token in its own sequence."""
        seq = self.field("token_seq", self.tokens)
        ends = self.field("seq_begin", self.seqs + 1)[1:]
        positions: npt.NDArray[np.int32] = (self.field("seq_len", self.seqs) - ends)[seq]
        positions += np.arange(self.tokens, dtype=np.int32)
        return positions

    def sequences(self, table: int = 0) -> list[SequenceFields]:
        """The sequences, with the blocks of a block table."""
        bounds, lengths = self.field("seq_begin", self.seqs + 1), self.field("seq_len", self.seqs)
        shape = self.tables, self.max_seqs, self.max_blocks
        blocks = self.field("block_table", self.tables * self.max_seqs * self.max_blocks).reshape(shape)[table]
        entries = (self.field(name, self.seqs) for name in ("state_from", "state_to"))
        return [
            SequenceFields(int(a), int(b), int(length - (b - a)), row, int(source), int(target))
            for a, b, length, row, source, target in zip(bounds, bounds[1:], lengths, blocks, *entries, strict=False)
        ]

    def advance(self, tokens: npt.NDArray[np.int32]) -> None:
        self.field("tokens", self.tokens)[:] = np.maximum(tokens, 0)
        self.field("seq_len", self.seqs)[:] += 1
        self.field("state_from", self.seqs)[:] = self.field("state_to", self.seqs)
