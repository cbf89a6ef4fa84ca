"""The options that devices are opened with."""

from __future__ import annotations

import pytest

from bitnet.core.devices.options import open_options
from bitnet.core.errors import InvalidInputError
from bitnet.core.hal import OpenOptions


def test_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BITNET_THREADS", "BITNET_STRICT_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert open_options() == OpenOptions(threads=None, strict=False)


def test_variables_are_defaults_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_THREADS", " 11 ")
    monkeypatch.setenv("BITNET_STRICT_MODE", "yes")
    assert open_options() == OpenOptions(threads=11, strict=True)
    assert open_options(threads=2, strict=False) == OpenOptions(threads=2, strict=False)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "100000", "²", "9" * 5000])
def test_a_variable_that_is_no_number_of_threads(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("BITNET_THREADS", value)
    with pytest.raises(InvalidInputError, match=r"^BITNET_THREADS is .* it must be a number from 1 to 1024"):
        open_options()


@pytest.mark.parametrize("threads", [0, -1, 1025, 2.0, "2"])
def test_a_number_of_threads_that_cannot_be(threads: int) -> None:
    with pytest.raises(InvalidInputError, match=f"^threads is {threads!r}; it must be a number from 1 to 1024"):
        OpenOptions(threads=threads)
