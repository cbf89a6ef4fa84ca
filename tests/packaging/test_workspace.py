"""What must agree across the workspace although it stands in several files."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

from bitnet.core.cli import plugins
from bitnet.core.hal import HAL_API

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def version(root: Path) -> Version:
    return Version((root / "VERSION").read_text().strip())


@pytest.fixture(scope="session")
def backends(packages: list[str]) -> list[str]:
    return [name for name in packages if name not in ("bitnet-core", "bitnet-server")]


def project(root: Path, package: str) -> dict[str, Any]:
    data: dict[str, Any] = toml(root / "packages" / package / "pyproject.toml")["project"]
    return data


def test_namespace_has_no_init(root: Path) -> None:
    assert not list(root.glob("packages/*/src/bitnet/__init__.py"))


def test_commands_of_our_packages_are_known_where_they_are_absent(root: Path, packages: list[str]) -> None:
    found: dict[str, str] = {}
    for package in packages:
        entry_points = project(root, package).get("entry-points", {})
        found |= dict.fromkeys(entry_points.get("bitnet.commands", {}), package)
    assert found == plugins.OURS


MAX_CODE_LINES = {"bitnet-cuda": 2090, "bitnet-opencl": 430, "bitnet-vulkan": 1700}
"""Maximum lines of code of a backend, where it is not 1,320. Neither blank lines nor comments and docstrings count.
CUDA's fuses recurrent layers and multiplies both matrices of their inputs in one launch, takes their prompts in chunks,
chooses tiles by measured cost, for few tokens among slices of K or, with scales of groups, among rings of them, and has
mixtures of experts and models for embeddings by kernels of their own.
Vulkan's has the choice of cooperative matrices, which no other API describes to its host, mixtures of experts, and
products by integer dot products for scales of groups, whose widths depend on the device's subgroups; recurrent layers
have transforms with their quantisation in one launch, and convolutions within products.
"""


def code_lines(text: str) -> int:
    documents = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in nothing)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documents)


def test_lines_of_code_are_counted() -> None:
    assert code_lines('"""One\ntwo."""\n\nx = [  # three\n    1,\n]\n"""Four."""\ny = """a\nb"""\n') == 5


def test_backends_are_small(root: Path, package: str, backends: list[str]) -> None:
    """What backends have in common belongs to the core: decision 0002."""
    if package in backends:
        files = list((root / "packages" / package / "src").rglob("*.py"))
        lines = sum(code_lines(file.read_text(encoding="utf-8")) for file in files)
        most = MAX_CODE_LINES.get(package, 1320)
        assert 100 < lines <= most, f"{package} has {lines:,} lines of code; {most:,} is the most."


def test_licence_is_the_same_everywhere(root: Path, package: str) -> None:
    assert (root / "packages" / package / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()


def test_version_stands_in_one_place(root: Path, package: str, version: Version) -> None:
    data = toml(root / "packages" / package / "pyproject.toml")
    assert data["project"]["dynamic"] == ["version"]
    assert (root / "packages" / package / data["tool"]["hatch"]["version"]["path"]).resolve() == root / "VERSION"
    core = project(root, "bitnet-core")
    ours = [*data["project"]["dependencies"], *(d for extra in core["optional-dependencies"].values() for d in extra)]
    for requirement in map(Requirement, ours):
        if requirement.name.startswith("bitnet-") and not requirement.extras:
            assert version in requirement.specifier, f"{requirement} does not allow {version}"


def test_extras_are_the_backends_that_exist(root: Path, backends: list[str]) -> None:
    """One extra for each backend; `oneapi` is the name of Level Zero's. What else there is needs no backend."""
    extras = project(root, "bitnet-core")["optional-dependencies"]
    names = {"oneapi" if name == "bitnet-level-zero" else name.removeprefix("bitnet-"): name for name in backends}
    assert set(extras) == {*names, "gpu", "hub", "object-store", "plot", "rich", "server", "sign", "testing"}
    for extra, package in names.items():
        assert [Requirement(line).name for line in extras[extra]] == [package]
    in_gpu = {name for line in extras["gpu"] for name in Requirement(line).extras or [Requirement(line).name]}
    assert {names.get(name, name) for name in in_gpu} == set(backends) - {"bitnet-metal"}


@pytest.mark.parametrize(
    ("system", "machine", "left_out"),
    [
        ("linux", "x86_64", set()),
        ("linux", "aarch64", set()),
        ("darwin", "arm64", {"bitnet-cuda"}),
        ("win32", "AMD64", set()),
        ("win32", "ARM64", {"bitnet-opencl"}),
    ],
)
def test_gpu_is_what_can_be_installed(
    root: Path, uv: Callable[..., str], backends: list[str], system: str, machine: str, left_out: set[str]
) -> None:
    """By a wheel's metadata, and by the lock file, whose markers are uv's."""
    here = {"sys_platform": system, "platform_machine": machine, "extra": ""}
    extras = project(root, "bitnet-core")["optional-dependencies"]
    wanted = [r for line in extras["gpu"] if (r := Requirement(line)).marker is None or r.marker.evaluate(here)]
    names = {Requirement(extras[next(iter(r.extras))][0]).name if r.extras else r.name for r in wanted}
    exported = uv("export", "--frozen", "--no-hashes", "--no-annotate", "--no-header", "--group", "gpu")
    locked = {
        match[1]
        for line in exported.splitlines()
        if (match := re.fullmatch(r"-e \./packages/([\w-]+)(?: ; (.*))?", line))
        and (match[2] is None or Marker(match[2]).evaluate(here))
    }
    assert names == locked - {"bitnet-core"} == set(backends) - {"bitnet-metal"} - left_out


def test_a_backend_needs_the_core_and_its_driver_binding_only(root: Path, backends: list[str]) -> None:
    for package in backends:
        data = project(root, package)
        needs = {Requirement(line).name for line in data["dependencies"]}
        assert "bitnet-core" in needs
        assert not needs & (set(backends) - {package})
        assert list(data["entry-points"]) == ["bitnet.backends"]


def test_every_backend_writes_the_contracts_version_out(root: Path, backends: list[str]) -> None:
    """A backend that took the number from the installed core would match whichever core that is."""
    files = [
        *(path for name in backends for path in root.glob(f"packages/{name}/src/bitnet/*/backend.py")),
        root / "tests/downstream/sample/src/bitnet_sample/backend.py",
        root / "tools/backend_template/every/package/src/bitnet/MODULE/backend.py.template",
    ]
    assert len(files) == len(backends) + 2
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"\bhal_api\b.*?= *(\w+)", text) == [str(HAL_API)], path
        assert "HAL_API" not in text, path


def test_workspace_knows_every_package(root: Path, packages: list[str]) -> None:
    workspace = toml(root / "pyproject.toml")
    assert set(workspace["tool"]["uv"]["sources"]) == set(packages)
    typed = {path.removeprefix("$MYPY_CONFIG_FILE_DIR/") for path in workspace["tool"]["mypy"]["mypy_path"]}
    tests = ("metal/tests/shim", "metal/tests/objc_on_cpu", "server/tests/clients/scripts")
    helpers = {f"packages/bitnet-{folder}" for folder in tests}
    assert typed == {"tools", *helpers, *(f"packages/{name}{part}" for name in packages for part in ("", "/src"))}
    assert set(toml(root / "tox.toml")["env_list"]) > {name.removeprefix("bitnet-") for name in packages}


def test_the_first_command_installs_what_running_needs(uv: Callable[..., str], packages: list[str]) -> None:
    """No tool and no backend comes with `uv run bitnet`; `--group gpu` adds the backends, and `dev` has those too."""

    def installed(*groups: str) -> set[str]:
        return set(re.findall(r"^(?:-e \./packages/)?([\w.-]+)", uv(*export, *groups), re.MULTILINE))

    export = ("export", "--frozen", "--no-hashes", "--no-annotate", "--no-header")
    plain, gpu, dev = installed(), installed("--group", "gpu"), installed("--group", "dev")
    assert plain == installed("--package", "bitnet-core")
    assert plain & set(packages) == {"bitnet-core"}
    assert gpu > plain | set(packages) - {"bitnet-cuda", "bitnet-metal", "bitnet-server"}
    assert "bitnet-metal" not in gpu
    assert dev > gpu | {"bitnet-server", "pytest", "ruff", "mypy", "zizmor"}
    assert len(plain) < 40 < len(dev)


def test_every_place_brings_the_tests_group(root: Path) -> None:
    """The second command of the README is what CI and the contributors' page run."""
    command = "uv run --group dev pytest"
    texts = {name: (root / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", ".ci/run")}
    assert [name for name, text in texts.items() if command not in text] == []
    assert "uv run bitnet run" in texts["README.md"]
    bare = re.compile(r"uv run (?:ruff|mypy|pytest)")
    automatic = [root / ".ci/run", root / ".pre-commit-config.yaml", *(root / ".github/workflows").iterdir()]
    assert [path.name for path in automatic if bare.search(path.read_text(encoding="utf-8"))] == []


def test_the_readmes_first_block_is_what_ci_runs(root: Path) -> None:
    """CI runs it before anything else has installed uv."""
    readme, ci = ((root / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    block = readme.split("```sh\n", 1)[1].split("```", 1)[0].splitlines()
    pip, first = (line.partition("    #")[0] for line in block if not line.startswith(("git clone", "cd ")))
    assert pip in ci.replace(" --quiet", "")
    assert ci.index(first) < ci.index("PATH=$PWD/.uv/bin:$PATH") < ci.index("uv run --group dev")


def test_a_clone_builds_once(root: Path, package: str) -> None:
    """uv builds anew when a folder among its cache keys appears, as it would if the first build made it."""
    keys = toml(root / "packages" / package / "pyproject.toml")["tool"]["uv"]["cache-keys"]
    for folder in (key["dir"] for key in keys if "dir" in key):
        there = subprocess.run(
            ["git", "ls-files", f"packages/{package}/{folder}"], cwd=root, capture_output=True, text=True, check=True
        )
        assert there.stdout.split() == [f"packages/{package}/{folder}/.gitignore"], f"what git keeps in {folder}"


def test_the_compiler_is_pinned_once(root: Path) -> None:
    build = toml(root / "packages/bitnet-core/pyproject.toml")["build-system"]["requires"]
    groups = toml(root / "pyproject.toml")["dependency-groups"].values()
    listed = [line for group in groups for line in group if isinstance(line, str)]
    pins = [line for line in [*build, *listed] if line.startswith("ziglang")]
    assert len(pins) == 2
    assert len(set(pins)) == 1
    assert pins[0].startswith("ziglang==")


def test_the_cores_own_tests_have_the_compiler(root: Path) -> None:
    """CI requires emulators of them, whose programs are compiled."""
    assert "native" in toml(root / "tox.toml")["env"]["core"]["dependency_groups"]


def test_hatch_and_tox_install_the_same_groups(root: Path, package: str) -> None:
    """`hatch run test` in a package's folder, and the package's environment of tox."""
    tox = toml(root / "tox.toml")
    name = package.removeprefix("bitnet-")
    groups = tox["env"].get(name, {}).get("dependency_groups", tox["env_run_base"]["dependency_groups"])
    environment = toml(root / "packages" / package / "pyproject.toml")["tool"]["hatch"]["envs"]["default"]
    (install,) = environment["pre-install-commands"]
    assert set(re.findall(r"--group ../../pyproject.toml:([\w-]+)", install)) == set(groups)
    assert environment["scripts"]["test"] == "pytest {args:tests}"


def test_links_and_classifiers(root: Path, package: str) -> None:
    """The same links everywhere, and the Pythons that CI runs."""
    data = project(root, package)
    assert data["urls"].keys() == {"Source", "Documentation", "Issues", "Changelog"}
    assert data["urls"] == project(root, "bitnet-core")["urls"]
    pythons = [line.rpartition(" ")[2] for line in data["classifiers"] if ":: Python :: 3." in line]
    ends = sorted(toml(root / "tools/ci_matrix.toml")["pythons"], key=Version)
    assert [pythons[0], pythons[-1]] == [ends[0], ends[-1]]
    assert data["requires-python"] == f">={ends[0]}"
    assert [int(version.partition(".")[2]) for version in pythons] == [*range(10, 10 + len(pythons))]


def test_ci_matrix_covers_every_package_and_target(root: Path, packages: list[str], hatch_build: ModuleType) -> None:
    data = toml(root / "tools/ci_matrix.toml")
    assert set(data["packages"]) == set(packages)
    for name, package in data["packages"].items():
        targets = {*hatch_build.TARGETS, "any"} if name == "bitnet-core" else {"any"}
        assert set(package["wheels"]) == targets, name


@pytest.mark.parametrize("what", ["tests", "wheels", "smoke"])
def test_ci_matrix_prints_what_the_workflows_read(root: Path, what: str) -> None:
    done = subprocess.run(
        [sys.executable, root / "tools/ci_matrix.py", what], capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout)["include"]
    text = "".join(path.read_text() for path in (root / ".github/workflows").glob("*.yml"))
    assert rows
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows)
    assert all(f"matrix.{key}" in text for row in rows for key in row)


def test_ci_matrix_refuses_other_words(root: Path) -> None:
    done = subprocess.run([sys.executable, root / "tools/ci_matrix.py", "wheel"], capture_output=True, check=False)
    assert done.returncode == 1


def test_lock_is_up_to_date(uv: Callable[..., str]) -> None:
    uv("lock", "--check")


def names(requirements: list[Any], groups: dict[str, list[Any]]) -> set[str]:
    """The distributions that requirements, and the groups that they include, name."""
    found = set()
    for given in requirements:
        found |= names(groups[given["include-group"]], groups) if isinstance(given, dict) else {Requirement(given).name}
    return found


def imported(file: Path) -> set[str]:
    """Modules without which a file cannot be imported."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    plain = {alias.name for line in body if isinstance(line, ast.Import) for alias in line.names}
    return {
        name.split(".")[0] for name in plain | {str(line.module) for line in body if isinstance(line, ast.ImportFrom)}
    }


def test_a_packages_own_environment_has_what_its_tests_import(root: Path, package: str) -> None:
    """Of what a dependency group brings: the group must be the environment's, as the workspace's has all of them."""
    groups, tox, own = (
        toml(root / "pyproject.toml")["dependency-groups"],
        toml(root / "tox.toml"),
        project(root, package),
    )
    environment = {**tox["env_run_base"], **tox["env"].get(package.removeprefix("bitnet-"), {})}
    there = names([{"include-group": group} for group in environment["dependency_groups"]], groups)
    there |= names([*own["dependencies"], "pytest"], groups)
    grouped, brings = names([{"include-group": "dev"}], groups) - there, packages_distributions()
    for file in (root / "packages" / package / "tests").rglob("*.py"):
        missing = {name for name in imported(file) if {*brings.get(name, [])} & grouped} - {"bitnet"}
        assert not missing, f"{file.relative_to(root)} imports {missing}; tox.toml names no group that has it"
