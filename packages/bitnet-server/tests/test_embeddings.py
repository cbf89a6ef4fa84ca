"""Vectors of texts, by the clients that ask for them: the same as the model's own, and errors that name the field."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import ollama
import openai
import pytest

TEXTS = ["What is BitNet?", "Weather", "naïve 😀 text"]


@pytest.fixture(scope="module")
def vectors(demo: Any) -> Any:
    return demo.model.embed(TEXTS)


def test_openai(demo: Any, vectors: Any) -> None:
    """Its client asks for base64 unless it is told otherwise."""
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    made = client.embeddings.create(model="demo", input=TEXTS)
    np.testing.assert_array_equal(np.array([one.embedding for one in made.data], np.float32), vectors)
    floats = client.embeddings.create(
        model="demo", input=TEXTS[0], encoding_format="float", dimensions=vectors.shape[1]
    )
    np.testing.assert_array_equal(np.array(floats.data[0].embedding, np.float32), vectors[0])
    tokens = [demo.model.tokenizer.encode(text) for text in TEXTS]
    assert made.usage.total_tokens == sum(map(len, tokens))
    by_ids = client.embeddings.create(model="demo", input=tokens)
    np.testing.assert_array_equal(np.array([one.embedding for one in by_ids.data], np.float32), vectors)
    last = client.embeddings.create(model="demo", input=tokens[0], extra_body={"pooling": "last"})
    np.testing.assert_array_equal(
        np.array(last.data[0].embedding, np.float32), demo.model.embed(TEXTS[:1], pooling="last")[0]
    )


def test_ollama(demo: Any, vectors: Any) -> None:
    client = ollama.Client(host=demo.url)
    made = client.embed("demo", TEXTS)
    np.testing.assert_array_equal(np.array(made.embeddings, np.float32), vectors)
    assert made.prompt_eval_count == sum(len(demo.model.tokenizer.encode(text)) for text in TEXTS)
    assert client.embed("demo", "").embeddings == []
    one = np.array(client.embeddings("demo", TEXTS[1]).embedding, np.float32)
    np.testing.assert_array_equal(one, demo.model.embed(TEXTS[1:2], normalize=False)[0])
    assert client.embeddings("demo", "").embedding == []
    assert len(client.embed("demo", "word " * 5000).embeddings) == 1  # cut, as Ollama does
    with pytest.raises(ollama.ResponseError, match=r"text 0 has [\d,]+ tokens; the context holds"):
        client.embed("demo", "word " * 1500, truncate=False)


def test_langchain(demo: Any, vectors: Any) -> None:
    langchain = pytest.importorskip("langchain_openai")
    embeddings = langchain.OpenAIEmbeddings(
        model="demo", base_url=f"{demo.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(np.array(embeddings.embed_documents(TEXTS)), vectors, rtol=0, atol=1e-7)
    np.testing.assert_allclose(np.array(embeddings.embed_query(TEXTS[1])), vectors[1], rtol=0, atol=1e-7)


def test_langchains_page(demo_model: Any, running: Any, shown: Callable[[str, str], str]) -> None:
    with running(demo_model, api_keys=("KEY",), names=("model",)) as server:
        code = shown("langchain-embeddings", server.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "It rains.\n"), done.stderr


@pytest.mark.parametrize("documents", [TEXTS, [{"text": text} for text in TEXTS]])
def test_rerank(demo: Any, documents: Any) -> None:
    body = {"model": "demo", "query": "What is a model?", "documents": documents, "top_n": 2}
    answer = demo.client.post("/v1/rerank", json=body).raise_for_status().json()
    scores = demo.model.embed(TEXTS) @ demo.model.embed(["What is a model?"])[0]
    best = np.argsort(-scores)[:2].tolist()
    assert [result["index"] for result in answer["results"]] == best
    for result, index in zip(answer["results"], best, strict=True):
        assert abs(result["relevance_score"] - scores[index]) < 1e-6
        assert result["document"] == {"text": TEXTS[index]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input"),
        ("/v1/embeddings", {"input": [[1], [10**6]]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "pooling": "max"}, "pooling"),
        ("/api/embed", {"model": "demo", "input": {"a": 1}}, "input"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", 5]}, "documents[1]"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ],
)
def test_bad_requests(demo: Any, path: str, body: Any, field: str) -> None:
    answer = demo.client.post(path, json=body)
    assert answer.status_code == 400
    assert field in answer.text


def test_a_long_text_is_refused_or_cut(demo: Any) -> None:
    long = {"input": ["a", "word " * 1500]}
    answer = demo.client.post("/v1/embeddings", json=long)
    assert (answer.status_code, "text 1 has" in answer.text) == (400, True)
    cut = demo.client.post("/v1/embeddings", json={**long, "truncate_prompt_tokens": -1, "encoding_format": "base64"})
    made = np.frombuffer(base64.b64decode(cut.json()["data"][1]["embedding"]), np.float32)
    np.testing.assert_array_equal(made, demo.model.embed(long["input"], truncate=True)[1])
