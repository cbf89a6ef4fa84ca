"""Requests to simulate: conversations of chats, and of agents, whose long instructions are shared by many."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 16
"""Tokens of a KV block."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation.

    Attributes:
        pause: Seconds since the previous turn's answer.
        blocks: Hashes of the prompt's full KV blocks, in order.
        prompt, output: Tokens of the prompt, and of the answer.
    """

    pause: float
    blocks: tuple[int, ...]
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each of which repeats what was said before.

    Attributes:
        start: Seconds at which the first turn is sent.
        key: What a router that reads no prompt would know it by.
    """

    start: float
    key: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What conversations of a kind are like. Lengths are means in tokens, and lengths drawn are geometric.

    Attributes:
        shared: Tokens of instructions that conversations of one sort begin with.
        sorts: Number of different instructions; the first are the most frequent (Zipf's law).
        pause: Mean seconds between an answer and the next turn.
    """

    shared: int
    sorts: int
    turns: int
    question: int
    answer: int
    pause: float


CHATS = Shape(shared=64, sorts=1, turns=5, question=80, answer=200, pause=10.0)
AGENTS = Shape(shared=8000, sorts=50, turns=12, question=300, answer=100, pause=1.0)


def conversations(shape: Shape, count: int, rate: float, rng: random.Random) -> list[Conversation]:
    """Conversations that begin at ``rate`` a second, at random times."""
    weights = [1 / (sort + 1) for sort in range(shape.sorts)]
    start, found = 0.0, []
    for number in range(count):
        start += rng.expovariate(rate)
        (sort,) = rng.choices(range(shape.sorts), weights)
        found.append(Conversation(start, number, _turns(shape, sort, number, rng)))
    return found


def _turns(shape: Shape, sort: int, number: int, rng: random.Random) -> tuple[Turn, ...]:
    def length(mean: int) -> int:
        return max(1, round(rng.expovariate(1 / mean)))

    total, turns = shape.shared, []
    hashed = _hashes(shape, sort, number)
    for turn in range(shape.turns):
        total += length(shape.question)
        output = length(shape.answer)
        pause = rng.expovariate(1 / shape.pause) if turn else 0.0
        turns.append(Turn(pause, tuple(hashed(i) for i in range(total // BLOCK)), total, output))
        total += output
    return tuple(turns)


def _hashes(shape: Shape, sort: int, number: int) -> Callable[[int], int]:
    def hashed(index: int) -> int:
        own = (index + 1) * BLOCK > shape.shared
        return hash((number, index)) if own else hash((-1 - sort, index))

    return hashed
