"""The archive of Python packages that a site's engine imports, as this Python has them installed: without libraries for
this machine, with the browser's."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from bitnet.core.errors import BitNetError

OWN = ("bitnet-core", "bitnet-server", "bitnet-webgpu")
"""Distributions of this project, with the metadata by which backends are found."""
OTHERS = ("click", "jinja2", "markupsafe", "packaging", "prometheus_client")
LEFT_OUT = frozenset({"__pycache__", "assets", "page", "ray"})
"""Folders that a browser has no use for."""
LEFT_OUT_KINDS = frozenset({".gguf", ".so", ".pyd", ".dylib", ".dll", ".spv", ".pyc", ".c", ".pyx"})
TIME = (1980, 1, 1, 0, 0, 0)
"""The time of every file, so that equal files make equal archives."""


def archive() -> bytes:
    """The archive, as a zip file.

    Raises:
        BitNetError: A package is not installed.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for name, data in sorted(_files()):
            packed.writestr(zipfile.ZipInfo(name, TIME), data, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def _files() -> Iterator[tuple[str, bytes]]:
    for name in OWN:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            raise BitNetError(f"{name} is not installed.", hint=f"pip install {name}") from None
        for file in ("METADATA", "entry_points.txt"):
            if (text := found.read_text(file)) is not None:
                yield f"{name.replace('-', '_')}-{found.version}.dist-info/{file}", text.encode()
        yield from _package(name.replace("-", "."))
    for name in OTHERS:
        yield from _package(name)


def _package(name: str) -> Iterator[tuple[str, bytes]]:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BitNetError(f"the package {name} is not installed.", hint=f"pip install {name}")
    root = Path(next(iter(spec.submodule_search_locations)))
    for folder, inside, names in os.walk(root, followlinks=True):
        inside[:] = [one for one in inside if one not in LEFT_OUT]
        for file in names:
            path = Path(folder, file)
            if path.suffix not in LEFT_OUT_KINDS and not file.startswith("."):
                yield f"{name.replace('.', '/')}/{path.relative_to(root).as_posix()}", path.read_bytes()
