"""The core on Pyodide, the Python of browsers, without threads and processes. npm brings it, and Node runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bitnet.core import load_model
from bitnet.core.text import sandbox

TEMPLATES: list[tuple[str, list[dict[str, Any]]]] = [
    (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}",
        [{"messages": [{"role": "user", "content": "h\u00e9 \U0001f600"}]}],
    ),
    ("{{ a }}{% if b %}{{ raise_exception('no') }}{% endif %}", [{"a": 1}, {"a": 2, "b": True}, {"a": 3}]),
    ("{{ raise_exception('messages must alternate') }}", [{}]),
    ("{% for %}", [{}]),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [{}]),
    ("{% generation %}said{% endgeneration %}{% break %}", [{}]),
]
"""Sources, each with sets of values."""
SCRIPT = """
import json
import bitnet.core
from bitnet.core.support import helper
from bitnet.core.text import sandbox

def render(source, several):
    try:
        return sandbox.render(source, several)
    except sandbox.TemplateError as error:
        return str(error)

sandbox.warm()
print(json.dumps([helper.possible(), [render(*given) for given in json.loads(TEMPLATES)]]))
"""


def rendered(source: str, several: list[dict[str, Any]]) -> Any:
    try:
        return sandbox.render(source, several)
    except sandbox.TemplateError as error:
        return str(error)


def test_templates_are_rendered_without_a_process(pyodide: Callable[[str], Any]) -> None:
    """With the results of helper processes, errors included."""
    possible, found = pyodide(f"TEMPLATES = {json.dumps(TEMPLATES)!r}\n{SCRIPT}")
    assert not possible
    assert found == [rendered(*given) for given in TEMPLATES]
    assert sum(isinstance(texts, list) for texts in found) >= 2


KEEP = """
from bitnet.core.support.cache import KernelCache

key = KernelCache.key(source="merges", device="", driver="", options="", compiler="")
KernelCache().keep(key, b"index")
print(json.dumps(KernelCache().get(key).decode()))
"""


def test_what_is_kept_is_read_again(pyodide: Callable[[str], Any]) -> None:
    """The index of a large vocabulary's merges is, whose rights a browser's Python cannot tell."""
    assert pyodide(f"import json\n{KEEP}") == "index"


ASK = """
import json
from bitnet.core import InvalidInputError, load_model, load_model_async

model = await load_model_async(device=DEVICE, context=256, max_seqs=2)
asked = [[{"role": "user", "content": text}] for text in QUESTIONS]
first, second = [model.chat_stream(m, max_tokens=16, temperature=t, seed=7) for m, t in zip(asked, (0, 0.7))]
chunks = [chunk.text async for chunk in first]
completion = await second
try:
    load_model()
except InvalidInputError as error:
    refused = str(error)
model.close()
print(json.dumps([model.device.name, chunks, completion.tokens, refused]))
"""


@pytest.mark.parametrize(
    ("device", "expected"),
    [(None, "cpu:simd128"), pytest.param("cpu:numpy", "cpu:numpy", marks=pytest.mark.nightly)],  # numpy takes some 15 s
)
def test_the_demo_model_answers(pyodide_numpy: Callable[[str], Any], device: str | None, expected: str) -> None:
    """In a browser's Python, without threads, with the tokens that this Python gives."""
    questions = ["What is 17 + 25?", "Count to three."]
    name, chunks, tokens, refused = pyodide_numpy(f"QUESTIONS, DEVICE = {questions!r}, {device!r}\n{ASK}")
    assert name == expected
    assert "".join(chunks) == "17 + 25 = 42."
    assert len(chunks) > 1
    assert "load_model_async" in refused
    with load_model(device="cpu") as model:
        messages = [{"role": "user", "content": questions[1]}]
        assert tuple(tokens) == model.chat(messages, max_tokens=16, temperature=0.7, seed=7).tokens
