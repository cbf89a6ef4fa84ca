"""What a browser's Python has imported, for its next start: ``engine/keep.js`` asks for it in a Python of its own."""

from __future__ import annotations

import importlib
import py_compile
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import bitnet.server.web.engine  # noqa: F401  (some modules need what it puts in the place of those that browsers lack)

WITH_JAVASCRIPT = "bitnet.webgpu"
"""A package whose modules hold JavaScript objects, which are not in Python's memory."""


def loaded() -> list[str]:
    """Names of the modules that are loaded, and can be kept with Python's memory."""
    return [name for name in list(sys.modules) if not name.startswith(WITH_JAVASCRIPT)]


def load(names: Iterable[str]) -> None:
    """Import modules as far as they are to be had."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


def compile_others(folder: str) -> None:
    """Compile the modules that cannot be kept, in the folder of all packages, for use without a look at the source.

    Raises:
        py_compile.PyCompileError: A module has an error.
    """
    for path in sorted(Path(folder, *WITH_JAVASCRIPT.split(".")).rglob("*.py")):
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(path), doraise=True, invalidation_mode=mode)
