"""The choice of a replica, and what a router remembers for it."""

from __future__ import annotations

from collections import Counter

from bitnet.server.ray.index import SILENT_SECONDS
from bitnet.server.ray.scoring import STALE_SECONDS, Candidate, Shared, matched_tokens, rank, with_models
from bitnet.server.ray.sent import Loads, Prompts, Sent

BLOCK = 16
HELD = {"a": {1, 2, 3}, "b": set[int](), "c": {2}}


def test_only_an_unbroken_beginning_matches() -> None:
    assert matched_tokens([1, 2, 3, 4], {1, 2, 4}, BLOCK) == 2 * BLOCK
    assert matched_tokens([1, 2], {2}, BLOCK) == 0
    assert matched_tokens([], {1}, BLOCK) == 0


def test_the_score_is_the_share_of_the_prompt_less_the_relative_load() -> None:
    candidates = [Candidate("a", 8 * BLOCK, 300.0), Candidate("b", 0, 100.0)]
    first, second = rank(candidates, 160, places=5, typical=100)
    assert (first.name, first.matched, first.score) == ("a", 128, 128 / 160 - (300 - 100) / 500)
    assert (second.name, second.matched, second.score) == ("b", 0, 0.0)
    first, second = rank(candidates, 160, places=1, typical=100)
    assert (first.name, second.name, second.score) == ("b", "a", 128 / 160 - (300 - 100) / 200)
    assert rank(candidates, 160, places=5, typical=100, beta=3.0)[0].name == "b"


def test_a_conversation_stays_where_its_prefix_is_until_that_replica_has_much_more_to_do() -> None:
    for load, best in ((0, "a"), (320, "a"), (5000, "b")):
        candidates = [Candidate("a", 20 * BLOCK, load), Candidate("b", 0, 0), Candidate("c", 0, 0)]
        assert (rank(candidates, 330, places=4, typical=100)[0].name == "a") == (best == "a")


def test_equal_replicas_are_taken_equally_often() -> None:
    candidates = [Candidate(name, 0, 0.0) for name in "abc"]
    count = Counter(rank(candidates, 20, places=4, typical=100)[0].name for _ in range(3000))
    assert min(count.values()) > 850


def test_with_an_old_view_it_is_the_less_loaded_of_two() -> None:
    candidates = [
        Candidate(name, 0, load, fresh=False) for name, load in zip("abcd", (0.0, 1.0, 2.0, 3.0), strict=True)
    ]
    count = Counter(rank(candidates, 20, places=4, typical=100)[0].name for _ in range(6000))
    # of the six pairs, a is in three, b is the less loaded of two others, c of one, and d of none
    assert count["d"] == 0
    for name, share in (("a", 3 / 6), ("b", 2 / 6), ("c", 1 / 6)):
        assert abs(count[name] / 6000 - share) < 0.04
    assert len(rank(candidates, 20, places=4, typical=100)) == 4


def test_with_an_old_view_it_is_the_holder_or_a_random_other_one() -> None:
    """The holder, unless it has more to do than all its places and the other one does not."""
    for load, best in ((0, {"a"}), (390, {"a"}), (5000, {"b", "c"})):
        old = [Candidate("a", 160, load, fresh=False), *(Candidate(name, 0, 0.0, fresh=False) for name in "bc")]
        for _ in range(20):
            first, second, _ = rank(old, 160, places=4, typical=100)
            assert first.name in best
            assert "a" in (first.name, second.name)


def test_what_others_share_is_no_reason_to_stay() -> None:
    """A prompt has 160 tokens: 128 are shared with others under way, and 20 are a conversation's own."""
    shared = Shared(128, 4)

    def best(matched: int, load: float) -> str:
        candidates = [Candidate("a", matched, load), Candidate("b", 128, 0.0), Candidate("c", 0, 0.0)]
        return rank(candidates, 160, places=16, typical=10, shared=shared)[0].name

    assert best(128, 10) == "b"
    assert best(148, 10) == "a"
    assert best(148, 90) == "a"
    assert best(148, 150) == "b"


def test_a_shared_prefix_is_computed_once_more_when_that_pays() -> None:
    """It has 1,280 of 1,300 tokens; with 8 users, that is 160 for each."""
    for load, best in ((140, "a"), (170, "b")):
        candidates = [Candidate("a", 1280, load), *(Candidate(name, 0, 0.0) for name in "bcdefgh")]
        found = rank(candidates, 1300, places=64, typical=10, shared=Shared(1280, 8))[0].name
        assert (found == "a") == (best == "a")


def test_there_may_be_no_replica() -> None:
    assert rank([], 20, places=4, typical=100) == []


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


def test_a_prompt_counts_as_cached_once_it_ended_until_its_replica_has_had_time_to_say_so() -> None:
    prompts, said = Prompts(), {"a": 0.0, "b": 0.0}

    def leading(prompt: list[int], now: float) -> dict[str, int]:
        return prompts.leading(prompt, now, said.__getitem__)

    prompts.begin("r1", "a", [1, 2])
    prompts.begin("r2", "a", [1, 2, 3])
    assert leading([1, 2, 3, 4], 10.0) == {}
    prompts.end("r2", 10.0)
    prompts.end("r2", 10.5)
    assert leading([1, 2, 3, 4], 10.1 + STALE_SECONDS) == {"a": 3}
    prompts.end("r1", 10.0 + STALE_SECONDS)
    said["a"] = 10.1 + STALE_SECONDS
    assert leading([1, 2, 3], 10.2 + STALE_SECONDS) == {"a": 2}  # of the request that ended later
    prompts.begin("r3", "b", [1])
    prompts.begin("r3", "a", [1])  # it was rejected by the first
    prompts.end("r3", 12.0)
    assert leading([1, 2], 12.0) == {"a": 2}
    prompts.keep({"b"})
    assert leading([1], 12.0) == {}
    prompts.begin("r4", "b", [1])
    prompts.end("r4", 20.0)
    assert leading([1], 20.0 + SILENT_SECONDS) == {"b": 1}
    assert leading([1], 20.1 + SILENT_SECONDS) == {}
    assert not prompts._counts


def test_a_prompt_shares_what_requests_under_way_begin_with() -> None:
    prompts = Prompts()
    assert prompts.shared([1, 2], BLOCK) == Shared(0, 0)
    prompts.begin("r1", "a", [1, 2, 3])
    prompts.begin("r2", "b", [1, 2])
    prompts.begin("r3", "a", [1, 4])
    assert prompts.shared([1, 2, 5], BLOCK) == Shared(2 * BLOCK, 2)
    assert prompts.shared([5, 2], BLOCK) == Shared(0, 0)
    prompts.keep({"a", "b"})
    prompts.end("r1", 0.0)
    prompts.stop("r2")
    assert prompts.shared([1, 2, 5], BLOCK) == Shared(BLOCK, 2)  # one is under way, and one has just ended
    prompts.keep({"b"})
    assert prompts.shared([1], BLOCK) == Shared(0, 0)
    assert not prompts._users


def test_a_second_replica_loads_a_model_when_the_first_has_all_its_places_taken() -> None:
    """The less loaded replicas lack the model, and a prompt that none has cached is worth less than loading it."""
    for load, best in ((0, "a"), (390, "a"), (410, "b")):
        candidates = [Candidate("a", 0, load), Candidate("b", 0, 0, loaded=False)]
        assert rank(candidates, 20, places=4, typical=100)[0].name == best, load
    nobody = [Candidate("a", 0, 5, loaded=False), Candidate("b", 0, 0, loaded=False)]
    assert rank(nobody, 20, places=4, typical=100)[0].name == "b"


def test_a_model_that_nobody_has_goes_where_there_are_few() -> None:
    found = with_models([Candidate("a", 0, 0), Candidate("b", 0, 0), Candidate("c", 0, 0)], HELD, 9)
    assert [one.name for one in rank(found, 20, places=4, typical=100)] == ["b", "c", "a"]
    found = with_models([Candidate("a", 0, 0), Candidate("b", 0, 0), Candidate("c", 0, 0)], HELD, 1)
    assert rank(found, 20, places=4, typical=100)[0].name == "a"


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
    candidates = [Candidate(name, 0, 5 * (name == "b"), fresh=False, loaded=name == "b") for name in "abc"]
    for _ in range(50):
        assert rank(candidates, 20, places=4, typical=100)[0].name == "b"
