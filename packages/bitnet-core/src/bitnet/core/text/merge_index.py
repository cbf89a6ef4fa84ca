"""Keeps on disk which token each merge of a large vocabulary makes.

To check 280,000 merges and to find their tokens takes a fifth of a second; to read an index of them, a millisecond. The
index is an entry of the cache of kernels, under the digest of the metadata that it was made from, so it is bounded,
written at once or not at all, and made again where it is damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bitnet.core.support.cache import KernelCache
from bitnet.core.text.merges import made_tokens

SCHEMA = "merges 1"
"""Part of an index's key; another number for whatever changes ids, merges or which of them are left out."""
MIN_MERGES = 1 << 15
"""Merges of the smallest vocabulary that gets an index."""
INDEX = np.dtype("<i4")


def indexed_tokens(
    merges: Sequence[str], ids: Mapping[str, int], tokens: int, digest: Callable[[], bytes] | None
) -> npt.NDArray[np.int32]:
    """What :func:`~bitnet.core.text.merges.made_tokens` returns, from the index if there is one; else one is made.

    Args:
        tokens: A bound on the ids.
        digest: A digest of everything that merges and ids are made from; None: there is no index.

    Raises:
        InvalidInputError: As :func:`~bitnet.core.text.merges.made_tokens`.
        ModelFileError: As ``digest``.
    """
    if digest is None or len(merges) < MIN_MERGES:
        return made_tokens(merges, ids)
    cache = KernelCache(level=logging.DEBUG)
    key = KernelCache.key(source=digest(), device="", driver="", options="", compiler=SCHEMA)
    made = _checked(cache.get(key), len(merges), tokens)
    if made is None:
        made = made_tokens(merges, ids)
        cache.keep(key, made.astype(INDEX).tobytes())
    return made


def _checked(payload: bytes | None, merges: int, tokens: int) -> npt.NDArray[np.int32] | None:
    """The index; None if there is none or it does not fit so many merges and tokens."""
    if payload is None or len(payload) != merges * INDEX.itemsize:
        return None
    made = np.frombuffer(payload, INDEX)
    return made if made.min() >= 0 and made.max() < tokens else None
