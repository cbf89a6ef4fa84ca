"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bitnet.core import Chunk, Completion
from bitnet.core.engine import TokenLogprob
from bitnet.server.api.known_fields import COMPLETIONS
from bitnet.server.api.openai import (
    FINISH,
    MAX_TOP_LOGPROBS,
    NOT_ASKED,
    Head,
    asked_prompt_logprobs,
    failed,
    finite,
    id_name,
    prompt_logprobs,
    usage,
)
from bitnet.server.api.progress import Progress
from bitnet.server.forms.structured import openai_form
from bitnet.server.forms.token_rules import TokenRules
from bitnet.server.generation.job import SSE, Job, Result
from bitnet.server.generation.prompts import read_prompts
from bitnet.server.generation.sampling import MAX_CHOICES, sampling_options, token_limit
from bitnet.server.models.service import Service
from bitnet.server.request.errors import RequestError, unsupported, wrong
from bitnet.server.request.fields import Fields


def parse(service: Service, fields: Fields) -> Job:
    """Parse a request for continuations of texts.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    COMPLETIONS.check(fields)
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    if fields.integer("best_of") not in (None, n):
        raise unsupported("best_of", "only n continuations are made.")
    logprobs, echo = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS), fields.flag("echo")
    prompts, special = read_prompts(fields), fields.flag("add_special_tokens", True)
    most, receipt = token_limit(fields, "max_tokens", "n_predict", default=16, least=0), fields.flag("x_bitnet_receipt")
    if receipt and most == 0:
        raise wrong("x_bitnet_receipt", "needs an answer; max_tokens is 0.")
    wanted = [asked_prompt_logprobs(fields), logprobs if echo else None, 0 if most == 0 else None]
    of_prompt = max((top for top in wanted if top is not None), default=None)
    answer = CompletionAnswer(service, fields, [p.text(service) for p in prompts] if echo else None, n)

    def tokens() -> Sequence[Sequence[int]]:
        answer.prompts = [p.tokens(service, special) for p in prompts]
        return answer.prompts

    return Job(
        prompts=tokens,
        options=sampling_options(
            fields,
            service.model.tokenizer,
            service.preset.sampling,
            max_tokens=most,
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
        ),
        answer=answer,
        n=n,
        stream=SSE if fields.flag("stream") else None,
        form=openai_form(fields),
        receipt=receipt,
        rules=TokenRules.read(fields),
        include_stop=fields.flag("include_stop_str_in_output"),
    )


class CompletionAnswer:
    """An answer as ``text_completion``.

    Args:
        echo: The prompts' texts, to send before the continuations; None: not sent.

    Attributes:
        prompts: The prompts' tokens, once they have been made.
    """

    def __init__(self, service: Service, fields: Fields, echo: Sequence[str] | None, n: int) -> None:
        self._service, self._head = service, Head(service, fields, "text_completion", "cmpl-")
        self._echo, self._n = echo, n
        self.prompts: Sequence[Sequence[int]] = ()
        self._offsets: dict[int, int] = {}  # by continuation, the next token's offset in the whole text
        self._progress = Progress(fields)
        self._ids, self._of_prompt = fields.flag("return_token_ids"), asked_prompt_logprobs(fields)
        self._as_ids, self._top_count = fields.flag("return_tokens_as_token_ids"), fields.integer("logprobs")

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        self._progress.begin(prompt_tokens)
        return ()

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        text, prompt, ids = chunk.text, None, {"token_ids": chunk.tokens} if self._ids else {}
        more = self._progress.add(chunk)
        if index not in self._offsets:
            self._offsets[index] = 0
            ids |= {"prompt_token_ids": tuple(self.prompts[index // self._n])} if self._ids else {}
            text, prompt = self._before(index) + text, chunk.prompt_logprobs
        logprobs = self._logprobs(index, chunk.logprobs, prompt)
        if text or chunk.logprobs or (chunk.tokens and ids) or chunk.finish_reason is not None:
            reason = None if chunk.finish_reason is None else FINISH[chunk.finish_reason]
            yield self._head.event("", [_choice(index, text, logprobs, reason) | ids], more)

    def end(self, result: Result) -> Iterable[bytes]:
        return self._head.last_events(result, "")

    def failed(self, error: RequestError) -> Iterable[bytes]:
        return failed(error)

    def whole(self, result: Result) -> Any:
        choices = []
        for i, c in enumerate(result.completions):
            logprobs = self._logprobs(i, c.logprobs, c.prompt_logprobs)
            choices.append(_choice(i, self._before(i) + c.text, logprobs, FINISH[c.finish_reason]) | self._extras(c))
        return self._head.object(choices=choices, usage=usage(result), **self._head.extras(result))

    def _extras(self, completion: Completion) -> dict[str, Any]:
        """What vLLM's fields have a choice carry besides."""
        found: dict[str, Any] = {**NOT_ASKED, "token_ids": None}
        if self._ids:
            found |= {"token_ids": completion.tokens, "prompt_token_ids": completion.prompt_tokens}
        if self._of_prompt is not None and completion.prompt_logprobs is not None:
            entries = completion.prompt_logprobs
            listed = prompt_logprobs(self._service, completion.prompt_tokens, entries, self._of_prompt)
            found["prompt_logprobs"] = listed
        return found

    def _before(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index // self._n]

    def _logprobs(
        self, index: int, entries: Sequence[TokenLogprob] | None, prompt: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        """The entries of new tokens, after those of the prompt if it is echoed. Nothing precedes its first token."""
        if entries is None:
            return None
        every = [*(prompt or ()), *entries] if self._echo is not None else entries
        rows: list[tuple[int, float | None, Any]] = [(e.token, finite(e.logprob), self._top(e)) for e in every]
        offset, unwritten = self._offsets.get(index, 0), False
        if prompt is not None and self._echo is not None:
            rows.insert(0, (self.prompts[index // self._n][0], None, None))
            unwritten = not self._before(index).startswith(self._name(rows[0][0]))  # the begin token of a text
        names = [self._name(token) for token, *_ in rows]
        offsets = []
        for i, name in enumerate(names):
            offsets.append(offset)
            offset += 0 if unwritten and i == 0 else len(name)
        self._offsets[index] = offset
        return {
            "tokens": names,
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [top for *_, top in rows],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The chosen token, which comes first as in vLLM, and the likeliest ones."""
        top = entry.top[: self._top_count]
        return {self._name(token): finite(p) for token, p in ((entry.token, entry.logprob), *top)}

    def _name(self, token: int) -> str:
        """A token's text; bytes that form only part of a character are shown as numbers, as in OpenAI's API."""
        if self._as_ids:
            return id_name(token)
        data = self._service.model.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
