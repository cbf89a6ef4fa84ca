"""A copy of the workspace, in which a new backend is made, built and installed beside this environment's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from new_backend import CHANGED

ROOT = Path(__file__).resolve().parents[2]


class Workspace:
    """What the tool and the checks of the workspace read, without the packages' sources."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("tools", "tests/packaging"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "demo_model"))
        for path in [ROOT / "LICENSE", ROOT / "VERSION", *map(ROOT.joinpath, CHANGED), *ROOT.glob("packages/*/*")]:
            if path.is_file():
                (root / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, root / path.relative_to(ROOT))
        (root / "kernels" / "cpu").mkdir(parents=True)
        shutil.copytree(ROOT / "kernels" / "opencl", root / "kernels" / "opencl")

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """What a command says, which must succeed."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BITNET_", "VIRTUAL_ENV", "PYTHON", "MYPY"))}
        own = {"PYTHONPATH": str(self.root / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            words, cwd=self.root, env={**kept, **own, **environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done

    def install(self, package: str) -> None:
        """Build a package's wheel and install it where :meth:`run` finds it."""
        uv = os.environ.get("UV") or shutil.which("uv")
        assert uv, "uv is not on the PATH"
        self.run(uv, "build", "--quiet", "--wheel", "--package", package, "--out-dir", "dist")
        (wheel,) = (self.root / "dist").glob("*.whl")
        self.run(uv, "pip", "install", "--python", sys.executable, "--target", "site", "--no-deps", str(wheel))


@pytest.fixture(scope="session")
def copy_workspace() -> Callable[[Path], Workspace]:
    """``copy_workspace(folder)`` makes a :class:`Workspace` in it."""
    return Workspace
