"""``bitnet pull``, ``list``, ``rm``, and models named by ``-hf`` and ``hf:``, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bitnet.core.model.default import default_model_path

if TYPE_CHECKING:
    from .conftest import Hub, Repo

    Ran = subprocess.CompletedProcess[str]

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "bitnet")
NAME = "some-org/tiny"
FILE = "tiny-i2_s.gguf"


@pytest.fixture
def bitnet(hub: Hub, tmp_path: Path) -> Callable[..., Ran]:
    """The installed command in a process of its own, in an empty folder; keyword arguments are variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BITNET_")}
    kept |= {"BITNET_CACHE_DIR": str(tmp_path / "cache"), "BITNET_DEVICE": "cpu"}

    def call(*args: str | Path, **env: str) -> Ran:
        return subprocess.run(
            [SCRIPT, *args], cwd=tmp_path, env=kept | env, capture_output=True, text=True, check=False, timeout=120,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return call


@pytest.fixture
def model(hub: Hub, make_repo: Callable[..., Repo]) -> bytes:
    """The demo model, which the hub has as an I2_S file beside a worse one."""
    data = default_model_path().read_bytes()
    hub.repos[NAME] = make_repo({FILE: data, "tiny-f16.gguf": b"GGUF" + bytes(100)})
    return data


def test_pull_run_list_rm(hub: Hub, bitnet: Callable[..., Ran], model: bytes, tmp_path: Path, cache: Path) -> None:
    pulled = bitnet("pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    path = Path(pulled.stdout.strip())
    assert path.read_bytes() == model
    assert pulled.stderr.startswith(f"{NAME}: {FILE}, ")
    assert "I2_S is what devices compute with" in pulled.stderr
    assert len(pulled.stderr.splitlines()) == 1, "no bar where there is no terminal"

    asked = len(hub.asked)
    named, local = bitnet("run", "-hf", NAME, "-n", "4", "Hello"), bitnet("run", "-n", "4", "Hello")
    assert named.returncode == 0, named.stderr
    assert named.stdout == local.stdout
    assert len(hub.asked) == asked

    listed = bitnet("list")
    assert listed.stdout.startswith(f"{NAME}:{FILE}  ")
    assert str(path) in listed.stdout
    (entry,) = json.loads(bitnet("list", "--json").stdout)
    family = entry.pop("family")
    assert entry == {"repo": NAME, "file": FILE, "size": len(model), "path": str(path)}
    assert family in listed.stdout

    refused = bitnet("rm", NAME)
    assert refused.returncode == 2
    assert path.exists()
    assert bitnet("rm", f"{NAME}:f16", "-y").returncode == 4
    removed = bitnet("rm", NAME, "-y")
    assert removed.returncode == 0, removed.stderr
    assert not [p for p in cache.rglob("*") if p.is_file()]
    assert bitnet("list").stdout == ""
    gone = bitnet("run", "-m", f"hf:{NAME}", "-n", "4", "Hello", HF_HUB_OFFLINE="1")
    assert gone.returncode == 4
    assert "HF_HUB_OFFLINE" in gone.stderr


def test_load_model_takes_a_name(hub: Hub, model: bytes) -> None:
    from bitnet.core import load_model

    with load_model(f"hf:{NAME}:i2_s", device="cpu", context=64) as loaded:
        assert loaded.path.read_bytes() == model


def test_one_file_of_two_is_removed(hub: Hub, bitnet: Callable[..., Ran], model: bytes) -> None:
    from bitnet.core.hub.names import parse
    from bitnet.core.hub.pull import locate

    kept, gone = locate(parse(f"{NAME}:{FILE}")), locate(parse(f"{NAME}:f16"))
    blob = gone.resolve()
    assert bitnet("rm", f"{NAME}:F16", "-y").returncode == 0
    assert kept.read_bytes() == model
    assert not gone.is_symlink()
    assert not blob.exists()


def test_errors_are_one_line_with_what_to_do(hub: Hub, bitnet: Callable[..., Ran], model: bytes) -> None:
    hub.repos[NAME].gated = True
    refused = bitnet("pull", NAME)
    assert refused.returncode == 4
    assert refused.stderr.splitlines()[-1].startswith("bitnet: error: some-org/tiny is only for accounts")
    assert f"{hub.url}/{NAME}" in refused.stderr
    twice = bitnet("run", "-hf", NAME, "-m", "other.gguf", "Hello")
    assert twice.returncode == 2
    assert "both name a model" in twice.stderr
    for name in ("https://evil.example/x", "../../etc", "org/na..me", "a/b/c"):
        wrong = bitnet("pull", name)
        assert wrong.returncode == 2, name
        assert "is no name of a model on the hub" in wrong.stderr
    assert all("evil" not in path and "etc" not in path for _, path, _ in hub.asked)


def test_the_extra_is_named_where_it_is_missing(bitnet: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "hidden" / "huggingface_hub").mkdir(parents=True)
    (tmp_path / "hidden" / "huggingface_hub" / "__init__.py").write_text(
        "raise ModuleNotFoundError('gone', name='huggingface_hub')"
    )
    missing = bitnet("pull", NAME, PYTHONPATH=str(tmp_path / "hidden"))
    assert missing.returncode == 4
    assert 'pip install "bitnet-core[hub]"' in missing.stderr


def test_help_does_not_import_the_library(bitnet: Callable[..., Ran]) -> None:
    code = "import sys; from bitnet.core.cli import main; main(['--help']); sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
