"""``/completion`` and ``/completions`` of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bitnet.core import Chunk, Completion
from bitnet.core.engine import GenerationOptions, TokenLogprob
from bitnet.server.api.known_fields import LLAMA_COMPLETION
from bitnet.server.api.llama_errors import error_body
from bitnet.server.api.llama_probabilities import Probabilities
from bitnet.server.api.llama_settings import DEFAULTS, NO_SLOT, named_slot, settings
from bitnet.server.api.openai import event, timings
from bitnet.server.api.progress import Progress
from bitnet.server.forms.structured import openai_form
from bitnet.server.forms.token_rules import TokenRules
from bitnet.server.generation.job import SSE, Job, Result
from bitnet.server.generation.prompts import read_prompts
from bitnet.server.generation.sampling import MAX_CHOICES, sampling_options, token_limit
from bitnet.server.models.service import Service
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

MAX_RESPONSE_FIELDS = 64

Prompts = Callable[[], Sequence[Sequence[int]]]


def parse(service: Service, fields: Fields) -> Job:
    """Parse a request for continuations of texts.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    LLAMA_COMPLETION.check(fields)
    prompts = read_prompts(fields)
    return completion_job(service, fields, lambda: [prompt.tokens(service, True) for prompt in prompts])


def completion_job(service: Service, fields: Fields, prompts: Prompts, stop_tokens: Iterable[int] = ()) -> Job:
    """The job that continues prompts as a request's fields say.

    Args:
        prompts: Makes the prompts' token ids.
        stop_tokens: Ids that end an answer besides those of the model and of the request.

    Raises:
        RequestError: A field is invalid or not supported.
    """
    most = token_limit(fields, "n_predict", "max_tokens", least=0)
    form, rules = openai_form(fields), TokenRules.read(fields)
    options = sampling_options(
        fields,
        service.model.tokenizer,
        service.preset.sampling,
        max_tokens=most,
        prompt_logprobs=0 if most == 0 else None,
        defaults=DEFAULTS,
    )
    options["stop_tokens"] = [*options.get("stop_tokens", ()), *stop_tokens]
    restricted = form is not None or rules is not None
    wanted = Probabilities(fields, GenerationOptions(**options), restricted=restricted)
    options["logprobs"] = wanted.logprobs
    answer = LlamaAnswer(service, fields, wanted)

    def made() -> Sequence[Sequence[int]]:
        tokens = prompts()
        answer.prompts = [service.model.tokenizer.decode(ids, skip_special=False) for ids in tokens]
        return tokens

    return Job(
        prompts=made,
        options=options,
        answer=answer,
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=SSE if fields.flag("stream") else None,
        form=form,
        receipt=fields.flag("x_bitnet_receipt"),
        rules=rules,
        include_stop=fields.flag("include_stop_str_in_output"),
    )


class LlamaAnswer:
    """An answer in the format of llama.cpp's ``/completion``.

    Attributes:
        prompts: The prompts' texts, once their tokens have been made.
    """

    def __init__(self, service: Service, fields: Fields, wanted: Probabilities) -> None:
        self._service, self._wanted = service, wanted
        self._n = fields.integer("n", 1, MAX_CHOICES) or 1
        self._tokens = fields.flag("return_tokens")
        self._only = fields.strings("response_fields", MAX_RESPONSE_FIELDS)
        self._said = {"stream": fields.flag("stream"), "timings_per_token": fields.flag("timings_per_token")}
        self._progress = Progress(fields)
        slot = named_slot(service, fields)
        self._slot = NO_SLOT if slot is None else slot
        self._counts: dict[int, int] = {}
        self._prompt_tokens: dict[int, int] = {}
        self.prompts: Sequence[str] = ()

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        self._progress.begin(prompt_tokens)
        return ()

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        more = self._progress.add(chunk)
        if chunk.prompt is not None:
            self._prompt_tokens[index] = chunk.prompt.tokens
        if not chunk.tokens and not chunk.text:
            return
        # Programs expect the probabilities of one token with each event
        each = [chunk.tokens]
        if self._wanted.count is not None and chunk.tokens:
            each = [(token,) for token in chunk.tokens]
        for i, tokens in enumerate(each):
            self._counts[index] = self._counts.get(index, 0) + len(tokens)
            value: dict[str, Any] = {
                "index": index,
                "content": chunk.text if i == len(each) - 1 else "",
                "tokens": tokens,
                "stop": False,
                "id_slot": self._slot,
                "tokens_predicted": self._counts[index],
                "tokens_evaluated": self._prompt_tokens.get(index, 0),
            }
            if chunk.logprobs is not None:
                value |= self._probabilities(chunk.logprobs[i : i + 1])
            yield event(value | more)

    def end(self, result: Result) -> Iterable[bytes]:
        for i, completion in enumerate(result.completions):
            yield event(self._only_wanted({**self._whole(i, completion, result), "content": "", "tokens": []}))

    def failed(self, error: RequestError) -> Iterable[bytes]:
        yield event(error_body(error))

    def whole(self, result: Result) -> Any:
        found = []
        for i, completion in enumerate(result.completions):
            value = self._whole(i, completion, result)
            if completion.logprobs is not None:
                value |= self._probabilities(completion.logprobs)
            found.append(self._only_wanted(value))
        return found if len(found) > 1 else found[0]

    def _whole(self, index: int, completion: Completion, result: Result) -> dict[str, Any]:
        reason = completion.stop_reason
        kind = ("word" if isinstance(reason, str) else "eos") if completion.finish_reason == "stop" else "limit"
        receipts = {} if result.receipts is None else {"x_bitnet_receipt": result.receipts[index]}
        return {
            "index": index,
            "content": completion.text,
            "tokens": completion.tokens if self._tokens else [],
            "id_slot": self._slot,
            "stop": True,
            "model": self._service.names[0],
            "tokens_predicted": len(completion.tokens),
            "tokens_evaluated": completion.timings.prompt_tokens,
            "generation_settings": self._settings(completion),
            "prompt": self.prompts[index // self._n],
            "has_new_line": "\n" in completion.text,
            "truncated": completion.finish_reason == "context",
            "stop_type": kind,
            "stopping_word": reason if isinstance(reason, str) else "",
            "tokens_cached": completion.timings.cached_tokens,
            "timings": timings(completion),
            **receipts,
        }

    def _settings(self, completion: Completion) -> dict[str, Any]:
        made = settings(completion.options, self._service.model.tokenizer, completion.seed)
        return made | self._said | {"n_probs": self._wanted.count or 0, "post_sampling_probs": self._wanted.drawn}

    def _probabilities(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"completion_probabilities": self._wanted.described(entries, self._service.model.tokenizer)}

    def _only_wanted(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields that ``response_fields`` names, by path, with ``/`` between its names; all if it names none."""
        if not self._only:
            return value
        found = {}
        for path in self._only:
            part: Any = value
            for name in path.split("/"):
                part = part.get(name, MISSING) if isinstance(part, dict) else MISSING
            if part is not MISSING:
                found[path] = part
        return found


MISSING = object()
