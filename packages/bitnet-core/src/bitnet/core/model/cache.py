"""Which layers share the blocks of the KV cache, and what a sequence's blocks take.

Layers that attend to a window no longer need the blocks behind it, while the other layers need all. So that the former
can be freed, a block holds positions of some layers only, and a sequence has a block table for each such group of
layers. All blocks have the same size, whichever layers use them, and come from one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitnet.core.hal import KVDtype, KVSpec

if TYPE_CHECKING:
    from bitnet.core.model.config import ModelConfig

MAX_TABLES = 8
"""Maximum block tables of a sequence, as each step carries them."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the layers of a model share the blocks of the KV cache.

    Attributes:
        layers: Layers in a block.
        windows: For each block table, the positions that its layers attend to; None: all.
        places: For each layer that attends, its table and its number among the table's layers.
    """

    layers: int
    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]

    def blocks(self, length: int, block_size: int, ahead: int) -> int:
        """Maximum blocks that a sequence holds until it has ``length`` positions, of which a step adds ``ahead``."""
        return sum(most_blocks(window, length, block_size, ahead) for window in self.windows)


def most_blocks(window: int | None, length: int, block_size: int, ahead: int) -> int:
    """Maximum blocks of one table that a sequence holds until it has ``length`` positions.

    Args:
        window: Positions that a token attends to, its own among them; None: all.
        ahead: Maximum positions that a step adds.
    """
    every = -(-length // block_size)
    # Positions that begin anywhere in a block touch at most one block more than they fill.
    return every if window is None else min(every, -(-(window - 1 + ahead) // block_size) + 1)


def cache_layout(config: ModelConfig, tables: int | None = None) -> CacheLayout:
    """The layout of a model's cache.

    Args:
        tables: 1: all layers share their blocks, so that none is freed before the sequence ends. None: as many as free
            blocks behind windows.
    """
    windows = config.attended
    sliding = sum(window is not None for window in windows)
    if tables == 1 or not sliding:
        return CacheLayout(len(windows), (None,), tuple((0, i) for i in range(len(windows))))
    full = len(windows) - sliding
    size = max(min(full, sliding) if full else sliding, -(-len(windows) // (MAX_TABLES - 1)))
    in_full = -(-full // size)
    found, counts = [], {True: 0, False: 0}
    for window in windows:
        number = counts[window is None]
        counts[window is None] += 1
        found.append((number // size + (0 if window is None else in_full), number % size))
    of_tables: Sequence[int | None] = [None] * in_full + [max(filter(None, windows))] * -(-sliding // size)
    return CacheLayout(size, tuple(of_tables), tuple(found))


def attended_bytes(config: ModelConfig, kv_dtype: KVDtype, length: int) -> int:
    """Bytes of keys and values that the next token after ``length`` positions reads."""
    layer = KVSpec(1, config.kv_heads, config.head_dim, 1, 1, kv_dtype).bytes
    return layer * sum(length if window is None else min(window, length) for window in config.attended)
