"""What a browser's Python has imported, for its next start: modules compiled, as an archive, and which of Python's own.

``engine/keep.js`` asks for it in a Python of its own, once the first answer has been given.
"""

from __future__ import annotations

import io
import marshal
import sys
import zipfile
from collections.abc import Sequence
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

UNCHECKED = MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
"""Begins compiled code that is used without a look at its source (PEP 552)."""


def loaded() -> tuple[list[str], list[str]]:
    """Source files of the modules that are loaded, and names of those that come with Python."""
    files, names = set(), []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if ".zip/" in path:
            names.append(name)
        elif path.endswith(".py") and Path(path).is_file():  # Python's frozen modules have no file
            files.add(path)
    return sorted(files), names


def compiled(files: Sequence[str]) -> bytes:
    """Compiled code of source files, as a zip file that is unpacked in the root folder.

    Raises:
        OSError: A file cannot be read.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        for file in files:
            code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
            packed.writestr(cache_from_source(file).lstrip("/"), UNCHECKED + marshal.dumps(code))
    return made.getvalue()
