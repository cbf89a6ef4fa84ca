"""Streamed text: whole characters, no part of a stop string, and in total the completion's text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from bitnet.core.engine import GenerationOptions

MakeRig = Callable[..., Any]


def force(rig: Any, text: bytes, **options: Any) -> Iterable[Any]:
    """Updates of a generation that is made to say ``text``, chosen by the host as it wants 21 log-probabilities."""
    (sequence,) = rig.engine.preparer.prepare([1], GenerationOptions(logprobs=21, ignore_eos=True, **options))
    wanted = iter(text)
    sequence._choose = lambda logits: next(wanted)
    rig.engine.add([sequence])
    while rig.engine.busy:
        yield from rig.engine.step()


def test_characters_are_whole(make_rig: MakeRig) -> None:
    text = "Grüße, 世界 🙂!"
    raw = text.encode()
    updates = list(force(make_rig(), raw, max_tokens=len(raw)))
    assert len(updates) == len(raw)
    assert "".join(u.chunk.text for u in updates) == text == updates[-1].result.text
    assert all(u.chunk.text in text for u in updates)
    assert bytes(token for u in updates for token in u.chunk.tokens) == raw == bytes(updates[-1].result.tokens)


def test_half_a_character_at_the_end_is_marked(make_rig: MakeRig) -> None:
    updates = list(force(make_rig(), "aé".encode()[:2], max_tokens=2))
    assert [u.chunk.text for u in updates] == ["a", "\ufffd"]


@pytest.mark.parametrize("stop", ["STOP", ["nothing", "STOP"], "é!"])
def test_a_stop_string_over_many_tokens(make_rig: MakeRig, stop: Any) -> None:
    raw = "So it goes. STé! STOP and more".encode()
    updates = list(force(make_rig(), raw, max_tokens=len(raw), stop=stop))
    text = "".join(u.chunk.text for u in updates)
    result = updates[-1].result
    assert text == result.text == ("So it goes. ST" if stop == "é!" else "So it goes. STé! ")
    assert (result.finish_reason, result.stop_reason) == ("stop", "é!" if stop == "é!" else "STOP")
    assert bytes(result.tokens).decode().endswith(result.stop_reason)


def test_what_looked_like_a_stop_string_comes_with_the_end(make_rig: MakeRig) -> None:
    updates = list(force(make_rig(), b"abST", max_tokens=4, stop="STOP"))
    assert [u.chunk.text for u in updates] == ["a", "b", "", "ST"]
    assert updates[-1].result.finish_reason == "length"


def test_a_stop_string_wins_over_the_length(make_rig: MakeRig) -> None:
    *_, last = force(make_rig(), b"abST", max_tokens=4, stop="ST")
    assert (last.result.text, last.result.finish_reason) == ("ab", "stop")
