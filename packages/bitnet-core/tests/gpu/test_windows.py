"""Matrices split into parts: each row is in one part, each part can be bound, and parts are as large as possible."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from bitnet.core.errors import OutOfMemoryError
from bitnet.core.gpu.drivers.windows import Window, bound, memory_of, row_windows
from bitnet.core.gpu.ops import next_power_of_two, power_of_two


@dataclass(eq=False)
class Memory:
    nbytes: int


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_a_matrix(seed: int) -> None:
    rng = random.Random(f"{seed} {random.random()}")
    for _ in range(300):
        rows, row_bytes = rng.randint(1, 5000), 4 * rng.randint(1, 300)
        alignment, most_rows = 2 ** rng.randint(2, 8), rng.choice([None, 4096])
        largest = rng.choice([alignment * row_bytes * rng.randint(1, 40), 1 << 40])
        matrix = Memory(rows * row_bytes)
        parts = list(row_windows(matrix, rows, row_bytes, largest=largest, alignment=alignment, most_rows=most_rows))
        at = 0
        for part, first, count in parts:
            assert first == at
            assert memory_of(part) is matrix
            offset = part.offset if isinstance(part, Window) else 0
            assert offset == first * row_bytes
            assert offset % alignment == 0
            assert part.nbytes == count * row_bytes <= largest
            assert most_rows is None or count <= most_rows
            at += count
        assert at == rows
        # The next row that could begin a part would be too many for any part but the last.
        step = next(n for n in range(1, alignment + 1) if n * row_bytes % alignment == 0)
        for _, _, count in parts[:-1]:
            assert (count + step) * row_bytes > largest or (most_rows is not None and count + step > most_rows)


def test_a_matrix_that_fits_is_the_buffer_itself() -> None:
    matrix = Memory(640)
    assert list(row_windows(matrix, 10, 64, largest=640, alignment=256)) == [(matrix, 0, 10)]
    assert len(list(row_windows(matrix, 10, 64, largest=639, alignment=256))) == 2


def test_powers_of_two() -> None:
    for n in range(1, 300):
        assert power_of_two(n) <= n < 2 * power_of_two(n)
        assert next_power_of_two(n) // 2 < n <= next_power_of_two(n)
        assert {power_of_two(n), next_power_of_two(n)} <= {2**i for i in range(10)}


def test_what_is_bound_is_whole_vectors_and_no_more_than_a_binding() -> None:
    buffer = Memory(100)
    assert bound(buffer, 112, "embed", "gpu:0") == (buffer, 0, 112)
    assert bound(Window(buffer, 32, 33), 48, "embed", "gpu:0") == (buffer, 32, 48)
    with pytest.raises(
        OutOfMemoryError, match="gpu:0: embed needs 48 bytes of one buffer; the device binds at most 47"
    ):
        bound(Window(buffer, 32, 33), 47, "embed", "gpu:0")
