"""The official ``ollama`` client, over the demo model and over scripted answers."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from pathlib import Path
from typing import Any

import ollama
import pytest

from bitnet.core import Model, __version__, load_model
from bitnet.core.gguf import GGUFFile
from bitnet.core.model.default import default_model_path
from bitnet.server.models import facts as model_facts
from bitnet.server.models.facts import digest_of, parameter_size
from bitnet.server.models.service import Source

QUESTION: Any = {"role": "user", "content": "What is 17 + 25?"}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(demo: Any) -> ollama.Client:
    return ollama.Client(host=demo.url)


def test_chat(client: ollama.Client, demo: Any) -> None:
    answer = client.chat(model="demo", messages=[QUESTION], options=GREEDY)
    expected = demo.model.chat([QUESTION])
    assert answer.message.content == expected.text
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count == len(expected.prompt_tokens)
    assert answer.eval_count == len(expected.tokens)
    lines = list(client.chat(model="demo:latest", messages=[QUESTION], options=GREEDY, stream=True))
    assert "".join(line.message.content or "" for line in lines) == expected.text
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


def test_generate(client: ollama.Client, demo: Any) -> None:
    answer = client.generate(model="demo", prompt="What is 17 + 25?", options=GREEDY)
    assert answer.response == "17 + 25 = 42."
    raw = client.generate(model="demo", prompt="Once upon", raw=True, options={**GREEDY, "num_predict": 7})
    assert raw.response == demo.model.generate("Once upon", max_tokens=7).text
    assert raw.done_reason == "length"


def test_without_a_prompt_it_only_loads_the_model(client: ollama.Client, demo: Any) -> None:
    for more in ({}, {"stream": False}, {"prompt": ""}):
        answer = demo.client.post("/api/generate", json={"model": "demo", **more})
        answered = answer.json()
        assert answered.pop("created_at").endswith("Z")
        assert answered == {"model": "demo", "response": "", "done": True, "done_reason": "load"}
    chat = demo.client.post("/api/chat", json={"model": "demo"}).json()
    assert (chat["message"], chat["done"]) == ({"role": "assistant", "content": ""}, True)
    assert client.chat(model="demo", messages=[]).done_reason == "load"
    assert [line.done_reason for line in client.generate(model="demo", stream=True)] == ["load"]
    assert demo.client.post("/api/generate", json={}).status_code == 400
    assert demo.client.post("/api/chat", json={"model": "demo", "messages": "x"}).status_code == 400
    assert demo.client.post("/api/generate", json={"model": "other"}).status_code == 404


def test_what_there_is(client: ollama.Client, demo: Any) -> None:
    assert [model.model for model in client.list().models] == ["demo"]
    assert [model.model for model in client.ps().models] == ["demo"]
    shown = client.show("demo")
    assert shown.details is not None
    assert shown.details.family == demo.model.config.architecture
    assert demo.client.get("/api/version").json() == {"version": __version__}


def test_errors_are_the_clients_own(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="is not here") as missing:
        client.chat(model="other", messages=[QUESTION])
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p is 7"):
        client.chat(model="demo", messages=[QUESTION], options={"top_p": 7})


def test_scripted_lines(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, "first line\nsecond “line”\n")
    with running(script_model) as server:
        lines = list(ollama.Client(host=server.url).chat(model="bitnet-demo", messages=[QUESTION], stream=True))
    assert "".join(line.message.content or "" for line in lines) == "first line\nsecond “line”\n"


def test_facts_about_models(client: ollama.Client, demo: Any) -> None:
    path = demo.model.path
    (listed,) = client.list().models
    assert listed.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert listed.details is not None
    parameters = sum(math.prod(tensor.shape) for tensor in GGUFFile(path).tensors.values())
    assert listed.details.parameter_size == f"{parameters / 1e6:.2f}M"
    assert listed.details.quantization_level == demo.model._file.quantization
    (running,) = client.ps().models
    assert (running.digest, running.details) == (listed.digest, listed.details)
    assert running.size_vram == 0  # it is on the CPU
    assert running.size is not None
    assert running.size >= path.stat().st_size
    assert running.expires_at is not None
    assert running.expires_at.year > 2100
    assert demo.client.get("/api/ps").json()["models"][0]["context_length"] == demo.model.context
    shown = client.show("demo")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.parameter_count"] == parameters
    assert shown.details == listed.details
    assert [parameter_size(n) for n in (12, 4_200, 4_250_000, 2_412_820_480)] == ["12", "4K", "4.25M", "2.4B"]


def test_large_files_are_identified_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(shutil.copy(default_model_path(), tmp_path / "m.gguf"))
    read = digest_of(file)
    assert read == hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(model_facts, "MAX_HASHED", file.stat().st_size - 1)
    large = digest_of(file)
    assert large is not None
    assert len(large) == 64
    assert large != read
    file.touch()
    assert digest_of(file) != large
    blob = file.rename(tmp_path / ("0123456789abcdef" * 4))
    file.symlink_to(blob)
    assert digest_of(file) == blob.name  # as the hub's cache has it
    file.unlink()
    assert digest_of(file) is None


def test_a_model_is_unloaded_and_loaded_again(running: Any, demo_model: Model) -> None:
    loads = []

    def load() -> Model:
        loads.append(load_model(demo_model.path, device="cpu", threads=1, max_seqs=2))
        return loads[-1]

    source = Source(("m",), demo_model.path, load)
    with running(None, sources=[source]) as server:
        client = ollama.Client(host=server.url)
        for ask in (lambda **more: client.generate("m", **more), lambda **more: client.chat("m", **more)):
            before = len(loads)
            assert ask(keep_alive=0).done_reason == "unload"
            assert client.ps().models == []
            for seconds in (0, "0s"):  # nothing is loaded to be unloaded
                assert ask(keep_alive=seconds).done_reason == "unload"
            assert len(loads) == max(before, 1)
            assert [model.model for model in client.list().models] == ["m"]
            loaded = ask(keep_alive="5m")
            assert (loaded.done_reason, len(loads)) == ("load", before + 1)
            assert [model.model for model in client.ps().models] == ["m"]
        client.generate("m", keep_alive="0s")
        answered = client.chat("m", messages=[QUESTION], options=GREEDY)
        assert answered.message.content == "17 + 25 = 42."
        assert answered.load_duration is not None
        assert answered.total_duration is not None
        assert 10**6 < answered.load_duration < answered.total_duration
        last = client.chat("m", messages=[QUESTION], options=GREEDY, keep_alive=0)
        assert last.message.content == "17 + 25 = 42."
        assert client.ps().models == []
        assert last.load_duration is not None
        assert last.load_duration < answered.load_duration
        others: list[Any] = ["soon", True, {}, ""]
        for wrong in others:
            answer = server.client.post("/api/generate", json={"model": "m", "keep_alive": wrong})
            assert answer.status_code == 400, wrong
            assert "keep_alive" in answer.json()["error"]
    deadline = time.monotonic() + 20
    while any(model._finalizer.alive for model in loads):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_model_of_another_program_stays(demo: Any) -> None:
    answer = demo.client.post("/api/generate", json={"model": "demo", "keep_alive": 0})
    assert (answer.status_code, "belongs to the program" in answer.json()["error"]) == (400, True)
    body = {"model": "demo", "prompt": "x", "keep_alive": 0, "stream": False, "options": {"num_predict": 1}}
    assert demo.client.post("/api/generate", json=body).status_code == 200


def test_the_context_of_an_answer_goes_on(client: ollama.Client, demo: Any) -> None:
    first = client.generate("demo", "What is 17 + 25?", options=GREEDY)
    question, answer = QUESTION, {"role": "assistant", "content": "17 + 25 = 42."}
    assert first.context is not None
    conversation = [question, answer, {"role": "user", "content": "And 3 + 4?"}]
    whole = demo.model.chat_tokens(conversation)
    assert list(first.context) == whole[: len(first.context)]
    second = client.generate("demo", "And 3 + 4?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count == len(whole)
    assert second.response == demo.model.generate(whole).text
    streamed = [*client.generate("demo", "What is 17 + 25?", options=GREEDY, stream=True)]
    assert [line.context for line in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].context == first.context
    assert client.generate("demo", "x", raw=True, options={"num_predict": 1}).context is None


def test_log_probabilities_and_top_k(client: ollama.Client, demo: Any) -> None:
    expected = demo.model.chat([QUESTION], logprobs=2)
    whole = client.chat("demo", [QUESTION], options=GREEDY, logprobs=True, top_logprobs=2)
    lines = [*client.chat("demo", [QUESTION], options=GREEDY, logprobs=True, top_logprobs=2, stream=True)]
    for found in (whole.logprobs or (), [entry for line in lines for entry in line.logprobs or ()]):
        assert [e.logprob for e in found] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-6)
        assert [len(e.top_logprobs or ()) for e in found] == [2] * len(expected.tokens)
    off = {"top_k": -1, "top_p": 1.0, "temperature": 1.0, "seed": 7, "num_predict": 30}
    story = [{"role": "user", "content": "Tell me a story."}]
    answered = client.chat("demo", story, options=off).message.content
    assert answered == demo.model.chat(story, temperature=1.0, seed=7, max_tokens=30).text
