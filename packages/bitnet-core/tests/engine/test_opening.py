"""Opening a device in the background."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core.cpu.device import CpuDevice
from bitnet.core.devices import opening as module
from bitnet.core.devices.opening import opening
from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.support.turns import TURN

USUAL = 0.004


@pytest.fixture(autouse=True)
def usual_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_device_is_open() -> None:
    """In whatever order two that overlap end."""
    first, second = (opening("cpu", threads=count, strict=None) for count in (None, 1))
    futures = [first.__enter__(), second.__enter__()]
    assert sys.getswitchinterval() == pytest.approx(TURN)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(TURN)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(USUAL)
    for future in futures:
        ((selection, device),) = future.result()
        assert selection.info.backend == "cpu"
        device.close()


def test_turns_are_as_usual_after_an_error() -> None:
    with pytest.raises(BitNetError), opening("no-such-device", threads=None, strict=None) as future:
        future.result()
    assert sys.getswitchinterval() == pytest.approx(USUAL)


def test_devices_that_open_at_the_same_time_have_the_threads_they_were_given(require_device: Any) -> None:
    """And what the environment says stays as it was, also for those that were given no number."""

    def threads(count: int | None) -> set[int]:
        found = set()
        for _ in range(50):
            with opening("cpu", threads=count, strict=None) as future:
                ((_, device),) = future.result()
            absent = "the native library is not there; numpy computes with one thread"
            require_device("cpu:scalar", None if isinstance(device, CpuDevice) else absent)
            assert isinstance(device, CpuDevice)
            found.add(device.threads)
            device.close()
        return found

    (usual,), before = threads(None), os.environ.get("BITNET_THREADS")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(threads, [None, usual + 1, usual + 2, usual + 3]))
    assert found == [{usual}, {usual + 1}, {usual + 2}, {usual + 3}]
    assert os.environ.get("BITNET_THREADS") == before


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_a_number_of_threads_that_cannot_be_is_refused(count: int) -> None:
    wanted = pytest.raises(InvalidInputError, match=rf"^threads is {count};")
    with wanted, opening("cpu", threads=count, strict=None) as future:
        future.result()


def test_what_opened_is_closed_where_another_fails_for_an_unexpected_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is no error of the device, and its neighbour opened after it."""
    closed: list[str] = []

    class Opened:
        def close(self) -> None:
            closed.append("second")

    def first(*, isolated: bool) -> Any:
        raise InvalidInputError("BITNET_NO_KERNEL_CACHE is 'maybe'.")

    def second(*, isolated: bool) -> Any:
        return Opened()

    options = SimpleNamespace(strict=False)
    selections = [SimpleNamespace(open=how, options=options, requested="x") for how in (first, second)]
    monkeypatch.setattr(module, "select_devices", lambda *_, **__: selections)
    with pytest.raises(InvalidInputError, match="maybe"), opening("x,y", threads=None, strict=None) as future:
        future.result()
    assert closed == ["second"]
