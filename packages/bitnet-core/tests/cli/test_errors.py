"""Every command answers bad input with one line on stderr and the documented status; nothing is left half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.cli import app, options
from bitnet.core.gguf.ternary import I2S_LAYOUTS

Bitnet = Callable[..., Any]

BAD = [
    ("nope", 2, "No such command 'nope'. Try 'bitnet --help'."),
    ("run -m MODEL Hi --nope", 2, "No such option"),
    ("run -m MODEL Hi Ho", 2, "Got unexpected extra argument (Ho). Put the prompt in quotes; -m names a model file."),
    ("run What is 17 + 25?", 2, "Put the prompt in quotes"),
    ("run -m MODEL Hi -p Ho", 2, "give the prompt once"),
    ("run -m MODEL -f absent.txt", 2, "absent.txt cannot be read: No such file or directory. Check the path."),
    ("run -m MODEL -f latin1.txt", 2, "latin1.txt is not UTF-8 (at byte 2)"),
    ("run -m MODEL -f .", 2, ". cannot be read: Is a directory. Check the path."),
    ("run -m MODEL", 2, "the prompt is empty"),
    ("run -m MODEL -f empty.txt", 2, "the prompt is empty"),
    ("run -m MODEL Hi --raw --system Be", 2, "--system and --raw exclude each other"),
    ("run -m MODEL Hi -n 0", 2, "--max-tokens is 0; it must be an integer ≥ 1, or -1"),
    ("run -m MODEL Hi -n x", 2, "'x' is not a valid integer"),
    ("run -m MODEL Hi --temp -1", 2, "--temperature is -1.0; it must be 0 or 1e-30 … 1e30"),
    ("run -m MODEL Hi --temp 1e-40", 2, "--temperature is 1e-40; it must be"),
    ("run -m MODEL Hi --temp 1e39", 2, "--temperature is 1e+39; it must be"),
    ("run -m MODEL Hi --repeat-penalty 1e39", 2, "--repetition-penalty is 1e+39; it must be"),
    ("run -m MODEL Hi --repeat-penalty 1e-40", 2, "--repetition-penalty is 1e-40; it must be"),
    ("run -m MODEL Hi --top-p 0", 2, "--top-p is 0.0; it must be in (0, 1]"),
    ("run -m MODEL Hi --min-p 2", 2, "--min-p is 2.0; it must be in [0, 1]"),
    ("run -m MODEL Hi --top-k -3", 2, "--top-k is -3"),
    ("run -m MODEL Hi --repeat-penalty 0", 2, "--repetition-penalty is 0.0"),
    ("run -m MODEL Hi -s -2", 2, "--seed is -2; it must be an unsigned 64-bit integer, or -1."),
    ("run -m MODEL Hi --stop=", 2, "--stop holds ''; it must be a string or strings, none empty."),
    ("run -m MODEL Hi --logprobs -1", 2, "--logprobs is -1"),
    ("run -m MODEL Hi -c 1", 2, "--context is 1; for random-2x128 it must be in 2 … 4096 tokens"),
    ("run -m MODEL Hi -c 100000", 2, "--context is 100000"),
    ("run -m MODEL Hi -c 8", 2, "the prompt has 16 tokens; the context holds 8, including one new token."),
    ("run -m MODEL Hi -c 8", 2, "Shorten the prompt, or load the model with a longer context (--context)."),
    ("run -m absent.gguf Hi -n 0", 2, "--max-tokens is 0"),  # before a model is loaded
    ("chat -m absent.gguf --temp -1", 2, "--temperature is -1.0"),
    ("run -m MODEL Hi -t 0", 2, "0 is not in the range 1<=x<=1024"),
    ("run -m MODEL Hi -t 9999", 2, "9999 is not in the range 1<=x<=1024"),
    ("run -m MODEL Hi --kv-dtype q4", 2, "'q4' is not one of 'f16', 'f32', 'i8'"),
    ("run -m MODEL Hi --i2s-layout x", 2, "'x' is not one of 'official', 'arm', 'columns'"),
    ("run -m MODEL Hi --device toaster", 2, "there is no device 'toaster'"),
    ("run -m MODEL Hi --device cuda:77 --strict", 3, "cuda:77 was asked for, but"),
    ("run -m absent.gguf Hi", 4, "absent.gguf: cannot be opened: No such file or directory"),
    ("run -m latin1.txt Hi", 4, "latin1.txt: magic"),
    ("run -m truncated.gguf Hi", 4, "truncated.gguf: "),
    ("run -m . Hi", 4, ".: is a folder. 'bitnet convert . model.gguf' converts"),
    ("run -m absent.gguf Hi --receipt no/such/run.json", 2, "no/such/run.json: the folder no/such does not exist"),
    ("run -m absent.gguf Hi --receipt .", 2, "--receipt . is a folder; name the file to write"),
    ("chat -m plain.gguf", 2, "plain has no chat template. Use 'bitnet run --raw'."),
    ("run -m plain.gguf Hi --system Be", 2, "plain has no chat template, so --system cannot be used"),
    ("eval asked.jsonl -m plain.gguf -n 1", 2, "plain has no chat template"),
    ("eval asked.jsonl -m MODEL -n 0", 2, "--questions is 0; it must be at least 1."),
    ("eval short.txt -m MODEL", 2, "line 1 is no question"),
    ("eval missing.jsonl -m MODEL", 2, "missing.jsonl"),
    ("eval asked.jsonl -m MODEL --parallel 0", 2, "--parallel is 0; it must be in 1 … 512."),
    ("run --model= Hi", 2, "'-m' / '--model': the name of the file is empty"),
    ("run -m MODEL --file=", 2, "'-f' / '--file': the name of the file is empty"),
    ("run -m MODEL Hi --receipt=", 2, "'--receipt': the name of the file is empty"),
    ("bench -m MODEL --plot=", 2, "'--plot': the name of the file is empty"),
    ("perplexity -m MODEL --file=", 2, "'-f' / '--file': the name of the file is empty"),
    ("perplexity -m MODEL", 2, "Missing option '-f' / '--file'"),
    ("perplexity -m absent.gguf -f absent.txt", 2, "absent.txt cannot be read: No such file or directory."),
    ("perplexity -m MODEL -f short.txt", 2, "the text has 2 tokens; one chunk needs 512"),
    ("perplexity -m MODEL -f short.txt -c 2", 2, "a chunk has 2 tokens; it must have at least 4"),
    ("inspect a b", 2, "Got unexpected extra argument (b)"),
    ("inspect absent.gguf", 4, "absent.gguf: cannot be opened"),
    ("inspect truncated.gguf", 4, "truncated.gguf: "),
    ("convert MODEL", 2, "Missing argument 'TARGET'"),
    ("convert absent out.gguf", 4, "absent"),
    ("convert . out.gguf", 4, "config.json"),
    ("convert MODEL short.txt", 2, "short.txt already exists"),
    ("convert MODEL --force .", 2, ". is a folder; name the file to write"),
    ("convert MODEL no/such/out.gguf", 1, "no/such/out.gguf cannot be written"),
    ("bench -m MODEL -p 0 -n 0", 2, "there is nothing to measure"),
    ("bench -m MODEL -p -3 -n 0", 2, "-3 is less than 0"),
    ("bench -m MISSING -p 8 -n 8 -r 0", 2, "0 is not in the range x>=1"),
    ("bench -m MODEL -p 8,x", 2, "'8,x'"),
    ("bench -m MODEL --plot speed.jpeg", 2, "speed.jpeg: the file must end in .png or .svg, not in '.jpeg'"),
    ("bench -m MODEL --plot missing/speed.png", 2, "the folder missing does not exist"),
    ("bench -m MODEL -p 5000 -n 8", 2, "the context for --n-prompt, --n-gen and --n-depth is 5002; "),
    ("bench -m MODEL -p 5000 -n 8", 2, "for random-2x128 it must be in 2 … 4096 tokens"),
    ("bench -m absent.gguf -t 2,0", 2, "'-t' / '--threads': 0 is less than 1."),
    ("bench -m absent.gguf -t 1025", 2, "'-t' / '--threads': 1025 is more than 1024."),
    ("bench -m absent.gguf -np 0", 2, "'-np' / '--parallel': 0 is less than 1."),
    ("bench -m MODEL -p 0 -np 600", 2, "--parallel is 600; it must be in 1 … 512."),
    ("cache", 2, "Missing command"),
    ("completion", 2, "Choose from: bash, zsh, fish."),
    ("completion tcsh", 2, "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    ("receipt verify absent.json", 2, "absent.json cannot be read: No such file or directory"),
    ("receipt verify .", 2, ". cannot be read: Is a directory"),
    ("receipt show absent.json", 2, "absent.json cannot be read"),
    ("receipt keygen", 2, "Missing argument 'FILE'"),
    ("receipt verify latin1.txt", 6, "latin1.txt is not a receipt"),
    ("receipt show short.txt", 6, "short.txt is not a receipt"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, model: Path, random_model: Any) -> Path:
    """The working folder: files of every kind of wrong."""
    (tmp_path / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "short.txt").write_text("to")
    (tmp_path / "empty.txt").write_text("\n")
    data = model.read_bytes()
    (tmp_path / "truncated.gguf").write_bytes(data[: len(data) // 2])
    shape = random_model.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512, context=256)
    metadata = random_model.metadata(shape) | {"general.name": "plain"}
    del metadata["tokenizer.chat_template"]
    (tmp_path / "asked.jsonl").write_text('{"question": "What is 1 + 1?", "number": 2}')
    random_model.write_gguf(tmp_path / "plain.gguf", metadata, dict(random_model.tensors(shape, 0)))
    return tmp_path


@pytest.mark.parametrize(("command", "status", "message"), BAD, ids=[command for command, _, _ in BAD])
def test_bad_input(bitnet: Bitnet, model: Path, folder: Path, command: str, status: int, message: str) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    args = [str(model) if arg == "MODEL" else arg for arg in command.split()]
    if args[0] not in ("cache", "completion", "inspect", "receipt", "convert", "nope") and "--device" not in args:
        args += ["--device", "cpu"]
    ran = bitnet(*args)
    assert (ran.status, ran.err.count("\n")) == (status, 1), ran
    assert ran.err.startswith("bitnet: error: ")
    assert message in ran.err
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_debug_shows_where(bitnet: Bitnet) -> None:
    ran = bitnet("run", "-m", "absent.gguf", "Hi", BITNET_LOG="debug")
    assert ran.status == 4
    assert "Traceback (most recent call last)" in ran.err
    assert ran.err.splitlines()[-1].startswith("bitnet: error: absent.gguf")


@pytest.mark.parametrize("fails", ["_start_new_thread", "_start_joinable_thread"])  # before Python 3.13, and since
def test_no_room_for_a_thread_is_no_bug(bitnet: Bitnet, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't start new thread")

    if not hasattr(threading, fails):
        pytest.skip(f"this Python's threading has no {fails}")
    monkeypatch.setattr(threading, fails, refuse)
    ran = bitnet("run", "Hi", "--device", "cpu")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == (
        "bitnet: error: the system has no room for another thread. Raise the limit of processes (ulimit -u; of a "
        "container, --pids-limit), or free memory.\n"
    )


def test_no_memory_is_no_bug(bitnet: Bitnet, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("bitnet.core.cli.run.load", refuse)
    ran = bitnet("run", "Hi")
    assert ran.status == 1
    assert ran.err.startswith("bitnet: error: there is not enough memory. Use a smaller model")


def test_a_bug_is_one_line_too(bitnet: Bitnet, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr("bitnet.core.cli.run.load", broken)
    ran = bitnet("run", "Hi")
    assert ran.status == 1
    assert ran.err == ("bitnet: error: ZeroDivisionError: oh no. This is a bug; BITNET_LOG=debug shows where it is.\n")


def test_both_spellings_of_help(bitnet: Bitnet) -> None:
    ran = bitnet("-h")
    assert ran.status == 0
    assert ran.out == bitnet("--help").out


def test_every_command_has_help(bitnet: Bitnet) -> None:
    groups = {"cache": "info", "receipt": "verify"}
    for name in app.cli.commands:
        for args in ((name,), (name, groups[name])) if name in groups else ((name,),):
            ran = bitnet(*args, "--help")
            assert (ran.status, ran.err) == (0, "")
            assert ran.out.startswith(f"Usage: bitnet {' '.join(args)}")


@pytest.mark.parametrize("columns", ["0", "1", "20", "33", "49"])
def test_help_fits_a_narrow_terminal(bitnet: Bitnet, columns: str) -> None:
    """All but examples, whose lines are to be copied, and words without a place to break them."""
    width = max(int(columns), 20) if columns != "0" else 80
    for name in ("", *app.cli.commands):
        ran = bitnet(*name.split(), "--help", COLUMNS=columns)
        assert ran.status == 0
        for line in ran.out.splitlines():
            assert len(line) <= width or re.search(r"bitnet|bash|zsh|fish", line), (name, line)
        if name and not hasattr(app.cli.commands[name], "commands"):  # of a group's, click cuts what is said short
            assert "".join(ran.out.split()) == "".join(bitnet(name, "--help").out.split())


TAKE_FILES = """\
run -m {} Hi
chat -m {}
run -f {}
run Hi --receipt {}
perplexity -f {}
bench -m {}
bench --plot {}
inspect {}
convert {} x
convert x {}
""".splitlines()


@pytest.mark.parametrize("command", TAKE_FILES)
def test_an_empty_file_name(bitnet: Bitnet, command: str) -> None:
    ran = bitnet(*("" if word == "{}" else word for word in command.split()))
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "the name of the file is empty" in ran.err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize("command", ["run Hi -m", "chat -m", "inspect", "convert"])
def test_a_model_without_permission(
    script_path: str, model: Path, tmp_path: Path, command: str, require_device: Callable[[str, str | None], None]
) -> None:
    """Status 4, as any model that cannot be read; root is asked to go without its privilege to read all."""
    path = tmp_path / "mine.gguf"
    path.write_bytes(model.read_bytes())
    path.chmod(0)
    words = [script_path, *command.split(), str(path), *(["out.gguf"] if command == "convert" else [])]
    if not os.geteuid():
        require_device("setpriv", None if shutil.which("setpriv") else "setpriv is not here")
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *words]
    ran = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (4, "")
    assert ran.stderr == f"bitnet: error: {path}: cannot be opened: Permission denied. Check the path.\n"


def test_options_have_the_names_that_users_of_other_tools_know(bitnet: Bitnet, model: Path) -> None:
    """Each of llama.cpp's or Hugging Face's is the same option."""
    base = ("run", "-m", model, "Hello", "--json", "--device", "cpu")
    ours = json.loads(bitnet(*base, "-n", "3", "-c", "100", "--system", "Be brief.").out)
    for tokens in ("--max-tokens", "--max-new-tokens", "--n-predict"):
        theirs = bitnet(*base, tokens, "3", "--ctx-size", "100", "--system-prompt", "Be brief.")
        assert theirs.status == 0, theirs.err
        assert json.loads(theirs.out)["tokens"] == ours["tokens"]
    ran = bitnet("perplexity", "-m", model, "-f", "-", "--ctx-size", "9", "--device", "cpu", stdin="text " * 9)
    assert ran.status == 0, ran.err


def test_i2s_layouts_are_those_of_the_reader() -> None:
    @app.cli.command("probe")
    @options.i2s_layout_option
    def probe(i2s_layout: str) -> None: ...

    (option,) = app.cli.commands.pop("probe").params
    assert list(option.type.choices) == list(I2S_LAYOUTS)  # type: ignore[attr-defined]
