"""``bitnet serve --ray``: what it refuses before anything is deployed, and the config that it writes."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bitnet.core.errors import BitNetError
from bitnet.server.commands.serve import serve


def refused(*arguments: str) -> str:
    """The error of a command that must fail."""
    done: Result = CliRunner().invoke(serve, ["--device", "cpu", *arguments])
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit | BitNetError), done.exception
    return f"{done.output}{done.exception}"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--replicas", "2"], "--replicas needs --ray"),
        (["--address", "auto"], "--address needs --ray"),
        (["--gpus-per-replica", "0.5"], "--gpus-per-replica needs --ray"),
        (["--write-config", "x.yaml"], "--write-config needs --ray"),
        (["--ray", "--replicas", "0"], "neither auto nor a number from 1"),
        (["--ray", "--replicas", "some"], "some is neither auto nor a number"),
        (["--min-replicas", "0"], "--min-replicas needs --ray"),
        (["--ray", "--replicas", "2", "--min-replicas", "0"], "--min-replicas needs --replicas auto"),
        (["--ray", "--gpus-per-replica", "-1"], "not in the range"),
        (["--ray", "--gpus-per-replica", "nan"], "nan"),
        (["--ray", "--uds", "socket"], "--uds and --ray exclude each other"),
        (["--ray", "--max-memory", "8"], "--max-memory with --ray needs --models"),
        (["--ray", "--slot-save-path", "."], "--slot-save-path and --ray exclude each other"),
        (["--ray", "--port", "0"], "--port 0 and --ray exclude each other"),
        (["--ray", "-m", "missing.gguf"], "missing.gguf"),
        (["--ray", "--models", ".", "--alias", "x"], "--alias needs -m"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], error: str) -> None:
    assert error in refused(*arguments)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "bitnet-server[ray]"' in refused("--ray")


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)")


@needs_ray
@pytest.mark.parametrize("address", ["nowhere", "ray://192.0.2.1:10001", "192.0.2.1:0", ":6379", "host:99999"])
def test_an_address_that_is_none(address: str) -> None:
    assert "it must be auto, or HOST:PORT" in refused("--ray", "--address", address)


@needs_ray
def test_no_cluster_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    error = refused("--ray", "--address", address)
    assert f"no Ray cluster answers at {address}: Connection refused. Start one with 'ray start --head'" in error


@needs_ray
def test_a_node_that_does_not_start_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because\nit is slow.")

    monkeypatch.setattr("ray.init", init)
    error = refused("--ray")
    assert "Ray cannot start on this machine: The current node timed out during startup." in error
    assert "slow" not in error


@needs_ray
def test_a_cluster_of_another_version() -> None:
    from ray._private import utils

    from bitnet.server.ray.cluster import _connection_error

    with pytest.raises(RuntimeError) as caught:
        utils.check_version_info({"ray_version": "2.1.0", "python_version": "3.9.1"}, "this process")
    error = str(_connection_error("auto", caught.value))
    assert error.startswith("the cluster runs Ray 2.1.0 on Python 3.9.1, and this is Ray 2.")
    assert "\n" not in error


@needs_ray
def test_a_model_that_a_node_cannot_read(tmp_path: Path) -> None:
    from bitnet.server.ray.cluster import _sizes

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(os.urandom(64))
    _, (demo, missing, wrong), _ = _sizes([None, str(tmp_path / "missing.gguf"), str(broken)], None)
    assert isinstance(demo, int)
    assert demo > 1 << 20
    assert "missing.gguf" in str(missing)
    assert "broken.gguf" in str(wrong)


@needs_ray
def test_the_config_that_serve_deploys(tmp_path: Path) -> None:
    import yaml

    from bitnet.server.ray.application import build
    from bitnet.server.ray.plan import Plan

    file = tmp_path / "serve.yaml"
    arguments = ["--ray", "--write-config", str(file), "--replicas", "3", "--gpus-per-replica", "0.5", "-np", "4"]
    done = CliRunner().invoke(serve, [*arguments, "--host", "0.0.0.0", "--api-key", "secret", "-c", "512"])
    assert (done.exit_code, done.exception) == (0, None)
    text = file.read_text()
    assert "secret" not in text
    document = yaml.safe_load(text)
    assert document["http_options"]["host"] == "0.0.0.0"
    (application,) = document["applications"]
    assert application["import_path"] == "bitnet.server.ray.application:build"
    plan = Plan.read(application["args"])
    assert (plan.replicas, plan.gpus, plan.settings.max_seqs, plan.options["context"]) == (3, 0.5, 4, 512)
    assert not plan.local
    build(application["args"])


@needs_ray
def test_the_config_of_a_models_folder(tmp_path: Path) -> None:
    import yaml

    from bitnet.server.ray.application import build
    from bitnet.server.ray.plan import Plan

    file = tmp_path / "serve.yaml"
    arguments = ["--ray", "--write-config", str(file), "--models", str(tmp_path), "--max-memory", "2"]
    done = CliRunner().invoke(serve, arguments)
    assert (done.exit_code, done.exception) == (0, None)
    (application,) = yaml.safe_load(file.read_text())["applications"]
    plan = Plan.read(application["args"])
    assert (plan.models, plan.folder, plan.settings.max_memory) == ((), str(tmp_path), 2_000_000_000)
    build(application["args"])


@needs_ray
def test_the_models_of_a_folder_are_compared_between_nodes(tmp_path: Path) -> None:
    from bitnet.server.ray.cluster import _sizes

    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.gguf").write_bytes(os.urandom(100))
    (tmp_path / "notes.txt").write_text("no model")
    assert _sizes([], str(tmp_path))[2] == {"sub/a": 100}
    assert _sizes([], None)[2] == {}
    assert "No such file" in str(_sizes([], str(tmp_path / "missing"))[2])


class LateProxy(BaseHTTPRequestHandler):
    """Serve's proxy before it has heard of the application, which it does after ``misses`` requests."""

    misses = 0

    def do_GET(self) -> None:
        type(self).misses -= 1
        self.send_response(404 if self.misses >= 0 else 200)
        self.end_headers()


@needs_ray
@pytest.mark.parametrize("misses", [0, 3, 1 << 30])
def test_a_proxy_may_hear_late_of_the_application(misses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitnet.server.ray import deploy

    monkeypatch.setattr(LateProxy, "misses", misses)
    with HTTPServer(("127.0.0.1", 0), LateProxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        if misses > 3:
            monkeypatch.setattr(deploy, "ROUTE_SECONDS", 0.7)
            with pytest.raises(BitNetError, match=f"nothing answers at {url}: Serve ran on this cluster already"):
                deploy._check_answers(url)
        else:
            deploy._check_answers(url)
            assert LateProxy.misses == -1
        server.shutdown()
