"""Where CI names NVRTC, the tests that compile with it must not be skipped."""

from __future__ import annotations

from collections.abc import Callable


def absent() -> str | None:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # its loader's own types
        return f"NVRTC cannot be used: {error}"
    return None


def test_nvrtc_is_there(require_device: Callable[[str, str | None], None]) -> None:
    require_device("nvrtc", absent())
