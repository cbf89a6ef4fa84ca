"""Finds what has changed since CI last passed, so that a run can leave out tests that would only pass again.

That state is the commit that ``BITNET_BASE`` names (a workflow asks for its last green run), else the one recorded in
``.ci/passed``: ``.ci/run`` writes it when everything has passed, and who lands the work commits it. Where neither names
a commit of this history, the state is unknown, and everything counts as changed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ".ci/passed"
BUILDS = (
    *("kernels/cpu", "kernels/vulkan"),
    *(":(glob)packages/*/*.py", ":(glob)packages/*/pyproject.toml"),
    *("tools/release.py", "tools/ci_matrix.toml", "tests/packaging"),
)
"""What decides how packages are built."""


def git(*words: str, root: Path = ROOT) -> str:
    """What a git command prints.

    Raises:
        OSError: There is no git.
        subprocess.CalledProcessError: It fails: this is no clone, or the clone lacks a commit.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@cache
def base(root: Path = ROOT) -> str:
    """The commit at which CI last passed; empty if it is unknown, or no ancestor of the commit that is checked out."""
    try:
        commit = os.environ.get("BITNET_BASE") or (root / RECORD).read_text(encoding="utf-8").strip()
        git("merge-base", "--is-ancestor", commit, "HEAD", root=root)
        return git("rev-parse", "--verify", f"{commit}^{{commit}}", root=root)
    except (OSError, subprocess.CalledProcessError):
        return ""


@cache
def head(root: Path = ROOT) -> str:
    """The commit that is tested; empty where git cannot tell."""
    try:
        return git("rev-parse", "HEAD", root=root)
    except (OSError, subprocess.CalledProcessError):
        return ""


@cache
def differing(*paths: str, root: Path = ROOT) -> Collection[str] | None:
    """The files that differ from the base's, or are new or gone, below these paths or anywhere; None if it is unknown.

    Files are relative to the root and have slashes.
    """
    if not (start := base(root)):
        return None
    try:
        differ = git("diff", "--name-only", "--no-renames", "-z", start, "--", *paths, root=root)
        new = git("ls-files", "--others", "--exclude-standard", "-z", "--", *paths, root=root)
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(filter(None, (differ + "\0" + new).split("\0")))


def changed(*paths: str, root: Path = ROOT) -> bool:
    """Whether a file below one of the paths differs from the base's, is new or gone; True if that is unknown."""
    return bool(paths) and differing(*paths, root=root) != frozenset()
