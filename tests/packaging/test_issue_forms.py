"""The issue forms: what their schema cannot say, and that the help page, `bitnet devices --report` and a form agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FORMS = ".github/ISSUE_TEMPLATE"
DEVICES = "2-device-report.yml"
MAX_BODY = 65_536
"""Characters of an issue that GitHub accepts."""


@pytest.fixture(scope="module")
def forms(root: Path) -> list[Path]:
    return sorted(path for path in (root / FORMS).iterdir() if path.name != "config.yml")


@pytest.fixture(scope="module")
def devices(root: Path) -> dict[str, Any]:
    """The form for what ran on a device."""
    form: dict[str, Any] = yaml.safe_load((root / FORMS / DEVICES).read_text(encoding="utf-8"))
    return form


@pytest.fixture(scope="module")
def help_page(root: Path) -> str:
    return (root / "docs/help.md").read_text(encoding="utf-8")


def fields(form: dict[str, Any]) -> list[dict[str, Any]]:
    """What is filled in: all but texts."""
    return [item for item in form["body"] if item["type"] != "markdown"]


def test_what_the_schema_cannot_say(forms: list[Path]) -> None:
    """GitHub refuses a form without a field, and fields with the same id or label; two forms cannot share a name."""
    names = []
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        names.append(form["name"])
        assert fields(form), path.name
        for each in ([item["id"] for item in fields(form)], [item["attributes"]["label"] for item in fields(form)]):
            assert len(set(each)) == len(each), path.name
    assert len(set(names)) == len(names)


def test_the_help_page_names_the_form_and_its_fields(devices: dict[str, Any], help_page: str) -> None:
    """In the form's order: the page's table has each field, and its commands are those that the labels name."""
    assert f"[{devices['name']}](https://github.com/bitnet-core/bitnet/issues/new?template={DEVICES})" in help_page
    labels = [item["attributes"]["label"] for item in fields(devices)]
    _, _, table = help_page.partition("| field of the form |")
    assert re.findall(r"^\| (?!---)(.+?) \|", table, re.MULTILINE) == labels
    (code,) = re.findall(r"```sh\n(git clone.*?)```", help_page, re.DOTALL)
    for command in re.findall(r"`(bitnet .*?)`", " ".join(labels)):
        assert f" {command}" in code
    (anchor,) = re.findall(r"/help/#([\w-]+)\)", str(devices["body"]))
    assert anchor in [line[3:].lower().replace(" ", "-") for line in help_page.splitlines() if line.startswith("## ")]


def test_the_form_asks_for_what_the_report_prints(devices: dict[str, Any], help_page: str) -> None:
    """The placeholder's lines begin as the report's do, in order, first and last ones included; it fits an issue."""
    command = [sys.executable, "-m", "bitnet.core", "devices", "--report"]
    utf8 = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(command, env=utf8, capture_output=True, check=False, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    (report,) = [item for item in fields(devices) if item["id"] == "report"]
    assert report["validations"]["required"]
    wanted = [line.partition("…")[0] for line in report["attributes"]["placeholder"].splitlines()]
    begins = [begin for begin in wanted if begin]
    assert lines[0].startswith(begins[0])
    assert lines[-1].startswith(begins[-1])
    assert [begin for line in lines for begin in begins if line.startswith(begin)] == begins
    assert f"from `{begins[0].strip()}` to the line that begins with `{begins[-1]}`" in help_page
    assert len(done.stdout) < MAX_BODY // 2
