"""How much work a step gets, from measured times."""

from __future__ import annotations

import pytest

from bitnet.core.engine.pacing import MAX_BURST, Pace


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_clock_that_stands_still(looks_ahead: bool) -> None:
    """As that of a browser does between two steps: the sizes of steps stay within their limits."""
    pace = Pace(256, looks_ahead=looks_ahead)
    pace.computed(256, 1, 1, 0.0)
    assert pace.beside_decode >= 64
    pace.computed(2, 2, 1, 0.0)
    assert 1 <= pace.burst([]).passes <= MAX_BURST
