"""Runs the command line in this process if that suffices, otherwise as the installed script."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bitnet.core.cli import main
from bitnet.core.support import guard, log

ROOT = Path(__file__).resolve().parents[4]


@dataclass
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of ours set, a cache and a folder of its own."""
    for name in [name for name in os.environ if name.startswith("BITNET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@contextmanager
def new_process() -> Iterator[None]:
    """Undo what a command leaves behind in its process: variables that options set, logging, the guard of files."""
    variables, handlers, level = dict(os.environ), list(log.logger.handlers), log.logger.level
    log._said.clear()
    yield
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)
    log.logger.handlers[:] = handlers
    log.logger.setLevel(level)
    log._said.clear()
    guard._library = None


@pytest.fixture
def bitnet(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """``bitnet("run", "-n", "5", stdin="…", BITNET_LOG="info")``: the command, called in this process."""

    def call(*args: str | Path, stdin: str | bytes = "", **env: str) -> Ran:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
            for name, value in env.items():
                patch.setenv(name, value)
            capfd.readouterr()
            with new_process():
                status = main([str(arg) for arg in args])
            out, err = capfd.readouterr()
        return Ran(status, out, err)

    return call


SCRIPT = str(Path(sysconfig.get_path("scripts")) / "bitnet")


@pytest.fixture
def script() -> Callable[..., Ran]:
    """The same as a process of its own: what a user runs. Only the variables given here are set."""

    def call(*args: str | Path, stdin: str = "", **env: str) -> Ran:
        done = subprocess.run(
            [SCRIPT, *args],
            input=stdin,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def script_path() -> str:
    return SCRIPT


@pytest.fixture(scope="session")
def random_model() -> ModuleType:
    """``tools/make_random_model.py``."""
    spec = importlib.util.spec_from_file_location("make_random_model", ROOT / "tools" / "make_random_model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def model(random_model: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose greedy answer never ends by itself: special tokens have no logit that could win."""
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    shape = random_model.Shape(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512, context=4096)
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    embedding = np.random.default_rng(seed).normal(0, 0.1, (shape.vocab, shape.hidden)).astype(np.float16)
    embedding[-8:] = 0
    tensors = dict(random_model.tensors(shape, seed)) | {"token_embd.weight": embedding}
    random_model.write_gguf(path, random_model.metadata(shape), tensors)
    return path


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that name no device take the CPU."""
    monkeypatch.setenv("BITNET_DEVICE", "cpu")


@pytest.fixture
def honest(bitnet: Callable[..., Ran], on_the_cpu: None, model: Path, tmp_path: Path) -> dict[str, Any]:
    """The receipt r.json of a run, and its answer in a.txt."""
    ran = bitnet("run", "-m", model, "Hello", "-n", "8", "--receipt", "r.json")
    assert ran.status == 0, ran.err
    (tmp_path / "a.txt").write_bytes(ran.out.encode())
    made: dict[str, Any] = json.loads((tmp_path / "r.json").read_bytes())
    return made


@pytest.fixture
def signed(bitnet: Callable[..., Ran], on_the_cpu: None, model: Path, tmp_path: Path) -> dict[str, Any]:
    """The receipt s.json of a run, signed with the key k."""
    assert bitnet("receipt", "keygen", "k").status == 0
    ran = bitnet("run", "-m", model, "Hello", "-n", "8", "--receipt", "s.json", "--receipt-key", "k")
    assert ran.status == 0, ran.err
    made: dict[str, Any] = json.loads((tmp_path / "s.json").read_bytes())
    return made
