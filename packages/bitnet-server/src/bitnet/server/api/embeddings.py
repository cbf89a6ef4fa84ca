"""Vectors of texts: OpenAI's ``/v1/embeddings``, Ollama's ``/api/embed`` and ``/api/embeddings``; ``/v1/rerank``."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ContextFullError
from bitnet.core.model.pooling import POOLINGS, Pooling
from bitnet.server.api.known_fields import EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, RERANK
from bitnet.server.generation.prompts import Prompt, read_prompts
from bitnet.server.models.service import Service
from bitnet.server.request.call import Call, long_json
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields

MAX_TEXTS = 2048
"""Maximum texts of a request; OpenAI's limit."""
AT_ONCE = 4096
"""Tokens computed before others' requests get their turn, and before it is seen that the client has left."""
F32 = npt.NDArray[np.float32]


class Vectors(NamedTuple):
    """``float32[n, d]``, one for each text, and the number of all texts' tokens."""

    rows: F32
    tokens: int


async def openai(service: Service, call: Call, fields: Fields) -> None:
    """``/v1/embeddings``.

    Raises:
        RequestError: A field is missing, not what it must be, or not supported.
    """
    EMBEDDINGS.check(fields)
    as_text = fields.choice("encoding_format", ("float", "base64"), "float") == "base64"
    wanted = fields.integer("dimensions", 1)
    truncates = fields.integer("truncate_prompt_tokens", -1, -1) is not None  # vLLM's word for the whole context
    pooling = _pooling(fields)
    texts = await call.read(lambda: read_prompts(fields, "input", MAX_TEXTS))
    _check_dimensions(service, wanted)
    made = await vectors(service, call, texts, pooling=pooling, truncate=truncates)
    data = (
        {"object": "embedding", "index": i, "embedding": _base64(row) if as_text else row.tolist()}
        for i, row in enumerate(made.rows)
    )
    usage = {"prompt_tokens": made.tokens, "total_tokens": made.tokens}
    await _reply(service, call, {"object": "list", "model": service.names[0], "usage": usage}, {"data": data})


async def ollama(service: Service, call: Call, fields: Fields) -> None:
    """``/api/embed``; without texts it only requests that the model be loaded.

    Raises:
        RequestError: As for :func:`openai`.
    """
    fields.require("model")
    OLLAMA_EMBED.check(fields)
    began = time.monotonic()
    truncates, wanted = fields.flag("truncate", True), fields.integer("dimensions", 1)
    _check_dimensions(service, wanted)
    given = fields.values.get("input")
    texts = await call.read(lambda: read_prompts(fields, "input", MAX_TEXTS)) if given not in (None, "", []) else []
    made = await vectors(service, call, texts, truncate=truncates)
    facts = {
        "model": service.names[0],
        "total_duration": int((time.monotonic() - began + call.load_seconds) * 1e9),
        "load_duration": int(call.load_seconds * 1e9),
        "prompt_eval_count": made.tokens,
    }
    await _reply(service, call, facts, {"embeddings": (row.tolist() for row in made.rows)})


async def ollama_one(service: Service, call: Call, fields: Fields) -> None:
    """``/api/embeddings``, which takes one text; its vector is not normalised, as Ollama's is not.

    Raises:
        RequestError: As for :func:`openai`.
    """
    fields.require("model")
    OLLAMA_EMBEDDINGS.check(fields)
    prompt = fields.text("prompt") or ""
    made = await vectors(service, call, [Prompt((prompt,))] * bool(prompt), truncate=True, normalize=False)
    await call.reply({"embedding": made.rows[0].tolist() if prompt else []})


async def rerank(service: Service, call: Call, fields: Fields) -> None:
    """``/v1/rerank``: documents by the cosine of their vectors and the query's.

    Raises:
        RequestError: As for :func:`openai`.
    """
    RERANK.check(fields)
    fields.require("query")
    query, most = fields.text("query") or "", fields.integer("top_n", 1)
    returns = fields.flag("return_documents", True)
    documents = await call.read(lambda: _documents(fields))
    if not query:
        raise wrong("query", "is empty.")
    made = await vectors(service, call, [Prompt((text,)) for text in (query, *documents)])
    scores = made.rows[1:] @ made.rows[0]
    best = np.argsort(-scores, kind="stable")[:most]
    results = [
        {
            "index": int(i),
            "relevance_score": float(scores[i]),
            **({"document": {"text": documents[i]}} if returns else {}),
        }
        for i in best
    ]
    usage = {"prompt_tokens": made.tokens, "total_tokens": made.tokens}
    await call.reply({"object": "list", "model": service.names[0], "results": results, "usage": usage})


async def _reply(service: Service, call: Call, value: Mapping[str, Any], lists: Mapping[str, Iterable[Any]]) -> None:
    """Answer with vectors: 2,048 of 2,560 numbers are 98 MB of JSON, which take seconds."""
    await call.reply(await service.shared.in_thread(lambda: long_json(value, lists, 1)))


async def vectors(
    service: Service,
    call: Call,
    texts: Sequence[Prompt],
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
    truncate: bool = False,
) -> Vectors:
    """The vectors of texts; requests for vectors of a model take turns.

    Raises:
        RequestError: A text is longer than the context, or no replica computed them.
    """
    tokens = await call.watch(service.shared.in_thread(lambda: _tokens(service, texts, truncate)))
    parts: list[F32] = []
    start = 0
    while start < len(tokens):
        stop, count = start, 0
        while stop < len(tokens) and (count == 0 or count + len(tokens[stop]) <= AT_ONCE):
            count += len(tokens[stop])
            stop += 1
        some = tokens[start:stop]
        async with service.embedding:
            rows = await call.watch(service.backend.embed(some, pooling=pooling, normalize=normalize))
        parts.append(rows)
        start = stop
    width = service.model.config.hidden_size
    return Vectors(np.concatenate(parts) if parts else np.empty((0, width), np.float32), sum(map(len, tokens)))


def _tokens(service: Service, texts: Sequence[Prompt], truncate: bool) -> list[list[int]]:
    """The tokens of texts, each with the special tokens of a whole text, cut to the context if ``truncate``."""
    context, tokenizer, made = service.model.context, service.model.tokenizer, []
    for i, text in enumerate(texts):
        ids = (_shortened(text, service.longest_text) if truncate else text).tokens(service, special=True, parse=False)
        if not ids:
            raise wrong("input", f"has no tokens at {i}.")
        if bad := [token for token in ids if not 0 <= token < tokenizer.vocab_size]:
            raise wrong("input", f"has the token {bad[0]} at {i}; the vocabulary is 0 … {tokenizer.vocab_size - 1}.")
        if len(ids) > context:
            if not truncate:
                raise ContextFullError(
                    f"text {i} has {len(ids):,} tokens; the context holds {context}.", tokens=len(ids), context=context
                )
            ends = ids[-1] in tokenizer.eos_ids
            ids = [*ids[: context - 1], ids[-1]] if ends else ids[:context]
        made.append(ids)
    return made


def _shortened(text: Prompt, characters: int) -> Prompt:
    """Without what follows the longest text that may fit the context, which need not even be read."""
    return Prompt(tuple(part[:characters] if isinstance(part, str) else part for part in text.parts))


def _pooling(fields: Fields) -> Pooling | None:
    value = fields.text("pooling")
    if value is not None and value not in POOLINGS:
        fields.choice("pooling", POOLINGS, value)
    return next((pooling for pooling in POOLINGS if pooling == value), None)


def _check_dimensions(service: Service, wanted: int | None) -> None:
    width = service.model.config.hidden_size
    if wanted is not None and wanted != width:
        raise wrong("dimensions", f"is {wanted}; {service.names[0]} was not trained for other lengths than {width}.")


def _base64(row: F32) -> str:
    """A vector's float32 numbers, little-endian."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def _documents(fields: Fields) -> list[str]:
    """The documents: texts, or objects with ``text``."""
    fields.require("documents")
    value = fields.values["documents"]
    if not isinstance(value, list) or not value:
        raise wrong("documents", "must be a list of texts, not empty.")
    if len(value) >= MAX_TEXTS:
        raise wrong("documents", f"has {len(value):,} texts; at most {MAX_TEXTS - 1} are allowed.")
    found = []
    for i, document in enumerate(value):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str) or not text:
            raise wrong(f"documents[{i}]", "must be a text, or an object with text, not empty.")
        found.append(text)
    return found
