"""Clients that ask for objects and call functions: instructor, LlamaIndex, pydantic-ai and openai-agents.

openai-agents and pydantic-ai also run a task of three rounds and hold a session of 20 turns, with instructions of more
than 50,000 tokens. Each request but the first computes less than 2 % of its prompt.
Schemas are those that pydantic writes by default. The scripted model says what a model would, and is held to the schema
where a client asks for that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from bitnet.core import Model

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))  # uv installs them
ADA = {"name": "Ada", "age": 36, "tags": ["x", "y"]}
SAID = '{"name":"Ada","age":36,"tags":["x","y"]}'
WITHOUT_END = SAID[:-1] + "".join(
    f',"key{i}":{i}' for i in range(1000)
)  # pydantic's schemas do not forbid further keys
# What clients call the function whose arguments are the object.
FUNCTION = re.compile(r'"name": "(weather|final_result|\w*Person)"')


def answer(prompt: str) -> str:
    """What a model would say that was told about tools, or about none."""
    if turn := re.findall(r"This is turn (\d+) of our talk", prompt):
        return f"It was turn {turn[-1]}." if len(turn) == int(turn[-1]) + 1 else "Some turns are missing."
    if clue := re.findall(r"clue (\d)", prompt):
        call = {"name": "follow", "arguments": {"clue": int(clue[-1])}}
        return "It is under the elm." if clue[-1] == "3" else json.dumps(call)
    if "27 degrees" in prompt:
        return "It is warm."
    if function := FUNCTION.search(prompt):
        own = {"weather": '{"city":"Zürich"}', "IterablePerson": f'{{"tasks":[{SAID}]}}'}
        arguments = own.get(function[1], WITHOUT_END)
        return f'{{"name": "{function[1]}", "arguments": {arguments}}}'
    return "Good day to you." if "Hello." in prompt else SAID


@pytest.fixture
def server(long_model: Model, running: Any, scripted: Any) -> Iterator[Any]:
    scripted(long_model, answer)
    with running(long_model, names=("m",)) as found:
        yield found


@pytest.mark.parametrize("client", ["llama_index", "openai_agents", "pydantic_ai"])
def test_flows(server: Any, python_client: Callable[[str, str], Any], client: str) -> None:
    out = python_client(f"{client}_flows.py", server.url)
    for api, found in out.items():
        assert found["text"] == "Good day to you.", api
        assert found["final"] == "It is warm.", api
        assert "".join(found["pieces"]) in ("It is warm.", "Good day to you."), api
        assert sum(bool(piece) for piece in found["pieces"]) > 1, api
        assert found["objects"] == [ADA] * len(found["objects"]), api
        if client == "llama_index":
            continue
        session = found["session"]
        assert [json.loads(call) for call in session["calls"]] == [{"clue": i} for i in range(3)], api
        assert session["found"] == "It is under the elm.", api
        assert session["turns"] == [f"It was turn {i}." for i in range(20)], api
        asked = session["tokens"]
        assert len(asked) == 24, api
        assert asked[0][0] > 50_000, api
        print(f"{client} by {api}: computed {[prompt - cached for prompt, cached in asked]} of {asked[0][0]} and more")
        assert all(prompt - cached < 0.02 * prompt for prompt, cached in asked[1:]), api


def test_instructor(server: Any, python_client: Callable[[str, str], Any]) -> None:
    out = python_client("instructor_flows.py", server.url)
    grown = {mode: out.pop(f"{mode} grows") for mode in ("TOOLS", "JSON", "JSON_SCHEMA")}
    assert out == {"TOOLS": [ADA] * 2, "JSON": [ADA], "JSON_SCHEMA": [ADA]}
    for mode, objects in grown.items():
        assert objects[-1] == ADA, mode
        assert len({json.dumps(found) for found in objects}) > 3, mode
        for before, after in pairwise(objects):
            assert (after["name"] or "").startswith(before["name"] or ""), mode
            assert str(after["age"]).startswith(str(before["age"] or "")), mode  # a number grows, too
            tags = before["tags"] or []
            assert (after["tags"] or [])[: len(tags) - 1] == tags[:-1], mode


def test_instructors_page(
    script_model: Model,
    running: Any,
    scripted: Any,
    uv: Callable[..., Any],
    installed: Callable[..., None],
    shown: Callable[[str, str], str],
) -> None:
    scripted(script_model, lambda prompt: answer(prompt.replace("\n", " ")))
    library = ("run", "--no-project", "--with", "instructor==1.17.0")
    with running(script_model, api_keys=("KEY",), names=("model",)) as server:
        installed("uv", uv(" ".join(library), "python", "-c", ""))
        done = uv(" ".join(library), "python", "-c", shown("instructor", server.url))
    assert done.returncode == 0, done.stderr
    whole, *grown = done.stdout.splitlines()
    assert whole == "Person(name='Ada', age=36, tags=['x', 'y'])"
    assert len(set(grown)) > 3
    assert grown[-1].endswith("Person(name='Ada', age=36, tags=['x', 'y'])".removeprefix("Person"))
