"""``bitnet run``: where the prompt comes from, what is written where, and what each option does."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import load_model

Bitnet = Callable[..., Any]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_DEVICE", "cpu")


def answer(ran: Any) -> dict[str, Any]:
    assert ran.status == 0, ran.err
    document: dict[str, Any] = json.loads(ran.out)
    return document


def test_the_prompt_comes_from_anywhere(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """Argument, option, file, pipe and ``-`` are the same prompt, rendered by the template, and the API's answer."""
    text = "Grüße, 你好"
    (tmp_path / "prompt.txt").write_bytes(f"{text}\r\n".encode())
    base = ("run", "-m", model, "-n", "6", "--json")
    with load_model(model, device="cpu") as loaded:
        wanted = loaded.chat([{"role": "user", "content": text}], max_tokens=6)
        system = loaded.chat(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}], max_tokens=6
        )
        raw = loaded.generate(text, max_tokens=6)
    assert len({wanted.tokens, system.tokens, raw.tokens}) > 1
    for ran in (
        bitnet(*base, text),
        bitnet(*base, "-p", text),
        bitnet(*base, "--file", "prompt.txt"),
        bitnet(*base, stdin=text),
        bitnet(*base, "-", stdin=f"{text}\n"),
    ):
        assert answer(ran)["tokens"] == list(wanted.tokens)
    assert answer(bitnet(*base, text, "--system", "Be brief."))["tokens"] == list(system.tokens)
    assert answer(bitnet(*base, text, "--raw"))["tokens"] == list(raw.tokens)


def test_text_goes_to_stdout_and_numbers_to_stderr(bitnet: Bitnet, model: Path) -> None:
    ran = bitnet("run", "-m", model, "Hello", "-n", "6")
    document = answer(bitnet("run", "-m", model, "Hello", "-n", "6", "--json"))
    assert ran.status == 0
    assert ran.out == document["text"] + "\n"
    (line,) = ran.err.splitlines()
    assert line.startswith("[cpu:")
    assert "first token" in line
    assert line.endswith("ended by --max-tokens]")
    timings = document["timings"]
    assert timings["generated_tokens"] == 6
    assert 0 < timings["first_token_s"] <= timings["total_s"]


def test_sampling_options_reach_the_engine(bitnet: Bitnet, model: Path) -> None:
    base = ("run", "-m", model, "Hello", "-n", "12", "--json")
    hot = ("--temp", "5", "--top-k", "0")
    first = answer(bitnet(*base, *hot, "-s", "7"))
    assert first["seed"] == 7
    assert answer(bitnet(*base, *hot, "--seed", "7"))["tokens"] == first["tokens"]
    free = answer(bitnet(*base, *hot))
    assert answer(bitnet(*base, *hot, "-s", "-1"))["seed"] != free["seed"]
    assert answer(bitnet(*base, *hot, "-s", str(free["seed"])))["tokens"] == free["tokens"]
    greedy = answer(bitnet(*base))["tokens"]
    assert greedy != first["tokens"]
    for narrow in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1")):
        assert answer(bitnet(*base, "--temperature", "5", *narrow))["tokens"] == greedy
    assert len(set(answer(bitnet(*base, "--repeat-penalty", "1e30"))["tokens"])) == 12


def test_an_answer_ends_where_it_is_told_to(bitnet: Bitnet, model: Path) -> None:
    base = ("run", "-m", model, "Hello", "--json")
    whole = answer(bitnet(*base, "-n", "40"))
    assert (whole["finish_reason"], len(whole["tokens"])) == ("length", 40)
    stop = whole["text"][3:5]
    cut = answer(bitnet(*base, "-n", "40", "--stop", "never seen", "--stop", stop))
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    full = answer(bitnet(*base, "-n", "-1", "-c", "60"))
    assert full["finish_reason"] == "context"
    assert full["timings"]["prompt_tokens"] + len(full["tokens"]) == 60


def test_logprobs(bitnet: Bitnet, model: Path) -> None:
    base = ("run", "-m", model, "Hello", "-n", "4", "--logprobs", "3")
    document = answer(bitnet(*base, "--json"))
    for token, entry in zip(document["tokens"], document["logprobs"], strict=True):
        assert entry["token"] == token == entry["top"][0]["token"]  # greedy
        assert entry["logprob"] == entry["top"][0]["logprob"] < 0
        assert [top["logprob"] for top in entry["top"]] == sorted((t["logprob"] for t in entry["top"]), reverse=True)
    lines = bitnet(*base).err.splitlines()
    assert len(lines) == 4 + 1
    assert f"{document['logprobs'][0]['logprob']:.4f}" in lines[0]


def test_kv_dtype_and_layout_reach_the_model(bitnet: Bitnet, model: Path) -> None:
    base = ("run", "-m", model, "Hello, how are you?", "-n", "1", "--logprobs", "0", "--json")
    f16, f32 = (answer(bitnet(*base, "--kv-dtype", d))["logprobs"][0]["logprob"] for d in ("f16", "f32"))
    assert f16 == pytest.approx(f32, abs=0.1)
    assert f16 != f32
    assert answer(bitnet(*base, "--i2s-layout", "arm"))["logprobs"][0]["logprob"] != f16


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process, and no SIGPIPE")
def test_interrupts_and_closed_pipes_end_quietly(script_path: str, model: Path) -> None:
    command = [script_path, "run", "-m", str(model), "Hello", "-n", "-1", "--device", "cpu:numpy"]
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, b"Traceback" in err) == (130, False)

    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout
    assert running.stderr
    assert running.stdout.read(1)
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait(timeout=60) == 141


def test_interrupt_while_the_command_is_imported(script: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    ran = script("--help", PYTHONPATH=str(tmp_path))
    assert (ran.status, ran.out, ran.err) == (130, "", "\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no shell that closes a stream")
def test_no_standard_stream_need_be_open(script_path: str, model: Path) -> None:
    command = shlex.join([script_path, "run", "-m", str(model), "--device", "cpu:numpy", "-n", "1"])

    def run(rest: str) -> tuple[int, str, str]:
        shell = ["sh", "-c", f"{command} {rest}"]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    status, out, err = run("Hello")
    assert (status, out != "", "answer" in err) == (0, True, True)
    assert run("Hello 2>&-") == (0, out, "")
    assert run("Hello <&- 2>&-") == (0, out, "")
    status, _, err = run("<&-")
    assert (status, "the prompt is empty" in err) == (2, True)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no shell that closes a stream, and no full device")
@pytest.mark.parametrize("output", [">&-", ">/dev/full", "<&- >&-"])
def test_an_answer_that_cannot_be_written_is_an_error(script_path: str, model: Path, output: str) -> None:
    if output.endswith("full") and not Path("/dev/full").exists():
        pytest.skip("there is no full device here")
    run = shlex.join(["run", "Hello", "-n", "1", "-m", str(model), "--device", "cpu:numpy"])
    chat = shlex.join(["chat", "-n", "1", "-m", str(model), "--device", "cpu:numpy"])
    convert = shlex.join(["convert", str(model), "x.gguf", "--force"])
    others = (f"{run} --json", "inspect", "cache info", convert, "--help", "--version") if output == ">&-" else ()
    for command in (run, chat, *others):
        line = f"{script_path} {command} {output}"
        if command == chat:
            if "<" in output:
                continue  # nothing is asked
            line = f"echo Hello | {line}"
        ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert (ran.returncode, ran.stderr.count("\n")) == (1, 1), (line, ran)
        assert re.match(r"bitnet: error: .*(Bad file descriptor|No space left on device)\.\n", ran.stderr), ran
        assert subprocess.run(["sh", "-c", f"{line} 2>&-"], timeout=60, check=False).returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
def test_what_is_for_the_person_may_be_lost(script_path: str, model: Path) -> None:
    line = shlex.join([script_path, "run", "Hello", "-n", "1", "-m", str(model), "--device", "cpu:numpy"])
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    shell = ["sh", "-c", f"{line} 2>/dev/full"]
    ran = subprocess.run(shell, capture_output=True, timeout=60, check=False, env=buffered)
    assert (ran.returncode, ran.stdout != b"") == (0, True)


def test_any_terminal_gets_utf8(script: Bitnet, model: Path) -> None:
    """The C locale's ASCII would end an answer in an exception."""
    ran = script("run", "-m", str(model), "é", "-n", "30", "--temp", "9", "-s", "1", LC_ALL="C", PYTHONUTF8="0")
    assert ran.status == 0, ran.err
    assert any(ord(c) > 127 for c in ran.out)


def test_the_first_command_of_the_readme(script: Bitnet) -> None:
    """With nothing but the question: the model in the package, on the best device there is."""
    ran = script("run", "What is 17 + 25?", BITNET_LOG="info", BITNET_DEVICE="auto")
    assert ran.status == 0, ran.err
    assert "42" in ran.out
    assert re.search(r"^requested=auto detected=\[.*cpu\] selected=\S+$", ran.err, re.MULTILINE)


def test_a_file_without_a_draft_layer_is_an_error(bitnet: Bitnet, model: Path) -> None:
    ran = bitnet("run", "-m", model, "--draft", model, "x")
    assert ran.status == 4
    assert "has no draft layer" in ran.err
