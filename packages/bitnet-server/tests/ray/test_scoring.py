"""The choice of a replica, by itself and over conversations that a small model of three replicas answers."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import pytest

from bitnet.server.ray.scoring import (
    STALE_SECONDS,
    Assumed,
    Candidate,
    Loads,
    Sent,
    matched_tokens,
    rank,
    with_models,
)

BLOCK = 16
HELD = {"a": {1, 2, 3}, "b": set[int](), "c": {2}}


def test_only_an_unbroken_beginning_matches() -> None:
    assert matched_tokens([1, 2, 3, 4], {1, 2, 4}, BLOCK) == 2 * BLOCK
    assert matched_tokens([1, 2], {2}, BLOCK) == 0
    assert matched_tokens([], {1}, BLOCK) == 0


def test_the_score_is_the_share_of_the_prompt_less_the_relative_load() -> None:
    candidates = [Candidate("a", 8 * BLOCK, 300.0), Candidate("b", 0, 100.0)]
    first, second = rank(candidates, 160, full_load=500)
    assert (first.name, first.matched, first.score) == ("a", 128, 128 / 160 - (300 - 100) / 500)
    assert (second.name, second.matched, second.score) == ("b", 0, 0.0)
    first, second = rank(candidates, 160, full_load=100)
    assert (first.name, second.name, second.score) == ("b", "a", 128 / 160 - (300 - 100) / 200)
    assert rank(candidates, 160, full_load=500, beta=3.0)[0].name == "b"


def test_a_conversation_stays_where_its_prefix_is_until_that_replica_has_much_more_to_do() -> None:
    for load, best in ((0, "a"), (320, "a"), (5000, "b")):
        candidates = [Candidate("a", 20 * BLOCK, load), Candidate("b", 0, 0), Candidate("c", 0, 0)]
        assert (rank(candidates, 330, full_load=400)[0].name == "a") == (best == "a")


def test_a_replica_whose_cache_is_unknown_counts_as_empty_beside_known_ones() -> None:
    candidates = [Candidate("a", None, 0.0), Candidate("b", BLOCK, 0.0)]
    assert [c.name for c in rank(candidates, 20, full_load=400)] == ["b", "a"]


def test_equal_replicas_are_taken_equally_often() -> None:
    candidates = [Candidate(name, 0, 0.0) for name in "abc"]
    count = Counter(rank(candidates, 20, full_load=400)[0].name for _ in range(3000))
    assert min(count.values()) > 850


def test_without_an_index_it_is_the_less_loaded_of_two() -> None:
    candidates = [Candidate(name, None, load) for name, load in zip("abcd", (0.0, 1.0, 2.0, 3.0), strict=True)]
    count = Counter(rank(candidates, 20, full_load=400)[0].name for _ in range(6000))
    # of the six pairs, a is in three, b is the less loaded of two others, c of one, and d of none
    assert count["d"] == 0
    for name, share in (("a", 3 / 6), ("b", 2 / 6), ("c", 1 / 6)):
        assert abs(count[name] / 6000 - share) < 0.04
    assert len(rank(candidates, 20, full_load=400)) == 4


def test_there_may_be_no_replica() -> None:
    assert rank([], 20, full_load=400) == []


def test_loads_are_those_of_the_requests_under_way() -> None:
    loads = Loads()
    loads.begin("r1", "a", 100)
    loads.begin("r2", "a", 50)
    loads.begin("r1", "b", 100)  # it was rejected by the first
    assert (loads.of("a"), loads.of("b")) == (50, 100)
    assert 50 < loads.typical < 256
    loads.end("r1")
    loads.end("r1")
    assert (loads.of("a"), loads.of("b")) == (50, 0)
    loads.keep({"b"}, 0.0)
    loads.end("r2")
    assert loads.of("a") == 0


def test_a_request_that_was_chosen_for_a_replica_counts_until_it_runs_or_is_forgotten() -> None:
    loads = Loads()
    loads.choose("r1", "a", 100, 10.0)
    loads.choose("r2", "a", 50, 10.0)
    assert loads.of("a") == 150
    loads.begin("r1", "b", 100)  # the other was full
    loads.keep({"a", "b"}, 10.1 + STALE_SECONDS)
    assert (loads.of("a"), loads.of("b")) == (0, 100)


def test_a_prompt_is_assumed_to_be_cached_until_the_replica_has_had_time_to_say_so() -> None:
    assumed = Assumed()
    assumed.begin("r1", "a", [1, 2])
    assumed.begin("r2", "a", [1, 2, 3])
    assert assumed.leading([1, 2, 3, 4], 1e9) == {"a": 3}
    assert assumed.leading([2], 0.0) == {"a": 1}
    assumed.end("r2", 10.0)
    assert assumed.leading([1, 2, 3], 10.0 + STALE_SECONDS) == {"a": 3}
    assert assumed.leading([1, 2, 3], 10.1 + STALE_SECONDS) == {"a": 2}  # of the request that still runs
    assumed.begin("r1", "b", [1])  # it was rejected by the first
    assert assumed.leading([1, 2], 20.0) == {"b": 1}
    assumed.keep({"a"})
    assert assumed.leading([1], 20.0) == {}
    assert not assumed._counts


class Replica:
    """A replica's cache of blocks, the least recently used of which are evicted."""

    def __init__(self, blocks: int) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.size, self.tokens = blocks, 0

    def compute(self, prompt: list[int], tokens: int) -> int:
        """Take a prompt in; return the tokens that were cached."""
        cached = matched_tokens(prompt, self.blocks.keys(), BLOCK)
        for block in reversed(prompt):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.size:
            self.blocks.popitem(last=False)
        self.tokens += tokens - cached
        return cached


def chosen(replicas: dict[str, Replica], loads: Loads, prompt: list[int], tokens: int) -> str:
    candidates = [
        Candidate(name, matched_tokens(prompt, r.blocks, BLOCK), loads.of(name)) for name, r in replicas.items()
    ]
    return rank(candidates, tokens, full_load=8 * loads.typical)[0].name


@pytest.mark.parametrize("seed", range(5))
def test_fifty_conversations_hit_their_replica_and_spread(seed: int) -> None:
    rng = random.Random(seed)
    replicas = {name: Replica(4000) for name in "abc"}
    loads, under_way = Loads(), []
    system = [rng.getrandbits(64) for _ in range(4)]  # which all conversations share
    talks = [list(system) for _ in range(50)]
    order = [i for i in range(50) for _ in range(10)]
    rng.shuffle(order)
    hits = turns = 0
    for number, i in enumerate(order):
        talk = talks[i]
        before = len(talk) - len(system)
        talk += [rng.getrandbits(64) for _ in range(rng.randrange(2, 12))]
        tokens = len(talk) * BLOCK + rng.randrange(BLOCK)
        name = chosen(replicas, loads, talk, tokens)
        cached = replicas[name].compute(talk, tokens)
        if before:
            turns += 1
            hits += cached >= before * BLOCK
        loads.begin(str(number), name, tokens - cached + 100)
        under_way.append(str(number))
        if len(under_way) > 8:
            loads.end(under_way.pop(rng.randrange(len(under_way))))
    assert hits / turns >= 0.9
    work = [replica.tokens for replica in replicas.values()]
    assert max(work) <= 1.5 * sum(work) / 3


@pytest.mark.parametrize("seed", range(5))
def test_a_popular_prefix_does_not_pile_up_on_one_replica(seed: int) -> None:
    rng = random.Random(seed)
    replicas = {name: Replica(4000) for name in "abc"}
    prefix = [rng.getrandbits(64) for _ in range(60)]
    replicas["a"].compute(prefix, 60 * BLOCK)
    loads, under_way, count = Loads(), [], Counter[str]()
    for number in range(600):
        prompt = [*prefix, *(rng.getrandbits(64) for _ in range(4))]
        tokens = len(prompt) * BLOCK
        name = chosen(replicas, loads, prompt, tokens)
        count[name] += 1
        cached = replicas[name].compute(prompt, tokens)
        loads.begin(str(number), name, tokens - cached + 100)
        under_way.append(str(number))
        if len(under_way) > 24:
            loads.end(under_way.pop(rng.randrange(len(under_way))))
    assert max(count.values()) <= 1.5 * 600 / 3


def test_a_second_replica_loads_a_model_when_the_first_has_all_its_places_taken() -> None:
    """The less loaded replicas lack the model, and a prompt that none has cached is worth less than loading it."""
    for load, best in ((0, "a"), (390, "a"), (410, "b")):
        candidates = [Candidate("a", 0, load), Candidate("b", 0, 0, loaded=False)]
        assert rank(candidates, 20, full_load=400)[0].name == best, load
    nobody = [Candidate("a", 0, 5, loaded=False), Candidate("b", 0, 0, loaded=False)]
    assert rank(nobody, 20, full_load=400)[0].name == "b"


def test_a_model_that_nobody_has_goes_where_there_are_few() -> None:
    found = with_models([Candidate("a", 0, 0), Candidate("b", 0, 0), Candidate("c", 0, 0)], HELD, 9)
    assert [one.name for one in rank(found, 20, full_load=400)] == ["b", "c", "a"]
    found = with_models([Candidate("a", 0, 0), Candidate("b", 0, 0), Candidate("c", 0, 0)], HELD, 1)
    assert rank(found, 20, full_load=400)[0].name == "a"


def test_a_model_counts_as_loaded_from_when_a_request_for_it_is_sent() -> None:
    sent = Sent()
    sent.send("a", 1, 0.0)
    sent.send("b", 1, 0.5)
    sent.send("a", 2, 0.5)
    assert sent.models(["a", "c"], 0.9) == {"a": {1, 2}, "c": set()}
    assert sent.models(["a", "b"], STALE_SECONDS + 0.1) == {"a": {2}, "b": {1}}
    sent.send("a", 1, 1.0)
    assert sent.models(["a"], STALE_SECONDS + 0.6) == {"a": {1}}


def test_without_an_index_a_replica_that_was_sent_the_model_comes_first() -> None:
    candidates = [Candidate("a", None, 0, loaded=False), Candidate("b", None, 5), Candidate("c", None, 0, loaded=False)]
    for _ in range(50):
        assert rank(candidates, 20, full_load=400)[0].name == "b"
