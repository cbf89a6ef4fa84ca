"""Ollama's pull, delete, copy, create, show and list, by the official client, with a hub of our own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ollama
import pytest

from bitnet.core import Model, load_model
from bitnet.core.errors import InvalidInputError
from bitnet.core.model.default import default_model_path
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.presets import ModelSettings

_path = Path(__file__).parents[2] / "bitnet-core" / "tests" / "cli" / "hub" / "conftest.py"
_spec = importlib.util.spec_from_file_location("hub_double", _path)
assert _spec
assert _spec.loader
_double = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _double  # dataclasses look there
_spec.loader.exec_module(_double)
hub = _double.hub
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
USER: Any = {"role": "user", "content": "Hi"}


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.005)


class Served:
    """A server over a models folder with the demo model as ``a``; each model says a text of its own."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.client = ollama.Client(host=server.url)

    def names(self) -> list[str]:
        return [str(one.model) for one in self.client.list().models]

    def loaded(self) -> list[str]:
        return [str(one.model) for one in self.client.ps().models]


@pytest.fixture
def engines() -> dict[str, Any]:
    return {}


@pytest.fixture
def served(hub: Any, tmp_path: Path, running: Any, scripted: Any, engines: dict[str, Any]) -> Iterator[Served]:
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(default_model_path(), folder / "a.gguf")

    def load(name: str, path: Path, settings: ModelSettings) -> Model:
        model = load_model(path, device="cpu", threads=1, max_seqs=4)
        engines[path.stem] = scripted(model, f"I am {path.stem}. END and more")
        return model

    with running(None, catalog=Catalog(folder, load)) as server:
        yield Served(server, folder)


def on_the_hub(hub: Any, name: str, *files: str) -> bytes:
    data = Path(default_model_path()).read_bytes()
    hub.repos[name] = _double.Repo({**dict.fromkeys(files, data), "README.md": b"a model"})
    return data


def test_a_model_is_pulled_with_progress_and_answers(hub: Any, served: Served) -> None:
    data = on_the_hub(hub, "org/name", "name-i2_s.gguf", "name-Q4_K_M.gguf")
    lines = list(served.client.pull("hf.co/org/name", stream=True))
    assert [line.status for line in lines][:1] == ["pulling manifest"]
    assert [line.status for line in lines][-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    parts = [line for line in lines if line.total is not None]
    assert parts
    assert {part.total for part in parts} == {len(data)}
    completed = [part.completed or 0 for part in parts]
    assert completed == sorted(set(completed))
    assert completed[-1] == len(data)
    assert all(part.digest == f"sha256:{_double.hashlib.sha256(data).hexdigest()}" for part in parts)
    assert served.names() == ["a", "org/name"]
    for name in ("org/name", "hf.co/org/name", "org/name:latest", "hf.co/org/name:i2_s"):
        assert str(served.client.chat(name, [USER]).message.content).startswith("I am name-i2_s.")
    again = list(served.client.pull("org/name", stream=True))
    assert [line.status for line in again] == ["pulling manifest", "writing manifest", "success"]
    assert len(hub.transfers()) == 1
    assert served.client.pull("org/name").status == "success"


def test_clients_share_a_download_and_the_last_one_ends_it(hub: Any, served: Served) -> None:
    data = on_the_hub(hub, "org/name", "name.gguf")
    hub.stall = 1_000_000
    body = {"model": "org/name"}
    with served.server.client.stream("POST", "/api/pull", json=body) as first:
        lines = first.iter_lines()
        assert json.loads(next(lines)) == {"status": "pulling manifest"}
        while json.loads(next(lines)).get("completed", 0) < hub.stall:
            pass
        with served.server.client.stream("POST", "/api/pull", json=body) as second:
            others = second.iter_lines()
            next(others)
            assert json.loads(next(others))["completed"] == hub.stall
    (pull,) = served.server.state.pulls._running.values()
    until(lambda: not pull.wanted)  # both have left
    hub.stall = None
    hub.go_on.set()
    assert served.client.pull("org/name").status == "success"
    assert hub.transfers() == [None, f"bytes={1_000_000}-"]  # it is resumed, not begun anew
    assert served.names() == ["a", "org/name"]
    assert len(data) > hub.transfers().index(None)


def test_what_cannot_be_pulled_says_why(hub: Any, served: Served) -> None:
    hub.repos["org/safe"] = _double.Repo({"model.safetensors": b"x" * 100, "config.json": b"{}"})
    hub.repos["org/gated"] = _double.Repo({"m.gguf": b"x"}, gated=True)
    for name, status, why in (
        ("llama3", 400, "not a valid model name on the hub"),
        ("https://example.org/x", 400, "not a valid model name on the hub"),
        ("org/none", 404, "has no org/none"),
        ("org/safe", 400, "bitnet convert hf:org/safe"),
        ("org/gated", 403, "accepted its terms"),
    ):
        with pytest.raises(ollama.ResponseError, match=why) as refused:
            served.client.pull(name)
        assert refused.value.status_code == status
        with pytest.raises(ollama.ResponseError, match=why):
            list(served.client.pull(name, stream=True))
    on_the_hub(hub, "org/name", "name.gguf")
    hub.flip = 1000
    with pytest.raises(ollama.ResponseError, match="does not match the hub's"):
        list(served.client.pull("org/name", stream=True))
    assert served.names() == ["a"]
    assert served.server.client.post("/api/pull", json={"model": 1}).status_code == 400
    assert served.server.client.post("/api/pull", json={}).json() == {"error": "model is missing."}


def test_too_many_downloads_are_refused(hub: Any, served: Served) -> None:
    hub.stall = 10
    with ThreadPoolExecutor(5) as pool:
        for i in range(4):
            on_the_hub(hub, f"org/m{i}", f"m{i}.gguf")
            hub.repos[f"org/m{i}"].files[f"m{i}.gguf"] += bytes(i)
        waiting = [pool.submit(served.client.pull, f"org/m{i}") for i in range(4)]
        until(lambda: len(hub.transfers()) == 4)
        on_the_hub(hub, "org/m4", "m4.gguf")
        with pytest.raises(ollama.ResponseError, match="4 models are being pulled already") as refused:
            served.client.pull("org/m4")
        assert refused.value.status_code == 429
        hub.stall = None
        hub.go_on.set()
        assert [done.result(60).status for done in waiting] == ["success"] * 4


def test_copies_and_created_models_share_the_model_in_memory(served: Served, engines: dict[str, Any]) -> None:
    client, folder = served.client, served.folder
    client.copy("a", "b:latest")
    lines = client.create(
        "brief",
        from_="b",
        system="Be brief.",
        template=TEMPLATE,
        parameters={"stop": ["END"], "temperature": 0.25, "num_predict": 77, "num_ctx": 4096},
        stream=True,
    )
    assert [line.status for line in lines][-1] == "success"
    assert client.create("briefer", from_="brief", system="Be briefer.").status == "success"
    assert served.names() == ["a", "b", "brief", "briefer"]
    assert client.chat("b", [USER]).message.content == "I am a. END and more"
    assert "Be brief" not in engines["a"].prompts[-1]
    answer = client.chat("brief", [USER])
    assert (answer.model, answer.message.content) == ("brief", "I am a. ")
    assert engines["a"].prompts[-1].endswith("<system>Be brief.<user>Hi<answer>")
    assert client.generate("briefer:latest", "Hi").response == "I am a. "
    assert engines["a"].prompts[-1].endswith("<system>Be briefer.<user>Hi<answer>")
    own = {"model": "brief", "messages": [USER], "stop": "and"}
    openai = served.server.client.post("/v1/chat/completions", json=own).json()
    assert (openai["model"], openai["choices"][0]["message"]["content"]) == ("brief", "I am a. END ")
    assert served.loaded() == ["a"]
    shown = client.show("brief")
    assert (shown.template, shown.parameters) == (TEMPLATE, 'temperature 0.25\nstop "END"\nnum_predict 77')
    assert shown.details is not None
    assert shown.details.parent_model == "a"
    assert shown.modelfile == (
        f'FROM a\nTEMPLATE """{TEMPLATE}"""\nSYSTEM """Be brief."""\n'
        'PARAMETER temperature 0.25\nPARAMETER stop "END"\nPARAMETER num_predict 77'
    )
    raw = served.server.client.post("/api/show", json={"model": "briefer"}).json()
    assert raw["system"] == "Be briefer."
    digests = {one.model: one.digest for one in client.list().models}
    assert digests["a"] == digests["b"]
    assert len(set(digests.values())) == 3
    again = Catalog(folder, lambda name, path, settings: pytest.fail("nothing is loaded"))
    assert again.created.names == served.server.state.pool.listing.catalog.created.names
    client.delete("brief")
    assert served.names() == ["a", "b", "briefer"]  # what was made from it stays
    assert client.chat("briefer", [USER]).message.content == "I am a. "
    with pytest.raises(ollama.ResponseError, match="brief' is not here"):
        client.chat("brief", [USER])


def test_what_cannot_be_created_says_why(served: Served) -> None:
    client, post = served.client, served.server.client.post
    for body, why in (
        ({"from": "nothing"}, "'nothing' is not here"),
        ({"from": "a", "quantize": "q4_0"}, "quantize is not supported: bitnet convert"),
        ({"from": "a", "files": {"m.gguf": "sha256:0"}}, "files is not supported"),
        ({"from": "a", "adapters": {"l": "x"}}, "adapters is not supported"),
        ({"from": "a", "messages": [USER]}, "messages is not supported"),
        ({"modelfile": "FROM a"}, "modelfile is not supported: use from"),
        ({}, "from is missing"),
        ({"from": "a", "parameters": {"top_p": 7}}, "parameters.top_p is 7"),
        ({"from": "a", "parameters": {"mirostat": 2}}, "parameters.mirostat is not supported"),
        ({"from": "a", "template": "{{ .System }} {{ .Prompt }}"}, "template is not a chat template in Jinja"),
        ({"from": "a", "model": "a"}, "a is a model's own name"),
        ({"from": "a", "model": "../x"}, "cannot be a model's name"),
        ({"from": "a", "model": "x y"}, "cannot be a model's name"),
        ({"from": "a", "model": "x" * 300}, "cannot be a model's name"),
        ({"from": "a", "model": "\u202etxt"}, "cannot be a model's name"),
    ):
        answer = post("/api/create", json={"model": "new", **body})
        assert answer.status_code in (400, 404), body
        assert why in answer.json()["error"], body
    attempts: list[Callable[[], object]] = [
        lambda: client.copy("nothing", "b"),
        lambda: client.copy("a", "a"),
        lambda: client.copy("a", ""),
    ]
    for refused in attempts:
        with pytest.raises(ollama.ResponseError):
            refused()
    assert served.names() == ["a"]
    assert [file.name for file in served.folder.iterdir()] == ["a.gguf"]


def test_show_and_list_load_nothing(served: Served) -> None:
    shown = served.client.show("a")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "bitnet-b1.58"
    assert shown.capabilities == ["completion", "tools"]
    assert served.names() == ["a"]
    assert served.loaded() == []
    with pytest.raises(ollama.ResponseError, match="is not here") as missing:
        served.client.show("b")
    assert missing.value.status_code == 404


def test_models_are_deleted_when_their_requests_have_ended(
    hub: Any, served: Served, engines: dict[str, Any], tmp_path: Path
) -> None:
    on_the_hub(hub, "org/name", "name.gguf", "other-Q4_K_M.gguf")
    served.client.pull("org/name")
    served.client.copy("org/name", "mine")
    assert str(served.client.chat("mine", [USER]).message.content).startswith("I am name.")
    with ThreadPoolExecutor(2) as pool:
        engines["name"].seconds = 0.05
        long = pool.submit(served.client.chat, "mine", [USER])
        until(lambda: bool(served.server.client.get("/metrics").text.count("bitnet_requests_running 1.0")))
        deleting = pool.submit(served.client.delete, "org/name")
        assert str(long.result().message.content).endswith("and more")
        assert deleting.result().status == "success"
    assert served.names() == ["a"]
    assert not list((tmp_path / "hf" / "hub").rglob("*.gguf"))
    with pytest.raises(ollama.ResponseError, match="was made from 'org/name', which is not here"):
        served.client.chat("mine", [USER])
    served.client.delete("a")
    assert served.names() == []
    assert not (served.folder / "a.gguf").exists()
    with pytest.raises(ollama.ResponseError, match="no model is") as missing:
        served.client.delete("a")
    assert missing.value.status_code == 404
    assert served.server.client.get("/health").status_code == 200


def test_only_a_models_own_name_deletes_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = served.server.state.pool.listing
    served.client.copy("a", "x")
    monkeypatch.setattr(
        listing, "_settings", replace(listing._settings, any_model=True, model_aliases=(("claude-*", "a"), ("*", "x")))
    )
    assert served.client.chat("anything", [USER]).message.content
    for name in ("anything", "claude-x"):
        for change in (served.client.delete, lambda name: served.client.copy(name, "y")):
            with pytest.raises(ollama.ResponseError, match="is not here"):
                change(name)
    assert served.names() == ["a", "x"]
    (served.folder / "a.gguf").unlink()
    with pytest.raises(ollama.ResponseError):  # names that lead to each other lead nowhere
        served.client.chat("x", [USER])


def test_a_hugging_face_folder_is_not_deleted(served: Served) -> None:
    weights = served.folder / "hf"
    weights.mkdir()
    for name in ("config.json", "model.safetensors"):
        (weights / name).write_text("{}")
    with pytest.raises(ollama.ResponseError, match="delete it by hand"):
        served.client.delete("hf")
    assert len(list(weights.iterdir())) == 2
    assert served.names() == ["a", "hf"]


def test_servers_of_fixed_models_refuse(demo: Any) -> None:
    client = ollama.Client(host=demo.url)
    attempts: list[Callable[[], object]] = [
        lambda: client.pull("org/name"),
        lambda: client.delete("demo"),
        lambda: client.copy("demo", "b"),
        lambda: client.create("b", from_="demo"),
    ]
    for change in attempts:
        with pytest.raises(ollama.ResponseError, match="start it with --models FOLDER"):
            change()


def test_a_models_folder_that_cannot_be_written_changes_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ollama.ResponseError, match="cannot be written: No space left on device"):
        served.client.copy("a", "b")
    monkeypatch.undo()
    assert [file.name for file in served.folder.iterdir()] == ["a.gguf"]
    assert served.names() == ["a"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', '{"x": {}}', '{"x": {"base": "a", "sampling": {"y": 1}}}'])
def test_a_file_of_created_names_that_is_spoilt_ends_the_command(tmp_path: Path, text: str) -> None:
    (tmp_path / "created.json").write_text(text)
    with pytest.raises(InvalidInputError, match=r"created\.json"):
        Catalog(tmp_path, lambda name, path, settings: pytest.fail("nothing is loaded"))


def test_names_are_created_side_by_side(served: Served) -> None:
    errors = []

    def make(i: int) -> None:
        try:
            served.client.copy("a", f"copy-{i}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert set(served.names()) == {"a", *(f"copy-{i}" for i in range(8))}
