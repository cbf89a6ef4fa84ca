"""Pyodide, the Python of browsers: which files of it a site has, with their hashes, and where they come from."""

from __future__ import annotations

import hashlib
import json
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from bitnet.core.errors import BitNetError, InvalidInputError

VERSION = "0.27.7"
ADDRESS = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full"
"""Where Pyodide's project publishes its files."""
SECONDS = 60.0
"""Seconds for which a download may be silent."""
NUMPY = "numpy-2.0.2-cp312-cp312-pyodide_2024_0_wasm32.whl"
FILES = {
    "pyodide.mjs": "04c052c815abb0bf2981fa38c2dfa58e3120ee5288c956df2b2a15e301782c5f",
    "pyodide.asm.js": "6b4c90de5b7172873f04f21884d0e9d2274e305fe32116558fe3e4fbe3618d51",
    "pyodide.asm.wasm": "a50dd1843f805a0b7c45b61037ee0d7b26dfe85efe0e18ef95a34ad24e401f5f",
    "python_stdlib.zip": "16611534726e5d8ac2bd8f926410b2dcb8d6f49aa24913463533b457a2115c16",
    NUMPY: "ebb61241d962b98b21597d7ce43b67668a6d5bab3acec4fbe958657320d7cd08",
}
"""The SHA-256 of each file."""
LOCK = {
    "info": {
        "abi_version": "2024_0",
        "arch": "wasm32",
        "platform": "emscripten_3_1_58",
        "python": "3.12.7",
        "version": VERSION,
    },
    "packages": {
        "numpy": {
            "depends": [],
            "file_name": NUMPY,
            "imports": ["numpy"],
            "install_dir": "site",
            "name": "numpy",
            "package_type": "package",
            "sha256": FILES[NUMPY],
            "unvendored_tests": True,
            "version": "2.0.2",
        }
    },
}
"""What Pyodide reads from ``pyodide-lock.json``: the packages that it can load."""


def files(source: str | None) -> dict[str, bytes]:
    """The files of Pyodide by name, checked.

    Args:
        source: A folder that has them, or the address of one; None: :data:`ADDRESS`.

    Raises:
        InvalidInputError: A file is not in the folder, or is not the pinned one.
        BitNetError: A file cannot be downloaded.
    """
    place = ADDRESS if source is None else source
    found = {name: _read(place, name) for name in FILES}
    for name, data in found.items():
        if (digest := hashlib.sha256(data).hexdigest()) != FILES[name]:
            raise InvalidInputError(
                f"{name} of {place} is not the one of Pyodide {VERSION}: its SHA-256 is {digest}, not {FILES[name]}.",
                hint=f"Take the files of {ADDRESS}.",
            )
    return found | {"pyodide-lock.json": json.dumps(LOCK).encode()}


def _read(place: str, name: str) -> bytes:
    try:
        if not place.startswith(("https://", "http://")):
            return (Path(place) / name).read_bytes()
        with urlopen(f"{place.rstrip('/')}/{name}", timeout=SECONDS) as answer:
            data: bytes = answer.read()
            return data
    except FileNotFoundError:
        raise InvalidInputError(
            f"{place} has no {name}.", hint=f"--pyodide names a folder with the files of Pyodide {VERSION}."
        ) from None
    except (OSError, HTTPException) as error:
        raise BitNetError(
            f"{name} cannot be read from {place}: {error}.",
            hint="Download the files yourself, and name their folder with --pyodide.",
        ) from error
