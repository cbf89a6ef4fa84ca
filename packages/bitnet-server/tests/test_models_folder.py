"""``bitnet serve --models``: what is listed, loaded on demand, set in ``models.toml``, and what comes and goes.

Long, because all of its tests share one folder of models and the helpers that watch it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitnet.core import Model, load_model
from bitnet.core.errors import BitNetError
from bitnet.core.model.default import default_model_path
from bitnet.server.commands.serve import serve as serve_command
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.folder import models_in
from bitnet.server.models.presets import ModelSettings, read_settings

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.005)


class Loader:
    """Loads files as the command does; each says a text of its own. A test may hold it up."""

    def __init__(self, scripted: Any) -> None:
        self.scripted = scripted
        self.loads: list[tuple[str, ModelSettings]] = []
        self.engines: dict[str, Any] = {}
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, name: str, path: Path, settings: ModelSettings) -> Model:
        assert self.gate.wait(30)
        self.loads.append((path.name, settings))
        model = load_model(path, device="cpu", threads=1, max_seqs=4, context=settings.context)
        self.engines[path.stem] = self.scripted(model, f"I am {path.stem}. END and more")
        return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and one of bitnet."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "hub"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    made.mkdir()
    return made


@pytest.fixture
def loader(scripted: Any) -> Loader:
    return Loader(scripted)


def model_at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(default_model_path(), path))


def states(server: Any) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in server.client.get("/v1/models").json()["data"]}


def said(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_every_model_of_a_folder_is_found(folder: Path) -> None:
    parts = [f"split-{i:05d}-of-00002.gguf" for i in (1, 2)]
    files = ("a.gguf", "A.v2.GGUF", "org/name/b.gguf", *parts, "later-00002-of-00002.gguf", "1/2/3/4/deep.gguf")
    others = ("mmproj-a.gguf", ".hidden.gguf", "notes.txt", ".cache/c.gguf", "1/2/3/4/5/deeper.gguf", "bad\n.gguf")
    for name in (*files, *others, "weights/config.json", "weights/model.safetensors", "config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "circle").symlink_to(folder, target_is_directory=True)
    (folder / "gone.gguf").symlink_to(folder / "nowhere")
    found = models_in(folder)
    assert {name: path.relative_to(folder).as_posix() for name, path in found.items()} == {
        "1/2/3/4/deep": "1/2/3/4/deep.gguf",
        "A.v2": "A.v2.GGUF",
        "a": "a.gguf",
        "org/name/b": "org/name/b.gguf",
        "split": parts[0],
        "weights": "weights",
    }
    assert list(found) == sorted(found)
    assert list(models_in(folder / "weights")) == ["weights"]  # a folder that is a model itself
    (folder / "split.gguf").touch()
    assert len(models_in(folder)) == len(found) + 1  # two of one name are both there


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[m]\ncontxt = 1", "[m].contxt is not a setting; context is the nearest"),
        ('["org/m:i2_s"]\nx = 1', '["org/m:i2_s"].x is not a setting; there are aliases, context'),
        ("[m.sampling]\ntemprature = 1", "[m].sampling.temprature is not a setting; temperature is the nearest"),
        ("[m.sampling]\ntop_p = 2", "[m].sampling.top_p is 2"),
        ("[m.sampling]\nstop = [1]", "[m].sampling.stop is"),
        ("[m]\ncontext = 'long'", "[m].context is 'long'; it must be an integer"),
        ("[m]\ncontext = 0", "[m].context is 0"),
        ("[m]\ndevice = ' '", "[m].device is empty"),
        ("[m]\naliases = [1979-05-27]", "[m].aliases is"),
        ("[m]\ntemplate = 'no.jinja'", "[m].template names"),
        ("[m]\ntemplate = 'bad.jinja'", "[m].template names"),
        ("[m]\ntemplate = 'latin.jinja'", "[m].template names a file that cannot be used: "),
        ("[m]\ntemplate = '.'", "[m].template names a file that cannot be used: "),
        ("[m]\ntemplate = ''", "[m].template is empty"),
        ('[m]\ntemplate = "\\u0000"', "it has a null character"),
        ("[m]\naliases = ['x', 'x']", "two models have the name 'x'"),
        ("[m]\naliases = ['n']\n[n]", "two models have the name 'n'"),
        ("m = 1", "m is outside of a table"),
        ("[m", "is not TOML"),
    ],
)
def test_settings_that_are_wrong_end_the_command(folder: Path, text: str, error: str) -> None:
    (folder / "bad.jinja").write_text("{% for %}")
    (folder / "latin.jinja").write_bytes(b"\xe9")
    (folder / "models.toml").write_text(text)
    with pytest.raises(BitNetError) as found:
        read_settings(folder)
    assert f"{folder / 'models.toml'}" in found.value.message
    assert error in found.value.message
    ended = CliRunner().invoke(serve_command, ["--models", str(folder), "--port", "0"])
    assert isinstance(ended.exception, BitNetError)
    assert ended.exception.message == found.value.message


@pytest.mark.parametrize("seed", range(20))
def test_settings_of_random_keys_and_values_are_read_or_refused(folder: Path, seed: int) -> None:
    rng = random.Random(f"{seed} {os.environ.get('PYTEST_XDIST_TESTRUNUID', '')}")
    keys = ["aliases", "context", "device", "system", "template", "sampling", "stop", "seed", "x"]
    values = ["1", "-1", "nan", "inf", "true", "[]", '["a", 1]', "{}", "{a = 1}", "2020-01-01", "[[[]]]"]
    values += ['"a"', '""', '"."', r'"\u0000"']
    lines = [f"{key} = {rng.choice(values)}" for key in rng.sample(keys, 3)]
    (folder / "models.toml").write_text("\n".join(["[m]", *lines, "[m.sampling]"][: rng.choice([4, 5])]))
    message = str(folder / "models.toml")
    try:
        found = list(read_settings(folder))
    except BitNetError as error:
        found, message = ["m"], error.message
    assert found == ["m"]
    assert str(folder / "models.toml") in message


def test_models_are_loaded_on_demand_and_unloaded_by_least_use(
    folder: Path, running: Any, loader: Loader, demo_model: Model
) -> None:
    for name in "abc":
        model_at(folder / f"{name}.gguf")
    size = demo_model.path.stat().st_size + demo_model.cache_bytes
    with running(None, catalog=Catalog(folder, loader), max_memory=int(size * 2.5)) as server:
        assert states(server) == dict.fromkeys("abc", "unloaded")
        assert server.client.get("/health").status_code == 200
        for name, here in (("b", "b"), ("a", "ab"), ("b", "ab"), ("c", "bc"), ("c:latest", "bc")):
            assert said(server.chat(model=name)).startswith(f"I am {name[0]}.")
            assert {one for one, state in states(server).items() if state == "loaded"} == set(here)
        assert said(server.chat()).startswith("I am c.")  # the one that was used last
        assert [name for name, _ in loader.loads] == ["b.gguf", "a.gguf", "c.gguf"]


def test_a_load_that_is_awaited_is_one_for_all_its_requests(folder: Path, running: Any, loader: Loader) -> None:
    """As in a browser, whose Python has no threads in which to wait."""
    model_at(folder / "a.gguf")
    model_at(folder / "bad.gguf").write_bytes(secrets.token_bytes(1000))

    async def load(name: str, path: Path, settings: ModelSettings) -> Model:
        await asyncio.sleep(0.05)
        return loader(name, path, settings)

    with running(None, catalog=Catalog(folder, load)) as server, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.chat, model="a") for _ in range(3)]
        assert {said(answer.result()) for answer in answers} == {"I am a. END and more"}
        assert len(loader.loads) == 1
        assert server.chat(model="bad").json()["error"]["code"] == "model_load_failed"
        assert states(server) == {"a": "loaded", "bad": "failed"}


def test_requests_wait_for_a_model_that_is_being_loaded(folder: Path, running: Any, loader: Loader) -> None:
    model_at(folder / "a.gguf")
    loader.gate.clear()
    with running(None, catalog=Catalog(folder, loader)) as server, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.chat, model="a") for _ in range(3)]
        until(lambda: states(server) == {"a": "loading"})
        assert not any(answer.done() for answer in waiting)
        loader.gate.set()
        assert {said(answer.result()) for answer in waiting} == {"I am a. END and more"}
        assert len(loader.loads) == 1
        assert states(server) == {"a": "loaded"}


def test_a_model_that_cannot_be_loaded_fails_alone_and_says_why(folder: Path, running: Any, loader: Loader) -> None:
    good = model_at(folder / "good.gguf")
    bad = folder / "bad.gguf"
    bad.write_bytes(good.read_bytes()[:100_000])
    with running(None, catalog=Catalog(folder, loader)) as server:
        refused = server.chat(model="bad")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_load_failed")
        entry = server.client.get("/v1/models/bad").json()["status"]
        assert entry["value"] == "failed"
        assert "file" in entry["reason"]
        assert str(folder) not in entry["reason"]
        assert server.client.get("/health").status_code == 200
        assert said(server.chat(model="good")).startswith("I am good.")
        shutil.copy(good, bad)
        assert said(server.chat(model="bad")).startswith("I am bad.")
        assert states(server) == {"bad": "loaded", "good": "loaded"}


def test_files_come_and_go(folder: Path, running: Any, loader: Loader) -> None:
    with running(None, catalog=Catalog(folder, loader)) as server:
        assert states(server) == {}
        for answer in (server.chat(), server.client.get("/props")):
            assert answer.status_code == 404
            assert "no models here yet" in answer.json()["error"]["message"]
        a, b = model_at(folder / "a.gguf"), model_at(folder / "sub" / "b.gguf")
        assert said(server.chat(model="sub/b")).startswith("I am b.")  # nobody has asked for the list
        assert states(server) == {"a": "unloaded", "sub/b": "loaded"}
        model = loader.engines["b"]
        a.unlink()
        b.unlink()
        for name in ("a", "sub/b"):
            gone = server.chat(model=name)
            assert gone.status_code == 404
            assert "is not here any more, as its file was removed" in gone.json()["error"]["message"]
            assert str(folder) not in gone.text
        assert states(server) == {}
        assert server.client.get("/health").status_code == 200
        model_at(a)
        assert said(server.chat(model="a")).startswith("I am a.")
        never = server.chat(model="never")
        assert "is not here; a is" in never.json()["error"]["message"]
        del model


def test_a_file_that_changes_while_it_is_not_loaded_is_loaded_as_it_is(
    folder: Path, running: Any, loader: Loader
) -> None:
    file = model_at(folder / "a.gguf")
    with running(None, catalog=Catalog(folder, loader)) as server:
        before = server.client.get("/v1/models/a").json()["status"]["bytes"]
        file.write_bytes(file.read_bytes() + bytes(1000))
        assert server.client.get("/v1/models").json()["data"][0]["status"]["bytes"] == before + 1000
        assert said(server.chat(model="a")).startswith("I am a.")


def test_a_served_file_that_is_spoilt_fails_until_it_changes_again(
    folder: Path, running: Any, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitnet.server.models.pool.SETTLE_SECONDS", 0.01)
    file = model_at(folder / "a.gguf")
    good = file.read_bytes()
    with running(None, catalog=Catalog(folder, loader)) as server:
        assert said(server.chat(model="a"))
        file.write_bytes(good[:1000])
        until(lambda: server.chat(model="a").status_code == 503 and states(server) == {"a": "failed"})
        until(lambda: server.state.pool.models[0].service is None)
        time.sleep(0.1)
        file.write_bytes(good)
        until(lambda: bool(server.chat(model="a").status_code == 200))
        assert states(server) == {"a": "loaded"}


def test_presets_set_what_requests_leave_open(folder: Path, running: Any, loader: Loader) -> None:
    model_at(folder / "a.gguf")
    model_at(folder / "b.gguf")
    (folder / "plain.jinja").write_text(TEMPLATE)
    (folder / "models.toml").write_text(
        """
        [a]
        aliases = ["gpt-x", "claude-x"]
        context = 300
        system = "Be brief."
        template = "plain.jinja"
        [a.sampling]
        stop = ["END"]
        max_tokens = 900
        seed = 77
        top_k = 9
        """
    )
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    with running(None, catalog=Catalog(folder, loader)) as server:
        assert list(states(server)) == ["a", "gpt-x", "claude-x", "b"]
        answer = server.client.post("/v1/chat/completions", json={"model": "gpt-x", **body})
        assert (said(answer), answer.json()["model"]) == ("I am a. ", "a")
        assert loader.engines["a"].prompts[-1].endswith("<system>Be brief.<user>Hi<answer>")
        params = server.client.get("/props").json()["default_generation_settings"]["params"]
        assert (params["seed"], params["top_k"], params["n_predict"], params["stop"]) == (77, 9, 900, ["END"])
        assert params["temperature"] == 0.8  # which no preset sets
        assert loader.loads[0][1].context == 300
        assert states(server)["gpt-x"] == "loaded"
        own = {"messages": [{"role": "system", "content": "Be long."}, *body["messages"]], "stop": "more"}
        assert said(server.client.post("/v1/chat/completions", json={"model": "a", **own})) == "I am a. END and "
        assert "<system>Be long.<user>Hi" in loader.engines["a"].prompts[-1]
        assert "Be brief" not in loader.engines["a"].prompts[-1]
        ollama = server.client.post("/api/chat", json={"model": "a", "stream": False, **body})
        assert ollama.json()["message"]["content"] == "I am a. "
        anthropic = {"model": "claude-x", "max_tokens": 50, **body}
        assert server.client.post("/v1/messages", json=anthropic).json()["content"][0]["text"] == "I am a. "
        responses = {"model": "a", "input": "Hi"}
        assert 'I am a. "' in server.client.post("/v1/responses", json=responses).text
        assert said(server.client.post("/v1/chat/completions", json={"model": "b", **body})).endswith("more")
        assert "Be brief" not in loader.engines["b"].prompts[-1]
        shown = server.client.get("/props").json()
        assert shown["chat_template"] != TEMPLATE  # of b, which was used last


def test_settings_are_read_again_when_they_change(
    folder: Path, running: Any, loader: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    model_at(folder / "a.gguf")
    settings = folder / "models.toml"
    with running(None, catalog=Catalog(folder, loader)) as server:
        assert list(states(server)) == ["a"]
        settings.write_text("[a]\naliases = ['x']\nsampling = {stop = 'END'}\n[nowhere]")
        assert list(states(server)) == ["a", "x"]
        assert "has settings of nowhere, which is not here" in caplog.text
        assert said(server.chat(model="x")) == "I am a. "
        settings.write_text("[a]\nalias = 'y'\nsomething = 1")
        assert list(states(server)) == ["a", "x"]
        assert "the settings stay as they were" in caplog.text
        settings.write_text("[a.sampling]\nstop = 'and'")
        assert said(server.chat(model="a")) == "I am a. END "  # without loading it again
        assert len(loader.loads) == 1
        assert server.chat(model="x").status_code == 404


def test_models_of_the_hubs_cache_are_served(folder: Path, running: Any, loader: Loader, cache: Path) -> None:
    def cached(repo: str, *files: str) -> None:
        place = cache / f"models--{repo.replace('/', '--')}"
        for file in files:
            model_at(place / "snapshots" / COMMIT / file)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(COMMIT)

    cached("org/one", "one-i2_s.gguf", "one-Q4_K_M.gguf")
    cached("org/two", "two-i2_s.gguf", "two-tq2_0.gguf")
    model_at(folder / "a.gguf")
    with running(None, catalog=Catalog(folder, loader)) as server:
        assert list(states(server)) == ["a", "org/one", "org/two:two-i2_s.gguf", "org/two:two-tq2_0.gguf"]
        for name, stem in (("org/one", "one-i2_s"), ("org/two", "two-i2_s"), ("org/two:tq2_0", "two-tq2_0")):
            assert said(server.chat(model=name)) == f"I am {stem}. END and more"
        assert server.chat(model="org/three").status_code == 404


def test_a_hugging_face_folder_is_converted_once(folder: Path, running: Any, scripted: Any, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "bitnet-core" / "tests" / "convert" / "conftest.py"
    spec = importlib.util.spec_from_file_location("convert_folders", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weights = module.Folder(folder / "hf")
    weights.pack("autobitlinear")
    weights.write()
    loader = Loader(scripted)
    catalog = Catalog(folder, loader)
    body = {"model": "hf", "prompt": "x", "max_tokens": 2}
    for _ in range(2):
        with running(None, catalog=catalog) as server:
            assert states(server) == {"hf": "unloaded"}
            assert server.client.get("/v1/models/hf").json()["status"]["bytes"] > 0
            assert server.client.post("/v1/completions", json=body).status_code == 200
            assert server.client.get("/api/tags").json()["models"][0]["details"]["family"] == "bitnet-b1.58"
    (made,) = (tmp_path / "cache" / "converted").rglob("*.gguf")
    written = made.stat().st_mtime_ns
    assert loader.loads[0][0] == loader.loads[1][0] == made.name
    config = json.loads((folder / "hf" / "config.json").read_text())
    (folder / "hf" / "config.json").write_text(json.dumps(config, indent=3))
    with running(None, catalog=catalog) as server:
        assert server.client.post("/v1/completions", json=body).status_code == 200
    (made,) = (tmp_path / "cache" / "converted").rglob("*.gguf")
    assert made.stat().st_mtime_ns != written


def test_a_named_model_is_loaded_first_and_stays_the_default(
    folder: Path, running: Any, loader: Loader, demo_model: Model
) -> None:
    from bitnet.server.models.service import Source

    model_at(folder / "bitnet-demo.gguf")
    model_at(folder / "b.gguf")
    own = Source(("bitnet-demo",), demo_model.path, lambda: demo_model, reloads=False)
    with running(None, sources=[own], catalog=Catalog(folder, loader)) as server:
        assert states(server) == {"bitnet-demo": "loaded", "b": "unloaded"}
        assert said(server.chat(model="b")).startswith("I am b.")
        assert said(server.chat()) == "17 + 25 = 42."
