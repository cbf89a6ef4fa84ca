"""``/infill`` of llama.cpp's server: the text between two others, by models whose vocabulary has marks for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitnet.core.text.tokenizer import Tokenizer
from bitnet.server.api.known_fields import INFILL
from bitnet.server.api.llama_completion import completion_job
from bitnet.server.generation.job import Job
from bitnet.server.models.service import Service
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

MAX_EXTRA = 1000
"""Maximum texts of other files."""
ANSWER_SHARE = 8
"""One in this many tokens of the context is left for the answer, if the request does not say how many it takes."""

PREFIX = ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>")
SUFFIX = ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>")
MIDDLE = ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>")
REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<reponame>", "<fim-repo>", "<REPO>")
FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
PAD = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>")
"""Names of marks, as of Qwen, StarCoder, Granite, DeepSeek, Code Llama and CodeGemma."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Token ids of a vocabulary's marks.

    Attributes:
        repository: Begins the name of a repository; None: there is none.
        file: Begins the name of a file; None: there is none.
        ends: Tokens that end an answer, as what follows belongs to another file.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    ends: tuple[int, ...]


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """The marks of a vocabulary; None: it lacks one that is needed."""

    def one(names: Sequence[str]) -> int | None:
        found = (tokenizer.encode(name, add_special=False, parse_special=True) for name in names)
        return next((ids[0] for ids in found if len(ids) == 1), None)

    prefix, suffix, middle, repository, file, pad = map(one, (PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE, PAD))
    if prefix is None or suffix is None or middle is None:
        return None
    ends = tuple(i for i in (prefix, suffix, middle, repository, file, pad) if i is not None)
    return Marks(prefix, suffix, middle, repository, file, ends)


@dataclass(frozen=True, slots=True)
class Gap:
    """What a request says about the text that is missing.

    Attributes:
        begun: The beginning of the missing text.
        extra: Names and texts of other files.
    """

    before: str
    begun: str
    after: str
    extra: tuple[tuple[str, str], ...]

    def tokens(self, service: Service, marks: Marks, answer: int | None) -> list[int]:
        """The prompt. What does not fit the context is left out: of the text before, its beginning; of the text after,
        its end; of the other files, what comes first.

        Args:
            answer: Maximum tokens of the answer; None: not said.
        """
        tokenizer, context = service.model.tokenizer, service.model.context
        longest = service.longest_text

        def encoded(text: str) -> list[int]:
            return tokenizer.encode(text, add_special=False)

        begun = encoded(self.begun[-longest:])
        begin = tokenizer.encode("")[:1] if tokenizer.bos_id is not None else []
        room = context - min(context // 2, context // ANSWER_SHARE if answer is None else answer) - len(begin) - 3
        before, after = [*encoded(self.before[-longest:]), *begun], encoded(self.after[:longest])
        of_after = min(len(after), max(room // 4, room - len(before)))
        before = before[max(0, len(before) - (room - of_after)) :]
        extra: list[int] = []
        for name, text in self.extra:
            if marks.file is None:
                extra += encoded(f"{name}\n{text[-longest:]}\n\n")
            else:
                extra += [marks.file, *encoded(f"{name}\n"), *encoded(text[-longest:])]
        if self.extra and marks.file is not None:
            named = encoded("repository\n") if marks.repository is not None else []
            extra = [*([marks.repository] if marks.repository is not None else []), *named, *extra, marks.file]
            extra += encoded("file\n")
        left = max(0, room - len(before) - of_after)
        extra = extra[len(extra) - left :] if left < len(extra) else extra
        return [*begin, *extra, marks.prefix, *before, marks.suffix, *after[:of_after], marks.middle]


def parse(service: Service, fields: Fields) -> Job:
    """Parse a request for the text between two others.

    Raises:
        RequestError: A field is missing, invalid or not supported, or the vocabulary has no marks for it.
    """
    INFILL.check(fields)
    marks = marks_of(service.model.tokenizer)
    if marks is None:
        why = "its vocabulary lacks marks for the texts before and after a gap"
        raise RequestError(501, f"{service.names[0]} does not fill gaps: {why}.", code="unsupported_endpoint")
    for name in ("input_prefix", "input_suffix"):
        fields.require(name)
    extra = []
    for chunk in fields.objects("input_extra", MAX_EXTRA) or ():
        chunk.require("text")
        extra.append((chunk.text("filename") or "tmp", chunk.text("text") or ""))
    before, begun, after = (fields.text(name) or "" for name in ("input_prefix", "prompt", "input_suffix"))
    gap, answer = Gap(before, begun, after, tuple(extra)), fields.integer("n_predict")
    most = answer if answer is not None and answer >= 0 else None
    return completion_job(service, fields, lambda: [gap.tokens(service, marks, most)], marks.ends)
