"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bitnet.core import Chunk
from bitnet.core.engine import TokenLogprob
from bitnet.core.errors import ContextFullError, brief
from bitnet.server.errors import RequestError, unsupported, wrong
from bitnet.server.fields import Fields, are_tokens
from bitnet.server.generation import SSE, Job, Result
from bitnet.server.openai import FINISH, Head, failed, finite, usage
from bitnet.server.sampling import MAX_CHOICES, sampling_options
from bitnet.server.service import Service
from bitnet.server.structured import openai_form

MAX_LOGPROBS = 20
MAX_PROMPTS = 256

REFUSED = {
    "suffix": "the model continues a text; it does not fill gaps.",
    "use_beam_search": "beam search is not implemented.",
    "prompt_logprobs": "use the Python API's Model.score.",
}


def parse(service: Service, fields: Fields) -> Job:
    """Parse a request for continuations of texts.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    fields.refuse(REFUSED)
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    if fields.integer("best_of") not in (None, n):
        raise unsupported("best_of", "only n continuations are made.")
    logprobs, echo = fields.integer("logprobs", 0, MAX_LOGPROBS), fields.flag("echo")
    if echo and logprobs is not None:
        raise unsupported("logprobs", "log-probabilities of an echoed prompt are not computed.")
    prompts = _prompts(fields)
    most = fields.integer("max_tokens", 1)
    answer = CompletionAnswer(service, fields, [_text(service, p) for p in prompts] if echo else None, n)
    return Job(
        prompts=lambda: [_tokens(service, p) for p in prompts],
        options=sampling_options(fields, max_tokens=16 if most is None else most, logprobs=logprobs),
        answer=answer,
        n=n,
        stream=SSE if fields.flag("stream") else None,
        form=openai_form(fields),
        receipt=fields.flag("x_bitnet_receipt"),
    )


def _prompts(fields: Fields) -> list[str | list[int]]:
    """The prompts: one text or several, one list of token ids or several."""
    fields.require("prompt")
    value = fields.values["prompt"]
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if len(several) > MAX_PROMPTS:
        raise wrong("prompt", f"has {len(several):,} prompts; at most {MAX_PROMPTS} are allowed.")
    for prompt in several:
        ids = isinstance(prompt, list) and are_tokens(prompt)
        if not (isinstance(prompt, str) or ids) or not prompt:
            raise wrong("prompt", f"is {brief(value)}; it must be a text, token ids, or a list of them, none empty.")
    return several


def _tokens(service: Service, prompt: str | list[int]) -> list[int]:
    return service.text_tokens(prompt) if isinstance(prompt, str) else prompt


def _text(service: Service, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    vocabulary, context = service.model.tokenizer.vocab_size, service.model.context
    if len(prompt) > context:
        raise ContextFullError(f"the prompt has {len(prompt):,} tokens; the context holds {context}.")
    if any(not 0 <= token < vocabulary for token in prompt):
        raise wrong("prompt", f"has a token that is not in the vocabulary, 0 … {vocabulary - 1}.")
    return service.model.tokenizer.decode(prompt, skip_special=False)


class CompletionAnswer:
    """An answer as ``text_completion``.

    Args:
        echo: The prompts' texts, to send before the continuations; None: not sent.
    """

    def __init__(self, service: Service, fields: Fields, echo: Sequence[str] | None, n: int) -> None:
        self._service, self._head = service, Head(service, fields, "text_completion", "cmpl-")
        self._echo, self._n = echo, n
        self._offsets: dict[int, int] = {}  # by continuation, the next token's offset in the whole text

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        return ()

    def _before(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index // self._n]

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        text = chunk.text if index in self._offsets else self._before(index) + chunk.text
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(self._name(entry.token)) for entry in chunk.logprobs or ())
        if text or chunk.logprobs or chunk.finish_reason is not None:
            reason = None if chunk.finish_reason is None else FINISH[chunk.finish_reason]
            yield self._head.event("", [self._choice(index, text, chunk.logprobs, reason, offset)])

    def end(self, result: Result) -> Iterable[bytes]:
        return self._head.last_events(result, "")

    def failed(self, error: RequestError) -> Iterable[bytes]:
        return failed(error)

    def whole(self, result: Result) -> Any:
        choices = [
            self._choice(i, self._before(i) + c.text, c.logprobs, FINISH[c.finish_reason], 0)
            for i, c in enumerate(result.completions)
        ]
        return self._head.object(choices=choices, usage=usage(result), **self._head.extras(result))

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, reason: str | None, offset: int
    ) -> dict[str, Any]:
        found = None if logprobs is None else self._logprobs(logprobs, offset)
        return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}

    def _logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        names = [self._name(e.token) for e in entries]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [finite(e.logprob) for e in entries],
            "top_logprobs": [{self._name(t): finite(p) for t, p in e.top} for e in entries],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token's text; bytes that form only part of a character are shown as numbers, as in OpenAI's API."""
        data = self._service.model.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
