"""Fetch Intel's compiler for GPUs that this Debian's own is too old to know, and print the command that starts it.

It is that of a newer Debian, unpacked beside its own C library into a folder; nothing is installed. It compiles SPIR-V.

    export BITNET_OCLOC=$(python3 tools/intel_compiler.py FOLDER)
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

SUITE = "forky"  # Debian 13 has none
PACKAGES = ("intel-ocloc", "libigc2", "libigdgmm12", "libc6", "libgcc-s1", "libstdc++6", "zlib1g")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
LOADER = "usr/lib64/ld-linux-x86-64.so.2"


def output(*command: str, cwd: Path | None = None) -> str:
    """What a command prints; what it says of a failure goes to this program's own errors."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd).stdout


def mirror() -> str:
    """Where this machine has its Debian from."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines())
    lists = output("apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages")
    found = dict(line.split(" ", 1) for line in lists.splitlines())
    codename = release.get("VERSION_CODENAME", "")
    if release.get("ID") != "debian" or codename not in found:
        raise SystemExit("intel_compiler.py: this takes a machine with Debian; run `apt-get update` there first.")
    return found[codename]


def fetch(folder: Path) -> None:
    """Download the packages by an apt that knows nothing of what is installed, and unpack them."""
    root = folder / "root"
    for part in ("lists/partial", "cache/archives/partial", "debs", "root"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror()} {SUITE} main\n", encoding="utf-8")
    places = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": "/dev/null",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    options = [word for name, value in places.items() for word in ("-o", f"{name}={value}")]
    output("apt-get", "-qq", *options, "update")
    output("apt-get", "-qq", *options, "download", *PACKAGES, cwd=folder / "debs")
    for package in sorted((folder / "debs").glob("*.deb")):
        output("dpkg-deb", "-x", str(package), str(root))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where it is, or is put")
    folder = parser.parse_args().folder.absolute()
    command = folder / "ocloc"
    if not command.exists():
        fetch(folder)
        root = folder / "root"
        (binary,) = (root / "usr/bin").glob("ocloc-*")
        starting = f"exec {root / LOADER} --library-path {root / LIBRARIES} {binary}"
        made = folder / "ocloc.new"
        made.write_text(f'#!/bin/sh\n{starting} "$@"\n', encoding="utf-8")
        made.chmod(0o755)
        made.replace(command)
    print(command)


if __name__ == "__main__":
    main()
