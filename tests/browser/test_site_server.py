"""The server of a static site, in Pyodide on Node: vectors of texts, beside those that this Python computes."""

from __future__ import annotations

import base64
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.model.default import default_model_path
from bitnet.server.web.packages import archive

TEXTS = ["What is BitNet?", "Weather", "na\u00efve \U0001f600 text"]
CLOSE = 1e-5
"""Difference of a vector's numbers, whose length is 1: exponentials and roots are other libraries'."""
SERVE = """
import json
from bitnet.server.web.engine import Engine

engine = Engine(folders[1], "cpu", 512, lambda done, total: None)

async def ask(number, method, path, body):
    status, pieces = [], []
    data = None if body is None else json.dumps(body).encode()
    headers = json.dumps([["content-type", "application/json"]])
    head = lambda code, headers: status.append(code)
    await engine.answer(number, method, path, headers, data, head, lambda piece: pieces.append(bytes(piece)))
    return status[0], json.loads(b"".join(pieces))

print(json.dumps([await ask(i, *asked) for i, asked in enumerate(json.loads(ASKED))]))
"""


@pytest.fixture
def ask(node: Callable[..., Any], with_numpy: Path, tmp_path: Path) -> Callable[..., Any]:
    """``ask(*requests)`` gives the status and the body of the answer to each method, path and body."""
    with zipfile.ZipFile(io.BytesIO(archive())) as packed:
        packed.extractall(tmp_path / "packages")
    (tmp_path / "models").mkdir()
    shutil.copy(default_model_path(), tmp_path / "models" / "demo.gguf")
    shutil.copy(Path(__file__).parent / "run.mjs", tmp_path)

    def ask(*requests: tuple[str, str, Any]) -> Any:
        (tmp_path / "script.py").write_text(f"ASKED = {json.dumps(requests)!r}\n{SERVE}", encoding="utf-8")
        ended = node("node", ["run.mjs", str(with_numpy), "script.py", "packages", "models"], cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr[-4000:]
        return json.loads(ended.stdout.splitlines()[-1])

    return ask


def test_vectors_are_those_of_this_python(ask: Callable[..., Any]) -> None:
    """By OpenAI's and Ollama's endpoints, and the order of documents; computed here by the level without vectors."""
    query = "What is a model?"
    answers = ask(
        ("POST", "/v1/embeddings", {"model": "demo", "input": TEXTS, "encoding_format": "float"}),
        (
            "POST",
            "/v1/embeddings",
            {"model": "demo", "input": TEXTS[0], "pooling": "last", "encoding_format": "base64"},
        ),
        ("POST", "/api/embed", {"model": "demo", "input": TEXTS}),
        ("POST", "/v1/rerank", {"model": "demo", "query": query, "documents": TEXTS}),
        ("POST", "/v1/embeddings", {"model": "demo", "input": "a " * 3000}),
    )
    assert [status for status, _ in answers] == [200, 200, 200, 200, 400]
    made, last, ollama, ranked, refused = (body for _, body in answers)
    with load_model(device="cpu:scalar", context=512) as model:
        vectors, own_last = model.embed(TEXTS), model.embed(TEXTS[:1], pooling="last")[0]
        scores = vectors @ model.embed([query])[0]
        tokens = sum(len(model.tokenizer.encode(text)) for text in TEXTS)
    found = np.array([one["embedding"] for one in made["data"]], np.float32)
    np.testing.assert_allclose(found, vectors, rtol=0, atol=CLOSE)
    assert np.abs(vectors[0] - vectors[1]).max() > 100 * CLOSE
    assert made["usage"]["total_tokens"] == tokens
    text = base64.b64decode(last["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(text, np.float32), own_last, rtol=0, atol=CLOSE)
    np.testing.assert_array_equal(np.array(ollama["embeddings"], np.float32), found)
    assert [one["index"] for one in ranked["results"]] == np.argsort(-scores, kind="stable").tolist()
    assert "tokens; the context holds 512" in refused["error"]["message"]
