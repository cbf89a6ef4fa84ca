"""The wings of ``bitnet.core`` stand on each other in one order: no import upwards, and no circle.

Imports are read from the source, those inside functions and under ``TYPE_CHECKING`` included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

import bitnet.core

WINGS = (
    "errors",
    "support",
    "hal",
    "gguf",
    "hub",
    "text",
    "model",
    "reference",
    "cpu",
    "gpu",
    "engine",
    "devices",
    "receipts",
    "arrays",
    "api",
    "loading",
    "evaluation",
    "cli",
    "testing",
    "__main__",
    "",
)
"""Bottom to top; the last is ``bitnet.core`` itself, which offers what is below."""
ROOT = Path(bitnet.core.__file__).parent


@cache
def modules(root: Path) -> Mapping[str, ast.Module]:
    """The modules below a folder by dotted name; a package has its folder's, and the folder itself ``""``."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


@cache
def statements(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, anywhere in its source."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(tree: ast.Module, known: Mapping[str, ast.Module]) -> Iterator[tuple[int, str]]:
    """Line and module of each import from ``bitnet.core``."""
    for node in statements(tree):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            package, _, inner = name.partition("bitnet.core")
            if package or (inner and not inner.startswith(".")):
                continue
            inner = inner.removeprefix(".")
            yield node.lineno, inner if inner in known else inner.rpartition(".")[0]


def upward(known: Mapping[str, ast.Module]) -> list[str]:
    """Imports from a wing above the importer's own."""
    rank = {wing: i for i, wing in enumerate(WINGS)}
    return [
        f"{name or 'bitnet.core'}:{line} imports {other or 'bitnet.core'}"
        for name, tree in known.items()
        for line, other in imports(tree, known)
        if rank[other.partition(".")[0]] > rank[name.partition(".")[0]]
    ]


def circle(known: Mapping[str, ast.Module]) -> Sequence[str]:
    """Modules that import each other in a ring; empty where there is none."""
    edges = {name: sorted({other for _, other in imports(tree, known)}) for name, tree in known.items()}
    done: set[str] = set()

    def follow(path: list[str]) -> Sequence[str]:
        for other in edges[path[-1]]:
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in done and (found := follow([*path, other])):
                return found
        done.add(path[-1])
        return ()

    return next(filter(None, (follow([name]) for name in edges if name not in done)), ())


def test_every_module_is_in_a_wing() -> None:
    assert {name.partition(".")[0] for name in modules(ROOT)} == {*WINGS}


def test_no_import_from_a_wing_above() -> None:
    assert upward(modules(ROOT)) == []


def test_no_circle() -> None:
    assert circle(modules(ROOT)) == ()


@pytest.mark.parametrize("wing", [wing for wing in WINGS if wing])
def test_the_first_line_says_who_lives_there(wing: str) -> None:
    first, *rest = (ast.get_docstring(modules(ROOT)[wing]) or "").split("\n")
    assert first.endswith("."), first
    assert len(first.split()) > 3, first
    assert not rest or not rest[0], "the first line is a sentence of its own"


@pytest.mark.parametrize(
    ("module", "line", "above"),
    [
        ("gguf.reader", "from bitnet.core.engine import Engine", True),
        ("gguf.reader", "from bitnet.core import api", True),
        ("gguf.reader", "import bitnet.core.devices.registry", True),
        ("gguf.reader", "from bitnet.core import load_model", True),
        ("gguf.reader", "def f() -> None:\n    from bitnet.core.loading import load_model", True),
        ("gguf.reader", "if TYPE_CHECKING:\n    from bitnet.core.model.config import ModelConfig", True),
        ("gguf.types", "from bitnet.core.gguf.reader import GGUFFile", False),
        ("hal.probe", "if TYPE_CHECKING:\n    from bitnet.core.hal.device import Device", False),
    ],
)
def test_what_is_planted_is_found(module: str, line: str, above: bool) -> None:
    known = dict(modules(ROOT))
    known[module] = ast.Module([*known[module].body, *ast.parse(line).body], [])
    assert len(upward(known)) == above
    assert above or module in circle(known)
