"""The index from blocks to replicas, beside a set of blocks for each replica."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bitnet.server.ray.holders import Holders
from bitnet.server.ray.scoring import matched_tokens


@pytest.mark.parametrize("_", range(10))
def test_it_knows_what_a_set_for_each_replica_knows(_: int) -> None:
    holders, sets = Holders(), {str(i): set[int]() for i in range(random.randrange(1, 80))}
    for _step in range(300):
        name, blocks = random.choice(list(sets)), random.choices(range(30), k=random.randrange(12))
        if random.random() < 0.6:
            holders.add(name, blocks)
            sets[name].update(blocks)
        else:
            holders.remove(name, blocks)
            sets[name].difference_update(blocks)
        prompt = random.choices(range(30), k=random.randrange(8))
        held = {name: matched_tokens(prompt, own, 1) for name, own in sets.items()}
        assert holders.leading(prompt) == {name: count for name, count in held.items() if count}
    for name, own in sets.items():
        holders.remove(name, list(own))
    assert not holders._sets
    assert not holders._bits
    assert not holders._names


class Read(Sequence[int]):
    """A prompt's blocks, which counts how often they are read."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks, self.reads = blocks, 0

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return self.blocks[index]

    def __iter__(self) -> Iterator[int]:
        for block in self.blocks:
            self.reads += 1
            yield block


def test_a_prompt_is_read_once_for_a_thousand_replicas() -> None:
    prompt = Read([random.getrandbits(64) for _ in range(500)])
    holders, held = Holders(), {str(i): random.randrange(501) for i in range(1000)}
    for name, count in held.items():
        holders.add(name, prompt.blocks[:count])
    assert holders.leading(prompt) == {name: count for name, count in held.items() if count}
    assert prompt.reads <= len(prompt)
