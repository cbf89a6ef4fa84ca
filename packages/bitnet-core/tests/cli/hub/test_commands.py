"""``bitnet pull``, ``list``, ``rm``, and models named by ``-hf`` and ``hf:``, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bitnet.core.model.default import default_model_path

if TYPE_CHECKING:
    from .conftest import Hub, Repo

Bitnet = Callable[..., Any]
NAME = "some-org/tiny"
FILE = "tiny-i2_s.gguf"


@pytest.fixture
def model(hub: Hub, make_repo: Callable[..., Repo]) -> bytes:
    """The demo model, which the hub has as an I2_S file beside a worse one."""
    data = default_model_path().read_bytes()
    hub.repos[NAME] = make_repo({FILE: data, "tiny-f16.gguf": b"GGUF" + bytes(100)})
    return data


def test_pull_run_list_rm(
    hub: Hub, bitnet: Bitnet, on_the_cpu: None, model: bytes, cache: Path, offline: Callable[[], None]
) -> None:
    pulled = bitnet("pull", NAME)
    assert pulled.status == 0, pulled.err
    path = Path(pulled.out.strip())
    assert path.read_bytes() == model
    assert pulled.err.startswith(f"{NAME}: {FILE}, ")
    assert "I2_S is what devices compute with" in pulled.err
    assert len(pulled.err.splitlines()) == 1, "no bar where there is no terminal"

    asked = len(hub.asked)
    named, local = bitnet("run", "-hf", NAME, "-n", "4", "Hello"), bitnet("run", "-n", "4", "Hello")
    assert named.status == 0, named.err
    assert named.out == local.out
    assert len(hub.asked) == asked

    listed = bitnet("list")
    assert listed.out.startswith(f"{NAME}:{FILE}  ")
    assert str(path) in listed.out
    (entry,) = json.loads(bitnet("list", "--json").out)
    family = entry.pop("family")
    assert entry == {"repo": NAME, "file": FILE, "size": len(model), "path": str(path)}
    assert family in listed.out

    refused = bitnet("rm", NAME)
    assert refused.status == 2
    assert path.exists()
    assert bitnet("rm", f"{NAME}:f16", "-y").status == 4
    removed = bitnet("rm", NAME, "-y")
    assert removed.status == 0, removed.err
    assert not [p for p in cache.rglob("*") if p.is_file()]
    assert bitnet("list").out == ""
    offline()
    gone = bitnet("run", "-m", f"hf:{NAME}", "-n", "4", "Hello")
    assert gone.status == 4
    assert "HF_HUB_OFFLINE" in gone.err


def test_load_model_takes_a_name(hub: Hub, model: bytes) -> None:
    from bitnet.core import load_model

    with load_model(f"hf:{NAME}:i2_s", device="cpu", context=64) as loaded:
        assert loaded.path.read_bytes() == model


@pytest.mark.parametrize("words", ["run Hello", "chat", "bench", "perplexity -f text.txt", "eval asked.jsonl"])
@pytest.mark.parametrize("option", ["-hf ", "-m hf:"])
def test_every_command_with_a_model_takes_a_name(
    hub: Hub, bitnet: Bitnet, on_the_cpu: None, tmp_path: Path, words: str, option: str
) -> None:
    (tmp_path / "text.txt").write_text("Hello")
    (tmp_path / "asked.jsonl").write_text('{"question": "Hello", "lacks": "?"}')
    done = bitnet(*f"{words} {option}{NAME}".split())
    assert done.status == 4, done.err
    assert f"has no {NAME}" in done.err


def test_a_model_on_the_hub_is_inspected(hub: Hub, bitnet: Bitnet, model: bytes) -> None:
    done = bitnet("inspect", f"hf:{NAME}")
    assert done.status == 0, done.err
    assert "bitnet" in done.out


def test_names_in_the_cache_are_completed(hub: Hub, bitnet: Bitnet, model: bytes) -> None:
    assert bitnet("pull", NAME).status == 0

    def complete(*words: str) -> str:
        ran = bitnet(_BITNET_COMPLETE="bash_complete", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
        return str(ran.out)

    assert f"plain,{NAME}\n" in complete("bitnet", "rm", "some")
    assert f"plain,{NAME}\n" in complete("bitnet", "run", "-hf", "some")
    assert NAME not in complete("bitnet", "rm", "other")


def test_one_file_of_two_is_removed(hub: Hub, bitnet: Bitnet, model: bytes) -> None:
    from bitnet.core.hub.names import parse
    from bitnet.core.hub.pull import locate

    kept, gone = locate(parse(f"{NAME}:{FILE}")), locate(parse(f"{NAME}:f16"))
    blob = gone.resolve()
    assert bitnet("rm", f"{NAME}:F16", "-y").status == 0
    assert kept.read_bytes() == model
    assert not gone.is_symlink()
    assert not blob.exists()


def test_safetensors_are_converted(
    hub: Hub, bitnet: Bitnet, on_the_cpu: None, make_repo: Callable[..., Repo], convert_folder: Any, tmp_path: Path
) -> None:
    source = convert_folder(tmp_path / "tiny")
    source.pack("autobitlinear", 1.5)
    files = {path.name: path.read_bytes() for path in source.write(shards=2).iterdir()}
    hub.repos[NAME] = make_repo(files | {"README.md": b"", "sub/other.safetensors": b"not asked for"})
    offered = bitnet("pull", NAME)
    assert offered.status == 4
    command = f"bitnet convert hf:{NAME} tiny.gguf"
    assert command in offered.err
    assert not hub.transfers()
    done = bitnet("pull", "--convert", NAME)
    assert done.status == 0, done.err
    assert "tiny.gguf" in done.out
    made = (tmp_path / "tiny.gguf").read_bytes()
    assert bitnet("convert", tmp_path / "tiny", "local.gguf").status == 0
    assert made == (tmp_path / "local.gguf").read_bytes()
    assert bitnet(*command.split()[1:]).status == 2, "the file is there already"
    assert bitnet(*command.split()[1:], "--force").status == 0
    assert len(hub.transfers()) == 2
    assert bitnet("convert", f"hf:{NAME}:i2_s", "other.gguf").status == 2


def test_errors_are_one_line_with_what_to_do(hub: Hub, bitnet: Bitnet, model: bytes) -> None:
    hub.repos[NAME].gated = True
    refused = bitnet("pull", NAME)
    assert refused.status == 4
    assert refused.err.splitlines()[-1].startswith("bitnet: error: some-org/tiny is available only to accounts")
    assert f"{hub.url}/{NAME}" in refused.err
    twice = bitnet("run", "-hf", NAME, "-m", "other.gguf", "Hello")
    assert twice.status == 2
    assert "both name a model" in twice.err
    for name in ("https://evil.example/x", "../../etc", "org/na..me", "a/b/c"):
        wrong = bitnet("pull", name)
        assert wrong.status == 2, name
        assert "is not a valid model name on the hub" in wrong.err
    assert all("evil" not in path and "etc" not in path for _, path, _ in hub.asked)


def test_the_extra_is_named_where_it_is_missing(bitnet: Bitnet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for command in (("pull", NAME), ("run", "-hf", NAME, "Hello"), ("rm", NAME)):
        missing = bitnet(*command)
        assert missing.status == 4
        assert 'pip install "bitnet-core[hub]"' in missing.err


def test_the_variables_of_the_library_count(hub: Hub, script: Bitnet, model: bytes, cache: Path) -> None:
    """In processes of their own, which read HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE themselves."""
    hub.repos[NAME].gated = True
    assert script("pull", NAME, HF_HUB_OFFLINE="1").status == 4
    assert not hub.asked
    pulled = script("pull", NAME, HF_TOKEN=hub.token)
    assert pulled.status == 0, pulled.err
    assert Path(pulled.out.strip()).is_relative_to(cache)
    assert script("pull", NAME, HF_HUB_OFFLINE="1").out == pulled.out


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can handle")
def test_what_a_signal_ends_goes_on(hub: Hub, bitnet: Bitnet, script_path: str, model: bytes, cache: Path) -> None:
    hub.stall = 150_000
    with subprocess.Popen([script_path, "pull", NAME], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size == hub.stall for path in cache.rglob("*.incomplete")):
            assert time.monotonic() < deadline, "the download has not begun"
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == 143
    hub.stall = None
    assert bitnet("pull", NAME).status == 0
    assert hub.transfers() == [None, "bytes=150000-"]


def test_a_split_model(hub: Hub, bitnet: Bitnet, make_repo: Callable[..., Repo], cache: Path) -> None:
    """All parts are fetched, listed as one, and removed together; one that is missing is fetched again."""
    parts = {f"m-i2_s-0000{i}-of-00003.gguf": os.urandom(1000 + i) for i in (1, 2, 3)}
    first, second, _ = parts
    hub.repos[NAME] = make_repo(parts | {"m-f16.gguf": b"GGUF"})
    pulled = bitnet("pull", NAME)
    assert pulled.status == 0, pulled.err
    assert f"{first} and 2 more parts, 3.01 kB" in pulled.err
    path = Path(pulled.out.strip())
    assert path.name == first
    assert {name: path.with_name(name).read_bytes() for name in parts} == parts
    (listed,) = json.loads(bitnet("list", "--json").out)
    assert (listed["file"], listed["size"]) == (first, 3006)
    path.with_name(second).resolve().unlink()
    path.with_name(second).unlink()
    assert bitnet("pull", NAME).status == 0
    assert path.with_name(second).read_bytes() == parts[second]
    assert bitnet("rm", "-y", f"{NAME}:{second}").status == 0
    assert not list(cache.rglob("*.gguf"))
