"""What the tests of the CPU device share."""

from __future__ import annotations

import ctypes

import pytest

from bitnet.core.cpu import native


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The native library of this machine."""
    handle = native.library().handle
    if handle is None:
        pytest.skip("there is no native library for this platform")
    return handle
