"""The device that opens beside other work."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bitnet.core.errors import BitNetError
from bitnet.core.opening import TURN, opening

USUAL = 0.004


@pytest.fixture(autouse=True)
def usual_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_device_is_open() -> None:
    """In whatever order two that overlap end."""
    first, second = opening("cpu", None), opening("cpu", 1)
    futures = [first.__enter__(), second.__enter__()]
    assert sys.getswitchinterval() == pytest.approx(TURN)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(TURN)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(USUAL)
    for future in futures:
        selection, device = future.result()
        assert selection.info.backend == "cpu"
        device.close()


def test_turns_are_as_usual_after_an_error() -> None:
    with pytest.raises(BitNetError), opening("no-such-device", None) as future:
        future.result()
    assert sys.getswitchinterval() == pytest.approx(USUAL)
