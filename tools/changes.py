"""Finds what has changed since a tested commit, for tests of slow builds.

That commit is the one that ``BITNET_BASE`` names (CI: the last one pushed, or the pull request's base), else where this
branch left ``origin/main``, else the commit before this one.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def base(root: Path = ROOT) -> str:
    """The commit that is compared with."""
    if named := os.environ.get("BITNET_BASE"):
        return named
    here, left = git("rev-parse", "HEAD", root=root), git("merge-base", "HEAD", "origin/main", root=root)
    return left if left != here else "HEAD^"


@cache
def head(root: Path = ROOT) -> str:
    """The commit that is tested; empty where git cannot tell."""
    try:
        return git("rev-parse", "HEAD", root=root)
    except (OSError, subprocess.CalledProcessError):
        return ""


@cache
def changed(*paths: str, root: Path = ROOT) -> bool:
    """Whether a file below one of the paths differs from the base's, or is new; True where git cannot tell."""
    if not paths:
        return False
    try:
        differ = git("diff", "--name-only", base(root), "--", *paths, root=root)
        return bool(differ or git("ls-files", "--others", "--exclude-standard", "--", *paths, root=root))
    except (OSError, subprocess.CalledProcessError):
        return True
