"""Barriers between recorded launches: in whatever order launches run between two of them, the result is the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from bitnet.core.gpu import Buffer
from bitnet.core.gpu.drivers.hazards import Hazards
from bitnet.core.gpu.drivers.windows import Window


@dataclass(eq=False)
class Memory:
    nbytes: int = 256


class Kernel(NamedTuple):
    """A launch: what it reads, and what it writes (both where it is in both)."""

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]

    @property
    def uses(self) -> list[tuple[Buffer, bool]]:
        return [(buffer, False) for buffer in self.reads] + [(buffer, True) for buffer in self.writes]


def whole(buffer: Buffer) -> int:
    return id(buffer.buffer if isinstance(buffer, Window) else buffer)


def executed(launches: Sequence[tuple[int, Kernel]]) -> dict[Any, Any]:
    """What memory holds in the end, as the term of launches that made it, and what each launch saw."""
    held: dict[Any, Any] = {}
    for number, kernel in launches:
        seen = tuple(held.get(whole(buffer)) for buffer in (*kernel.reads, *kernel.writes))
        held["seen", number] = seen
        held |= {whole(buffer): hash((number, seen, place)) for place, buffer in enumerate(kernel.writes)}
    return held


def random_launches(rng: random.Random) -> list[Kernel]:
    memories = [Memory() for _ in range(rng.randint(2, 7))]

    def some(most: int) -> tuple[Buffer, ...]:
        chosen = rng.sample(memories, rng.randint(0, min(most, len(memories))))
        return tuple(Window(buffer, 16 * rng.randrange(4), 64) if rng.random() < 0.3 else buffer for buffer in chosen)

    return [Kernel(some(3), some(2)) for _ in range(rng.randint(1, 14))]


def barriers(launches: Sequence[Kernel]) -> list[bool]:
    hazards = Hazards()
    return [hazards.waits(kernel.uses) for kernel in launches]


@pytest.mark.parametrize("seed", range(4))
def test_any_order_between_barriers_gives_the_same(seed: int) -> None:
    rng = random.Random(f"{seed} {random.random()}")
    for _ in range(300):
        launches = random_launches(rng)
        expected = executed(list(enumerate(launches)))
        for _ in range(5):
            order: list[tuple[int, Kernel]] = []
            together: list[tuple[int, Kernel]] = []
            for number, (kernel, waits) in enumerate(zip(launches, barriers(launches), strict=True)):
                if waits:
                    order += rng.sample(together, len(together))
                    together.clear()
                together.append((number, kernel))
            order += rng.sample(together, len(together))
            assert executed(order) == expected, launches


@pytest.mark.parametrize("seed", range(4))
def test_no_barrier_without_a_launch_that_it_is_for(seed: int) -> None:
    """Exchanging the launch behind a barrier with one before it, since the last barrier, changes what comes out."""
    rng = random.Random(f"{seed} {random.random()}")
    found = 0
    for _ in range(300):
        launches = random_launches(rng)
        begin = 0
        for at, waits in enumerate(barriers(launches)):
            if waits:
                others = (list(enumerate(launches))[i : at + 1] for i in range(begin, at))
                assert any(executed([group[0], group[-1]]) != executed([group[-1], group[0]]) for group in others)
                begin, found = at, found + 1
    assert found > 100


def test_two_readers_need_no_barrier_and_a_writer_needs_one() -> None:
    x, y, z = Memory(), Memory(), Memory()
    assert barriers([Kernel((x,), (y,)), Kernel((x,), (z,)), Kernel((), (x,)), Kernel((x,), ())]) == [
        False,
        False,
        True,
        True,
    ]
    assert barriers([Kernel((), (Window(x, 0, 64),)), Kernel((Window(x, 128, 64),), ())]) == [False, True]
