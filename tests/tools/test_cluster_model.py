"""The discrete-event model of a cluster: what can be computed by hand, what is conserved, and the order of ways."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("simpy", reason="SimPy is not installed (the group `simulation`)")

from cluster_model.autoscaling import Scale
from cluster_model.replica import Speed
from cluster_model.routing import WAYS
from cluster_model.run import Failure, simulate
from cluster_model.traces import BLOCK, Conversation, Shape, Turn, conversations

STEP, PROMPT = 0.01, 0.001
SLOW = Speed(sequences=(1, 4), seconds=(STEP, STEP), prompt_seconds=PROMPT, places=4, chunk=64, blocks=1000)
SHAPE = Shape(shared=320, sorts=8, turns=5, question=40, answer=10, pause=0.3)


def turn(prompt: int, output: int, start: int = 0) -> Turn:
    return Turn(0.0, tuple(range(start, start + prompt // BLOCK)), prompt, output)


def test_one_replica_as_computed_by_hand() -> None:
    """A prompt of 100 tokens takes two chunks; the second turn computes what is behind its last cached block."""
    talk = Conversation(1.0, 0, (turn(100, 5), turn(130, 3)))
    found = simulate([talk], 1, SLOW, "random", random.Random(0))
    cached = 100 // BLOCK * BLOCK
    assert found.ttft == pytest.approx([2 * STEP + 100 * PROMPT, STEP + (130 - cached) * PROMPT])
    assert found.seconds == pytest.approx(1.0 + found.ttft.sum() + 4 * STEP + 2 * STEP)
    assert (found.cached, found.prompts, found.tokens) == (cached, 230, 8)


def test_an_answer_is_cached_for_the_next_turn() -> None:
    first = Turn(0.0, (0, 1), 2 * BLOCK, BLOCK + 1, answered=(2,))
    talk = Conversation(0.0, 0, (first, turn(3 * BLOCK + 4, 1)))
    found = simulate([talk], 1, SLOW, "prefix", random.Random(0))
    assert found.cached == 3 * BLOCK
    assert found.ttft[1] == pytest.approx(STEP + 4 * PROMPT)


def test_a_common_prefix_is_computed_once() -> None:
    """Of two prompts that come together, the second waits for two chunks of the first, and has 12 tokens of its own."""
    talks = [Conversation(0.0, i, (turn(tokens, 1),)) for i, tokens in enumerate((130, 140))]
    found = simulate(talks, 1, SLOW, "random", random.Random(0))
    assert found.ttft == pytest.approx([3 * STEP + (128 + 2 + 12) * PROMPT] * 2)


def test_prompts_beside_decoding_get_a_quarter_of_a_step() -> None:
    """Where 25 ms are fewer tokens than that. One sequence decodes, so a prompt of 40 tokens takes three steps."""
    talks = [Conversation(0.0, 0, (turn(10, 50),)), Conversation(0.1, 1, (turn(40, 1, start=100),))]
    found = simulate(talks, 1, SLOW, "random", random.Random(0))
    steps = [STEP + count * PROMPT for count in (16, 16, 8)]
    assert found.ttft[0] == pytest.approx(sum(steps))  # it comes at the end of a step


def test_requests_take_time_to_reach_a_replica() -> None:
    talks = [Conversation(0.0, 0, (turn(10, 1), turn(10, 1)))]
    found = simulate(talks, 1, SLOW, "random", random.Random(0), delay=0.5)
    assert found.ttft[0] == pytest.approx(0.5 + STEP + 10 * PROMPT)


def test_real_replicas_get_the_prompts_of_the_trace() -> None:
    """Blocks of tokens are equal where the trace says so, and nowhere else."""
    pytest.importorskip("ray", reason="Ray is not installed (the group `ray`)")
    from bitnet.core.engine.blocks import prefix_digests
    from compare_simulation import SHAPE as LOCAL
    from compare_simulation import prompts

    digests: dict[int, bytes] = {}
    for talk in conversations(LOCAL, 12, 1.0, random.Random()):
        for one, prompt in zip(talk.turns, prompts(talk), strict=True):
            assert len(prompt.content) == one.prompt
            assert prompt.output_tokens == one.output
            found = prefix_digests([*map(int, prompt.content)], BLOCK)
            for block, digest in zip(one.blocks, found, strict=True):
                assert digests.setdefault(block, digest) == digest
    assert len(set(digests.values())) == len(digests)


def test_more_requests_than_places_wait() -> None:
    """Six requests of one token's prompt and ten tokens on four places: the last two begin when the first four end."""
    talks = [Conversation(0.0, i, (Turn(0.0, (), 1, 10),)) for i in range(6)]
    found = simulate(talks, 1, SLOW, "random", random.Random(0))
    first = STEP + 4 * PROMPT
    assert np.sort(found.ttft)[:4] == pytest.approx([first] * 4)
    assert np.sort(found.ttft)[4:] == pytest.approx([first + 9 * STEP + STEP + 2 * PROMPT] * 2)


@pytest.mark.parametrize("way", WAYS)
def test_each_request_ends_once_whatever_fails(way: str) -> None:
    seed = random.randrange(1 << 30)
    talks = conversations(SHAPE, 40, 20.0, random.Random(seed))
    found = simulate(talks, 8, SLOW, way, random.Random(seed), failure=Failure(1.0, 0.25))
    assert len(found.ttft) + found.lost == 40 * SHAPE.turns, seed
    assert found.ttft.min() >= STEP
    again = simulate(talks, 8, SLOW, way, random.Random(seed), failure=Failure(1.0, 0.25))
    assert np.array_equal(found.ttft, again.ttft), seed


def test_prefixes_are_found_by_those_who_look() -> None:
    seed = random.randrange(1 << 30)
    talks = conversations(SHAPE, 60, 20.0, random.Random(seed))
    hits = {way: simulate(talks, 8, SLOW, way, random.Random(seed)).hits for way in WAYS}
    assert hits["prefix"] > hits["random"] + 0.1, (seed, hits)
    assert hits["prefix"] > hits["least loaded"] + 0.1, (seed, hits)


def test_a_full_cache_evicts() -> None:
    small = Speed(sequences=(1,), seconds=(STEP,), prompt_seconds=PROMPT, places=1, chunk=64, blocks=4)
    prompt = 4 * BLOCK
    talk = Conversation(0.0, 0, (turn(prompt, 1), turn(prompt, 1, start=100), turn(prompt, 1)))
    found = simulate([talk], 1, small, "prefix", random.Random(0))
    assert found.cached == 0


def test_replicas_follow_a_step_of_the_load_and_do_not_flap() -> None:
    """Ten requests at a time for a minute, replicas with four places: one is there, then three, then one."""
    asked = tuple(Turn(0.0, (), 1, 100) for _ in range(60))
    talks = [Conversation(30.0, i, asked) for i in range(10)]
    late = Conversation(400.0, 10, (Turn(0.0, (), 1, 10),))
    found = simulate([*talks, late], 1, SLOW, "prefix", random.Random(0), scale=Scale(min=1, max=8))
    counts = [count for _, count in found.replicas]
    top = counts.index(max(counts))
    assert max(counts) == 3
    assert counts == [*sorted(counts[:top]), *sorted(counts[top:], reverse=True)]
    assert counts[-1] == 1
    first = next(time for time, count in found.replicas if count > 1)
    assert 30 + 5 + 10 <= first <= 30 + 10 + 5 + 10 + 2  # too few for 5 s, once the average shows it; and 10 s to start
    assert len(found.ttft) == 601
    spans = zip(found.replicas, [*found.replicas[1:], (found.seconds, 0)], strict=True)
    assert found.busy == pytest.approx(sum(count * (end - start) for (start, count), (end, _) in spans))
