"""``bitnet serve --ray -m s3://BUCKET/KEY`` on two nodes, from the command to answers; moto's store holds the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from bitnet.core import Model
from bitnet.core.model.default import default_model_path

if TYPE_CHECKING:
    from .conftest import Node, Served

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly,
]
pytest.importorskip("obstore", reason="obstore is not installed (the group `object-store`)")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (the group `object-store`)")
pytest.importorskip("moto.server", reason="moto is not installed (the group `object-store`)")

KEY = "some where/demo.gguf"


class Store:
    """An S3 store of this machine, with the demo model in it.

    Attributes:
        environment: What a process needs to read it.
        downloads: How many times the model was asked for.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.downloads = 0
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.port}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _answer(self, request: dict[str, Any], start: Any) -> Any:
        self.downloads += request["REQUEST_METHOD"] == "GET" and request["PATH_INFO"].endswith(KEY)
        return self._moto(request, start)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    client.put_object(Bucket="models", Key=KEY, Body=default_model_path().read_bytes())
    yield made
    made.server.shutdown()


def test_each_node_downloads_a_model_once(
    store: Store,
    head: Callable[..., AbstractContextManager[Node]],
    worker: Callable[..., AbstractContextManager[Node]],
    served: Callable[..., AbstractContextManager[Served]],
    environment: Mapping[str, str],
    demo_model: Model,
    tmp_path: Path,
) -> None:
    """Four replicas on two nodes, an ingress and the command: two downloads. Receipts name replicas of both nodes."""
    caches = [tmp_path / name for name in ("first", "second")]
    here, there = ({**store.environment, "BITNET_CACHE_DIR": str(cache)} for cache in caches)
    with head(2, **here) as first, worker(first.address, 2, **there):
        options = ["--address", first.address, "--replicas", "4", "-np", "2", "-m", f"s3://models/{KEY}"]
        with served({**environment, **here}, *options) as server:
            _wait_for_proxies(server.url)
            answers = asyncio.run(_asked(server.url, 24))
            log = server.log("engine")
    want = demo_model.generate("Once upon a time", max_tokens=20, temperature=0).text
    assert {one["choices"][0]["text"] for one in answers} == {want}
    places = {(at["id"], at["node"]) for one in answers if (at := one["x_bitnet_receipt"]["environment"]["replica"])}
    assert len({node for _, node in places}) == 2, places
    for replica, node in places:
        assert f"replica {replica} on node {node} serves" in log
    assert store.downloads == 2
    for cache in caches:
        (file,) = cache.rglob("*.gguf")
        assert file.read_bytes() == default_model_path().read_bytes()


def _wait_for_proxies(url: str) -> None:
    """Wait until both nodes' proxies, which share the port here, know the application."""
    ends = time.monotonic() + 60
    while any(httpx.get(f"{url}/health", timeout=60).status_code != 200 for _ in range(20)):
        assert time.monotonic() < ends


async def _asked(url: str, count: int) -> list[Any]:
    """Answers of requests sent at the same time, so that all replicas have some to do."""
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "x_bitnet_receipt": True}
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(count)))
    assert {answer.status_code for answer in answers} == {200}
    return [answer.json() for answer in answers]
