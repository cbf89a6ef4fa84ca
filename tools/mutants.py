"""Checks that a fault anywhere in a package fails a test that a push selects.

For each of some modules drawn at random, a random function is made to raise, and pytest runs the test files that stand
on the module until a test fails: first those that name the function, then the nearest. pytest chooses among their tests
as for a push of that change. A test counts only if it then passes without the fault and fails with it again. Run it in
a clone of its own with no uncommitted changes: it edits sources, and restores them.

    mutants.py [--count 60] [--first 1] [--seed 1] [--files 25] [--seconds 300] [bitnet-core bitnet-server]
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from changes import RECORD, git
from closure import ROOT, Closure

FAULT = 'raise AssertionError("a mutant")'
EVERY = ("-m", "nightly or not nightly")


def statements(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """A function's statements without its docstring and ``...``."""
    return [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]


def mutate(path: Path, rng: random.Random) -> str:
    """Make a random function of a module raise, or the module if it has none; returns the name of what raises."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if functions := [node for node in nodes if statements(node)]:
        function = rng.choice(functions)
        first = statements(function)[0]
        start = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", []))])
        before = lines[start - 1][: first.col_offset]
        if before.strip():  # on the line of `def`
            lines[start - 1] = f"{before}{FAULT}\n"
        else:
            lines.insert(start - 1, f"{before}{FAULT}\n")
        name = function.name
    else:
        lines.append(f"\n{FAULT}\n")
        name = path.stem
    ast.parse("".join(lines))
    path.write_text("".join(lines), encoding="utf-8")
    return name


def nearest(closure: Closure, path: Path, name: str) -> list[tuple[int, Path]]:
    """The test files that stand on a file, and how many imports away it is.

    Those that name the function come first, then the nearest, then those that stand on the least.
    """
    word = re.compile(rf"\b{name.strip('_')}\b")
    found = []
    for test in closure.tests():
        if path in closure.stands_on(test):
            files, steps = closure.own(test), 0
            seen = set(files)
            while path not in seen and files:
                seen |= (files := {other for file in files for other in closure.imported(file)} - seen)
                steps += 1
            silent = not word.search(test.read_text(encoding="utf-8"))
            found.append((silent, steps, len(closure.stands_on(test)), test))
    return [(steps, test) for _, steps, _, test in sorted(found)]


def run_tests(*options: str, seconds: float) -> tuple[int, str]:
    """Exit status and output of pytest in one process; status 124 if it took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *options]
    kept = {name: value for name, value in os.environ.items() if name != "BITNET_BASE"}
    with subprocess.Popen(
        command, cwd=ROOT, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, process.communicate()[0]
    return process.returncode, output


def killer(path: Path, function: str, closure: Closure, files: int, seconds: float) -> str:
    """The test that fails because of a fault in a file, and the distance of its file; empty if none does."""
    for steps, test in nearest(closure, path, function)[:files]:
        name = test.relative_to(ROOT).as_posix()
        status, output = run_tests("-x", name, seconds=seconds)
        if status in (1, 2, 3, 4):  # a test failed, or the file cannot even be imported
            failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S.*?)(?: - |$)", output, re.MULTILINE)
            again = failed[1] if failed and status == 1 else name
            with restored(path):
                passes, _ = run_tests("-x", again, *EVERY, seconds=2 * seconds)
            if passes == 0 and run_tests("-x", again, *EVERY, seconds=2 * seconds)[0]:
                return f"{again} ({steps} imports away)"
    return ""


@contextmanager
def restored(path: Path) -> Iterator[None]:
    """In this context, a file is as it was committed."""
    mutant = path.read_text(encoding="utf-8")
    git("checkout", "--", str(path))
    try:
        yield
    finally:
        path.write_text(mutant, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("packages", nargs="*", default=["bitnet-core", "bitnet-server"], help="packages to draw from")
    parser.add_argument("--count", type=int, default=60, help="modules to draw")
    parser.add_argument("--first", type=int, default=1, help="number in the draw to begin at, after an interrupted run")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--files", type=int, default=25, help="test files to try for each module")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of each test file")
    given = parser.parse_args()
    if git("status", "--porcelain", "--", ".", f":!{RECORD}"):
        raise SystemExit("This clone has uncommitted changes, which would be lost. Run this in a clone of its own.")
    (ROOT / RECORD).write_text(git("rev-parse", "HEAD") + "\n", encoding="utf-8")  # the state before each fault
    rng, closure = random.Random(given.seed), Closure()
    modules = sorted(path for name in given.packages for path in (ROOT / "packages" / name / "src").rglob("*.py"))
    survived = 0
    for number, path in enumerate(rng.sample(modules, min(given.count, len(modules))), start=1):
        started = time.monotonic()
        name = mutate(path, rng)
        try:
            if number < given.first:  # its fault was drawn all the same, as those that follow depend on it
                continue
            found = killer(path, name, closure, given.files, given.seconds)
        finally:
            git("checkout", "--", str(path))
        survived += not found
        module = path.relative_to(ROOT / "packages").as_posix()
        print(f"{module}: {name}: {found or 'SURVIVED'}; {time.monotonic() - started:.0f} s", flush=True)
    print(f"{survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
