"""The commands around a model: convert, perplexity, embed, eval, cache, completion, version."""

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

import numpy as np
import pytest

from bitnet.core import load_embedder, load_model
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


def test_embed(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """The same vectors by arguments, a file of lines and one of JSON; as lines and as an array."""
    texts = ["a text", "two\nlines", "ünï"]
    (tmp_path / "texts.jsonl").write_text(
        "\n\n".join([json.dumps(texts[0]), *(json.dumps({"text": t}) for t in texts[1:])])
    )
    (tmp_path / "texts.txt").write_text("a text\n\nünï\n", encoding="utf-8")
    with load_embedder(model, device="cpu") as embedder:
        wanted = embedder.embed(texts)
        last = embedder.embed(texts[:1], pooling="last", normalize=False)
    ran = bitnet("embed", *texts, "-m", model)
    made = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["index"] for line in made] == [0, 1, 2]
    np.testing.assert_array_equal(np.array([line["embedding"] for line in made], np.float32), wanted)
    assert bitnet("embed", "-f", "texts.jsonl", "-m", model, "-o", "made.npy").status == 0
    np.testing.assert_array_equal(np.load(tmp_path / "made.npy"), wanted)
    assert bitnet("embed", "-f", "texts.txt", "-m", model, "-o", "made.jsonl").out == ""
    made = [json.loads(line)["embedding"] for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(np.array(made, np.float32), wanted[[0, 2]])
    ran = bitnet("embed", texts[0], "-m", model, "--pooling", "last", "--no-normalize")
    np.testing.assert_array_equal(np.array([json.loads(ran.out)["embedding"]], np.float32), last)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 1}', "line 2 is {'text': 1}; it must be a text"),
        ("[", "line 2 is not JSON"),
        ("[" * 10**5, "line 2 is not JSON"),
    ],
)
def test_embed_names_the_line(bitnet: Bitnet, model: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "texts.jsonl").write_text(f'"a"\n{line}\n')
    ran = bitnet("embed", "-f", "texts.jsonl", "-m", model)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
    for words in ([], ["a", "-f", "texts.jsonl"]):
        assert bitnet("embed", *words, "-m", model).status == 2


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
