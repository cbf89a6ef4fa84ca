"""llama.cpp's slots: their tokens are saved, and restored into the cache of a server that has not seen them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import Model, load_model


def new_text() -> str:
    return "".join(random.choices("abcdefgh ", k=200))


def ask(server: Any, prompt: Any, **fields: Any) -> Any:
    body = {"prompt": prompt, "n_predict": 5, "ignore_eos": True, "temperature": 0, "return_tokens": True, **fields}
    answer = server.client.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def act(server: Any, action: str, slot: Any = 0, **body: Any) -> Any:
    return server.client.post(f"/slots/{slot}?action={action}", json=body)


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory, running: Any, demo_model: Model) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("slots")
    with running(demo_model, slot_save_path=str(folder)) as server:
        server.folder = folder
        yield server


def test_a_slot_is_restored_into_an_empty_cache(keeper: Any, running: Any) -> None:
    text, slot = new_text(), random.randrange(4)
    first = ask(keeper, text, id_slot=slot)
    prompt = keeper.model.tokenizer.encode(text)
    expected = [*prompt, *first["tokens"][:-1]]
    assert first["id_slot"] == slot
    ask(keeper, new_text())  # it names no slot
    saved = act(keeper, "save", slot, filename="a.bin").json()
    assert saved.pop("timings").keys() == {"save_ms"}
    size = (keeper.folder / "a.bin").stat().st_size
    assert saved == {"id_slot": slot, "filename": "a.bin", "n_saved": len(expected), "n_written": size}

    with (
        load_model(keeper.model.path, device="cpu", max_seqs=2, threads=1) as model,
        running(model, slot_save_path=str(keeper.folder)) as fresh,
    ):
        restored = act(fresh, "restore", 1, filename="a.bin").json()
        assert restored.pop("timings").keys() == {"restore_ms"}
        assert restored == {"id_slot": 1, "filename": "a.bin", "n_restored": len(expected), "n_read": size}
        again = ask(fresh, text)
        assert again["tokens"] == first["tokens"]
        assert len(prompt) - 64 < again["tokens_cached"] < len(prompt)
        assert again["timings"]["cache_n"] == again["tokens_cached"] > 0
        assert act(fresh, "save", 1, filename="b.bin").status_code == 200
    assert (keeper.folder / "b.bin").read_bytes() == (keeper.folder / "a.bin").read_bytes()


def test_every_way_to_ask_fills_a_slot(keeper: Any) -> None:
    several = [new_text(), new_text()]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": new_text()}]},
        "/v1/completions": {"prompt": new_text(), "stream": True},
        "/completion": {"prompt": several, "n": 2, "ignore_eos": True},
    }
    for slot, (path, body) in enumerate(bodies.items()):
        done = keeper.client.post(path, json={**body, "max_tokens": 3, "id_slot": slot})
        assert done.status_code == 200, done.text
        answer = act(keeper, "save", slot, filename=f"{slot}")
        assert answer.status_code == 200, answer.text
    last = json.loads((keeper.folder / "2").read_text())["tokens"]
    prompt = keeper.model.tokenizer.encode(several[-1])
    assert last[: len(prompt)] == prompt
    assert len(last) == len(prompt) + 2
    erased = keeper.client.post("/slots/2?action=erase")
    assert erased.json() == {"id_slot": 2, "n_erased": len(last)}
    assert act(keeper, "erase", 2).json()["n_erased"] == 0
    empty = act(keeper, "save", 2, filename="none")
    assert (empty.status_code, "is empty" in empty.text) == (400, True)
    assert not (keeper.folder / "none").exists()


def test_a_slot_holds_a_whole_context(keeper: Any) -> None:
    context = keeper.model.context
    whole = ask(keeper, new_text(), n_predict=-1, ignore_eos=True, id_slot=3)
    assert whole["truncated"]
    assert act(keeper, "save", 3, filename="whole").json()["n_saved"] == context - 1
    assert act(keeper, "restore", 3, filename="whole").json()["n_restored"] == context - 1


NAMES = ("", ".", "..", "../x", "a/b", "/etc/x", "a\\b", ".x", "x.", "x ", "a\0b", "a\nb", "c:x", "NUL", "com1.bin")


@pytest.mark.parametrize("action", ["save", "restore"])
def test_names_that_leave_the_folder_are_refused(keeper: Any, action: str) -> None:
    ask(keeper, new_text(), id_slot=0)
    (keeper.folder.parent / "x").write_text("{}")
    before = {*keeper.folder.iterdir()}
    for name in (*NAMES, "x" * 129, "ä", 3, None):
        answer = act(keeper, action, filename=name)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "filename"), name
    assert {*keeper.folder.iterdir()} == before
    assert (keeper.folder.parent / "x").read_text() == "{}"
    (keeper.folder / "inner").mkdir()
    linked = keeper.folder / "link"
    linked.symlink_to(keeper.folder.parent / "x")
    for name in ("inner", "link"):
        assert act(keeper, action, filename=name).status_code == 400
    (keeper.folder / "inner").rmdir()
    linked.unlink()


def test_files_that_are_no_slots_are_refused(keeper: Any) -> None:
    ask(keeper, new_text(), id_slot=0)
    assert act(keeper, "save", filename="good").status_code == 200
    good = json.loads((keeper.folder / "good").read_text())
    tokens = good["tokens"]
    bad: list[Any] = [
        b"",
        b"\xff\x00",
        b"[" * 10_000,
        b"x" * (17 * keeper.model.context + 2000),
        [],
        {**good, "tokens": []},
        {**good, "tokens": [*tokens, -1]},
        {**good, "tokens": [*tokens, 2**40]},
        {**good, "tokens": [*tokens, True]},
        {**good, "tokens": [*tokens, keeper.model.config.vocab_size]},
        {**good, "tokens": tokens * (keeper.model.context // len(tokens) + 1)},
        {**good, "tokens": tokens[:-1]},
        {"tokens": tokens},
    ]
    for content in bad:
        path: Path = keeper.folder / "bad"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        answer = act(keeper, "restore", filename="bad")
        assert answer.status_code == 400, (str(content)[:80], answer.text)
        assert "bad" in answer.json()["error"]["message"]
    assert act(keeper, "restore", filename="absent").status_code == 404
    assert act(keeper, "restore", filename="good").status_code == 200


def test_slots_and_actions_that_there_are_not(keeper: Any) -> None:
    for slot in (-1, 4, "x", "00"):
        assert "0 … 3" in act(keeper, "erase", slot).json()["error"]["message"]
    for query in ("?action=move", "?action=", ""):
        assert keeper.client.post(f"/slots/0{query}", json={}).status_code == 400
    for wrong in (4, -2, "x"):
        answer = keeper.client.post("/completion", json={"prompt": "x", "id_slot": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "id_slot")
