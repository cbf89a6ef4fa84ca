"""The summary of a KV cache, and mirrors of it that see only some of the messages."""

from __future__ import annotations

import random

import pytest

from bitnet.server.ray.summary import MAX_CHANGES, MAX_HASHES, Summary, model_hash, short_hashes


@pytest.mark.parametrize("seed", range(20))
def test_a_mirror_of_a_mirror_has_the_hashes_whatever_messages_are_lost(seed: int) -> None:
    rng = random.Random(seed)
    original, index, router = Summary(), Summary(), Summary()
    held: list[int] = []
    for _ in range(4 * MAX_CHANGES):
        held = [one for one in held if rng.random() > 0.2] + [rng.getrandbits(8) for _ in range(rng.randrange(8))]
        original.update(held)
        assert original.hashes == set(held)
        if rng.random() < 0.05:
            index = Summary()  # it was restarted
        if rng.random() < 0.02:
            router = Summary()
        if rng.random() < 0.5:
            assert index.apply(original.since(index.version))
            assert index.hashes == original.hashes
        if rng.random() < 0.3:
            assert router.apply(index.since(router.version))
            assert router.hashes == index.hashes


def test_a_change_names_only_what_has_changed() -> None:
    original, mirror = Summary(), Summary()
    original.update(range(1000))
    mirror.apply(original.since(0))
    original.update(range(1, 1001))
    change = original.since(mirror.version)
    assert (change.added, change.removed) == (frozenset({1000}), frozenset({0}))


def test_a_change_from_another_version_is_refused() -> None:
    original, mirror = Summary(), Summary()
    original.update([1])
    first = original.since(0)
    original.update([2])
    second = original.since(1)
    assert not mirror.apply(second)
    assert (mirror.version, mirror.hashes) == (0, set())
    assert mirror.apply(first)
    assert mirror.apply(second)
    assert mirror.hashes == {2}


def test_a_summary_is_bounded_and_keeps_the_last_ones() -> None:
    original = Summary()
    original.update(range(MAX_HASHES + 5))
    assert original.hashes == set(range(5, MAX_HASHES + 5))


def test_hashes_are_64_bits_of_the_digests() -> None:
    assert short_hashes([bytes(range(16)), b"\xff" * 16]) == [0x0706050403020100, 2**64 - 1]


def test_equal_blocks_of_two_models_differ() -> None:
    digests = [bytes(range(16)), b"\xff" * 16]
    small, large = (short_hashes(digests, model_hash(name)) for name in ("small", "large"))
    assert not set(small) & set(large)
    assert all(0 <= one < 1 << 64 for one in [*small, *large])
    assert model_hash("small") not in small
