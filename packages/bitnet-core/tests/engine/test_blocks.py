"""The KV cache's bookkeeping under random use: no block is lost, assigned twice or shared for wrong content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet.core.engine.blocks import BlockPool, BlockTable, prefix_digests

SIZE = 2


class World:
    """Sequences over one pool, and what each block of the device would hold."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.live: list[tuple[BlockTable, list[int], int]] = []
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}

    def admit(self, tokens: list[int]) -> None:
        table = BlockTable(self.pool, SIZE)
        cached = table.reuse(tokens, len(tokens) - 1)
        assert cached <= len(tokens) - 1
        for position in range(cached):
            # A cached position holds what these tokens up to it would have put there.
            held = self.memory[table.blocks[position // SIZE], position % SIZE]
            assert held == tuple(tokens[: position + 1])
        if not table.reserve(len(tokens)):
            table.release()
            return
        self.live.append((table, tokens, cached))

    def compute(self, which: int, count: int) -> None:
        table, tokens, computed = self.live[which]
        end = min(computed + count, len(tokens))
        for position in range(computed, end):
            self.memory[table.blocks[position // SIZE], position % SIZE] = tuple(tokens[: position + 1])
        table.record(tokens, end)
        self.live[which] = (table, tokens, end)

    def extend(self, which: int, token: int) -> None:
        table, tokens, computed = self.live[which]
        if table.reserve(len(tokens) + 1):
            self.live[which] = (table, [*tokens, token], computed)

    def check(self) -> None:
        held = {block for table, _, _ in self.live for block in table.blocks}
        assert len(held) + self.pool.available == self.pool.size
        contents = self.pool.contents()
        assert len(contents) == len(set(contents)) <= self.pool.size
        for table, tokens, computed in self.live:
            assert len(table.blocks) * SIZE >= len(tokens)
            for position in range(computed):  # nobody wrote over it
                assert self.memory[table.blocks[position // SIZE], position % SIZE] == tuple(tokens[: position + 1])


actions = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
    st.tuples(st.just("compute"), st.integers(0, 99), st.integers(1, 5)),
    st.tuples(st.just("extend"), st.integers(0, 99), st.integers(0, 1)),
    st.tuples(st.just("release"), st.integers(0, 99)),
)


@settings(max_examples=300, deadline=None)
@given(blocks=st.integers(1, 12), script=st.lists(actions, max_size=60))
def test_random_use(blocks: int, script: list[Any]) -> None:
    world = World(blocks)
    for name, *arguments in script:
        if name == "admit":
            world.admit(arguments[0])
        elif world.live:
            which = arguments[0] % len(world.live)
            if name == "release":
                world.live.pop(which)[0].release()
            else:
                getattr(world, name)(which, *arguments[1:])
        world.check()
    for table, _, _ in world.live:
        table.release()
    assert world.pool.available == blocks


def test_a_block_released_twice_is_noticed() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block])


def test_what_is_unused_for_longest_goes_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4)
    old, new = BlockTable(pool, SIZE), BlockTable(pool, SIZE)
    for table, tokens in ((old, [1, 2, 3, 4]), (new, [5, 6, 7, 8])):
        assert table.reserve(4)
        table.record(tokens, 4)
        table.release()

    def known(tokens: list[int]) -> int:
        table = BlockTable(pool, SIZE)
        length = table.reuse(tokens, len(tokens))
        table.release()
        return length

    other = BlockTable(pool, SIZE)
    assert other.reserve(1)  # takes the end of the older
    assert (known([1, 2, 3, 4]), known([5, 6, 7, 8])) == (2, 4)
    assert other.reserve(SIZE + 1)  # `known` used the older one last but one, so its beginning goes now
    assert (known([1, 2, 3, 4]), known([5, 6, 7, 8])) == (0, 4)


def test_the_contents_are_the_digests_of_full_blocks_and_lose_what_is_evicted() -> None:
    pool = BlockPool(2)
    table = BlockTable(pool, SIZE)
    assert table.reserve(4)
    table.record([1, 2, 3], 3)
    assert pool.contents() == list(prefix_digests([1, 2, 3], SIZE))
    table.record([1, 2, 3, 4], 4)
    assert pool.contents() == list(prefix_digests([1, 2, 3, 4], SIZE))
    table.release()
    assert pool.contents() == list(prefix_digests([1, 2, 3, 4], SIZE))
    other = BlockTable(pool, SIZE)
    assert other.reserve(1)
    assert pool.contents() == list(prefix_digests([1, 2], SIZE))
