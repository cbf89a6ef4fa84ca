"""Makes the static folder: the page, the engine that answers it within the browser, Pyodide, and models."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from bitnet.core import __version__
from bitnet.core.errors import InvalidInputError
from bitnet.core.gguf.split import whole_name
from bitnet.core.model.file import open_model
from bitnet.server.api.page import assets, content_policy, with_styles
from bitnet.server.web import packages, pyodide

if TYPE_CHECKING:
    from importlib.abc import Traversable

RECORD = "site.json"
"""Names what a site offers. A folder that has it is a site, which another build may replace."""
START = '<script type="module" src="engine/start.js"></script>\n    '
"""Comes before the page's own script, whose requests it takes."""
MAIN = '<script type="module" src="assets/main.js">'
STYLES = '<link rel="stylesheet" href="assets/start.css">\n  </head>'
PACKED = frozenset({".whl", ".zip", ".gguf", ".png", ".woff2"})
"""Files that a server does not compress."""


def build(target: Path, models: Sequence[Path], pyodide_source: str | None) -> dict[str, int]:
    """Make a site, and put it where an earlier one was.

    Args:
        target: Its folder, which must not exist, or be empty, or hold an earlier site.
        models: GGUF files that the site offers; the first is the one that it proposes.
        pyodide_source: As for :func:`bitnet.server.web.pyodide.files`.

    Returns:
        Bytes by what they are for, compressed as a server compresses them; ``models`` comes last.

    Raises:
        InvalidInputError: The folder holds something else.
        BitNetError: A model or a package cannot be read, or Pyodide is not to be had.
    """
    if target.exists() and not (target / RECORD).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInputError(f"{target} is not an earlier site.", hint="Name an empty folder, or a new one.")
    offered = [_offer(path) for path in models]
    content = {**_page(), **_engine(pyodide.files(pyodide_source))}
    sizes = _sizes(content)
    archive = hashlib.sha256(content["engine/packages.zip"]).hexdigest()
    record = {"version": __version__, "bytes": sum(sizes.values()), "packages": archive, "models": offered}
    content[RECORD] = json.dumps(record, indent=1).encode()
    content["sw.js"] = _service_worker(content)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made = Path(scratch) / "site"
        for name, data in content.items():
            (path := made / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (made / "weights").mkdir()
        for path in models:
            shutil.copyfile(path, made / "weights" / path.name)
        if target.exists():
            target.rename(Path(scratch) / "earlier")
        made.rename(target)
    return sizes | {"models": sum(path.stat().st_size for path in models)}


def _offer(path: Path) -> dict[str, str | int]:
    """What a site says of a model.

    Raises:
        BitNetError: It is not a model, or is in several files.
    """
    name = path.name.removesuffix(".gguf")
    if whole_name(name) != name:
        raise InvalidInputError(f"{path} is a part of a model.", hint="A site takes models of one file.")
    gguf = open_model(path).gguf
    return {"name": name, "path": f"weights/{path.name}", "bytes": path.stat().st_size, "sha256": gguf.sha256()}


def _page() -> dict[str, bytes]:
    """The server's page, which begins with what starts the engine."""
    found = {path[1:]: content for path, (content, _, _) in assets().files.items()}
    own = dict(_walk(files("bitnet.server.web") / "assets"))
    found |= own
    html = (files("bitnet.server") / "page" / "index.html").read_text(encoding="utf-8")
    assert MAIN in html
    html = html.replace(MAIN, START + MAIN).replace("</head>", STYLES, 1)
    styled, hashes = with_styles(html.encode(), lambda path: found[path])
    policy = content_policy(hashes, scripts=("bitnet-engine",), framed=True)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    found["index.html"] = styled.replace(b'<meta charset="utf-8">', f'<meta charset="utf-8">\n    {meta}'.encode(), 1)
    found["assets/mcp.json"] = b'{"servers": []}'
    found["package.json"] = found["package.json"].replace(b"0.0.0", __version__.encode(), 1)
    found[".nojekyll"] = b""  # GitHub Pages would leave out what its generator does not know
    return found


def _engine(python: Mapping[str, bytes]) -> dict[str, bytes]:
    found = {f"engine/pyodide/{name}": data for name, data in python.items()}
    return found | {"engine/packages.zip": packages.archive()}


def _walk(folder: Traversable, inside: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{inside}{entry.name}/")
        else:
            yield inside + entry.name, entry.read_bytes()


def _sizes(content: Mapping[str, bytes]) -> dict[str, int]:
    """Compressed bytes of the page, of Pyodide, of numpy, and of this project's packages with what they import."""
    sizes = dict.fromkeys(("page", "Pyodide", "numpy", "packages"), 0)
    for name, data in content.items():
        path = PurePosixPath(name)
        kind = "Pyodide" if path.parent.name == "pyodide" else "packages" if path.suffix == ".zip" else "page"
        packed = len(data) if path.suffix in PACKED else len(gzip.compress(data, mtime=0))
        sizes["numpy" if path.name == pyodide.NUMPY else kind] += packed
    return sizes


def _service_worker(content: Mapping[str, bytes]) -> bytes:
    """The service worker, which keeps these files; other files make another version."""
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    names = [name for name in content if name not in ("sw.js", ".nojekyll", "index.html")]
    head = (
        f"const VERSION = {json.dumps(digest.hexdigest()[:20])};\nconst FILES = {json.dumps(['./', *sorted(names)])};\n"
    )
    return head.encode() + content["sw.js"]
