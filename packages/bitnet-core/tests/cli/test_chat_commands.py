"""What is typed in ``bitnet chat`` besides messages, and how its answers are laid out."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import load_model
from bitnet.core.cli.wrapping import Wrapping

Bitnet = Callable[..., Any]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_DEVICE", "cpu")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_undo_again_save_load_and_model(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """The expected answers are those of the Python interface to the messages that should remain."""
    other = tmp_path / "an other.gguf"
    other.write_bytes(model.read_bytes())
    typed = (
        "One\nTwo\n/undo\nThree\n/again\n/system Be brief.\nFour\n/save first.json\n/reset\n/load first.json\n"
        f'/model "{other}"\nFive\n/save last.json\n/model none.gguf\n/model\n'
    )
    ran = bitnet("chat", "-m", model, "-n", "4", "--no-stats", stdin=typed)
    assert ran.status == 0, ran.err
    assert "[cpu:" not in ran.err
    first, last = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("first.json", "last.json"))
    roles = ["system", *["user", "assistant"] * 3]
    assert [message["role"] for message in first] == roles
    assert [message["content"] for message in first if message["role"] != "assistant"] == [
        "Be brief.",
        "One",
        "Three",
        "Four",
    ]
    assert last[:7] == first
    assert last[7] == user("Five")
    with load_model(model, device="cpu") as loaded:

        def answers(*messages: dict[str, str]) -> str:
            return loaded.chat(messages, max_tokens=4).text

        one = answers(user("One"))
        begun = [user("One"), {"role": "assistant", "content": one}]
        two, three = answers(*begun, user("Two")), answers(*begun, user("Three"))
        assert [first[2]["content"], first[4]["content"]] == [one, three]
        four, five = answers(*first[:-1]), answers(*last[:-1])
    assert first[-1]["content"] == four
    assert ran.out == "".join(f"{text}\n" for text in (one, two, three, three, four, five))
    assert "none.gguf" in ran.err
    assert ran.err.rstrip().endswith(str(other))  # it has stayed the model


@pytest.mark.parametrize("leave", ["exit", "quit", "/quit", "/bye"])
def test_words_that_leave(bitnet: Bitnet, model: Path, leave: str) -> None:
    ran = bitnet("chat", "-m", model, "-n", "1", stdin=f"{leave}\n/nope\n")
    assert (ran.status, ran.out, ran.err) == (0, "", "")


def test_set(bitnet: Bitnet, model: Path) -> None:
    typed = "/set max-tokens 2\nHi\n/set top_k x\n/set n -1\n/set temperature -3\n/set nothing 1\n/set\n"
    ran = bitnet("chat", "-m", model, "-n", "5", stdin=typed)
    assert ran.status == 0
    assert "answer 2 tokens" in ran.err
    assert "'x' is not a valid integer" in ran.err
    assert re.search(r"temperature.* is -3", ran.err)
    assert "nothing named nothing" in ran.err
    assert "\nmax_tokens -1\ntemperature 0.0\n" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("begin", ["/multiline", '"""'])
def test_a_message_of_several_lines(bitnet: Bitnet, model: Path, tmp_path: Path, begin: str) -> None:
    ran = bitnet("chat", "-m", model, "-n", "1", stdin=f'{begin}\none\n/undo\n\nexit\n"""\n/save a.json\n')
    assert ran.status == 0
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))[0] == user("one\n/undo\n\nexit")


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "cut": ('[{"role": "user", "content": "Hi"', "not JSON (line 1"),
    "latin": (b"\xe9", "not UTF-8"),
    "empty": ("", "not JSON"),
    "number": ("7", "no list of messages"),
    "none": ("[]", "no list of messages"),
    "text": ('["Hi"]', "message 1 is not an object"),
    "role": ('[{"role": "wizard", "content": "Hi"}]', "message 1 has no role"),
    "content": ('[{"role": "user", "content": 7}]', "message 1 has no text in content"),
    "missing": ('[{"role": "user"}]', "message 1 has no text in content"),
    "image": ('[{"role": "user", "content": [{"type": "image_url"}]}]', "content other than text"),
    "turns": ('[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]', "message 2 has the role user"),
    "begins": ('[{"role": "assistant", "content": "a"}]', "user is expected"),
    "surrogate": ('[{"role": "user", "content": "\\ud800"}]', "half of a surrogate pair"),
    "deep": ("[" * 100_000, "not a conversation"),
    "digits": ("[" + "9" * 10_000 + "]", "not a conversation"),
}


def test_a_broken_file_changes_nothing(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """Neither the conversation, which is saved as it was, nor the file, over which nothing is saved."""
    for name, (data, _) in BROKEN.items():
        (tmp_path / f"{name}.json").write_bytes(data if isinstance(data, bytes) else data.encode())
    tries = "".join(f"/load {name}.json\n" + f"/save {name}.json\n" * bool(BROKEN[name][0]) for name in BROKEN)
    typed = f"Hi\n{tries}/load absent.json\n/load\n/save\n/save no/such.json\n/save kept.json\n"
    ran = bitnet("chat", "-m", model, "-n", "2", "--no-stats", stdin=typed)
    assert ran.status == 0
    assert "Traceback" not in ran.err
    lines = ran.err.splitlines()
    for name, (data, wanted) in BROKEN.items():
        assert any(line.startswith(f"{name}.json") and wanted in line for line in lines), (name, ran.err)
        assert (tmp_path / f"{name}.json").read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert ran.err.count("exists and is not a saved conversation") == len(BROKEN) - 1
    assert len(json.loads((tmp_path / "kept.json").read_text("utf-8"))) == 2
    assert len(list(tmp_path.glob("*.tmp"))) == 0


def test_a_message_without_an_answer_is_answered(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """An object with messages, as of a request to a server, loads as a list does."""
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    (tmp_path / "a.json").write_text(json.dumps({"messages": [{"role": "user", "content": parts}], "top_p": 1}))
    with load_model(model, device="cpu") as loaded:
        wanted = loaded.chat([user("Hi")], max_tokens=3).text
    assert bitnet("chat", "-m", model, "-n", "3", stdin="/load a.json\n").out == f"{wanted}\n"


def test_nothing_to_undo(bitnet: Bitnet, model: Path) -> None:
    ran = bitnet(
        "chat",
        "-m",
        model,
        stdin="/undo\n/again\n/save a.json\n/system\n/system \udcff\n".encode("utf-8", "surrogateescape"),
    )
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (0, "", 5)


def test_a_forgotten_message_is_saved(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    typed = "".join(f"{digit * 60}\n" for digit in "1234") + "/save a.json\n"
    ran = bitnet("chat", "-m", model, "-n", "5", "-c", "160", stdin=typed)
    assert "forgotten" in ran.err
    assert [m["content"][0] for m in json.loads((tmp_path / "a.json").read_text("utf-8"))[::2]] == list("1234")


@pytest.mark.parametrize("columns", [9, 20, 79])
def test_words_are_whole(columns: int) -> None:
    """Each word is whole in a line that fits, no line could take the next word, and chunks' borders do not matter."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    draw = random.Random(seed)
    words = ["x" * draw.randint(1, 9) for _ in range(300)]
    text = "".join(word + draw.choice([" ", " ", " ", "\n"]) for word in words)
    whole = Wrapping()
    shown = whole.add(text, columns) + whole.rest(columns)
    pieces, rest, split = Wrapping(), text, ""
    while rest:
        size = draw.randint(1, 7)
        split += pieces.add(rest[:size], columns)
        rest = rest[size:]
    assert split + pieces.rest(columns) == shown
    assert shown.split() == words
    paragraphs = text.split("\n")
    lines = iter(shown.split("\n"))
    for paragraph in paragraphs:
        wanted = paragraph.split()
        line: list[str] = []
        for word in wanted:  # as many as fit
            if line and len(" ".join([*line, word])) > columns:
                assert next(lines).split() == line
                line = []
            line.append(word)
        assert next(lines).split() == line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("    code\n\tx", "    code\n\tx"),
        ("abcdefghijklmno", "abcdefghij\nklmno"),
        ("ab abcdefghijk", "ab\nabcdefghij\nk"),
        ("漢字漢字漢字", "漢字漢字漢\n字"),
        ("e\u0301" * 10 + " x", "e\u0301" * 10 + "\nx"),
        ("12345678\tx", "12345678\nx"),
        ("a  \n\nb ", "a  \n\nb "),
    ],
)
def test_wrapping(text: str, shown: str) -> None:
    wrapping = Wrapping()
    assert wrapping.add(text, 10) + wrapping.rest(10) == shown


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_bare_command_lists_commands_first_in_24_rows(bitnet: Bitnet, columns: str) -> None:
    ran = bitnet(COLUMNS=columns)
    lines = ran.out.splitlines()
    assert ran.status == 0
    assert len(lines) < 24
    assert max(map(len, lines)) <= int(columns)
    assert lines[1] == "Commands:"
    assert lines[2].split()[0] == "run"


def test_help_is_as_wide_as_the_terminal(bitnet: Bitnet) -> None:
    assert 100 < max(map(len, bitnet("run", "--help", COLUMNS="140").out.splitlines())) <= 140
