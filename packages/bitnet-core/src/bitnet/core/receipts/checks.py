"""Checks receipts, for consistency and against a given model, prompt, answer and keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from bitnet.core.devices import registry
from bitnet.core.engine.options import GenerationOptions
from bitnet.core.errors import InvalidInputError, ModelFileError, ReceiptError, brief
from bitnet.core.gguf import GGUFFile
from bitnet.core.hal.probe import TEST_DRIVER
from bitnet.core.receipts import signing
from bitnet.core.receipts.document import SCHEMA_VERSION, digest, text_sha256
from bitnet.core.receipts.record import Prompt, is_conversation, messages_sha256, shape, speeds
from bitnet.core.receipts.schema import problems
from bitnet.core.support.mapped import MappedFile

_NAME = "[!-<>-Z^-~]+"  # ASCII without the separators of a start-up line
_SUMMARY = re.compile(rf"requested=({_NAME}(?: {_NAME})*) detected=\[([a-z0-9_, -]+)\] selected=(\S+)")
_CLOCK_SKEW = timedelta(minutes=1)
_MAX_NAMED = 10
"""Maximum findings reported for one receipt."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a receipt that holds.

    Attributes:
        signed_by: Id of the key that signed it; None: it is unsigned, or ``cryptography`` is not installed to check the
            signature. Either way anyone could have written it.
        trusted: Whether that key is one of those given; if not, it may be anyone's.
        unchecked: Descriptions of what could not be checked here; usually empty.
    """

    signed_by: str | None
    trusted: bool
    unchecked: tuple[str, ...]


def verify(
    receipt: Any,
    *,
    model: str | Path | None = None,
    prompt: Prompt | None = None,
    answer: str | None = None,
    keys: Sequence[str | Path] = (),
) -> Verdict:
    """Check everything in a receipt that can be checked without running the model, which ``rerun`` does.

    Args:
        receipt: As :func:`bitnet.core.receipts.load` gives it.
        model: A model file that must match the SHA-256 in the receipt.
        prompt: The prompt that must match: a text (for a conversation, its last message) or all messages.
        answer: The answer's text that must match.
        keys: Files of trusted public keys; one of them must have signed the receipt.

    Raises:
        ReceiptError: The receipt does not hold; the message says why.
        ModelFileError: ``model`` cannot be read.
        InvalidInputError: A key cannot be read or is not a key, or ``cryptography`` is not installed.
    """
    trusted = signing.trusted_ids(keys)
    unchecked: list[str] = []
    signed_by = None
    wrong = list(islice(_check_form(receipt), _MAX_NAMED + 1))
    if not wrong:
        if receipt["digest"] != digest(receipt):
            wrong.append("it was changed after it was made: its digest does not match")
        signed_by, faults = _check_signature(receipt, trusted if keys else None, unchecked)
        wrong += faults
        wrong += _check_fake(receipt)
        wrong += _check_time(receipt["timestamp"])
        wrong += _check_selection(receipt)
        wrong += _check_kernels(receipt, unchecked)
        wrong += _check_numbers(receipt["performance_baseline"])
        wrong += _check_generation(receipt)
        if prompt is not None:
            wrong += _check_prompt(receipt["request"], prompt, unchecked)
        if answer is not None and receipt["answer"]["text_sha256"] != text_sha256(answer):
            wrong.append("it is of another answer")
        if model is not None:
            wrong += _check_model(receipt, Path(model))
    if wrong:
        more = ["and more"] if len(wrong) > _MAX_NAMED else []
        raise ReceiptError(f"The receipt does not hold: {'; '.join([*wrong[:_MAX_NAMED], *more])}.")
    return Verdict(signed_by, signed_by in trusted, tuple(unchecked))


def _check_form(receipt: Any) -> Iterator[str]:
    version = receipt.get("schema_version") if isinstance(receipt, dict) else None
    if isinstance(version, str) and version != SCHEMA_VERSION and re.fullmatch(r"\d{1,4}(\.\d{1,4}){2}", version):
        yield f"its schema_version is {version}, but this version of bitnet reads only {SCHEMA_VERSION}"
        return
    yield from problems(
        receipt, json.loads((files("bitnet.core.receipts") / "receipt.schema.json").read_text(encoding="utf-8"))
    )


def _check_signature(
    receipt: Mapping[str, Any], trusted: set[str] | None, unchecked: list[str]
) -> tuple[str | None, list[str]]:
    """The key that signed it, and what is wrong with the signature."""
    if receipt["signature"] is None:
        return None, [] if trusted is None else ["it is unsigned, but a key is given"]
    key: str = receipt["signature"]["key"]
    try:
        if not signing.fits(receipt):
            changed = "the receipt was changed after signing, or the signature was made up"
            return None, [f"its signature does not match: {changed}"]
    except signing.NoCryptographyError as error:  # no key is given: reading one would have failed
        unchecked.append(f"the signature ({error})")
        return None, []
    if trusted is not None and key not in trusted:
        return key, [f"it was signed by the key {key}, which is not one of those given"]
    return key, []


def _check_fake(receipt: Mapping[str, Any]) -> Iterator[str]:
    pretended = receipt["environment"]["variables"].get("BITNET_GPU_FAKE", "")
    if receipt["fake"] or pretended:
        yield f"it was made with a fake device (BITNET_GPU_FAKE={pretended and brief(pretended)})"
    if receipt["environment"]["device"]["vendor"] == TEST_DRIVER:
        yield "it was made with a test driver, which is not a GPU"


def _check_time(timestamp: str) -> Iterator[str]:
    try:
        made = datetime.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        yield f"there is no such time as {timestamp}"
        return
    if made > datetime.now(timezone.utc) + _CLOCK_SKEW:
        yield f"{timestamp} is in the future"


def _check_selection(receipt: Mapping[str, Any]) -> Iterator[str]:
    """The start-up line, the device and the backend must be consistent."""
    path, backend = receipt["compute_path"], receipt["backend"]
    match = _SUMMARY.fullmatch(receipt["backend_summary"])
    if match is None:
        yield "backend_summary is no start-up line"
        return
    requested, detected, selected = match[1], match[2].split(", "), match[3]
    if path.partition(":")[0] != backend:
        yield f"compute_path is {path}, backend is {backend}"
    if selected != path:
        yield f"compute_path is {path}, backend_summary says {selected}"
    if backend not in detected:
        yield f"{backend} was selected but not detected"
    if backend == "cpu" and receipt["environment"]["device"]["type"] != "cpu":
        yield f"{path} is said to be {receipt['environment']['device']['type']}"
    names = (backend, path, receipt["environment"]["device"]["id"].lower())
    granted = requested == "auto" or requested in names or (requested == "gpu" and backend != "cpu")
    if not granted and (backend != "cpu" or receipt["strict"]):  # only the CPU may replace a missing device
        yield f"{requested} was requested; {path} cannot have been selected"


def _check_kernels(receipt: Mapping[str, Any], unchecked: list[str]) -> Iterator[str]:
    """Each kernel's name must end in the backend or level it ran on, and its backend, if installed here, must list
    it."""
    backend, index = receipt["compute_path"].split(":", 1)
    tags = {backend}
    if backend == "cpu":
        tags = {"numpy"} if index == "numpy" else {index, "scalar"}
    kernels = receipt["kernels"]
    foreign = [name for name in kernels if not name.endswith(tuple(f"_{tag}" for tag in tags))]
    if foreign:
        yield f"{_some(foreign)} did not run on {receipt['compute_path']}"
    plugin = registry.installed().get(backend)
    if plugin is None:
        unchecked.append(f"{backend} is not installed here: its list of kernels")
        return
    made_with = receipt["environment"]["packages"].get(plugin.distribution)
    if made_with != plugin.version:
        what = f"{plugin.distribution} {plugin.version} is installed here, not {brief(made_with)}"
        unchecked.append(f"{what}: its list of kernels")
        return
    try:
        known = set(plugin.backend().kernels())
    except Exception as error:
        unchecked.append(f"{backend} does not work here ({error}): its list of kernels")
        return
    if invented := [name for name in kernels if name not in known and name not in foreign]:
        yield f"{backend} has no kernel {_some(invented)}"


def _check_numbers(numbers: Mapping[str, Any]) -> Iterator[str]:
    tokens, total, first = (numbers[n] for n in ("tokens_generated", "total_time_ms", "first_token_latency_ms"))
    if (first is None) != (tokens == 0):
        yield f"{tokens} tokens do not go with a first_token_latency_ms of {first}"
    if first is not None and first > total:
        yield f"first_token_latency_ms {first} is more than total_time_ms {total}"
    speed, decode = speeds(tokens, total, first)
    if not _close(numbers["tokens_per_second"], speed):
        yield f"{tokens} tokens in {total} ms are {speed} tokens/s, not {numbers['tokens_per_second']}"
    if not _close(numbers["decode_tokens_per_second"], decode):
        yield f"decode_tokens_per_second is {numbers['decode_tokens_per_second']}; the times give {decode}"


def _close(given: float | None, computed: float | None) -> bool:
    if given is None or computed is None:
        return given is computed
    return abs(given - computed) <= 2e-6 * computed


def _some(names: Sequence[str]) -> str:
    return ", ".join([*(f"{name:.80}" for name in names[:5]), *(["…"] if len(names) > 5 else [])])


def _check_generation(receipt: Mapping[str, Any]) -> Iterator[str]:
    """Answer, options and counts must be consistent."""
    request, answer, setup = receipt["request"], receipt["answer"], receipt["setup"]
    numbers, tokens, reason = receipt["performance_baseline"], answer["tokens"], answer["finish_reason"]
    if request["text_sha256"] is not None and request["messages"] is not None:
        yield "it names both a text and a conversation as prompt"
    try:
        options = options_of(receipt)
    except InvalidInputError as error:
        yield f"its options are invalid: {error.message.rstrip('.')}"
        return
    if any(token >= receipt["model_info"]["vocab_size"] for token in tokens):
        yield "the answer has a token outside the vocabulary"
    extra = numbers["tokens_generated"] - len(tokens)
    if extra not in (0, 1) or (extra and reason != "stop"):
        yield f"{numbers['tokens_generated']} tokens were generated, but the answer has {len(tokens)}"
    most, context = options.max_tokens, setup["context"]
    if most is not None and (len(tokens) > most or (reason == "length" and len(tokens) != most)):
        yield f"the answer has {len(tokens)} tokens with max_tokens {most}, and ended by {reason}"
    if most is None and reason == "length":
        yield "the answer ended by max_tokens, but there was no such limit"
    filled = numbers["prompt_tokens"] + len(tokens)
    if filled > context or (reason == "context" and filled != context):
        yield f"prompt and answer have {filled} tokens with a context of {context}, and the answer ended by {reason}"


def options_of(receipt: Mapping[str, Any]) -> GenerationOptions:
    """The options, including the seed, of a receipt with a valid form.

    Raises:
        InvalidInputError: One is out of its range.
    """
    given = receipt["request"]["options"]
    bias: dict[int, float] = {}
    for pair in given["logit_bias"]:
        if len(pair) != 2 or not isinstance(pair[0], int):
            raise InvalidInputError("logit_bias has something other than a token and a number.")
        bias[pair[0]] = -float("inf") if pair[1] is None else pair[1]
    return GenerationOptions(**{**given, "logit_bias": bias or None, "seed": receipt["seed"]})


def _check_prompt(request: Mapping[str, Any], prompt: Prompt, unchecked: list[str]) -> Iterator[str]:
    text, messages = request["text_sha256"], request["messages"]
    if text is None and messages is None:
        unchecked.append("the prompt: the receipt binds its token ids, not its text")
    elif is_conversation(prompt):
        if messages is None:
            yield "it is of a text, not of a conversation"
        elif messages != messages_sha256(prompt):
            yield "it is of another conversation"
    elif not isinstance(prompt, str):
        raise InvalidInputError("the prompt to check is neither text nor messages.")
    else:
        if (text or messages[-1]["sha256"]) != text_sha256(prompt):
            yield "it is of another prompt"
        if messages and len(messages) > 1:
            unchecked.append("the messages before the prompt")


def _sha256(path: Path) -> str:
    """The SHA-256 of a model, with all its parts; or of a file that is no model, to compare it as well."""
    try:
        return GGUFFile(path).sha256()
    except ModelFileError:
        return MappedFile(path).sha256()


def _check_model(receipt: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Check the file's hash, and what else the receipt says about it."""
    info, found = receipt["model_info"], _sha256(path)
    if found != info["sha256"]:
        yield f"{path} is not the model it was made with: its SHA-256 is {found}"
        return
    from bitnet.core.model.file import open_model

    try:
        file = open_model(path, i2s_layout=receipt["setup"]["i2s_layout"])
    except ModelFileError as error:
        yield f"{path} has the right SHA-256 but is not a model ({error.reason.rstrip('.')})"
        return
    facts = {"size": file.size, "quantization_type": file.quantization, **shape(file.config)}
    for name, value in facts.items():
        if info[name] != value:
            yield f"model_info.{name} is {brief(info[name])}; in {path} it is {brief(value)}"
