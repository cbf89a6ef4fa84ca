"""A step: everything that varies between runs of a program, in one small int32 buffer.

The program's limits fix the buffer's layout, so a device uploads it whole, and recorded launches read from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal.program import Limits

HEADER_WORDS = 8
"""Number of words in a step's header; words that :class:`HeaderWord` does not name are 0."""


class HeaderWord(IntEnum):
    """Index of each word in a step's header; in kernels these are ``STEP_TOKENS`` and so on.

    Attributes:
        TOKENS: M, the tokens of the step.
        SEQS: S, its sequences.
        ROWS: R, its rows that need logits.
        DONE: Number of completed passes of a run; 0 from the host, then counted by the device.
        LOGITS: 1 if the host reads the logits after the run, else 0.
        ADJUST: 1 if any row's logits are adjusted before its token is chosen, else 0.
        LOGPROBS: 1 + the number of likeliest tokens whose log-probabilities are wanted besides the chosen one's; 0:
            none.
    """

    TOKENS = 0
    SEQS = 1
    ROWS = 2
    DONE = 3
    LOGITS = 4
    ADJUST = 5
    LOGPROBS = 6


_HEADER = slice(HeaderWord.TOKENS, HeaderWord.LOGPROBS + 1)
"""Precomputed, because steps are built thousands of times a second."""


EXTREME = 1e30
"""Maximum temperature, and 1 / the minimum: beyond it, divided logits may not be finite in float32."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token; ``temperature`` 0 is greedy. Semantics: ``sample`` in kernels/README.md.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 each turn their filter off. ``seed`` is an unsigned 64-bit number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("temperature", self.temperature == 0 or 1 / EXTREME <= self.temperature <= EXTREME, "0 or 1e-30 … 1e30"),
            ("top_k", self.top_k >= 0, "an integer ≥ 0 (0: off)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1] (1: off)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1] (0: off)"),
            ("seed", 0 <= self.seed < 2**64, "an unsigned 64-bit integer"),
        ):
            if not good:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; it must be {wanted}.")


GREEDY = SamplingParams()

IN_PROMPT, IN_OUTPUT = 1, 2
"""A token's mark in a slot: 1 if it is in the prompt, plus 2 for each occurrence in the output."""


@dataclass(frozen=True, slots=True)
class Adjustment:
    """How a sequence's logits are adjusted before its token is chosen. Semantics: ``sample`` in kernels/README.md.

    Needs :data:`~bitnet.core.hal.PENALTIES`.

    Attributes:
        slot: Index of the slot with its marks and biases (:meth:`~bitnet.core.hal.Executable.fill_slot`), used by this
            sequence only.
        repetition: Divides positive and multiplies negative logits of marked tokens.
        presence: Subtracted from the logits of tokens in the output.
        frequency: Subtracted from a token's logit once per occurrence in the output.
    """

    slot: int
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


MAX_COUNT = 64
"""Maximum passes that one call of :meth:`~bitnet.core.hal.Executable.start` or its ``go_on`` begins."""
MAX_LOGPROBS = 20
"""Maximum likeliest tokens whose log-probabilities a device reports."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a step.

    Attributes:
        tokens: Ids to feed now, at least one.
        length: Positions in the cache once these tokens are in it; the first token is at ``length - len(tokens)``.
        blocks: Cache blocks of the sequence, in order, enough for ``length`` positions.
        rows: Indices into ``tokens`` whose logits are wanted (usually only the last, or none during prefill).
        adjustment: How to adjust its only row; the token chosen there is counted as output in the slot.
        state_from: Entry of the program's states in which the sequence's states before these tokens are; -1: they are
            zeros.
        state_to: Entry that gets its states after these tokens, often the same one. No other sequence of the step
            reads or writes it.
        more_blocks: Blocks of its further block tables, as many as of the first. What lies behind the window of all
            layers of a table may be any block.
    """

    tokens: Sequence[int] | npt.NDArray[np.int32]
    length: int
    blocks: Sequence[int] = ()
    rows: Sequence[int] = ()
    sampling: SamplingParams = GREEDY
    adjustment: Adjustment | None = None
    state_from: int = -1
    state_to: int = 0
    more_blocks: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Word offsets of each field in the step buffer, and its size in int32 words.

    Fields, in order: header, ``tokens[max_tokens]``, ``token_seq[max_tokens]`` (which sequence a token belongs to),
    ``seq_begin[max_seqs + 1]`` (its first token; entry S is M), ``seq_len[max_seqs]`` (cache length after the step),
    ``rows[max_rows]`` (token index of each row), then per row ``temperature``, ``top_k``, ``top_p``, ``min_p`` (floats
    as their bits), ``seed_lo``, ``seed_hi``, ``slot`` (0: none, else its number + 1), ``repetition``, ``presence``,
    ``frequency``, and ``block_table[tables, max_seqs, max_blocks]``, ``state_from[max_seqs]``, ``state_to[max_seqs]``.
    """

    limits: Limits
    offsets: dict[str, int] = field(init=False)
    words: int = field(init=False)

    def __post_init__(self) -> None:
        m, s, r = self.limits.max_tokens, self.limits.max_seqs, self.limits.max_rows
        sizes = {
            "header": HEADER_WORDS,
            "tokens": m,
            "token_seq": m,
            "seq_begin": s + 1,
            "seq_len": s,
            "rows": r,
            "temperature": r,
            "top_k": r,
            "top_p": r,
            "min_p": r,
            "seed_lo": r,
            "seed_hi": r,
            "slot": r,
            "repetition": r,
            "presence": r,
            "frequency": r,
            "block_table": self.limits.tables * s * self.limits.max_blocks,
            "state_from": s,
            "state_to": s,
        }
        offsets, at = {}, 0
        for name, size in sizes.items():
            offsets[name] = at
            at += size
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "words", at)


class Step:
    """A packed step.

    Attributes:
        data: ``int32[layout.words]``, C-contiguous: the buffer that a device uploads.
        tokens, seqs, rows: M, S and R of this step.

    Args:
        logits: Whether the logits that ``Sample`` reads must be valid after the run. If not, a device may skip logits
            of tokens that cannot be chosen; it samples the same tokens.
        logprobs: Number of likeliest tokens per row whose log-probabilities the device reports besides the chosen
            token's (:meth:`~bitnet.core.hal.Executable.logprobs`); None: no report. If ``logits`` is false, all of a
            row's may be off by the same number, 1/64 at most, where there are 32,768 tokens or more. Needs
            :data:`~bitnet.core.hal.LOGPROBS`.

    Raises:
        InvalidInputError: The sequences do not fit the limits, a sequence's blocks do not hold its length, or
            ``logprobs`` is out of its range.
    """

    __slots__ = ("data", "layout", "rows", "seqs", "tokens")

    def __init__(
        self,
        layout: StepLayout,
        sequences: Sequence[SequenceStep],
        *,
        block_size: int = 32,
        logits: bool = True,
        logprobs: int | None = None,
    ) -> None:
        limits, at = layout.limits, layout.offsets
        self.layout = layout
        self.data = np.zeros(layout.words, np.int32)
        self.tokens = sum(len(s.tokens) for s in sequences)
        self.seqs = len(sequences)
        self.rows = sum(len(s.rows) for s in sequences)
        for what, have, most in (
            ("tokens", self.tokens, limits.max_tokens),
            ("sequences", self.seqs, limits.max_seqs),
            ("rows", self.rows, limits.max_rows),
        ):
            if have > most:
                raise InvalidInputError(f"a step of {have} {what} exceeds the program's limit of {most}.")
        data, floats, words = self.data, self.data.view(np.float32), self.data.view(np.uint32)
        adjusted = any(seq.adjustment is not None for seq in sequences)
        reported = 0 if logprobs is None else 1 + logprobs
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise InvalidInputError(f"logprobs is {logprobs}; it must be in 0 … {MAX_LOGPROBS}, or None.")
        data[_HEADER] = self.tokens, self.seqs, self.rows, 0, logits, adjusted, reported
        # Fields are written whole, from lists: writing one number into an array takes ten times as long as an append
        fed: list[int] = []
        begins, rows, drawn = [0], [], []
        for s, seq in enumerate(sequences):
            n = len(seq.tokens)
            if n == 0 or n > seq.length:
                raise InvalidInputError(f"sequence {s} feeds {n} tokens into a cache of length {seq.length}.")
            tables = (seq.blocks, *seq.more_blocks)
            if seq.blocks and len(tables) != limits.tables:
                raise InvalidInputError(f"sequence {s} has {len(tables)} block tables of {limits.tables}.")
            for t, blocks in enumerate(tables):
                if limits.max_blocks < len(blocks):
                    raise InvalidInputError(f"sequence {s} has {len(blocks)} blocks; the limit is {limits.max_blocks}.")
                if blocks and len(blocks) * block_size < seq.length:
                    raise InvalidInputError(f"sequence {s} of length {seq.length} has only {len(blocks)} blocks.")
                begin = at["block_table"] + (t * limits.max_seqs + s) * limits.max_blocks
                data[begin : begin + len(blocks)] = blocks
            for row in seq.rows:
                if not 0 <= row < n:
                    raise InvalidInputError(f"sequence {s} wants logits of token index {row}; it feeds {n} tokens.")
                rows.append(begins[s] + row)
                drawn.append(seq.sampling)
            fed.extend(seq.tokens)  # not +=, which numpy arrays define as addition
            begins.append(begins[s] + n)

        def put(field: str, into: npt.NDArray[Any], values: Sequence[float]) -> None:
            into[at[field] : at[field] + len(values)] = values

        put("tokens", data, fed)
        put("token_seq", data, [s for s, seq in enumerate(sequences) for _ in seq.tokens])
        put("seq_begin", data, begins)
        put("seq_len", data, [seq.length for seq in sequences])
        put("rows", data, rows)
        put("state_from", data, [seq.state_from for seq in sequences])
        put("state_to", data, [seq.state_to for seq in sequences])
        put("temperature", floats, [p.temperature for p in drawn])
        put("top_k", data, [min(p.top_k, 2**31 - 1) for p in drawn])
        put("top_p", floats, [p.top_p for p in drawn])
        put("min_p", floats, [p.min_p for p in drawn])
        put("seed_lo", words, [p.seed & 0xFFFFFFFF for p in drawn])
        put("seed_hi", words, [p.seed >> 32 for p in drawn])
        if not adjusted:
            return
        changes = []
        for s, seq in enumerate(sequences):
            if seq.adjustment is not None and len(seq.rows) > 1:
                raise InvalidInputError(
                    f"sequence {s} has a slot and {len(seq.rows)} rows; with a slot it must have one row."
                )
            changes += [seq.adjustment or _NONE] * len(seq.rows)
        put("slot", data, [a.slot + 1 for a in changes])
        put("repetition", floats, [a.repetition for a in changes])
        put("presence", floats, [a.presence for a in changes])
        put("frequency", floats, [a.frequency for a in changes])


_NONE = Adjustment(-1)
