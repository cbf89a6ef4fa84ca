"""Build, check and try a release. The release workflow and the tests both do it with this.

    release.py ready                       VERSION, the changelog, the tag and the packages' links agree
    release.py wheel PACKAGE TARGET DIST   one wheel, with the build requirements of uv.lock, by hash
    release.py sdists DIST                 the sdist of every package
    release.py rebuild DIST OUT PACKAGE…   the wheels that these packages' sdists make
    release.py sbom FOLDER                 a CycloneDX bill of materials for each package, by the lock file
    release.py complete DIST               DIST holds every file of the release, and no other
    release.py smoke DIST PACKAGE…         install these packages from DIST alone, then run them

It needs `uv` and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ci_matrix

ROOT = Path(__file__).resolve().parents[1]
QUESTION, ANSWER = "What is 17 + 25?", "42"
REQUIREMENTS = """
import importlib.metadata, json, sys
print(json.dumps([line for name in sys.argv[1:] for line in importlib.metadata.requires(name)]))
"""


def version() -> str:
    return (ROOT / "VERSION").read_text(encoding="utf-8").strip()


def run(*words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> str:
    """Run a program, free of the environment that this one runs in; returns its output.

    Raises:
        SystemExit: It failed; the message has all it said.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BITNET_", "VIRTUAL_ENV", "PYTHON"))}
    done = subprocess.run(
        words, cwd=cwd, env={**kept, **env}, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def uv(*words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> str:
    program = os.environ.get("UV") or shutil.which("uv")
    if program is None:
        raise SystemExit("uv is not on the PATH")
    return run(program, *words, cwd=cwd, env=env)


@contextmanager
def build_requirements() -> Iterator[Path]:
    """A file with what uv.lock has of the group `build`: versions and hashes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "build.txt")
        uv("export", "--frozen", "--only-group", "build", "--no-emit-workspace", "-o", path)
        yield path


def build(dist: Path, *what: str | Path, env: Mapping[str, str] = {}) -> None:
    """Build with the locked build requirements and nothing else: a requirement without a hash is refused."""
    with build_requirements() as pinned:
        locked = "--build-constraints", pinned, "--require-hashes"
        uv("build", "--no-sources", *locked, "--out-dir", dist, *what, env=env)


def wheel(package: str, target: str, dist: Path) -> None:
    """Build the wheel of a package for a target of its build hook."""
    build(dist, "--wheel", "--package", package, env={"BITNET_TARGET": target})


def sdists(dist: Path) -> None:
    build(dist, "--sdist", "--all-packages")


def rebuild(dist: Path, out: Path, packages: Sequence[str], env: Mapping[str, str] = {}) -> None:
    """Build wheels from sdists as an installer does: each alone, far from the workspace."""
    for package in packages:
        build(out, "--wheel", sdist_of(dist, package), env=env)


def stem(package: str) -> str:
    return f"{package.replace('-', '_')}-{version()}"


def sdist_of(dist: Path, package: str) -> Path:
    path = dist / f"{stem(package)}.tar.gz"
    if not path.is_file():
        raise SystemExit(f"{dist} has no {path.name}")
    return path


def ready(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to release what does not know that it is one; outside of a tag there is nothing to refuse.

    Raises:
        SystemExit: With what must be changed.
    """
    if environment.get("GITHUB_REF_TYPE") != "tag":
        return
    tag, here = environment["GITHUB_REF_NAME"], version()
    if tag != f"v{here}":
        raise SystemExit(f"the tag is {tag}, and VERSION says {here}")
    if not re.search(rf"^## \[{re.escape(here)}\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        raise SystemExit(f"CHANGELOG.md has no section `## [{here}]`")
    source = f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_REPOSITORY']}"
    for package in ci_matrix.load()["packages"]:
        project = ci_matrix.toml(ROOT / "packages" / package / "pyproject.toml")["project"]
        if (named := project["urls"]["Source"]) != source:
            raise SystemExit(f"the links of {package} are to {named}, and this is {source}: set [project.urls]")


def sbom(folder: Path) -> None:
    """Write what each package needs, extras included, with versions and hashes of ``uv.lock``: one file a package."""
    folder.mkdir(parents=True, exist_ok=True)
    export = ["export", "--frozen", "--no-default-groups", "--all-extras", "--format", "cyclonedx1.5"]
    for package in ci_matrix.load()["packages"]:
        bill = json.loads(uv(*export, "--preview-features", "sbom-export", "--package", package))
        # uv knows no version of a package whose version is dynamic.
        bill["metadata"]["component"] |= {"version": version(), "purl": f"pkg:pypi/{package}@{version()}"}
        name = f"{package}-{version()}.cdx.json"
        (folder / name).write_text(json.dumps(bill, indent=2), encoding="utf-8")


def complete(dist: Path) -> None:
    """Refuse a release that lacks a file of `ci_matrix.toml`, or has another.

    Raises:
        SystemExit: With the files' names.
    """
    if not dist.is_dir():
        raise SystemExit(f"{dist} is no folder")
    left = sorted(path.name for path in dist.iterdir())
    for name, package in ci_matrix.load()["packages"].items():
        wheels = [file for file in left if file.startswith(f"{stem(name)}-") and file.endswith(".whl")]
        if len(wheels) != len(package["wheels"]):
            wanted = ", ".join(package["wheels"])
            raise SystemExit(f"{name} {version()} needs {len(package['wheels'])} wheels ({wanted}), not {wheels}")
        left = [file for file in left if file not in {*wheels, sdist_of(dist, name).name}]
    if left:
        raise SystemExit(f"no part of the release {version()}: {', '.join(left)}")


def smoke(dist: Path, packages: Sequence[str], *options: str | Path) -> None:
    """Install packages in a fresh environment from the wheels of a folder alone, then use them.

    What is not ours comes from the index, as wheels.

    Args:
        options: More of `uv pip install` for what is not ours.

    Raises:
        SystemExit: Something cannot be installed, does not fit, is missing or answers wrongly.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, here, ours = Path(name), version(), list(packages)
        uv("venv", "--python", sys.executable, "venv", cwd=folder)
        programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        install = ["pip", "install", "--python", "venv", "--only-binary", ":all:"]
        alone = ["--no-config", "--no-index", "--find-links", str(dist.resolve()), "--no-deps"]
        uv(*install, *alone, *(f"{package}=={here}" for package in ours), cwd=folder, env={"UV_FIND_LINKS": ""})
        needs: list[str] = json.loads(run(programs / "python", "-c", REQUIREMENTS, *ours, cwd=folder))
        others = [line for line in needs if "extra ==" not in line and not line.startswith("bitnet-")]
        uv(*install, *options, *others, cwd=folder)
        uv("pip", "check", "--python", "venv", cwd=folder)

        settings = {"BITNET_CACHE_DIR": str(folder / "cache"), "PYTHONUTF8": "1"}
        listed = json.loads(run(programs / "bitnet", "devices", "--json", cwd=folder, env=settings))["backends"]
        if "bitnet-server" in ours:  # no backend, but a command
            run(programs / "bitnet", "serve", "--help", cwd=folder, env=settings)
        for package in [name for name in ours if name != "bitnet-server"]:
            found = [backend for backend in listed if backend["distribution"] == package]
            if not found or any(b["version"] != here or b["status"] == "broken" for b in found):
                raise SystemExit(f"`bitnet devices` says of {package} {here}: {json.dumps(found, indent=2)}")
        names = [device["name"] for backend in listed for device in backend["devices"]]
        if not any(name.startswith("cpu:") and name != "cpu:numpy" for name in names):
            raise SystemExit(f"the native library is missing or does not open; there are only: {', '.join(names)}")
        said = run(programs / "bitnet", "run", QUESTION, cwd=folder, env=settings)
        if ANSWER not in said:
            raise SystemExit(f"to {QUESTION!r} it said {said!r}")
    print(f"{', '.join(ours)} {here}: installed from {dist} alone; it answers {said.strip()!r}")


def main(args: list[str]) -> None:
    match args:
        case ["-h" | "--help"]:
            print(__doc__)
        case ["ready"]:
            ready()
        case ["wheel", package, target, dist]:
            wheel(package, target, Path(dist))
        case ["sdists", dist]:
            sdists(Path(dist))
        case ["rebuild", dist, out, *packages] if packages:
            rebuild(Path(dist), Path(out), packages)
        case ["sbom", folder]:
            sbom(Path(folder))
        case ["complete", dist]:
            complete(Path(dist))
        case ["smoke", dist, *packages] if packages:
            smoke(Path(dist), packages)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
