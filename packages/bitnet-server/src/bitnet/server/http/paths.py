"""Paths of requests: what a proxy has put before them, needless slashes, and the nearest path that there is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from bitnet.server.request.call import Scope

LIKE = 0.75
"""How alike a path must be to be named, as ``difflib`` counts: a missing prefix or a wrong letter is, not more."""
TYPED = 0.93
"""How alike a path must be to be named before one that it only ends with: one wrong letter of a path of some length."""
MAX_COMPARED = 100
"""Maximum characters of a path that is compared; comparing takes time that grows with their square."""


def route(scope: Scope) -> str:
    """The path of a request below the server's root path, without doubled and trailing slashes; the root path itself
    is empty.

    A proxy may strip the root path or leave it on. An ASGI server puts it before the path in either case.
    """
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    for _ in range(2 if root else 0):
        if path == root or path.startswith(root + "/"):
            path = path[len(root) :]
    return re.sub("//+", "/", path).rstrip("/") or path[:1]  # "/" and "//" are "/", and "" stays what it is


def nearest(path: str, known: Iterable[str]) -> str | None:
    """The known path that a client may have meant: with another prefix, or written almost alike."""
    known = sorted(known, key=len, reverse=True)
    if found := get_close_matches(path[:MAX_COMPARED], known, 1, TYPED):
        return found[0]
    for one in known:
        if len(one) > 1 and (path.endswith(one) or (len(path) > 1 and one.endswith(path))):
            return one
    found = get_close_matches(path[:MAX_COMPARED], known, 1, LIKE)
    return found[0] if found else None
