"""Rotary embeddings: frequencies, their scaling for long contexts, and the tables of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

ROPE_PIECE = 1024
"""Positions whose angles are computed at a time; Ctrl-C takes effect between two such pieces."""
BETA_FAST, BETA_SLOW = 32.0, 1.0
"""Default turns that bound YaRN's ramp, from its paper."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): short wavelengths are unchanged, long ones are stretched, with a ramp in between.

    Attributes:
        factor: Factor by which the longest wavelengths are stretched.
        original_context: Positions that the model was first trained for.
        beta_fast: Wavelengths with at least this many turns in the original context are unchanged.
        beta_slow: Wavelengths with at most this many turns are stretched by the whole factor.
    """

    factor: float
    original_context: float
    beta_fast: float = BETA_FAST
    beta_slow: float = BETA_SLOW

    def ramp(self, theta: float, rotated: int) -> tuple[float, float]:
        """The pairs at which the ramp begins and ends; the second is not below the first.

        Raises:
            ValueError: The parameters define no ramp; the message says why.
        """
        if theta <= 1:
            raise ValueError(f"a rotary base of {theta}, which YaRN needs to be above 1")
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"a beta_fast of {self.beta_fast}, below the beta_slow of {self.beta_slow}")

        def pair(turns: float) -> float:
            return rotated * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), rotated - 1)
        if high < low:
            raise ValueError(f"no ramp: it would go from pair {low} to pair {high}")
        return low, high

    def frequencies(self, waves: F32, theta: float) -> F32:
        """Scaled frequencies; ``waves`` ``f32[rotated / 2]`` are the reciprocals of the unscaled ones."""
        low, high = self.ramp(theta, 2 * len(waves))
        pairs = np.arange(len(waves), dtype=np.float32)
        kept: F32 = np.float32(1) - np.clip((pairs - np.float32(low)) / np.float32(high - low or 0.001), 0, 1)
        stretched: F32 = np.reciprocal(np.float32(self.factor) * waves)
        return stretched * (1 - kept) + kept / waves


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): each pair's wavelength is stretched by its own factor.

    Attributes:
        short: Factor of each pair, for contexts up to the original one.
        long: Factor of each pair, for longer contexts.
        original_context: Positions that the model was first trained for.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int

    def frequencies(self, waves: F32, positions: int) -> F32:
        """Frequencies for a context of ``positions``; all keys in a cache must be rotated with the same ones."""
        factors = np.array(self.long if positions > self.original_context else self.short, np.float32)
        frequencies: F32 = np.reciprocal(factors * waves)
        return frequencies


def yarn_attention(factor: float) -> float:
    """YaRN's factor of sines and cosines for a context stretched by ``factor``."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def longrope_attention(factor: float, original_context: float) -> float:
    """LongRoPE's factor of sines and cosines for a context stretched by ``factor``."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


class Rotated(Protocol):
    """The parts of :class:`bitnet.core.model.ModelConfig` that the tables need."""

    @property
    def rotated(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_freq_factors(self) -> F32 | None: ...
    @property
    def rope_scaling(self) -> Yarn | LongRope | None: ...
    @property
    def rope_attention_factor(self) -> float: ...


def rope_frequencies(config: Rotated, positions: int) -> F32:
    """The angle from one position to the next of each pair, ``f32[rotated / 2]``, in a context of ``positions``.

    Each step is rounded to f32 as in transformers' ``ROPE_INIT_FUNCTIONS``, with which the models were trained.
    """
    exponents = np.arange(0, config.rotated, 2, dtype=np.float32) / np.float32(config.rotated)
    waves = np.power(np.float64(config.rope_theta), exponents).astype(np.float32)
    frequencies: F32
    match config.rope_scaling:
        case None:
            frequencies = np.reciprocal(waves)
        case Yarn() as yarn:
            frequencies = yarn.frequencies(waves, config.rope_theta)
        case LongRope() as long:
            frequencies = long.frequencies(waves, positions)
    if config.rope_freq_factors is not None:
        frequencies /= np.asarray(config.rope_freq_factors, np.float32)
    return frequencies


def rope_tables(config: Rotated, positions: int) -> tuple[F32, F32]:
    """Cosines and sines, each ``f32[positions, rotated / 2]``, of the rotary angles (Su et al. 2021).

    Frequencies and angles are rounded to f32 as in Hugging Face's implementation, on which these models were trained
    and are checked: at long positions this rounding is the largest source of error in the angles (ADR 0020).
    """
    frequencies, factor = rope_frequencies(config, positions), np.float32(config.rope_attention_factor)
    cos, sin = np.empty((2, positions, config.rotated // 2), np.float32)
    for begin in range(0, positions, ROPE_PIECE):
        piece = slice(begin, min(begin + ROPE_PIECE, positions))
        angles = np.outer(np.arange(piece.start, piece.stop, dtype=np.float32), frequencies).astype(np.float64)
        cos[piece], sin[piece] = np.cos(angles), np.sin(angles)
        if factor != 1:
            cos[piece] *= factor
            sin[piece] *= factor
    return cos, sin


def rope_bytes(config: Rotated) -> int:
    """Bytes of the rotary tables for each position."""
    return 4 * config.rotated
