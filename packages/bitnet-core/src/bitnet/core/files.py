"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from bitnet.core.errors import BitNetError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes its name, in one step, once everything is written; until then, what was there stays.

    A pipe or a device, such as ``/dev/stdout``, is not replaced but written to.

    Raises:
        BitNetError: The file cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()  # a link stays one
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BitNetError(f"{path} cannot be written: {error.strerror or error}.") from error
