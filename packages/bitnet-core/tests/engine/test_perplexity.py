"""Perplexity: the chunks of llama.cpp's tool, and its formula for the error, recomputed token by token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.engine.perplexity import Running
from bitnet.core.errors import InvalidInputError


@pytest.mark.parametrize("bos", [None, 999])
def test_chunks_and_formula(bos: int | None) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, 37).tolist()
    table = -rng.exponential(2, (1000, 1000))  # log-probability of a token after another
    asked = []

    def score(chunk: Sequence[int], start: int) -> npt.NDArray[np.float64]:
        asked.append((chunk, start))
        return np.array([table[a, b] for a, b in zip(chunk[start - 1 :], chunk[start:], strict=False)])

    running = Running(tokens, context=10, bos=bos)
    results = [running.add(score(chunk, running.start)) for chunk in running.chunks]
    assert len(results) == 3
    # Positions 5 … 8 of each chunk of ten predict tokens 6 … 9.
    scored = [-table[tokens[i + j], tokens[i + j + 1]] for i in (0, 10, 20) for j in (5, 6, 7, 8)]
    last = results[-1]
    assert (last.tokens, last.chunks) == (12, 3)
    assert math.isclose(last.value, math.exp(statistics.fmean(scored)))
    mean_of_squares = statistics.fmean(x * x for x in scored)
    spread = math.sqrt((mean_of_squares - statistics.fmean(scored) ** 2) / (len(scored) - 1))
    assert math.isclose(last.error, spread * last.value)
    assert [chunk[0] for chunk, _ in asked] == ([tokens[0], tokens[10], tokens[20]] if bos is None else [bos] * 3)
    assert [chunk[1:] for chunk, _ in asked] == [tokens[i + 1 : i + 10] for i in (0, 10, 20)]


def test_too_short() -> None:
    with pytest.raises(InvalidInputError, match="9 tokens; one chunk needs 10"):
        Running([1] * 9, context=10, bos=None)
    with pytest.raises(InvalidInputError, match="at least 4"):
        Running([1] * 9, context=3, bos=None)
