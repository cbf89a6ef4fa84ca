"""The commands around a model: convert, perplexity, eval, cache, completion, version."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import load_model
from bitnet.core.cli import console
from bitnet.core.support.cache import KernelCache

Bitnet = Callable[..., Any]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_DEVICE", "cpu")


def test_version(bitnet: Bitnet) -> None:
    assert bitnet("--version").out == f"bitnet {version('bitnet-core')}\n"


def test_convert_and_perplexity(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """A converted model is the same model, and measures the same."""
    ran = bitnet("convert", model, "copy.gguf")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("copy.gguf: ")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 12)
    base = ("perplexity", "-f", "text.txt", "-c", "64", "--json")
    ours, copy = (json.loads(bitnet(*base, "-m", path).out) for path in (model, "copy.gguf"))
    with load_model(model, device="cpu") as loaded:
        *_, wanted = loaded.perplexity((tmp_path / "text.txt").read_text(), context=64)
    assert ours["value"] == copy["value"] == pytest.approx(wanted.value)
    assert (ours["tokens"], ours["chunks"]) == (wanted.tokens, wanted.chunks)
    text = bitnet(*base[:-1], "-m", model).out
    assert text.startswith(f"perplexity {wanted.value:.4f} ± {wanted.error:.4f}")
    assert bitnet("convert", model, "copy.gguf", "--force").status == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows' pipes are not in the file system")
def test_convert_writes_nothing_else_into_a_pipe(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """Standard output may be that pipe."""
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    ran = bitnet("convert", model, pipe, "--force")
    reader.join(10)
    assert (ran.status, ran.out, ran.err) == (0, "", f"{pipe}: written\n")
    assert bitnet("convert", model, "copy.gguf").status == 0
    assert read == [(tmp_path / "copy.gguf").read_bytes()]


def test_eval_ends_with_1_where_a_claim_is_missed(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    lines = [{"question": f"What is {n} + 1?", "number": n + 10**9} for n in range(3)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ran = bitnet("eval", "asked.jsonl", "-m", model, "-n", "2", "--json")
    report = json.loads(ran.out)
    assert (ran.status, report["passed"], report["categories"][0]["questions"]) == (0, True, 2)
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"claim": 0.5}])))
    missed = bitnet("eval", "asked.jsonl", "-m", model)
    assert missed.status == 1
    assert "MISSED" in missed.out


def test_cache(bitnet: Bitnet, tmp_path: Path) -> None:
    keep = KernelCache()
    for i in range(3):
        key = keep.key(source=str(i), device="d", driver="1", options="", compiler="c")
        keep.put(key, os.urandom(1000), label=f"kernel {i}", seconds=0.1)
    info = json.loads(bitnet("cache", "info", "--json").out)
    assert (info["folder"], info["entries"]) == (str(tmp_path / "cache" / "kernels"), 3)
    assert 3000 < info["size"] < 4000
    assert bitnet("cache", "info").out.startswith(f"{info['folder']}: 3 entries, 3.")
    assert bitnet("cache", "path").out == f"{info['folder']}\n"
    (tmp_path / "cache" / "chat_history").write_text("one\ntwo\n")
    ran = bitnet("cache", "clear")
    assert ran.out.startswith("removed 3 entries, 3.")
    assert ran.out.endswith("; 2 lines of conversations\n")
    assert not (tmp_path / "cache" / "chat_history").exists()
    assert json.loads(bitnet("cache", "info", "--json").out)["entries"] == 0


def test_a_terminal_shows_progress_and_a_file_does_not(
    bitnet: Bitnet, model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_two() -> str:
        with console.compile_progress():
            for i in range(2):
                key = KernelCache.key(source=str(i), device="d", driver="1", options="", compiler="c")
                KernelCache().put(key, b"binary", label=f"kernel_{i}", seconds=0.25)
        return capfd.readouterr().err

    assert compile_two() == ""
    assert bitnet("convert", model, "one.gguf").err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    shown = compile_two()
    assert "compiled 2 kernels; last: kernel_1, 250 ms" in shown
    assert shown.endswith("\r\x1b[K")
    assert "converting" in bitnet("convert", model, "two.gguf").err
    monkeypatch.setenv("COLUMNS", "20")
    narrow = bitnet("convert", model, "three.gguf").err
    assert "converting" in narrow
    for drawn in (compile_two(), narrow):
        lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", drawn))
        assert max(map(len, lines)) <= 20, lines  # one that wraps is not drawn over by the next
