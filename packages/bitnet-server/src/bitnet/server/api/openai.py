"""Shared by OpenAI's endpoints: errors, usage, log-probabilities, ids, streamed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bitnet.core import Completion
from bitnet.core.engine import TokenLogprob
from bitnet.core.errors import brief
from bitnet.server.generation.job import Result
from bitnet.server.models.service import Service
from bitnet.server.request.call import to_json
from bitnet.server.request.errors import RequestError, wrong
from bitnet.server.request.fields import Fields

FINISH = {"stop": "stop", "length": "length", "context": "length", "cancelled": "stop"}
DONE = b"data: [DONE]\n\n"
MAX_METADATA, MAX_METADATA_TEXT = 16, 64 + 512
"""Maximum members of ``metadata``, and characters of a name and its value together."""
NOTHING: Mapping[str, Any] = {}
NOT_ASKED: Mapping[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None}
"""Fields of vLLM's answers about the prompt, which are null in answers to requests that do not ask for them."""
MAX_TOP_LOGPROBS = 20

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the format of OpenAI's API; about a prompt that is too long also its tokens and the context's, under
    the names of llama.cpp's server."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    lengths = {} if error.lengths is None else dict(zip(("n_prompt_tokens", "n_ctx"), error.lengths, strict=True))
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code, **lengths}}


def read_metadata(fields: Fields) -> Mapping[str, Any]:
    """What a client keeps with a response, within the bounds of OpenAI's API."""
    found = fields.object("metadata", MAX_METADATA) or Fields({})
    for name in found.values:
        if len(name) + len(found.text(name) or "") > MAX_METADATA_TEXT:
            raise wrong(found.name(brief(name)), f"is longer than {MAX_METADATA_TEXT} characters.")
    return found.values


_TEXT_EVENT = b'%b[{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n'


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def usage(result: Result) -> dict[str, Any]:
    """Tokens of a request."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.generated_tokens,
        "total_tokens": result.prompt_tokens + result.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": result.reasoning_tokens,
            "accepted_prediction_tokens": result.accepted_prediction_tokens,
            "rejected_prediction_tokens": result.rejected_prediction_tokens,
        },
    }


def timings(completion: Completion) -> dict[str, Any]:
    """Speeds of a continuation, under the names of llama.cpp's server; 0 where nothing was computed."""
    t = completion.timings
    prompt, decode = t.prefill_tokens_per_second or 0.0, t.decode_tokens_per_second or 0.0
    drafts = {"draft_n": t.drafted_tokens, "draft_n_accepted": t.accepted_tokens} if t.drafted_tokens else {}
    return {
        "cache_n": t.cached_tokens,
        "prompt_n": t.prompt_tokens - t.cached_tokens,
        "prompt_ms": t.prefill_seconds * 1e3,
        "prompt_per_token_ms": _inverse(prompt),
        "prompt_per_second": prompt,
        "predicted_n": len(completion.tokens),
        "predicted_ms": t.decode_seconds * 1e3,
        "predicted_per_token_ms": _inverse(decode),
        "predicted_per_second": decode,
        **drafts,
        "queue_ms": t.started * 1e3,
        "first_token_ms": None if t.first_token is None else t.first_token * 1e3,
    }


def _inverse(per_second: float) -> float:
    """Milliseconds of each; 0 for a rate of 0."""
    return 1e3 / per_second if per_second else 0.0


def stream_options(fields: Fields) -> Fields | None:
    """The options of a stream.

    Raises:
        RequestError: There are some, but no stream was asked for.
    """
    found = fields.object("stream_options")
    if found is not None and not fields.flag("stream"):
        raise wrong("stream_options", "is allowed only where stream is true.")
    return found


class Head:
    """The first fields of every object of an answer, and the extra fields of the last one."""

    def __init__(self, service: Service, fields: Fields, kind: str, prefix: str) -> None:
        self.id = prefix + secrets.token_hex(12)
        self._kind, self._created = kind, int(time.time())
        self._start = b""
        self._names = {"model": service.names[0], "system_fingerprint": service.fingerprint}
        stream = stream_options(fields)
        self.usage = stream is not None and stream.flag("include_usage")

    def object(self, suffix: str = "", **values: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self._kind + suffix,
            "created": self._created,
            **self._names,
            **values,
        }

    def event(self, suffix: str, choices: list[dict[str, Any]], more: Mapping[str, Any] = NOTHING) -> bytes:
        """An object of a stream as an event. Their common fields are serialised once, as there is an event for every
        step."""
        rest = b"," + to_json(more)[1:-1] if more else b""
        return self._begun(suffix) + to_json(choices) + rest + b"}\n\n"

    def text_event(self, suffix: str, index: int, delta: bytes) -> bytes:
        """As :meth:`event`, for a choice of a chat with nothing but a delta, which is JSON."""
        return _TEXT_EVENT % (self._begun(suffix), index, delta)

    def _begun(self, suffix: str) -> bytes:
        if not self._start:
            self._start = event(self.object(suffix)).removesuffix(b"}\n\n") + b',"choices":'
        return self._start

    def extras(self, result: Result) -> dict[str, Any]:
        """Timings and requested receipts: one receipt, or a list if there are several continuations."""
        found: dict[str, Any] = {"timings": timings(result.completions[0])}
        if result.receipts is not None:
            found["x_bitnet_receipt"] = result.receipts[0] if len(result.receipts) == 1 else result.receipts
        return found

    def last_events(self, result: Result, suffix: str) -> Iterable[bytes]:
        """The events that end a stream: usage, receipts and timings, if usage or receipts were requested."""
        if self.usage or result.receipts is not None:
            counts = {"usage": usage(result)} if self.usage else {}
            yield event(self.object(suffix, choices=[], **counts, **self.extras(result)))
        yield DONE


def failed(error: RequestError) -> Iterable[bytes]:
    yield event(error_body(error))
    yield DONE


def chat_logprobs(service: Service, entries: Iterable[TokenLogprob], *, as_ids: bool = False) -> dict[str, Any]:
    """Log-probabilities in the format of ``/v1/chat/completions``.

    Args:
        as_ids: Whether tokens are named by their ids, as vLLM's ``return_tokens_as_token_ids`` has it.
    """

    def one(token: int, logprob: float) -> dict[str, Any]:
        data = service.model.tokenizer.token_bytes(token)
        name = id_name(token) if as_ids else data.decode("utf-8", "replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(data)}

    content = [one(e.token, e.logprob) | {"top_logprobs": [one(t, p) for t, p in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def id_name(token: int) -> str:
    """A token's name where ``return_tokens_as_token_ids`` is set."""
    return f"token_id:{token}"


def asked_prompt_logprobs(fields: Fields) -> int | None:
    """vLLM's ``prompt_logprobs``: the number of likeliest tokens to list; None: none are wanted.

    Raises:
        RequestError: It is out of its range, or the answer is streamed.
    """
    asked = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    if asked is not None and fields.flag("stream"):
        raise wrong("prompt_logprobs", "cannot be streamed.")
    return asked


def finite(logprob: float) -> float:
    """Replace infinity, which JSON lacks, by -9999, as OpenAI's API does."""
    return max(logprob, -9999.0)


def prompt_logprobs(service: Service, prompt: Sequence[int], entries: Sequence[TokenLogprob], top: int) -> list[Any]:
    """Log-probabilities of a prompt in the format of vLLM: one object by token id for each token, None for the first.

    Args:
        top: Number of likeliest tokens to list.
    """
    tokenizer = service.model.tokenizer

    def one(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    found: list[Any] = [None] if prompt else []
    for entry in entries:
        likeliest = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        rank = likeliest[entry.token][1] if entry.token in likeliest else None
        listed = {entry.token: (entry.logprob, rank), **dict([*likeliest.items()][:top])}
        found.append({str(token): one(token, *value) for token, value in listed.items()})
    return found
