"""Markdown at a terminal: what is on the screen in the end, however the text came in pieces."""

from __future__ import annotations

import random
import re
import sys

import pytest

from bitnet.core.cli import markdown
from bitnet.core.cli.console import Shown

pytest.importorskip("rich", reason="rich is not installed")
PARTS = (
    "# A title\n",
    "Some **bold words** and `code`, again and again, until the line is longer than the terminal is wide, as here.",
    "- one\n- two\n\n  goes on\n- [three](https://x.org/three)",
    "1. first\n\n2. second",
    "```python\ndef f(x):\n\n    return x  # **not bold**\n```",
    "~~~~\n~~~\n\n# no title\n~~~~",
    "| a | b |\n|---|--:|\n| 1 | 2 |",
    "> a quote\nof two lines",
    "日本語の文章 and e\u0301",
    "x < y & [red]no markup[/red] :smile:",
    "Text\n---",
)


class Screen:
    """What a terminal shows of text and of the few control sequences that are used."""

    def __init__(self, rows: int) -> None:
        self.lines, self.row, self.rows, self.returned = [""], 0, rows, False

    def write(self, text: str) -> None:
        for piece in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|\r|\n|[^\x1b\r\n]+", text):
            if piece == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            elif piece == "\r":
                self.returned = True
            elif re.fullmatch(r"\x1b\[\d+A", piece):
                self.row -= int(piece[2:-1])
                assert self.row >= max(0, len(self.lines) - self.rows), "a row that has left the screen"
            elif piece == "\x1b[J":
                assert self.returned
                self.lines[self.row :] = [""]
            elif not re.fullmatch(r"\x1b\[[\d;]*m", piece):
                assert "\x1b" not in piece
                self.lines[self.row] += piece
                self.returned = False

    def text(self) -> list[str]:
        return [line.rstrip() for line in self.lines]


def shown(pieces: list[str], columns: int, rows: int) -> list[str]:
    found = markdown.console()
    assert found is not None
    formatting, screen = markdown.Formatting(found), Screen(rows)
    for piece in pieces:
        screen.write(formatting.add(piece, columns, rows))
    screen.write(formatting.rest(columns, rows))
    return screen.text()


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


@pytest.mark.parametrize("rows", [200, 6])
def test_random_pieces_leave_what_the_whole_text_leaves(rows: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(40):
        text = "\n\n".join(chance.choices(PARTS, k=chance.randint(1, 8))) + chance.choice(["", "\n", "\n\n\n"])
        columns = chance.choice([20, 41, 79])
        cuts = sorted(chance.sample(range(1, len(text)), min(len(text) - 1, chance.randint(1, 60))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found = shown(pieces, columns, rows)
        if rows == 200:
            assert found == shown([text], columns, rows)
        assert max(map(len, found)) <= columns
        for word in (
            "again",
            "goes on",
            "first",
            "second",
            "return x",
            "no title",
            "of two lines",
            "日本語",
            ":smile:",
        ):
            assert "".join(found).count(word) <= text.count(word)
        assert "".join(found).count("日") == text.count("日")


def test_a_block_is_formatted() -> None:
    found = "\n".join(shown(list("A **bold** [link](https://x.org).\n\n- one\n\n```\ncode **\n```\n"), 60, 50))
    assert found.split("\n") == ["A bold link (https://x.org).", "", " • one", "", "", " code **", ""]


def test_a_block_that_is_higher_than_the_screen_stays() -> None:
    text = "**a**\n" * 30
    assert shown(list(text), 60, 10) == ["**a**"] * 30


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_answers_are_formatted_and_thoughts_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Shown(formatted=True) as out:
        for reasoning, text in (("*I*\n", ""), ("", "**Yes**\x1b[31m"), ("", "\n\nNo")):
            out.chunk(reasoning, text)
    said = capsys.readouterr().out
    assert "*I*" in said
    assert "\x1b[31m" not in said
    screen = Screen(24)
    screen.write(said)
    assert ("Yes\\x1b[31m" in screen.text()) == (term == "xterm")
    assert ("**Yes**\\x1b[31m" in screen.text()) == (term == "dumb")
    assert screen.text()[-1] == "No"


def test_without_rich_nothing_changes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Shown(formatted=True) as out:
        out.chunk("", "**Yes**")
    assert capsys.readouterr().out == "**Yes**"
