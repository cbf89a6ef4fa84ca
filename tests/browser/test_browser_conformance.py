"""Parts of the conformance suite at its small size on a browser's WebGPU, run by Pyodide: each in a page of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.nightly  # SwiftShader compiles each kernel for seconds

PARTS = ["ProbeTests", "LinearTests", "NormTests", "RowwiseTests", "RecurrentTests", "TransformTests"]
PARTS += ["Int8CacheTests", "HeadTests", "TableTests", "BlockTableTests"]
PARTS += ["SampleTests", "PenaltyTests", "LogprobTests", "StartTests"]
"""Parts that pass on SwiftShader in a minute or two each. Others were not run to their end, or need threads."""
RUN = """
import json, os
from pathlib import Path
import pytest
from bitnet.webgpu.backend import BACKEND

await BACKEND.request()
Path("test_part.py").write_text(f'''
from bitnet.core.testing import suite
from bitnet.webgpu.backend import BACKEND

class TestPart(suite.{PART}):
    backend = BACKEND
    size = "small"
''')
ended = {}

class Report:
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            ended[report.nodeid] = [report.outcome, str(report.longrepr)[-2000:]]

options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=no", "test_part.py"]
code = pytest.main(options, plugins=[Report()])
json.dumps([int(code), ended])
"""


@pytest.mark.parametrize("part", PARTS)
def test_conformance(chromium: Callable[..., Any], part: str) -> None:
    code, ended = chromium(f"PART = {part!r}\n{RUN}")
    failed = {name: text for name, (outcome, text) in ended.items() if outcome == "failed"}
    assert not failed, failed
    assert code == 0, ended
    assert ended
