"""Names in the code follow one grammar: what says nothing is not a name, and a bound is called MIN or MAX."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMPTY = {"told", "news", "hush", "shy", "aside"}
"""Words that say nothing of what a name holds. The name of a test is a sentence, and may have them."""
BOUNDS = {"MOST": "MAX", "LEAST": "MIN"}
VERBS = {"set_aside", "setAside"}
SUSPECT = re.compile("|".join([*BOUNDS, f"(?i:{'|'.join(EMPTY)})"]))
"""What a file with such a name has somewhere: others need not be parsed."""
OTHER_LANGUAGES = (
    *("*.c", "*.h", "*.cpp", "*.cl", "*.clh", "*.cu", "*.cuh", "*.metal", "*.glsl", "*.comp", "*.wgsl"),
    *("*.js", "*.mjs"),
)
FOLDERS = ("packages", "tests", "tools", "kernels", "conftest.py")
NOT_CODE = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'", re.DOTALL)


def names_in_python(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name():
                yield node.id
            case ast.arg():
                yield node.arg
            case ast.Attribute():
                yield node.attr
            case ast.alias(asname=str(name)):
                yield name


def names_in_others(text: str) -> Iterator[str]:
    """Every word of the code that is no comment and no string; those of a JavaScript template are among them."""
    yield from re.findall(r"[A-Za-z_]\w*", NOT_CODE.sub(" ", text))


def faults(names: Iterator[str]) -> list[str]:
    found = set()
    for name in names:
        words = re.findall(r"[A-Za-z][a-z]*|[A-Z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name))
        said_nothing = EMPTY.intersection(word.lower() for word in words) and not name.startswith("test_")
        bounds = BOUNDS.keys() & set(name.split("_")) if name.isupper() else set()
        if (said_nothing or bounds) and name not in VERBS:
            found.add(name)
    return sorted(found)


def faults_by_file(names: Callable[[str], Iterator[str]], *patterns: str) -> dict[str, list[str]]:
    """The faults of each file whose name matches one of the patterns."""
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in tracked(*patterns)}
    assert len(texts) > 150
    found = {path: faults(names(text)) for path, text in texts.items() if SUSPECT.search(text)}
    return {path: names for path, names in found.items() if names}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *(f"{folder}*{p}" for folder in FOLDERS for p in patterns)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("this is no git repository")
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


@pytest.mark.parametrize(
    ("python", "other"),
    [
        ("told = 1", "int told = 1;"),
        ("def f(news): pass", "void f(int news)"),
        ("f'{told_at}'", "x[told_at]"),
        ("class LastNews: pass", "struct LastNews {}"),
        ("x.told", "x.told"),
        ("MOST_ROWS = 8", "#define MOST_ROWS 8"),
        ("HOLD_LEAST = 1", "#define MOST(a, b) a"),
    ],
)
def test_what_is_planted_is_found(python: str, other: str) -> None:
    assert len(faults(names_in_python(python))) == 1
    assert len(faults(names_in_others(other))) == 1


def test_english_is_no_fault() -> None:
    assert faults(names_in_python("def test_it_is_told(): 'told'; most = ALMOST = newest = set_aside()")) == []
    assert faults(names_in_others("/* told */ int most = 'told'; // at most\nf(\"news\"); setAside(AT);")) == []


def test_names_of_python() -> None:
    assert faults_by_file(names_in_python, "*.py") == {}


def test_names_of_other_languages() -> None:
    assert faults_by_file(names_in_others, *OTHER_LANGUAGES) == {}
