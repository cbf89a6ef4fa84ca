"""What docs/serve-behind.md tells an operator to write, checked by the programs that read it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bitnet.core import Model

PAGE = Path(__file__).parents[3] / "docs/serve-behind.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
SYSTEMD = shutil.which("systemd-analyze")
WORDS = " ".join(f"word{i}" for i in range(12))
STEP = 0.1


def _block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return str(found)


def _replace(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _nginx(folder: Path, upstream: str) -> Iterator[str]:
    """Run nginx with the page's block, at a free port, in front of ``upstream``."""
    assert NGINX is not None
    port = _free_port()
    site = _replace(_block("nginx"), "listen 80;", f"listen 127.0.0.1:{port};")
    site = _replace(site, "http://127.0.0.1:8080", upstream)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # Without the header by which the server turns buffering off, so that the block stands alone.
    temporary += "proxy_ignore_headers X-Accel-Buffering;\n"
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off;\nworker_processes 1;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{site}}}\n"
    )
    command = [NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(file)]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + 10
        while time.monotonic() < end and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        assert process.poll() is None, (folder / "error.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.nightly(unless_changed=("packages/bitnet-server", "docs/serve-behind.md"))
@pytest.mark.skipif(NGINX is None, reason="no nginx")
def test_nginx_passes_each_piece_on(script_model: Model, running: Any, scripted: Any, tmp_path: Path) -> None:
    scripted(script_model, WORDS).seconds = STEP
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "temperature": 0}
    text, times = "", []
    with (
        running(script_model) as server,
        _nginx(tmp_path, server.url) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["server"].startswith("nginx")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    text += choices[0]["delta"]["content"]
                    times.append(time.monotonic())
    assert text == WORDS
    # Pieces come one step apart. nginx 1.22 passes pieces on to a fast reader with `proxy_buffering on` too.
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert sum(gap > STEP / 2 for gap in gaps) > 5, gaps


@pytest.mark.nightly(unless_changed=("packages/bitnet-server", "docs/serve-behind.md"))
@pytest.mark.skipif(SYSTEMD is None, reason="no systemd-analyze")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    assert SYSTEMD is not None
    program = shutil.which("true")
    assert program is not None
    unit = tmp_path / "bitnet.service"
    unit.write_text(_replace(_block("ini"), "/opt/bitnet/bin/bitnet", program))  # must be there for the check
    command = [SYSTEMD, "verify", "--man=no", str(unit)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in checked.stderr.splitlines() if "bitnet.service" in line]
    assert (checked.returncode, complaints) == (0, []), checked.stderr
