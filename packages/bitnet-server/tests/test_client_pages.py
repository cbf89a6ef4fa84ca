"""``docs/clients``: tests run what these pages show, or a page says what is not run, and why.

Above each block stands a mark for its test, ``<!-- run: NAME in FILE -->``, or a sentence, ``Not run in tests: WHY.``
A test takes the block from the page with ``shown("NAME")``, so that both stay the same.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "clients").glob("*.md"))
RUN = re.compile(r"<!-- run: ([\w-]+) in (\S+) -->")
NOT_RUN = re.compile(r"Not run in tests: \w.{8,}\.")
COMMAND = re.compile(r"(?<!`)`((?:bitnet|pip|npm|docker|uv|curl) [^`\n]+)`")


def uses(file: Path) -> set[str]:
    """The blocks that the tests of a file, or fixtures, take from the pages."""
    found = set()
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        fixture = any("pytest.fixture" in ast.unparse(decorator) for decorator in function.decorator_list)
        takes = "shown" in [argument.arg for argument in function.args.args]
        if not (takes and (fixture or function.name.startswith("test_"))):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "shown":
                (name, *_) = node.args
                assert isinstance(name, ast.Constant), f"{file}: shown() is called with a name that is computed"
                found.add(str(name.value))
    return found


def faults(page: str) -> list[str]:
    """What is wrong with the marks of a page."""
    wrong, above, fence, shown = [], "", "", set()
    for line in page.splitlines():
        if fence:
            above, fence = line, "" if line == fence else fence
            continue
        if opened := re.match(r" *(?:`{3,}|~{3,})", line):
            fence = opened[0]
            if mark := RUN.fullmatch(above):
                name, test = mark.groups()
                shown.add(name)
                if not (ROOT / test).is_file():
                    wrong.append(f"{name}: there is no {test}")
                elif name not in uses(ROOT / test):
                    wrong.append(f"{name}: no test in {test} calls shown({name!r})")
            elif not NOT_RUN.fullmatch(above):
                wrong.append(f"neither a mark nor a reason is above {line!r}, but {above!r}")
        above = line or above
    return wrong


def blocks(text: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def everything() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_block_is_run_or_says_why_not(page: Path) -> None:
    assert not faults(page.read_text(encoding="utf-8"))


def test_each_name_is_that_of_one_block() -> None:
    names = [name for name, _ in RUN.findall(everything())]
    assert len(names) == len(set(names))
    taken = {name for file in (ROOT / "packages/bitnet-server/tests").rglob("test_*.py") for name in uses(file)}
    assert taken == set(names)


def test_a_command_within_a_sentence_is_one_of_a_block() -> None:
    lines = [line for text in blocks(everything()) for line in text.splitlines()]
    for command in COMMAND.findall(everything()):
        assert any(line == command or line.startswith(f"{command} ") for line in lines), command


GOOD = "<!-- run: serve in packages/bitnet-server/tests/test_serve_command.py -->\n\n```sh\nbitnet serve\n```\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<!-- run", "<!-- runs", "neither"),
        ("serve in", "other in", "no test"),
        ("serve_command", "gone", "there is no"),
        (GOOD.splitlines()[0], "Not run in tests.", "neither"),
        (GOOD.splitlines()[0], "Not run in tests: .", "neither"),
        ("```sh", "A sentence between.\n\n```sh", "neither"),
        ("```\n", "```\n\n```json\n{}\n```\n", "neither"),
        ("```\n", "```\n\n  ~~~\nbitnet serve\n  ~~~\n", "neither"),
    ],
)
def test_a_page_that_is_wrong_is_found(old: str, new: str, said: str) -> None:
    assert not faults(GOOD)
    assert not faults(GOOD.replace(GOOD.splitlines()[0], "Not run in tests: it takes a display."))
    (fault,) = faults(new.join(GOOD.rsplit(old, 1)))
    assert said in fault
