"""Requests to simulate: conversations of chats, and of agents, whose long instructions are shared by many."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from bitnet.core.model.program import BLOCK_SIZE

BLOCK = BLOCK_SIZE
"""Tokens of a KV block."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation.

    Attributes:
        pause: Seconds since the previous turn's answer.
        blocks: Hashes of the prompt's full KV blocks, in order.
        prompt, output: Tokens of the prompt, and of the answer.
        answered: Hashes of the blocks that the answer fills, which follow those of the prompt.
    """

    pause: float
    blocks: tuple[int, ...]
    prompt: int
    output: int
    answered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each of which repeats what was said before.

    Attributes:
        start: Seconds at which the first turn is sent.
        key: What a router that reads no prompt would know it by.
        sort: Which instructions it begins with.
    """

    start: float
    key: int
    turns: tuple[Turn, ...]
    sort: int = 0


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
        found.append(Conversation(start, number, _turns(shape, sort, number, rng), sort))
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
        blocks = tuple(hashed(i) for i in range((total + output - 1) // BLOCK))  # the last token is not in the cache
        full = total // BLOCK
        turns.append(Turn(pause, blocks[:full], total, output, blocks[full:]))
        total += output
    return tuple(turns)


def _hashes(shape: Shape, sort: int, number: int) -> Callable[[int], int]:
    def hashed(index: int) -> int:
        own = (index + 1) * BLOCK > shape.shared
        return hash((number, index)) if own else hash((sort, index, 0))

    return hashed
