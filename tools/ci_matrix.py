"""Print what CI needs from tools/ci_matrix.toml: `ci_matrix.py tests|wheels|smoke` as JSON, `apt|devices` as words.

`tests`, `wheels` and `smoke` are job matrices of GitHub Actions: one row per package, runner and Python; one per
package and platform; one per runner, with the packages whose wheels and whose sdists are tried there. `apt` and
`devices` are what a single x86-64 machine with Debian installs and must then have, over all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LINUX = "ubuntu-24.04"


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def load() -> dict[str, Any]:
    return toml(Path(__file__).with_suffix(".toml"))


def tests(data: dict[str, Any]) -> str:
    rows = [
        {
            "package": name,
            "tox": name.removeprefix("bitnet-"),
            "runner": runner,
            "python": python,
            "resolution": resolution,
            "apt": " ".join(package["apt"]) if runner == LINUX else "",
            "devices": ",".join(devices),
        }
        for name, package in data["packages"].items()
        for runner, devices in package["runners"].items()
        for python, resolution in data["pythons"].items()
    ]
    return json.dumps({"include": rows})


def wheels(data: dict[str, Any]) -> str:
    packages = data["packages"].items()
    return json.dumps(
        {"include": [{"package": name, "target": target} for name, p in packages for target in p["wheels"]]}
    )


def smoke(data: dict[str, Any]) -> str:
    rows = []
    for runner, cannot in data["smoke"].items():
        installed = [name for name in data["packages"] if name not in cannot.get("install", [])]
        built = [name for name in installed if name not in cannot.get("build", [])]
        rows.append({"runner": runner, "packages": " ".join(installed), "sdists": " ".join(built)})
    return json.dumps({"include": rows})


def apt(data: dict[str, Any]) -> str:
    packages = data["packages"].values()
    return " ".join(name for p in packages for name in [*p["apt"], *p.get("debian", {}).get("apt", [])])


def devices(data: dict[str, Any]) -> str:
    packages = data["packages"].values()
    return ",".join(
        name for p in packages for name in [*p["runners"].get(LINUX, []), *p.get("debian", {}).get("devices", [])]
    )


PRINT = {"tests": tests, "wheels": wheels, "smoke": smoke, "apt": apt, "devices": devices}

if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        raise SystemExit
    if len(sys.argv) != 2 or sys.argv[1] not in PRINT:
        raise SystemExit(__doc__)
    print(PRINT[sys.argv[1]](load()))
