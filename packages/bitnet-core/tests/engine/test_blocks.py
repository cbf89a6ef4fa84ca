"""The KV cache's bookkeeping under random use: no block is lost, assigned twice or shared for wrong content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet.core.engine.blocks import UNUSED, BlockPool, BlockTable, cached_prefix, prefix_digests

SIZE = 2


class World:
    """Sequences over one pool, and what each block of the device would hold."""

    def __init__(self, blocks: int, windows: tuple[int | None, ...]) -> None:
        self.pool, self.windows = BlockPool(blocks), windows
        self.live: list[tuple[BlockTable, list[int], int]] = []
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}

    def admit(self, tokens: list[int]) -> None:
        table = BlockTable(self.pool, SIZE, self.windows)
        cached = table.reuse(tokens, len(tokens) - 1)
        assert cached <= len(tokens) - 1
        self.check_content(table, tokens, cached)
        if not table.reserve(len(tokens)):
            table.release()
            return
        self.live.append((table, tokens, cached))

    def check_content(self, table: BlockTable, tokens: list[int], computed: int) -> None:
        """What the next token attends to is what these tokens put there, and nobody wrote over it."""
        for number, window in enumerate(self.windows):
            for position in range(0 if window is None else max(0, computed + 1 - window), computed):
                held = self.memory[table.tables[number][position // SIZE], position % SIZE]
                assert held == (number, *tokens[: position + 1])

    def compute(self, which: int, count: int) -> None:
        table, tokens, computed = self.live[which]
        end = min(computed + count, len(tokens))
        for number, blocks in enumerate(table.tables):
            for position in range(computed, end):
                self.memory[blocks[position // SIZE], position % SIZE] = (number, *tokens[: position + 1])
        table.record(tokens, end)
        self.live[which] = (table, tokens, end)

    def slide(self, which: int) -> None:
        table, _, computed = self.live[which]
        table.slide(computed)
        for number, window in enumerate(self.windows):
            behind = table.tables[number][: table._released[number]]
            assert all(block == UNUSED for block in behind)
            assert len(behind) == (0 if window is None else max(0, computed + 1 - window) // SIZE)

    def extend(self, which: int, token: int) -> None:
        table, tokens, computed = self.live[which]
        if table.reserve(len(tokens) + 1):
            self.live[which] = (table, [*tokens, token], computed)

    def check(self) -> None:
        held = [
            block
            for table, _, _ in self.live
            for blocks, released in zip(table.tables, table._released, strict=True)
            for block in blocks[released:]
        ]
        assert len(held) == sum(table.held for table, _, _ in self.live)
        assert len(set(held)) + self.pool.available == self.pool.size
        contents = self.pool.contents()
        assert len(contents) == len(set(contents)) <= self.pool.size
        for table, tokens, computed in self.live:
            assert all(len(blocks) * SIZE >= len(tokens) for blocks in table.tables)
            self.check_content(table, tokens, computed)


actions = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
    st.tuples(st.just("compute"), st.integers(0, 99), st.integers(1, 5)),
    st.tuples(st.just("extend"), st.integers(0, 99), st.integers(0, 1)),
    st.tuples(st.just("release"), st.integers(0, 99)),
    st.tuples(st.just("slide"), st.integers(0, 99)),
)
layouts = st.sampled_from([(None,), (None, 1), (None, 2), (None, 3, 3), (4,), (None, 5)])


@settings(max_examples=300, deadline=None)
@given(blocks=st.integers(1, 12), windows=layouts, script=st.lists(actions, max_size=60))
def test_random_use(blocks: int, windows: tuple[int | None, ...], script: list[Any]) -> None:
    world = World(blocks, windows)
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


def test_a_prefix_is_reused_where_its_last_window_is_cached() -> None:
    """Not where blocks of the window have been given to others, though all blocks of other layers are there."""
    windows, tokens = (None, 3), list(range(12))
    pool = BlockPool(8)
    table = BlockTable(pool, SIZE, windows)
    for end in (4, 8):
        assert table.reserve(end)
        table.record(tokens, end)
        table.slide(end)
    assert table.held == 4 + 1  # a token at 8 attends to 6, 7 and itself
    digests = list(prefix_digests(tokens, SIZE))

    def usable() -> int:
        return cached_prefix(pool, digests, windows, SIZE).usable

    def after(count: int) -> int:
        return cached_prefix(pool, digests[:count], windows, SIZE).usable

    assert [after(n) for n in range(1, 5)] == [1, 2, 3, 4]  # what is behind the window is idle, but still there
    other = BlockTable(pool, SIZE)
    assert other.reserve(2 * SIZE)
    assert [after(n) for n in range(1, 5)] == [0, 0, 3, 4]
    assert other.reserve(3 * SIZE)
    assert [after(n) for n in range(1, 5)] == [0, 0, 0, 4]
    again = BlockTable(pool, SIZE, windows)
    assert again.reuse(tokens, 11) == usable() * SIZE == 8
    assert again.held == 5
    for each in (table, again, other):
        each.release()
    assert pool.available == 8
