"""``bitnet serve --ray --models``: two replicas that load a folder's models on demand, of which each holds two."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bitnet.core import Model, load_model
from bitnet.core.model.default import default_model_path

if TYPE_CHECKING:
    from .conftest import Served

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly(unless_changed=("packages/bitnet-server/src/bitnet/server/ray",)),
]
MODELS = ("a", "b", "sub/c")
SETTINGS = """
["a"]
aliases = ["first"]
context = 256
sampling = {max_tokens = 3}
"""
QUESTION: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Folder:
    """A server of a folder of models."""

    path: Path
    server: Served

    def ask(self, model: str, **more: Any) -> Any:
        return self.server.client.post("/v1/completions", json={**QUESTION, "model": model, **more})


@pytest.fixture(scope="module")
def folder(
    served: Callable[..., AbstractContextManager[Served]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Folder]:
    made = tmp_path_factory.mktemp("models")
    (made / "sub").mkdir()
    for name in MODELS:
        shutil.copy(default_model_path(), made / f"{name}.gguf")
    (made / "broken.gguf").write_bytes(os.urandom(1000))
    (made / "models.toml").write_text(SETTINGS)
    with load_model(context=512, max_seqs=4, device="cpu", threads=1) as model:
        one = default_model_path().stat().st_size + model.cache_bytes
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_CACHE": str(made / "no-hub")}
    options = ["--models", str(made), "--max-memory", str(2.5 * one / 1e9), "-c", "512", "-np", "4"]
    with served(environment, "--replicas", "2", *options) as server:
        yield Folder(made, server)


def test_each_model_answers_and_stays_where_it_is_loaded(folder: Folder, demo_model: Model) -> None:
    assert {one["id"] for one in folder.server.client.get("/v1/models").json()["data"]} >= {*MODELS, "first"}
    expected = demo_model.generate(QUESTION["prompt"], max_tokens=12, temperature=0).text
    for _ in range(6):
        for name in MODELS:
            answer = folder.ask(name)
            assert answer.json()["choices"][0]["text"] == expected, answer.text
    # A choice from old knowledge may load a model on both replicas. All three on one of them would be loaded each time.
    loads = folder.server.log("folder").count(" loading ")
    assert len(MODELS) <= loads <= 2 * len(MODELS)


def test_settings_and_aliases_hold(folder: Folder) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "model": "first"}
    document = folder.server.client.post("/v1/chat/completions", json=body).json()
    assert document["usage"]["completion_tokens"] == 3
    long = folder.ask("first", prompt="a " * 400)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_prefixes_are_those_of_the_model(folder: Folder) -> None:
    """A prompt that one model has cached is not taken to be cached for another one."""
    text = " ".join(os.urandom(2).hex() for _ in range(60))
    cached = []
    for name in ("b", "b", "sub/c", "sub/c"):
        usage = folder.ask(name, prompt=text).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert min(cached[1], cached[3]) >= usage["prompt_tokens"] - 32


def test_vectors_are_those_of_the_model(folder: Folder, demo_model: Model) -> None:
    body = {"input": ["Weather", "A cat."], "model": "sub/c"}
    answer = folder.server.client.post("/v1/embeddings", json=body)
    found = np.array([one["embedding"] for one in answer.json()["data"]], np.float32)
    np.testing.assert_array_equal(found, demo_model.embed(["Weather", "A cat."]))


def test_models_that_cannot_be_had(folder: Folder) -> None:
    missing = folder.ask("d")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    broken = folder.ask("broken")
    assert (broken.status_code, broken.json()["error"]["code"]) == (503, "model_load_failed")
    assert "broken could not be loaded" in broken.json()["error"]["message"]
    assert folder.ask("a").status_code == 200


def test_a_model_that_comes_later_takes_the_place_of_the_least_recently_used(folder: Folder) -> None:
    for name in ("d", "e"):
        shutil.copy(default_model_path(), folder.path / f"{name}.gguf")
    for name in ("d", "e", *MODELS):
        assert folder.ask(name).status_code == 200, name
    ends = time.monotonic() + 10
    while " unloading " not in folder.server.log("folder"):
        assert time.monotonic() < ends, folder.server.log("folder")
        time.sleep(0.1)
    (folder.path / "e.gguf").unlink()
    assert folder.ask("e").status_code == 404
