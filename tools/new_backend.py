"""Make the package of a new backend, ready to be filled in, and name it wherever the workspace lists its packages.

    uv run --group dev tools/new_backend.py NAME  # packages/bitnet-NAME and kernels/NAME
    uv run --group dev tools/new_backend.py NAME --family opencl  # packages/bitnet-NAME, on kernels/opencl
    uv run --group dev tools/new_backend.py NAME --dry-run  # only lists what that would make and change

The package builds, registers, and passes its tests: `bitnet devices` lists it as unsupported until it is written. Its
files are those of tools/backend_template: of `every`, and of its family or `own`. Everything is made in a temporary
folder and moved into place at the end, so that a failure changes nothing.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from string import Template
from typing import Any

from bitnet.core.errors import BitNetError, InvalidInputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).with_name("backend_template")
ENDING = ".template"
EVERY, OWN = "every", "own"
"""Folders of templates: for every backend, and for one with kernels of its own."""
FAMILIES = ("opencl",)
"""Kernel families that a backend may stand on: folders of kernels, and of templates."""
EXTRAS = {"level-zero": "oneapi"}
"""Extras of bitnet-core that are not called as their backend."""
RESERVED = {"auto", "core", "cpu", "gpu", "none", *EXTRAS.values()}
"""Words that mean something else where a backend is named."""
LONGEST = 20
"""Characters of a name, so that the templates' lines stay within 120."""

WORKSPACE, CORE = "pyproject.toml", "packages/bitnet-core/pyproject.toml"
TOX, MATRIX, LOCK = "tox.toml", "tools/ci_matrix.toml", "uv.lock"
CHANGED = (WORKSPACE, CORE, TOX, MATRIX, LOCK)


def toml(root: Path, path: str) -> dict[str, Any]:
    return tomllib.loads((root / path).read_text(encoding="utf-8"))


def folders(name: str, family: str | None) -> list[str]:
    """What is made for a backend."""
    return [f"packages/bitnet-{name}", *([] if family else [f"kernels/{name}"])]


def check_name(name: str, root: Path, family: str | None) -> None:
    """Refuse what cannot be the name of a new backend.

    Raises:
        InvalidInputError: It is malformed, reserved, or taken.
    """
    shown = f"the name {name[:40]!r}"
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > LONGEST:
        rule = f"Use lower-case letters, digits and single dashes, a letter first, at most {LONGEST}: level-zero."
        raise InvalidInputError(f"{shown} cannot be a backend's.", hint=rule)
    for folder in folders(name, family):
        if (root / folder).exists():
            raise InvalidInputError(f"{folder} is there already; nothing is overwritten.")
    tox, extras = toml(root, TOX), toml(root, CORE)["project"]["optional-dependencies"]
    if keyword.iskeyword(name) or name in {*RESERVED, *tox["env_list"], *tox["env"], *extras}:
        hint = "It is a word of Python, of tox, or of bitnet's own: choose another."
        raise InvalidInputError(f"{shown} is reserved.", hint=hint)


def values(name: str, root: Path) -> dict[str, str]:
    """Values of ``$name`` and its like in the templates."""
    major, minor = map(int, (root / "VERSION").read_text(encoding="utf-8").split(".")[:2])
    title = "".join(part.capitalize() for part in name.split("-"))
    span = f">={major}.{minor},<{major}.{minor + 1}"
    return {"name": name, "module": name.replace("-", "_"), "title": title, "range": span}


def made_files(words: dict[str, str], family: str | None) -> dict[str, str]:
    """Path in the workspace → text, of every file to be made from a template."""
    places = {"package": f"packages/bitnet-{words['name']}", "kernels": f"kernels/{words['name']}"}
    files = {}
    for folder in (TEMPLATES / EVERY, TEMPLATES / (family or OWN)):
        for template in sorted(folder.rglob(f"*{ENDING}")):
            part, *rest = template.relative_to(folder).parts
            path = "/".join([places[part], *rest]).replace("MODULE", words["module"]).removesuffix(ENDING)
            files[path] = Template(template.read_text(encoding="utf-8")).substitute(words)
    return files


def registered(root: Path, words: dict[str, str]) -> dict[str, str]:
    """Path → new text, of every file that lists the packages.

    Raises:
        InvalidInputError: One of them does not look as expected.
    """
    name, span = words["name"], words["range"]
    package, extra = f"bitnet-{name}", EXTRAS.get(name, name)
    texts = {path: (root / path).read_text(encoding="utf-8") for path in (WORKSPACE, CORE, TOX, MATRIX)}

    def put(path: str, before: str, new: str, after: str) -> None:
        """Put ``new`` between what the patterns ``before`` and ``after`` match, which must be there once."""
        pattern = f"({before})({after})"
        texts[path], count = re.subn(pattern, lambda m: m[1] + new + m[2], texts[path], flags=re.MULTILINE)
        if count != 1:
            raise InvalidInputError(f"{path} has {count} places that match {pattern!r}; 1 was expected.")

    put(WORKSPACE, r"^\[tool\.uv\.sources\]\n(?:bitnet-.*\n)+", f"{package} = {{ workspace = true }}\n", "")
    paths = "".join(f'  "$MYPY_CONFIG_FILE_DIR/packages/{package}{part}",\n' for part in ("", "/src"))
    put(WORKSPACE, "", paths, r'^  "\$MYPY_CONFIG_FILE_DIR/tools",$')
    put(CORE, "", f'{extra} = ["{package}{span}"]\n', r"^gpu = \[")
    if name != "metal":  # `gpu` is all that can be installed on every platform
        put(CORE, r"^gpu = \[.*", f', "bitnet-core[{extra}]"', r"\]$")
    put(TOX, r"^env_list = \[[^\]]*", f'"{name}", ', r'"packaging",?\s*\]$')
    texts[MATRIX] += f'\n[packages.{package}]\nwheels = ["any"]\napt = []\nrunners = {{ "ubuntu-24.04" = [] }}\n'
    for text in texts.values():
        tomllib.loads(text)
    return texts


def command(*words: str, at: Path) -> None:
    """Run a command, quietly unless it fails."""
    done = subprocess.run(words, cwd=at, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise BitNetError(
            f"`{Path(words[0]).name} {' '.join(words[1:])}` failed; nothing has changed. It said:\n{said}"
        )


def stage(folder: Path, root: Path, words: dict[str, str], kernels: str, files: dict[str, str]) -> None:
    """Write everything into a small copy of the workspace: what uv needs to lock it, and the new files.

    Args:
        kernels: The folder of the backend's kernels.
        files: Path → text, of what is made or changed.
    """
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise BitNetError("uv is not on the PATH.", hint="Run this as `uv run --group dev tools/new_backend.py`.")
    needed = [root / "VERSION", root / LOCK, *root.glob("packages/*/*")]
    for path in filter(Path.is_file, needed):
        copy = folder / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    package = folder / "packages" / f"bitnet-{words['name']}"
    shutil.copy(root / "LICENSE", package)
    link = package / "src" / "bitnet" / words["module"] / "kernels"
    link.symlink_to(Path("../../../../..") / kernels, target_is_directory=True)
    # Where an import is sorted to, and where a line breaks, depends on the name.
    command(sys.executable, "-m", "ruff", "check", "--quiet", "--select", "I", "--fix", str(package), at=folder)
    command(sys.executable, "-m", "ruff", "format", "--quiet", str(package), at=folder)
    command(uv, "lock", at=folder)


def place(folder: Path, root: Path, made: list[str]) -> None:
    """Move the new folders and the changed files into place: all of them, or none."""
    before = {path: (root / path).read_bytes() for path in CHANGED}
    try:
        for path in (*made, *CHANGED):
            (folder / path).replace(root / path)
    except BaseException:
        for path in made:
            shutil.rmtree(root / path, ignore_errors=True)
        for path, data in before.items():
            (root / path).write_bytes(data)
        raise


def new_backend(name: str, root: Path = ROOT, *, family: str | None = None, dry_run: bool = False) -> list[str]:
    """Make a backend's package; returns what was made and changed, or would be, a line each.

    Args:
        family: One of ``FAMILIES``, whose kernels it takes; None for kernels of its own.

    Raises:
        InvalidInputError: The name cannot be had.
        BitNetError: uv or ruff failed; nothing has changed.
    """
    check_name(name, root, family)
    words, kernels = values(name, root), f"kernels/{family or name}"
    made, changed, new = made_files(words, family), registered(root, words), folders(name, family)
    if not dry_run:
        with tempfile.TemporaryDirectory(prefix=".new-backend-", dir=root) as folder:
            stage(Path(folder), root, words, kernels, {**made, **changed})
            place(Path(folder), root, new)
    others = [f"{new[0]}/LICENSE", f"{new[0]}/src/bitnet/{words['module']}/kernels -> {kernels}"]
    return [*(f"make {path}" for path in sorted([*made, *others])), *(f"change {path}" for path in CHANGED)]


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="what --device and `pip install bitnet-NAME` will take")
    parser.add_argument("--family", choices=FAMILIES, help="kernels that are there already; without, it brings its own")
    parser.add_argument("--dry-run", action="store_true", help="list what would be made and changed; do nothing")
    given = parser.parse_args(args)
    try:
        print(*new_backend(given.name, family=given.family, dry_run=given.dry_run), sep="\n")
    except (BitNetError, OSError) as error:
        print(f"new_backend: error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, BitNetError) else 1
    if not given.dry_run:
        print(f"\nNext: `uv sync --group dev`, then packages/bitnet-{given.name}/README.md says what to write.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
