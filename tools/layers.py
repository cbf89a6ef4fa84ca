"""Prints the rooms of ``bitnet.core`` and ``bitnet.server``, lowest floor first, and what breaks their order.

A room is a module or folder directly below the package. It imports from rooms below it, never from one above, and no
modules import each other in a circle. Imports inside functions and under ``TYPE_CHECKING`` count.

Any source file of the repository that has more than ``MAX_LINES`` lines gives the reason in its first docstring or
comment, in a sentence that begins with "Long".

    layers.py      prints; exit status 1 if something breaks the order or gives no reason
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MAX_LINES = 400
"""Number of lines from which a file needs a reason."""
SOURCES = (
    *(".c", ".cl", ".clh", ".comp", ".cpp", ".css", ".cu", ".cuh", ".glsl", ".h", ".js", ".m", ".metal", ".mjs", ".py"),
    *(".sh", ".wgsl"),
)
"""How the names of source files end; data, documents and lists of tests' answers are as long as they are."""
_REASON = re.compile(r"\bLong[ ,:].*?\.(?=\s|$)", re.DOTALL)
_COMMENT = re.compile(r"\s*(//|/?\*|#)")


@cache
def modules(root: Path) -> Mapping[str, ast.Module]:
    """The modules below a folder by dotted name; a package has its folder's, and the folder itself ``""``."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


@cache
def statements(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, anywhere in its source."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@dataclass(frozen=True)
class House:
    """A package and its rooms.

    Attributes:
        package: Its dotted name.
        rooms: From the lowest floor up; the last is ``""``, the package itself, which offers what is below.
    """

    package: str
    rooms: tuple[str, ...]

    @property
    def root(self) -> Path:
        first, last = self.package.split(".")
        return REPOSITORY / f"packages/{first}-{last}/src/{first}/{last}"

    @cached_property
    def known(self) -> Mapping[str, ast.Module]:
        return modules(self.root)

    def imports(self, tree: ast.Module, known: Mapping[str, ast.Module]) -> Iterator[tuple[int, str]]:
        """Line and module of each import from the package."""
        for node in statements(tree):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, "imports are absolute"
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                before, _, inner = name.partition(self.package)
                if before or (inner and not inner.startswith(".")) or (not inner and name != self.package):
                    continue
                inner = inner.removeprefix(".")
                yield node.lineno, inner if inner in known else inner.rpartition(".")[0]

    def upward(self, known: Mapping[str, ast.Module] | None = None) -> list[str]:
        """Imports from a room above the importer's own."""
        known = self.known if known is None else known
        floor = {room: i for i, room in enumerate(self.rooms)}
        return [
            f"{name or self.package}:{line} imports {other or self.package}"
            for name, tree in known.items()
            for line, other in self.imports(tree, known)
            if floor[other.partition(".")[0]] > floor[name.partition(".")[0]]
        ]

    def circle(self, known: Mapping[str, ast.Module] | None = None) -> Sequence[str]:
        """Modules that import each other in a ring; empty where there is none."""
        known = self.known if known is None else known
        edges = {name: sorted({other for _, other in self.imports(tree, known)}) for name, tree in known.items()}
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


def why_long(path: Path) -> str | None:
    """The reason for a source file's length: ``None`` where it needs none, empty where it gives none."""
    text = path.read_text(encoding="utf-8")
    if text.count("\n") <= MAX_LINES:
        return None
    if path.suffix == ".py":
        begin = ast.get_docstring(ast.parse(text)) or ""
    else:
        begin = "\n".join(_COMMENT.sub("", line, count=1) for line in takewhile(_COMMENT.match, text.splitlines()))
    reason = _REASON.search(begin)
    return " ".join(reason[0].split()) if reason else ""


def long_files() -> dict[str, str]:
    """The repository's source files of more than ``MAX_LINES`` lines, each with its reason or nothing."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    sources = [name for name in names if name.endswith(SOURCES) and (REPOSITORY / name).is_file()]
    return {name: why for name in sorted(sources) if (why := why_long(REPOSITORY / name)) is not None}


CORE = House(
    "bitnet.core",
    (
        *("errors", "support", "hal", "gguf", "hub", "text", "model", "reference", "cpu", "gpu", "engine", "devices"),
        *("receipts", "arrays", "embedder", "api", "loading", "evaluation", "cli", "testing", "__main__", ""),
    ),
)
SERVER = House(
    "bitnet.server",
    (
        "request",
        "forms",
        "chat",
        "batch",
        "models",
        "generation",
        "isolated",
        "api",
        "http",
        "ray",
        "data",
        "bench",
        "web",
        "launch",
        "commands",
        "",
    ),
)
HOUSES = (CORE, SERVER)


def report(house: House) -> tuple[str, bool]:
    """What a person reads of a package, and whether its order is whole."""
    lines = [f"{house.package}, lowest floor first:"]
    for floor, room in enumerate(house.rooms):
        inside = [name for name in house.known if name.partition(".")[0] == room]
        first = (ast.get_docstring(house.known[room]) or "").partition("\n")[0]
        lines.append(f"{floor:3} {room or house.package:12} {len(inside):3} modules  {first}")
    faults = [f"up: {line}" for line in house.upward()]
    if ring := house.circle():
        faults.append(f"circle: {' -> '.join(ring)}")
    return "\n".join([*lines, *(faults or ["No import goes up, and there is no circle."])]), not faults


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    reports = [report(house) for house in HOUSES]
    print("\n\n".join(text for text, _ in reports))
    long = long_files()
    print(f"\nOver {MAX_LINES} lines:")
    for file, reason in long.items():
        print(f"{file}: {reason or 'no reason is given'}")
    return int(not all(whole for _, whole in reports) or not all(long.values()))


if __name__ == "__main__":
    sys.exit(main())
