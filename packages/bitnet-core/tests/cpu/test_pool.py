"""The thread pool where only chance would bring a program: ``pool_cases.c``, compiled with the pool's own source."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from emulated import build_hook

SOURCE = Path(__file__).with_name("pool_cases.c")


@cache
def program() -> Path:
    """The cases as a program, kept in the build cache."""
    hook = build_hook()
    target = hook.TARGETS[hook.host()]
    name = f"pool-cases-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    path: Path = hook.cache() / hook.digest(target) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):  # tests run in several processes
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                flags = [*hook.settings()["flags"], "-I", ".", "-O2"]
                hook.link(target, [*flags, str(SOURCE), "platform.c"], linked := Path(folder, name))
                linked.replace(path)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="this system does not fork")
@pytest.mark.parametrize("case", ["left_out", "forked"])
def test_case(case: str) -> None:
    """``left_out``: a thread comes back and loses no item. ``forked``: a child's threads take turns at once."""
    assert subprocess.run([program(), case], check=False, timeout=60).returncode == 0
