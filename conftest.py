"""What the tests of every package share."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

REQUIRED = "BITNET_REQUIRE_DEVICES"


@pytest.fixture(scope="session")
def require_device() -> Callable[[str, str | None], None]:
    """``require_device(name, absent)`` skips the test when ``absent`` says why a device or tool is not there.

    ``name`` is what ``BITNET_REQUIRE_DEVICES`` calls it (comma-separated: ``cpu:avx2,qemu-aarch64``): where that names
    it, absence fails the test, so that CI never skips by accident. ``absent`` is None for a device that is there.
    """
    required = {part.strip() for part in os.environ.get(REQUIRED, "").split(",")}

    def require(name: str, absent: str | None) -> None:
        if absent is None:
            return
        if name in required:
            pytest.fail(f"{REQUIRED} names {name}, but {absent}")
        pytest.skip(absent)

    return require
