"""The documentation: the site builds without a warning, links lead somewhere, and what is named exists."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import bitnet.core
from bitnet.core.cli.app import EXIT_CODES, cli
from bitnet.core.model.default import default_model_path
from bitnet.core.support.env import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
SITE = "https://bitnet-core.github.io/bitnet/"
SOURCE = "https://github.com/bitnet-core/bitnet/"


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that match, new ones included, links left out."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in listed if (path := ROOT / name).is_file() and path.resolve() == path]


def prose() -> list[Path]:
    return tracked("*.md")


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "tools/site/mkdocs.yml", "-d", str(built)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def test_the_site_has_every_command_variable_and_exit_code(site: Path) -> None:
    text, environment = page(site, "command-line"), page(site, "environment")
    assert "\b" not in text  # click's mark for lines that stay as they are
    assert "<p>The prompt is the argument" in text  # a paragraph, not code
    for name, command in cli.commands.items():
        assert f"bitnet {name}<a" in text  # its heading, with the permanent link
        for option in (parameter for parameter in command.params if parameter.param_type_name == "option"):
            assert all(spelling in text for spelling in option.opts)
    assert all(f"<code>{variable.name}</code>" in environment for variable in VARIABLES)
    assert all(f"<td>{code}</td>" in environment for code in EXIT_CODES)


def test_the_site_has_everything_that_the_core_exports(site: Path) -> None:
    text = page(site, "api")
    missing = [name for name in bitnet.core.__all__ if name != "__version__" and f'id="bitnet.core.{name}"' not in text]
    assert not missing
    assert ":func:" not in text
    assert ":class:" not in text


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="(?:stylesheet|preload)"[^>]+"https?:')
    assert not [file for file in site.rglob("*.html") if fetched.search(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", ["index", "first-steps", "devices", "environment", "python", "receipts"])
def test_the_examples_of_a_page_run(name: str, tmp_path: Path) -> None:
    """All of a page, one after another, with the demo model as the reader's own."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    assert code
    code = code.replace('"model.gguf"', repr(str(default_model_path())))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "BITNET_DEVICE": "cpu", "BITNET_STRICT_MODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or "print(" not in code


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    for file in (ROOT / "docs/adr").glob("[0-9]*.md"):
        title = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert f"- [{title}]({file.name})" in index


def test_every_decision_says_where_it_stands() -> None:
    """Accepted on a day, and, if superseded, by a page that is there."""
    for file in (ROOT / "docs/adr").glob("[0-9]*.md"):
        status = file.read_text(encoding="utf-8").splitlines()[2]
        assert re.match(r"\*\*Status\.\*\* Accepted, 20\d\d-\d\d-\d\d\.", status), file.name
        newer = re.search(r"Superseded by (.*)", status)
        assert not newer or (
            (found := re.match(r"\[\d{4}\]\(([\w-]+\.md)\)\.", newer[1])) and (file.parent / found[1]).is_file()
        ), file.name


def test_every_measurement_says_when_where_and_how() -> None:
    for file in (ROOT / "docs/measurements").glob("*.md"):
        text = file.read_text(encoding="utf-8")
        assert file.name == "README.md" or (
            re.search(r"20\d\d-\d\d-\d\d", text) and re.search(r"`.*(run|python|bench)", text)
        )


def test_lines_can_be_read_in_a_terminal() -> None:
    """At most 160 columns, apart from tables and code."""
    wide = []
    for file in tracked("*.md"):
        text = re.sub(r"^( *)```.*?^\1```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        wide += [f"{file.name}: {line[:60]}" for line in text.splitlines() if len(line) > 160 and "|" not in line[:5]]
    assert not wide


# Links


def links(file: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\((?!#)([^()\s]+)\)", text)


def leads_nowhere(file: Path, link: str) -> bool:
    path = link.partition("#")[0]
    if path == f"{SITE}try/":  # made by `bitnet web build`
        return "-o build/site/try" not in (ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8")
    if link.startswith(SITE):
        name = path.removeprefix(SITE).rstrip("/") or "index"
        return not any((ROOT / "docs" / f"{name}{end}").is_file() for end in (".md", "/README.md", "/index.md"))
    if link.startswith(SOURCE):
        found = re.fullmatch(r"(?:blob|tree)/main/(.+)", path.removeprefix(SOURCE))
        return found is not None and not (ROOT / found[1]).exists()
    return not link.startswith(("http:", "https:", "mailto:")) and not (file.parent / path).exists()


def test_links_lead_somewhere() -> None:
    assert not [
        f"{file.relative_to(ROOT)}: {link}" for file in prose() for link in links(file) if leads_nowhere(file, link)
    ]


def test_links_of_what_pypi_shows_are_absolute(package: str) -> None:
    assert not [link for link in links(ROOT / "packages" / package / "README.md") if not link.startswith("https://")]


@pytest.mark.parametrize(
    "link", ["gone.md", f"{SITE}gone/", f"{SOURCE}blob/main/gone.py", f"{SITE}adr/0001-gone/", "../kernels/gone.md"]
)
def test_a_link_that_leads_nowhere_is_found(link: str) -> None:
    assert leads_nowhere(ROOT / "docs/index.md", link)


# Names


@cache
def names_of(module: str) -> frozenset[str] | None:
    """What a module of ours names, its classes' members among them; None where there is no such module."""
    for source in ROOT.glob("packages/*/src"):
        path = source.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return names_in(file)
        if path.is_dir():
            return frozenset()
    return None


@cache
def names_in(file: Path) -> frozenset[str]:
    found: set[str] = {path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return frozenset(found)


def is_there(path: str) -> bool:
    """Whether a dotted path that begins with ``bitnet.`` is a module, or a name in one."""
    words = path.split(".")
    for count in range(len(words), 0, -1):
        if (names := names_of(".".join(words[:count]))) is not None:
            return len(words) == count or words[count] in names
    return False


ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([\w.]+)`")
NO_NAMES = {"bitnet.backends", "bitnet.commands", "bitnet.__file__"}  # groups of entry points; a regular package's
EXAMPLES = re.compile(r"\btoy|NAME")  # backends that a page makes
DOTTED = re.compile(r"`(bitnet(?:\.\w+)+)(?:\(\))?`")


def unknown_names(file: Path, text: str) -> list[str]:
    roles = ROLE.findall(text) if file.suffix == ".py" else []
    ours = {name for name in (*DOTTED.findall(text), *roles) if name.startswith("bitnet.")} - NO_NAMES
    local = {name for name in roles if not name.startswith("bitnet.") and not hasattr(builtins, name)}
    here = names_in(file) if local else frozenset()
    return sorted(
        {name for name in ours if not EXAMPLES.search(name) and not is_there(name)}
        | {name for name in local if name.split(".")[0] not in here}
    )


def test_names_in_docstrings_and_pages_exist() -> None:
    files = [*prose(), *tracked("packages/**/*.py", "tools/**/*.py", "tests/**/*.py")]
    wrong = {
        str(file.relative_to(ROOT)): found
        for file in files
        if file != Path(__file__) and (found := unknown_names(file, file.read_text(encoding="utf-8")))
    }
    assert not wrong


def test_a_name_that_is_not_there_is_found() -> None:
    file = ROOT / "packages/bitnet-core/src/bitnet/core/errors.py"
    for said in (":func:`gone`", ":class:`bitnet.core.Gone`", "`bitnet.core.gone.Thing`", ":mod:`bitnet.gone`"):
        assert unknown_names(file, said), said
    assert not unknown_names(file, ":class:`BitNetError`, `bitnet.core.load_model()`, :class:`bitnet.core.hal.Device`")


PATH = re.compile(r"`((?:packages|kernels|tools|tests|docs|\.github|\.ci)/[\w./-]+)`")


def test_paths_in_pages_exist() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {path}"
        for file in prose()
        for path in PATH.findall(file.read_text(encoding="utf-8"))
        if not EXAMPLES.search(path)
        and not (ROOT / path).exists()
        and not (ROOT / "packages/bitnet-core" / path).exists()
    ]
    assert not wrong
