"""Names, keys and messages from files, drivers and plug-ins cannot control a terminal or forge a line of output."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitnet.core.cli import console, devices
from bitnet.core.cli.app import cli
from bitnet.core.devices.document import backend_document
from bitnet.core.devices.plugin import BackendReport
from bitnet.core.hal import DeviceInfo, DeviceType, ProbeResult, ProbeStatus
from bitnet.core.support import log
from bitnet.core.support.foreign import label, printable, without_controls

Bitnet = Callable[..., Any]

NASTY = "n\x1b[2J\x9b31m\x1b]0;title\x07\nFORGED holds: 9 tokens\r\nFORGED\x0b\x0c\x85\u2028FORGED\u202e\u2066\x00\x7f"
"""Escape sequences of 7 and 8 bits, every kind of line end, direction overrides."""
IN_A_PATH = NASTY.replace("\x00", "").replace("/", "")


def is_safe(text: str) -> bool:
    """Whether a terminal shows it as it is, and no line is the foreign text's own."""
    lines = text.split("\n")
    return all(line.isprintable() and not line.lower().startswith("forged") for line in lines)


def check(ran: Any, status: int) -> None:
    assert ran.status == status, ran
    assert is_safe(ran.out), ran.out
    assert is_safe(ran.err), ran.err
    assert "forged" in (ran.out + ran.err).lower()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_DEVICE", "cpu")


@pytest.fixture
def nasty(random_model: Any, tmp_path: Path) -> Path:
    """A good model with nasty names, in a file with one."""
    shape = random_model.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512, context=256)
    metadata = random_model.metadata(shape) | {
        "general.name": NASTY,
        f"general.{NASTY}": NASTY,
        "general.list": [NASTY, NASTY],
        "tokenizer.chat_template": "{{ raise_exception(messages[0].content) }}",
    }
    tensors = dict(random_model.tensors(shape, 0))
    path = tmp_path / f"{IN_A_PATH}.gguf"
    random_model.write_gguf(path, metadata, tensors)
    return path


def with_changes(path: Path, random_model: Any, name: str, **changes: Any) -> Path:
    """A file that cannot be run, by what its metadata or tensors are."""
    shape = random_model.Shape(layers=1, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512, context=256)
    metadata = random_model.metadata(shape) | changes.get("metadata", {})
    tensors = dict(random_model.tensors(shape, 0)) | changes.get("tensors", {})
    random_model.write_gguf(path.parent / name, metadata, tensors)
    return path.parent / name


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such file names")
def test_of_model_files(bitnet: Bitnet, nasty: Path, random_model: Any, tmp_path: Path) -> None:
    named = {"general.name": NASTY}
    check(bitnet("inspect", nasty), 0)
    ran = bitnet("inspect", nasty, "--json")
    check(ran, 0)
    document = json.loads(ran.out)  # nothing of it is lost
    assert (document["metadata"][f"general.{NASTY}"], document["path"]) == (NASTY, str(nasty))
    check(bitnet("run", "-m", nasty, "--raw", "Hi", "-n", "2", "-c", "9999"), 2)  # the error names the model
    check(bitnet("run", "-m", nasty, NASTY.replace("\x00", "")), 2)  # the template refuses, in the prompt's words
    check(bitnet("chat", "-m", nasty, stdin="FORGED \x1b[2J\x9b\n"), 0)
    check(bitnet("chat", "-m", nasty, stdin="/FORGED\x1b[2J\x9b\n"), 0)
    asked = tmp_path / "asked.jsonl"
    lines = [{"category": NASTY, "question": "1 + 1", "number": 2}, {"category": NASTY, "claim": 1}]
    asked.write_text("\n".join(map(json.dumps, lines)))
    check(bitnet("eval", asked, "-m", with_changes(nasty, random_model, "x", metadata=named)), 1)
    asked.write_text(json.dumps({**lines[0], NASTY: 1}))
    check(bitnet("eval", asked, "-m", nasty), 2)
    no_template = {**named, "tokenizer.chat_template": 1}
    check(bitnet("run", "-m", with_changes(nasty, random_model, "FORGED", metadata=no_template), "Hi"), 4)
    check(bitnet("bench", "-m", nasty, "-p", "4", "-n", "0", "-r", "1"), 0)
    check(bitnet("convert", nasty, tmp_path / f"{IN_A_PATH}.out"), 0)
    check(bitnet("convert", nasty, tmp_path / f"{IN_A_PATH}.out"), 2)
    check(bitnet("perplexity", "-m", nasty, "-f", f"{IN_A_PATH}.txt"), 2)
    logprobs = bitnet("run", "-m", nasty, "--raw", "Hi", "-n", "4", "--logprobs", "20", "--temp", "9")
    assert (logprobs.status, is_safe(logprobs.err)) == (0, True)
    float_tensor = np.zeros((1, 2), np.float32)
    for changes in (
        {"metadata": {"general.architecture": NASTY}},
        {"metadata": {"tokenizer.ggml.model": NASTY}},
        {"metadata": {"tokenizer.chat_template": f"{{% {NASTY} %}}"}},
        {"tensors": {NASTY: float_tensor}},
    ):
        bad = with_changes(nasty, random_model, "FORGED.gguf", **changes)
        check(bitnet("inspect", bad), 4)
        for command in (("run", "Hi", "-m"), ("chat", "-m")):
            check(bitnet(*command, bad), 4)
        check(bitnet("convert", bad, "x.gguf"), 4)
        check(bitnet("run", "Hi", "-m", bad, BITNET_LOG="debug"), 4)  # with a traceback


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such file names")
def test_of_receipts(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """Whatever the verdict is, the file has no part in how it looks."""
    from bitnet.core.receipts import digest

    assert bitnet("run", "-m", model, "Hello", "-n", "2", "--receipt", "r.json").status == 0
    honest = json.loads((tmp_path / "r.json").read_text())

    def texts(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(below, str):
                yield (*at, key)
            elif isinstance(below, (dict, list)):
                yield from texts(below, (*at, key))

    path = tmp_path / f"{IN_A_PATH}.json"
    for place in texts(honest):
        forged = json.loads(json.dumps(honest))
        value = forged
        for key in place[:-1]:
            value = value[key]
        value[place[-1]] = NASTY
        for sealed in (False, True):
            if sealed:
                forged["digest"] = digest(forged)
            path.write_text(json.dumps(forged))
            for command in (("verify",), ("verify", "-m", str(model)), ("show",)):
                ran = bitnet("receipt", command[0], path, *command[1:])
                assert is_safe(ran.out), (place, ran)
                assert is_safe(ran.err), (place, ran)
    path.write_text(NASTY)
    check(bitnet("receipt", "verify", path), 6)


def test_of_devices(bitnet: Bitnet, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo("evil", "0", NASTY, NASTY, NASTY, DeviceType.CPU, 1, NASTY, (NASTY,), {"note": NASTY})
    found = ProbeResult(ProbeStatus.OK, [info], NASTY, NASTY, {NASTY: NASTY}, {NASTY: NASTY})
    broken = ProbeResult(ProbeStatus.BROKEN, [], NASTY, NASTY, {NASTY: NASTY}, {NASTY: NASTY})
    reports = [BackendReport("evil", NASTY, NASTY, found), BackendReport("worse", NASTY, NASTY, broken)]
    proofs: Any = {info.name: SimpleNamespace(passed=False, time=0.1, error=NASTY)}
    for report in reports:
        console.say(*devices._backend_lines(report, proofs))
        text = capfd.readouterr().out
        assert "FORGED" in text
        assert is_safe(text)
        console.print_json(backend_document(report, proofs))
        text = capfd.readouterr().out
        assert is_safe(text)
        assert json.loads(text)["reason"] == NASTY
    monkeypatch.setattr("bitnet.core.devices.registry.list_devices", lambda: reports)
    ran = bitnet(_BITNET_COMPLETE="zsh_complete", COMP_WORDS="bitnet run --device e", COMP_CWORD="3")
    assert (ran.status, ran.out.split("\n")[1::3]) == (0, ["evil", r"evil\:0"])
    assert is_safe(ran.out)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such file names")
def test_of_folders_and_the_command_line(bitnet: Bitnet, tmp_path: Path) -> None:
    folder = str(tmp_path / IN_A_PATH)
    check(bitnet("cache", "path", BITNET_CACHE_DIR=folder), 0)
    for more in ((), ("--json",)):
        check(bitnet("cache", "info", *more, BITNET_CACHE_DIR=folder), 0)
    for args in ((IN_A_PATH,), ("run", "Hi", f"--{IN_A_PATH}"), ("run", "Hi", "--kv-dtype", IN_A_PATH)):
        check(bitnet(*args), 2)
    check(bitnet("devices", BITNET_LOG=IN_A_PATH), 2)


def test_of_logs_and_failures(bitnet: Bitnet, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        log.logger.warning("it said %s", NASTY)
        try:
            raise OSError(NASTY)
        except OSError:
            log.logger.exception("it failed")
        raise RuntimeError(NASTY)

    monkeypatch.setattr("bitnet.core.cli.run.load", broken)
    check(bitnet("run", "Hi"), 1)
    check(bitnet("run", "Hi", BITNET_LOG="debug"), 1)


def test_an_answer_at_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts, emoji, lines and tabs as they are; raw where no terminal shows it."""
    text = "שלום 👩\u200d👩\u200d👧 \u202eabc\u202c\tx\r\ny\x1b[31m\x9b\x07\x00"
    console.answer(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console.answer(text)
    assert capsys.readouterr().out == "שלום 👩\u200d👩\u200d👧 \u202eabc\u202c\tx\ny\\x1b[31m\\x9b\\x07\\x00"


def test_every_character_is_shown_or_named() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert printable(everything).isprintable()
    assert printable("C:\\a é") == "C:\\a é"
    assert printable("\x1b\n\x9b\u202e\ud800\U000e0001") == r"\x1b\n\x9b\u202e\ud800\U000e0001"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", without_controls(everything))
    assert label(f"a{' ' * 90}FORGED") == "a FORGED"
    assert label("x" * 100) == "x" * 100
    assert label("x" * 101) == "x" * 99 + "…"


def test_all_is_written_through_one_module() -> None:
    """A new command cannot forget it: nothing else in the command line's package writes."""
    folder = Path(console.__file__).parent
    assert len(list(folder.glob("*.py"))) >= len(cli.commands)
    wrong = re.compile(r"click\.s?echo\(|\bprint\(|sys\.std(out|err)\.write")
    for path in folder.glob("*.py"):
        found = wrong.findall(path.read_text(encoding="utf-8"))
        writing = {"console.py": 6, "__init__.py": 1, "app.py": 1, "markdown.py": 1}  # the last into a string
        allowed = writing.get(path.name, 0)
        assert len(found) <= allowed, path
