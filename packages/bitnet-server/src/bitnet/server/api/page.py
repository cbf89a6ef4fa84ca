"""The page at ``/`` and its assets: read once from the package, served with a strict Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from urllib.parse import urlsplit

from bitnet.server.models.state import State
from bitnet.server.request.call import Call
from bitnet.server.request.errors import RequestError

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types pdf-worker"
)
HEADERS = (
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-cache"),
)
STYLESHEET = re.compile(rb'<link rel="stylesheet" href="(assets/[^"]+)">')
MCP_PATH = "/assets/mcp.json"
"""Where the page reads which MCP servers it may call."""


@dataclass(frozen=True, slots=True)
class Assets:
    """The files of the page.

    Attributes:
        files: Paths, each with content, content type and entity tag.
        styles: The sources by which the policy names the style sheets in ``index.html``.
    """

    files: Mapping[str, tuple[bytes, str, str]]
    styles: tuple[str, ...]


def policy(mcp: Sequence[str]) -> str:
    """The Content-Security-Policy, which lets the page connect to its own server and to those MCP servers."""
    origins = sorted({f"{one.scheme}://{one.netloc}" for one in map(urlsplit, mcp)})
    return content_policy(assets().styles, origins)


def content_policy(
    styles: Sequence[str], origins: Sequence[str] = (), *, scripts: Sequence[str] = (), framed: bool = False
) -> str:
    """A Content-Security-Policy of the page.

    Args:
        styles: Sources of its style sheets.
        origins: Which it may connect to besides its own.
        scripts: Names of further policies of Trusted Types, which make addresses of workers.
        framed: Whether it says nothing of frames around the page, as a policy in the page itself cannot.
    """
    found = POLICY.replace("connect-src 'self'", " ".join(["connect-src 'self'", *origins]))
    found = found.replace("style-src 'self'", " ".join(["style-src 'self'", *styles]))
    found = " ".join([found, *scripts])
    return found.replace("frame-ancestors 'none'; ", "") if framed else found


@cache
def assets() -> Assets:
    """The files in the package's folder of the page; no others are served."""
    found: dict[str, tuple[bytes, str]] = {}
    page = files("bitnet.server") / "page"
    pending = [("", page)] if page.is_dir() else []
    while pending:
        path, folder = pending.pop()
        for entry in folder.iterdir():
            name = f"{path}/{entry.name}"
            if entry.is_dir():
                pending.append((name, entry))
            elif (kind := KINDS.get("." + entry.name.rpartition(".")[2])) is not None:
                found[name] = entry.read_bytes(), kind
    styles: list[str] = []
    if index := found.get("/index.html"):
        content, styles = with_styles(index[0], lambda path: found[f"/{path}"][0])
        found["/index.html"] = content, index[1]
    tagged = {path: (*one, f'"{hashlib.sha256(one[0]).hexdigest()[:20]}"') for path, one in found.items()}
    return Assets(tagged, tuple(styles))


def with_styles(html: bytes, read: Callable[[str], bytes]) -> tuple[bytes, list[str]]:
    """Put style sheets into the page: a browser paints nothing before it has them, and need not ask for them then.

    Returns:
        The page, and the hash of each style sheet, as a policy names it.
    """
    styles: list[str] = []

    def style(found: re.Match[bytes]) -> bytes:
        text = read(found[1].decode())
        styles.append(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'")
        return b"<style>" + text + b"</style>"

    return STYLESHEET.sub(style, html), styles


async def page(state: State, call: Call) -> None:
    """A file of the page; ``/`` is ``index.html``."""
    path = "/index.html" if "path" not in call.scope["path_params"] else f"/assets/{call.scope['path_params']['path']}"
    if not state.settings.page or path not in {*assets().files, MCP_PATH}:
        raise RequestError(404, "There is no such page.")
    headers = [("content-security-policy", policy(state.settings.mcp)), *HEADERS]
    if path == MCP_PATH:
        return await call.reply({"servers": list(state.settings.mcp)}, headers=headers)
    content, kind, tag = assets().files[path]
    headers.append(("etag", tag))
    if (b"if-none-match", tag.encode()) in call.scope["headers"]:
        await call.reply(b"", status=304, kind=kind, headers=headers)
    else:
        await call.reply(content, kind=kind, headers=headers)


async def slash(state: State, call: Call) -> None:
    """Send a browser from the root path to the same with a slash, from where the page's addresses lead on."""
    await call.reply(b"", status=308, headers=[("location", call.scope["path"].rpartition("/")[2] + "/")])
