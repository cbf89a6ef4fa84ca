"""The rooms of the core and of the server stand on each other in one order: no import upwards, and no circle."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from layers import CORE, HOUSES, MAX_LINES, SERVER, House, long_files, report, why_long

EACH = pytest.mark.parametrize("house", HOUSES, ids=lambda house: house.package)


@EACH
def test_every_module_is_in_a_room(house: House) -> None:
    assert {name.partition(".")[0] for name in house.known} == {*house.rooms}


@EACH
def test_no_import_from_a_room_above(house: House) -> None:
    assert house.upward() == []


@EACH
def test_no_circle(house: House) -> None:
    assert house.circle() == ()


def test_long_files_say_why() -> None:
    found = long_files()
    assert "packages/bitnet-core/src/bitnet/core/api.py" in found
    assert [file for file, reason in found.items() if not reason] == []


@pytest.mark.parametrize(
    ("name", "begin", "reason"),
    [
        ("a.py", '"""A.\n\nLong, because it is\none list. More.\n"""\n', "Long, because it is one list."),
        ("a.py", '"""A."""\n# Long, because no docstring says so.\n', ""),
        ("a.h", "/*\n * A.\n *\n * Long, because of\n * its stages.\n */\n", "Long, because of its stages."),
        ("a.cu", "// A.\n//\n// Long, because it is\n// one kernel.\n", "Long, because it is one kernel."),
        ("a.cu", "// A.\nint a;\n// Long, because this is far below.\n", ""),
    ],
)
def test_where_a_reason_is_found(tmp_path: Path, name: str, begin: str, reason: str) -> None:
    file = tmp_path / name
    file.write_text(begin + "\n" * (MAX_LINES - begin.count("\n")))
    assert why_long(file) is None
    file.write_text(begin + "\n" * MAX_LINES)
    assert why_long(file) == reason


@pytest.mark.parametrize(("house", "room"), [(house, room) for house in HOUSES for room in house.rooms if room])
def test_the_first_line_says_who_lives_there(house: House, room: str) -> None:
    first, *rest = (ast.get_docstring(house.known[room]) or "").split("\n")
    assert first.endswith("."), first
    assert len(first.split()) > 3, first
    assert not rest or not rest[0], "the first line is a sentence of its own"


@pytest.mark.parametrize(
    ("house", "module", "line", "above"),
    [
        (CORE, "gguf.reader", "from bitnet.core.engine import Engine", True),
        (CORE, "gguf.reader", "from bitnet.core import api", True),
        (CORE, "gguf.reader", "import bitnet.core.devices.registry", True),
        (CORE, "gguf.reader", "from bitnet.core import load_model", True),
        (CORE, "gguf.reader", "def f() -> None:\n    from bitnet.core.loading import load_model", True),
        (CORE, "gguf.reader", "if TYPE_CHECKING:\n    from bitnet.core.model.config import ModelConfig", True),
        (CORE, "gguf.types", "from bitnet.core.gguf.reader import GGUFFile", False),
        (CORE, "hal.probe", "if TYPE_CHECKING:\n    from bitnet.core.hal.device import Device", False),
        (SERVER, "models.service", "from bitnet.server.http.app import App", True),
        (SERVER, "request.call", "def f() -> None:\n    from bitnet.server import Settings", True),
        (SERVER, "models.shared", "from bitnet.server.models.pool import Pool", False),
    ],
)
def test_what_is_planted_is_found(house: House, module: str, line: str, above: bool) -> None:
    known = dict(house.known)
    known[module] = ast.Module([*known[module].body, *ast.parse(line).body], [])
    assert len(house.upward(known)) == above
    assert above or module in house.circle(known)


def test_a_report_names_rooms_and_what_breaks_their_order() -> None:
    text, whole = report(SERVER)
    assert whole
    assert "No import goes up, and there is no circle." in text
    assert text.index(" request ") < text.index(" models ") < text.index(" http ")
    text, whole = report(replace(SERVER, rooms=SERVER.rooms[::-1]))
    assert not whole
    assert "up: http.app:" in text
    assert MAX_LINES == 400
