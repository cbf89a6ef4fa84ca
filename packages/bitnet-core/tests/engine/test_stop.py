"""Stop strings: however the text is split into pieces, they end it at the same place and are never shown."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet.core.engine.stop import StopMatcher

text = st.text("abc", max_size=24)
stop_strings = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def expected(whole: str, stops: list[str]) -> tuple[str, str | None]:
    """Text shown and stop string found, by trying every end of the text in turn."""
    for end in range(len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return whole[: end - len(longest)], longest
    return whole, None


@settings(max_examples=500, deadline=None)
@given(whole=text, stops=stop_strings, cuts=st.lists(st.integers(0, 24)))
def test_any_cut_gives_the_same(whole: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown, matched = expected(whole, stops)
    borders = [0, *sorted(min(c, len(whole)) for c in cuts), len(whole)]
    out = ""
    for begin, end in pairwise(borders):
        out += matcher.push(whole[begin:end])
        assert shown.startswith(out), "a part of a stop string was shown"
        if matcher.matched is None:
            pending = whole[len(out) : end]
            # Nothing is held back but what could still become a stop string.
            assert not pending or any(stop.startswith(pending) for stop in stops)
    out += matcher.flush()
    assert (out, matcher.matched) == (shown, matched)
