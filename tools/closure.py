"""Computes what a test file stands on: the source files that it imports or starts, directly or through others.

Imports are read from the source, those inside functions included, as any of them may run. These count, too: modules
named in strings (``import_module("bitnet.core.x")``, code for ``python -c``), the ``bitnet`` command and scripts where
a test starts them, and the modules of entry points where their group is named. Imports for type checkers alone do not.
So do files and folders that a test names by their path (``ROOT / "kernels" / "opencl"``), as it reads or lists them.
What no source says (kernels that a package loads, the page's files) is declared in ``conftest.py``.

    closure.py TEST_FILE         prints what a test file stands on
    closure.py --of SOURCE_FILE  prints the test files that stand on a file
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("packages/*/src", "tools", "packages/bitnet-metal/tests/shim", "packages/bitnet-metal/tests/objc_on_cpu")
"""Patterns of the folders that modules are imported from: the packages', and pytest's ``pythonpath``."""
TESTS = ("packages/*/tests/**/test_*.py", "tests/**/test_*.py")
COMMAND = "bitnet.core.__main__"
"""What the script ``bitnet`` and ``python -m bitnet.core`` run."""
BACKENDS, COMMANDS = "bitnet.backends", "bitnet.commands"
"""Groups of entry points."""
HELP = {"--help", "-h"}
"""Options with which ``bitnet`` imports every command."""
_FROM = re.compile(r"\bfrom\s+(bitnet[\w.]*)\s+import\s+\(?([\w\s,]+)")
_DOTTED = re.compile(r"\bbitnet(?:\.\w+)+")
_SCRIPT = re.compile(r"[\w./-]+\.py\b")
_PATH = re.compile(r"[\w.-]+(/[\w.*-]+)+")


class Place(NamedTuple):
    """A path that a source names.

    Attributes:
        up: The folder that it starts from, as an index of the ``parents`` of the file; None: the repository's root.
        parts: Its parts; ``*`` stands for one that is no literal, but at the end, where it is left out.
    """

    up: int | None
    parts: tuple[str, ...]


@dataclass
class Source:
    """What the source of one file says.

    Attributes:
        imports: Pairs of a module and a name imported from it, which may be a module, too; an empty name for the module
            alone.
        lazy: The names that the file imports for type checkers or in ``__getattr__``, and their modules. Who imports
            such a name from the file imports it from there.
        scripts: File names ending in ``.py`` in its strings.
        words: Its strings that are one word.
        starts: Whether it names the command ``bitnet`` as a program.
        places: The paths that it names.
    """

    imports: set[tuple[str, str]] = field(default_factory=set)
    lazy: dict[str, str] = field(default_factory=dict)
    scripts: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    starts: bool = False
    places: set[Place] = field(default_factory=set)


def read(tree: ast.Module, package: str = "") -> Source:
    """What a module says.

    Args:
        package: The package that its relative imports start from.
    """
    found = Source()
    found.places = set(Places(tree).named())
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, lazy = todo.pop()
        match node:
            case ast.Expr(value=ast.Constant()):  # a docstring
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                todo += [(child, True) for child in node.body] + [(child, lazy) for child in node.orelse]
                continue
            case ast.FunctionDef(name="__getattr__") | ast.FunctionDef(name="__dir__"):
                lazy = True
            case ast.Import() if not lazy:
                found.imports |= {(alias.name, "") for alias in node.names}
            case ast.ImportFrom():
                start = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                module = ".".join(filter(None, [*start, node.module or ""]))
                if lazy:
                    found.lazy |= {alias.asname or alias.name: module for alias in node.names}
                else:
                    found.imports |= {(module, alias.name) for alias in node.names}
            case ast.Attribute():
                if dotted := _dotted(node):
                    found.imports |= set(_readings(dotted))
            case ast.Constant(value=str(text)):
                _read_string(text, found)
            case ast.List(elts=[ast.Constant(value="bitnet" | "bitnet.exe"), *_]):
                found.starts = True
            case ast.BinOp(op=ast.Div(), right=ast.Constant(value="bitnet" | "bitnet.exe")):
                found.starts = True
            case ast.Call(func=ast.Attribute(attr="which"), args=[ast.Constant(value="bitnet"), *_]):
                found.starts = True
            case _:
                pass
        todo += [(child, lazy) for child in ast.iter_child_nodes(node)]
    return found


class Places:
    """The paths that a module names: from ``ROOT``, from its own file, or from names that stand for such paths."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._known: dict[str, Place] = {}
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if (place := self._place(value)) is not None:
                    self._known[name] = place

    def named(self) -> Iterator[Place]:
        """Every path, without those that go on with more parts."""
        inner = set[ast.AST]()
        for node in ast.walk(self._tree):  # outer nodes first
            match node:
                case ast.BinOp(op=ast.Div()) if (place := self._place(node)) is not None:
                    inner.add(node.left)
                    if node not in inner:
                        known = place.parts[:-1] if place.parts[-1] == "*" else place.parts
                        yield Place(place.up, known)
                case ast.Call(
                    func=ast.Attribute(attr="glob" | "rglob", value=ast.Name() as folder),
                    args=[ast.Constant(value=str(pattern)), *_],
                ):
                    if (place := self._place(folder)) is not None:
                        yield Place(place.up, (*place.parts, *pattern.split("/")))
                case ast.Constant(value=str(text)) if _PATH.fullmatch(text):
                    yield Place(None, tuple(text.split("/")))

    def _place(self, node: ast.expr) -> Place | None:
        """The path that an expression stands for; None if it is not known to be one."""
        match node:
            case ast.Name(id="ROOT"):
                return Place(None, ())
            case ast.Name(id=name):
                return self._known.get(name)
            case ast.Subscript(value=ast.Attribute(attr="parents"), slice=ast.Constant(value=int(up))):
                return Place(up, ())
            case ast.Attribute(attr="parent", value=ast.Call()):
                return Place(0, ())
            case ast.BinOp(op=ast.Div(), left=left, right=ast.Constant(value=str(text))):
                before = self._place(left)
                return before and Place(before.up, (*before.parts, *text.split("/")))
            case ast.BinOp(op=ast.Div(), left=left):
                before = self._place(left)
                return before and Place(before.up, (*before.parts, "*"))
            case _:
                return None


def _dotted(node: ast.expr) -> str:
    """``bitnet.core.x`` of such an attribute; empty for others."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) and node.id == "bitnet" else ""


def _readings(dotted: str) -> Iterator[tuple[str, str]]:
    """Each way to read a dotted name as a module and a name in it."""
    parts = dotted.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i]), parts[i]


def _read_string(text: str, found: Source) -> None:
    if "bitnet" in text:
        for module, names in _FROM.findall(text):
            found.imports |= {(module, name) for name in re.findall(r"\w+", names)}
        for dotted in _DOTTED.findall(text):
            found.imports |= set(_readings(dotted))
        found.starts |= text == "bitnet.core" or "-m bitnet.core" in text
    if ".py" in text:
        found.scripts |= set(_SCRIPT.findall(text))
    if len(text) < 40 and " " not in text:
        found.words.add(text)


class Closure:
    """What the files of a repository import.

    Args:
        gone: Source files that are no longer there. Who still imports one stands on it.

    Attributes:
        files: The file of each module that can be imported, by dotted name.
    """

    def __init__(self, root: Path = ROOT, gone: Collection[Path] = ()) -> None:
        self.root = root
        self.files: dict[str, Path] = {}
        self._packages: dict[Path, str] = {}
        for folder in (folder for pattern in SOURCES for folder in sorted(root.glob(pattern))):
            for path in sorted({*folder.rglob("*.py"), *(path for path in gone if folder in path.parents)}):
                parts = path.relative_to(folder).with_suffix("").parts
                inside = path.name == "__init__.py"
                self.files[".".join(parts[:-1] if inside else parts)] = path
                self._packages[path] = ".".join(parts[:-1])
        self._roots = {name.partition(".")[0] for name in self.files}  # `bitnet` is a namespace and has no file
        self._sources: dict[Path, Source] = {}
        self._imported: dict[Path, frozenset[Path]] = {}
        self._there: dict[str, bool] = {}

    @cached_property
    def entry_points(self) -> Mapping[str, Mapping[str, str]]:
        """The module of each entry point of the packages, by group and name."""
        found: dict[str, dict[str, str]] = {}
        for project in sorted(self.root.glob("packages/*/pyproject.toml")):
            group = ""
            for line in project.read_text(encoding="utf-8").splitlines():
                if heading := re.fullmatch(r"\[(?:project\.entry-points\.\"([\w.]+)\")?.*\]", line):
                    group = heading[1] or ""
                elif group and (entry := re.fullmatch(r'([\w-]+) = "([\w.]+):\w+"', line)):
                    found.setdefault(group, {})[entry[1]] = entry[2]
        return found

    def source(self, path: Path) -> Source:
        """What a file's source says."""
        if path not in self._sources:
            text = path.read_bytes() if path.is_file() else b""
            self._sources[path] = read(ast.parse(text, str(path)), self._packages.get(path, ""))
        return self._sources[path]

    def imported(self, path: Path) -> frozenset[Path]:
        """The files that a file imports or starts, without what these import."""
        if path not in self._imported:
            source = self.source(path)
            found = {file for module, name in source.imports for file in self._resolve(module, name, path)}
            if BACKENDS in source.words:
                for module in self.entry_points.get(BACKENDS, {}).values():
                    found |= self._resolve(module, "", path)
            if "src" not in path.relative_to(self.root).parts:  # tests and tools start programs
                places = (self.root, path.parent, self.root / "tools")
                named = source.scripts | {f"{word}.py" for word in source.words if word in self.files}
                scripts = {place / script for script in named for place in places}
                found |= {script.resolve() for script in scripts if script.is_file()}
                found |= self._resolve(COMMAND, "", path) if source.starts else set()
            self._imported[path] = frozenset(found - {path, self.root / "conftest.py"})
        return self._imported[path]

    def _resolve(self, module: str, name: str, importer: Path) -> set[Path]:
        """The files that run when a file imports a name from a module."""
        parts = module.split(".")
        beside = importer.with_name(f"{parts[0]}.py")
        if parts[0] not in self._roots and beside.is_file():
            return {beside}
        packages = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
        found = {self.files[package] for package in packages if package in self.files}
        if inner := self.files.get(f"{module}.{name}"):
            found.add(inner)
        elif (file := self.files.get(module)) and (home := self.source(file).lazy.get(name)) and home != module:
            found |= self._resolve(home, name, file)
        return found

    def own(self, test: Path) -> set[Path]:
        """A test file and the ``conftest.py`` files of its folders.

        The root's is left out: it chooses tests, and has tests of its own.
        """
        folders = [folder for folder in test.parents if self.root in folder.parents]
        return {test, *(path for folder in folders if (path := folder / "conftest.py").is_file())}

    def stands_on(self, test: Path) -> frozenset[Path]:
        """What is a test file's own, and all that this imports or starts."""
        own = self.own(test)
        todo = [*own]
        if any(self.source(path).starts for path in own):
            words = set[str]().union(*(self.source(path).words for path in own))
            for name, module in self.entry_points.get(COMMANDS, {}).items():
                if name in words or words & HELP:
                    todo += self._resolve(module, "", test)
        seen: set[Path] = set()
        while todo:
            if (path := todo.pop()) not in seen:
                seen.add(path)
                todo += self.imported(path)
        return frozenset(seen)

    def reads(self, test: Path) -> frozenset[str]:
        """The files and folders that a test file and what is not a package's source name by their path.

        They are relative to the root, and there; a pattern is one if something fits it. A folder of modules alone
        (``tools``) is none: what is imported from it counts.
        """
        found = set[str]()
        for path in self.stands_on(test):
            if "src" not in path.relative_to(self.root).parts:
                for place in self.source(path).places:
                    if ".." in place.parts:
                        continue
                    start = self.root if place.up is None else path.parents[place.up]
                    if self.root in (start, *start.parents):
                        found.add("/".join((*start.relative_to(self.root).parts, *place.parts)))
        return frozenset(name for name in found - {"", *SOURCES} if self._is_there(name))

    def _is_there(self, name: str) -> bool:
        if name not in self._there:
            at = self.root / name
            self._there[name] = next(self.root.glob(name), None) is not None if "*" in name else at.exists()
        return self._there[name]

    def tests(self) -> list[Path]:
        """Every test file."""
        return sorted(path for pattern in TESTS for path in self.root.glob(pattern))


def covers(paths: Iterable[str], name: str) -> bool:
    """Whether a file is one of the paths or below one, or fits a pattern among them.

    A pattern that ends with a name of its own (``packages/*/src``) covers what is below, too.
    """
    above = [name, *(parent.as_posix() for parent in PurePosixPath(name).parents)]
    for path in paths:
        if "*" not in path:
            found = path in above
        else:
            found = any(map(_fits(path), [name] if "*" in path.rpartition("/")[2] else above))
        if found:
            return True
    return False


@cache
def _fits(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """The pattern as an expression: ``**/`` stands for any folders, ``*`` for a part of one name."""
    parts = re.split(r"(\*\*/|\*)", pattern)
    return re.compile("".join({"**/": "(?:.*/)?", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)).fullmatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a test file, whose sources are listed")
    parser.add_argument("--of", action="store_true", help="list the tests that stand on this file instead")
    given = parser.parse_args()
    closure, path = Closure(), given.file.resolve()
    name = path.relative_to(ROOT).as_posix()
    if given.of:
        tests = closure.tests()
        found = [test for test in tests if path in closure.stands_on(test) or covers(closure.reads(test), name)]
        names = [test.relative_to(ROOT).as_posix() for test in found]
    else:
        names = [file.relative_to(ROOT).as_posix() for file in closure.stands_on(path)] + [*closure.reads(path)]
    for each in sorted(names):
        print(each)


if __name__ == "__main__":
    main()
