"""Commands of other packages: found by their entry points, loaded when needed, harmless when broken."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.cli import plugins

GOOD = """
import click

print("loaded", flush=True)

@click.command()
@click.option("--times", default=1)
def greet(times):
    "Greet whoever asks."
    click.echo("hello " * times)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """The environment in which a package with a good command and three broken ones is installed."""
    (tmp_path / "good_plugin.py").write_text(GOOD)
    (tmp_path / "bad_plugin.py").write_text("number = 3\n")
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[bitnet.commands]\ngreet = good_plugin:greet\nlost = no_such_module:x\nnumber = bad_plugin:number\n"
        "run = good_plugin:greet\n"
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bitnet.core", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_of_another_package_runs(plugin: dict[str, str]) -> None:
    done = run(plugin, "greet", "--times", "2")
    assert (done.returncode, done.stdout) == (0, "loaded\nhello hello \n"), done.stderr


def test_the_help_lists_it_and_says_which_are_broken(plugin: dict[str, str]) -> None:
    done = run(plugin, "--help")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "greet Greet whoever asks." in lines
    assert any(line.startswith("lost (broken: No module named") for line in lines)
    assert any(line.startswith("number (broken: bad_plugin:number is no") for line in lines)


def test_a_broken_one_is_an_error_with_its_package(plugin: dict[str, str]) -> None:
    done = run(plugin, "lost", "--whatever", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("bitnet: error: the command lost of plugin cannot be loaded: ModuleNotFoundError")
    assert "Traceback" not in done.stderr


def test_one_for_another_core_says_so_before_its_code_runs(plugin: dict[str, str]) -> None:
    info = Path(plugin["PYTHONPATH"], "plugin-1.0.dist-info")
    with (info / "METADATA").open("a") as file:
        file.write("Requires-Dist: bitnet-core>=0.0.1,<0.0.2\n")
    done = run(plugin, "greet")
    assert (done.returncode, done.stdout) == (1, "")
    needs = f"plugin 1.0 needs bitnet-core <0.0.2,>=0.0.1, but {version('bitnet-core')} is installed"
    said = " ".join(done.stderr.split())
    assert said.startswith(f"bitnet: error: the command greet of plugin cannot be loaded: {needs}")
    assert said.endswith("pip install --upgrade bitnet-core plugin")


def test_our_own_commands_come_first_and_load_no_other(plugin: dict[str, str]) -> None:
    done = run(plugin, "run", "--help")
    assert done.returncode == 0, done.stderr
    assert "Answer one prompt" in done.stdout
    assert "loaded" not in done.stdout


BROKEN = {
    "entry points that are not UTF-8": {"entry_points.txt": b"[bitnet.commands]\nf\xfc = m:f\n"},
    "another program's entry points that are not UTF-8": {"entry_points.txt": b"[console_scripts]\nf\xfc = m:f\n"},
    "entry points in UTF-16": {"entry_points.txt": "[bitnet.commands]\nf = m:f\n".encode("utf-16")},
    "entry points without a section": {"entry_points.txt": b"bitnet.commands = f\n"},
    "an entry point without an equals sign": {"entry_points.txt": b"[bitnet.commands]\njust a line\n"},
    "metadata that is not UTF-8": {"METADATA": b"Name: br\xfcken\n"},
    "no metadata": {"METADATA": None},
    "no name": {"METADATA": b"Metadata-Version: 2.1\nVersion: 1.0\n"},
}


@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN)
def test_a_broken_distribution_hides_no_other(
    plugin: dict[str, str], tmp_path: Path, files: dict[str, bytes | None]
) -> None:
    info = tmp_path / "a_broken_one-1.0.dist-info"  # found before the good one
    info.mkdir()
    good: dict[str, bytes | None] = {
        "METADATA": b"Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n",
        "entry_points.txt": b"[bitnet.commands]\nf = m:f\n",
    }
    for name, content in (good | files).items():
        if content is not None:
            (info / name).write_bytes(content)
    done = run(plugin, "greet")
    assert (done.returncode, done.stdout) == (0, "loaded\nhello \n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", plugins.OURS)
@pytest.mark.parametrize("arguments", [(), ("-m", "model.gguf", "--port", "80"), ("--help",)])
def test_a_command_whose_package_is_absent_names_it(
    name: str, arguments: tuple[str, ...], bitnet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "found", dict)
    done = bitnet(name, *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        f"bitnet: error: the command {name} is in bitnet-server, which is not installed. pip install bitnet-server\n"
    )
    assert f"\n  {name} " not in bitnet("--help").out
