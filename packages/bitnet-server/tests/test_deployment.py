"""``docs/serve-deploy.md``: each configuration is taken from the page and given to the program that it is for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import yaml

from bitnet.core import Model
from bitnet.server.commands.serve import serve
from ports import free_port

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "Dockerfile"
PAGE = "docs/serve-deploy.md"
PORT = "8080"
Need = Callable[[str, str], None]


def blocks(language: str, page: str = PAGE) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no {language}"
    return found


def block(language: str, page: str = PAGE) -> str:
    (only,) = blocks(language, page)
    return only


def replaced(text: str, **changes: str) -> str:
    """The text with each key's value from ``changes``; keys are regular expressions and must be there."""
    for old, new in changes.items():
        text, count = re.subn(old, lambda _, new=new: new, text)  # type: ignore[misc]
        assert count, f"no {old} in:\n{text}"
    return text


def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, f"{shlex.join(map(str, words))}: {done.stdout}{done.stderr}"
    return done


def accepted(words: list[str]) -> dict[str, Any]:
    """The parameters that ``bitnet serve`` reads from a command line."""
    path, *rest = words
    assert path.rpartition("/")[2] == "bitnet"
    assert rest[0] == "serve"
    return serve.make_context("bitnet serve", rest[1:]).params


def test_a_command_line_that_is_wrong_is_found() -> None:
    with pytest.raises(click.UsageError):
        accepted(["bitnet", "serve", "--max-bodies", "3"])
    with pytest.raises(click.UsageError):
        accepted(["bitnet", "serve", "--port", "eighty"])


def test_each_block_of_the_page_has_a_test() -> None:
    languages = re.findall(r"^```(\w+)$", (ROOT / PAGE).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {*languages} == {"sh", "nginx", "caddyfile", "ini", "yaml"}


# Proxies


@contextmanager
def process(*words: str | Path, port: int) -> Iterator[None]:
    """A program that runs until the end of the ``with``, which begins when it listens."""
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert started.poll() is None, started.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.05)
        yield
    finally:
        started.terminate()
        started.communicate(timeout=20)


@contextmanager
def nginx(folder: Path, upstream: int) -> Iterator[str]:
    """An nginx's address; it has the page's server, and ignores the header by which ours turns buffering off."""
    key, certificate, port = folder / "key.pem", folder / "cert.pem", free_port()
    subject = ("-subj", "/CN=llm.example.com", "-days", "1")
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *subject)
    changes = {
        r"443": str(port),
        r"/etc/ssl/llm\.example\.com\.pem": str(certificate),
        r"/etc/ssl/private/llm\.example\.com\.key": str(key),
        rf"127\.0\.0\.1:{PORT}": f"127.0.0.1:{upstream}",
    }
    with nginx_with(folder, replaced(block("nginx"), **changes), port):
        yield f"https://127.0.0.1:{port}"


@contextmanager
def nginx_with(folder: Path, servers: str, port: int) -> Iterator[None]:
    """An nginx with these servers, which listen at the port."""
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off; proxy_ignore_headers X-Accel-Buffering;\n{temporary}\n{servers}}}\n"
    )
    words = ("nginx", "-p", folder, "-e", "stderr", "-c", config)
    assert "warn" not in run(*words, "-t").stderr
    with process(*words, port=port):
        yield


@contextmanager
def caddy(folder: Path, upstream: int) -> Iterator[str]:
    """The address of a Caddy with the page's site in it, over HTTP: a certificate would be asked of an authority."""
    port = free_port()
    changes = {r"llm\.example\.com": f"http://127.0.0.1:{port}", rf"127\.0\.0\.1:{PORT}": f"127.0.0.1:{upstream}"}
    config = folder / "Caddyfile"
    config.write_text("{\n\tadmin off\n}\n" + replaced(block("caddyfile"), **changes))
    with process("caddy", "run", "--adapter", "caddyfile", "--config", config, port=port):
        yield f"http://127.0.0.1:{port}"


def wait_for(server: Any, running: int) -> None:
    """Wait until so many requests run; a minute at most."""
    end = time.monotonic() + 60
    while server.model.load().running != running:
        assert time.monotonic() < end, f"{server.model.load().running} requests run, not {running}"
        time.sleep(0.05)


def test_nginx_asks_another_server_when_one_is_dead(tmp_path: Path, demo: Any, require_device: Need) -> None:
    """A conversation stays at its server, whichever that is, and goes to the other one if it does not answer."""
    if shutil.which("nginx") is None:
        require_device("nginx", "nginx is not installed")
    port, dead = free_port(), free_port()
    changes = {
        r"listen 8000": f"listen 127.0.0.1:{port}",
        r"192\.0\.2\.11:8080": f"127.0.0.1:{dead}",
        r"192\.0\.2\.12:8080": f"127.0.0.1:{demo.port}",
        r"location / \{": "location / { add_header x-upstream $upstream_addr;",
    }
    asked: set[str] = set()
    with (
        nginx_with(tmp_path, replaced(block("nginx", "docs/serve-gateways.md"), **changes), port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        for session in range(20):
            body = {"prompt": "Once", "max_tokens": 3}
            answer = client.post("/v1/completions", json=body, headers={"x-session-id": str(session)})
            assert answer.status_code == 200
            asked.add(answer.headers["x-upstream"])
    assert f"127.0.0.1:{dead}, 127.0.0.1:{demo.port}" in asked, "no session was the dead server's"


@pytest.mark.parametrize(("name", "proxy"), [("nginx", nginx), ("caddy", caddy)])
def test_a_proxy_passes_streams_on_and_ends_what_nobody_reads(
    name: str, proxy: Any, tmp_path: Path, script_model: Model, running: Any, scripted: Any, require_device: Need
) -> None:
    for program in (name, "openssl"):
        if shutil.which(program) is None:
            require_device(program, f"{program} is not installed")
    scripted(script_model, "one two three four five six seven eight nine ten " * 20).seconds = 0.05
    # Log-probabilities: one token a step, so that 400 tokens take 20 seconds.
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Count."}],
        "stream": True,
        "logprobs": True,
        "ignore_eos": True,
    }
    with running(script_model, api_keys=("right",), max_body=16_000_000) as server, proxy(tmp_path, server.port) as at:
        secret = {"authorization": "Bearer right"}
        with httpx.Client(base_url=at, verify=False, timeout=30, headers=secret) as client:
            times = []
            with client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 20}) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if "content" in line:
                        times.append(time.monotonic())
            assert times[-1] - times[0] > 0.5, "the proxy kept the stream back"

            with client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 400}) as answer:
                next(answer.iter_lines())
            wait_for(server, running=0)

            whole = {**body, "max_tokens": 400, "stream": False}
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=whole, timeout=1)
            wait_for(server, running=0)

            for size, status in ((15_900_000, 400), (17_000_000, 413)):  # more than the context; more than the body
                assert client.post("/v1/completions", json={"prompt": "a" * size}).status_code == status
            assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401


# systemd


def test_the_unit_is_right(tmp_path: Path, require_device: Need) -> None:
    text = block("ini")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
    params = accepted(shlex.split(line))
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, flags=re.MULTILINE)
    assert int(stop) > params["drain"] + 5  # what Listen adds for uvicorn
    (credential,) = re.findall(r"^LoadCredential=(\w+):", text, flags=re.MULTILINE)
    assert str(params["api_key_file"]) == f"${{CREDENTIALS_DIRECTORY}}/{credential}"
    if shutil.which("systemd-analyze") is None:
        require_device("systemd", "systemd-analyze is not installed")
    unit = tmp_path / "bitnet.service"
    unit.write_text(replaced(text, **{r"/opt/bitnet/bin/bitnet": sys.executable}))
    done = run("systemd-analyze", "verify", "--man=no", unit)
    assert str(unit.name) not in done.stderr, done.stderr


# Containers


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in order: name and arguments."""
    lines = re.sub(r"\\\n", " ", DOCKERFILE.read_text(encoding="utf-8")).splitlines()
    said = [line for line in lines if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in said)]


def only(name: str) -> str:
    (found,) = (rest for instruction, rest in dockerfile() if instruction == name)
    return found


def container_command() -> list[str]:
    return [*json.loads(only("ENTRYPOINT")), *json.loads(only("CMD"))]


def test_the_dockerfile_says_what_docker_knows() -> None:
    steps = dockerfile()
    known = {"FROM", "ARG", "COPY", "WORKDIR", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in steps} <= known
    assert steps[0][0] == "FROM"
    stages = {rest.split(" AS ")[1] for name, rest in steps if name == "FROM" and " AS " in rest}
    assert {found for _, rest in steps for found in re.findall(r"--from=(\S+)", rest)} == stages
    params = accepted(container_command())
    assert params["host"] == "0.0.0.0"
    assert int(only("EXPOSE")) == params["port"]
    assert only("USER").split(":")[0] not in ("0", "root")


def test_the_health_check_tells_a_server_from_none(demo: Any) -> None:
    words = json.loads(only("HEALTHCHECK").partition("CMD ")[2])
    for port, status in ((demo.port, 0), (free_port(), 1)):
        code = replaced(words[2], **{PORT: str(port)})
        done = subprocess.run([sys.executable, words[1], code], capture_output=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="hadolint's wheel is Linux's")
def test_the_dockerfile_is_what_hadolint_wants() -> None:
    run("hadolint", "--config", ROOT / ".hadolint.yaml", DOCKERFILE)


def test_the_compose_file_follows_its_schema_and_the_server() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    run(*check, ROOT / "compose.yaml")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    params = accepted(container_command())
    for service in services.values():
        assert service["ports"] == [f"127.0.0.1:{params['port']}:{params['port']}"]
        assert service["stop_grace_period"] == "45s"
    assert services["bitnet-cuda"]["build"]["args"]["BACKENDS"] == "cuda"


@pytest.mark.nightly(
    unless_changed=("Dockerfile", "packages/bitnet-server/pyproject.toml", "packages/bitnet-core/pyproject.toml")
)
@pytest.mark.skipif(os.name == "nt", reason="an image of Linux; its steps are a POSIX shell's")
def test_the_steps_of_the_dockerfile_make_a_server(tmp_path: Path) -> None:
    """With folders below a temporary one, on this machine's Python."""
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")} | {"BACKENDS": "cuda"}
    for name, rest in dockerfile():
        if name == "RUN":
            step = re.sub(r"/(opt|dist)\b", rf"{tmp_path}/\1", rest).replace(".uv", f"{tmp_path}/uv")
            step = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", step)
            run("sh", "-ec", step, cwd=ROOT, env=environment)
    assert "bitnet-cuda" in run(f"{tmp_path}/opt/bitnet/bin/pip", "list").stdout
    program, *arguments = container_command()
    command = [
        f"{tmp_path}{program}",
        *arguments[: arguments.index("-m")],
        "--device",
        "cpu",
        "--port",
        str(port := free_port()),
    ]
    with process(*command, port=port):
        assert httpx.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ok"}
        fields = {"prompt": "1 + 1", "response_format": {"type": "json_object"}, "max_tokens": 5}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=fields, timeout=60).status_code == 200


# Programs that use the server


def test_open_webui_finds_the_server(script_model: Model, running: Any) -> None:
    services = yaml.safe_load(block("yaml"))["services"]
    params = accepted([*json.loads(only("ENTRYPOINT")), *services["bitnet"]["command"]])
    variables = services["open-webui"]["environment"]
    base = httpx.URL(variables["OPENAI_API_BASE_URL"])
    assert (base.host, base.port) == ("bitnet", params["port"])
    assert variables["OPENAI_API_KEY"] == services["bitnet"]["environment"]["BITNET_API_KEY"]
    assert "BITNET_API_KEY" in {option.envvar for option in serve.params}
    with running(script_model, api_keys=("right",), names=params["alias"]) as server:
        at = f"{server.url}{base.path}"
        secret = {"authorization": "Bearer right"}
        (model,) = httpx.get(f"{at}/models", headers=secret).json()["data"]
        assert model["id"] == "bitnet"
        body = {"model": model["id"], "messages": [{"role": "user", "content": "2 + 3"}], "stream": True}
        answer = httpx.post(f"{at}/chat/completions", headers=secret, json=body, timeout=60)
        assert answer.text.rstrip().endswith("data: [DONE]")


# The shell


def test_the_shell_is_given_commands_that_exist() -> None:
    for text in blocks("sh"):
        if shutil.which("bash"):
            run("bash", "-n", "-c", text)
        for name in re.findall(r"--package (\S+)", text):
            assert (ROOT / "packages" / name / "pyproject.toml").is_file()
        for extra in re.findall(r"bitnet-server\[(\w+)\]", text):
            assert f"\n{extra} = [" in (ROOT / "packages/bitnet-server/pyproject.toml").read_text(encoding="utf-8")
