"""Reruns the generation recorded in a receipt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.core.devices.select import select_device
from bitnet.core.errors import DeviceUnavailableError, InvalidInputError, ReceiptError, brief
from bitnet.core.loading import load_model
from bitnet.core.receipts.checks import options_of, verify
from bitnet.core.receipts.document import text_sha256, tokens_sha256
from bitnet.core.receipts.record import Prompt, is_conversation
from bitnet.core.text.prompt import ChatTokens
from bitnet.core.text.thinking import Marks, thinking_of

if TYPE_CHECKING:
    from bitnet.core.engine import Completion
    from bitnet.core.hal import DeviceInfo
    from bitnet.core.text.tokenizer import Tokenizer


def rerun(
    receipt: Any, prompt: Any, *, model: str | Path, device: str | None = None, strict: bool | None = None
) -> DeviceInfo:
    """Repeat the generation of a receipt, with its model, options and seed, and compare the tokens.

    The receipt is first verified with this prompt and model. A CPU level always gives the same tokens; so does a GPU of
    the same kind with the same driver and no other load. Another kind of device may choose a different token if two are
    about equally likely. Speeds are not compared.

    Args:
        receipt: As returned by :func:`bitnet.core.receipts.load`.
        prompt: The prompt, as passed to ``generate`` (text, token ids) or ``chat`` (messages); the receipt has only its
            hash.
        model: The model file.
        device: The device to run on; None: the same CPU level or GPU backend.
        strict: As for :func:`~bitnet.core.select_device`.

    Returns:
        The device used.

    Raises:
        ReceiptError: The receipt does not hold, or the tokens differ; the message names the first difference.
        DeviceUnavailableError: That device is not available. No other device takes its place.
        InvalidInputError: The prompt is not the whole conversation.
        ModelFileError, DeviceError: As for ``load_model``.
    """
    verify(receipt, model=model, prompt=prompt if _has_text(prompt) else None)
    messages = receipt["request"]["messages"]
    if messages is not None and isinstance(prompt, str):
        if len(messages) > 1 or messages[0]["role"] != "user":
            raise InvalidInputError(f"the conversation has {len(messages)} messages, but only the last one is given.")
        prompt = [{"role": "user", "content": prompt}]
    if not (most := receipt["performance_baseline"]["tokens_generated"]):
        raise InvalidInputError("there is nothing to rerun: no token was generated.")

    backend = receipt["backend"]
    wanted = device or (receipt["compute_path"] if backend == "cpu" else backend)
    selection = select_device(wanted, strict=strict)

    def check(info: DeviceInfo) -> None:
        if selection.fake and info.backend != "cpu":
            raise InvalidInputError(f"{info.name} is faked by BITNET_GPU_FAKE.", hint="Unset it and run again.")
        if device is None and info.backend != backend:
            raise DeviceUnavailableError(
                f"the receipt was made on {receipt['compute_path']}, and no {backend} device can be used here.",
                hint="Another kind of device may choose other tokens; to run on one anyway, name it with --device.",
            )

    check(selection.info)  # before another device is opened in its place
    with closing(selection.open()) as opened:
        check(opened.info)
        options: Any = asdict(replace(options_of(receipt), max_tokens=most))
        try:
            with load_model(
                model, device=opened, **{"deterministic": False, "prompt_lookup": False, **receipt["setup"]}
            ) as loaded:
                if is_conversation(prompt):
                    done = loaded.chat(prompt, **options)
                else:
                    done = loaded.generate(_with_thinking(receipt, prompt, loaded.tokenizer), **options)
        except InvalidInputError as error:
            raise ReceiptError(f"The receipt does not hold: it cannot be rerun, as {error.message}") from error
    if difference := _difference(receipt, done):
        made_on, found = receipt["environment"]["device"]["description"], opened.info.description
        here = f"run again on {opened.info.name}"
        hint = None
        if receipt["compute_path"] != opened.info.name or (backend != "cpu" and made_on != found):
            here += f" ({brief(found)}; it was made on {receipt['compute_path']}, {brief(made_on)})"
            hint = "Another kind of device may choose a different token if two are about equally likely."
        raise ReceiptError(f"The receipt does not hold: {here}, {difference}.", hint=hint)
    return opened.info


def _with_thinking(receipt: Mapping[str, Any], prompt: Any, tokenizer: Tokenizer) -> Any:
    """Token ids with the marks of thoughts that the receipt names; a text as it is."""
    found = receipt["request"].get("thinking")
    if found is None or isinstance(prompt, str):
        return prompt
    marks = Marks(found["start"], found["end"])
    return ChatTokens(prompt, thinking_of(marks, tokenizer, opened=found["opened"]))


def _has_text(prompt: Prompt) -> bool:
    return isinstance(prompt, str) or is_conversation(prompt)


def _difference(receipt: Mapping[str, Any], done: Completion) -> str | None:
    answer = receipt["answer"]
    if receipt["request"]["tokens_sha256"] != tokens_sha256(done.prompt_tokens):
        return "the prompt has different tokens (some chat templates insert the date)"
    if found := first_difference(answer["tokens"], done.tokens):
        return found
    if (answer["finish_reason"] == "stop") != (done.finish_reason == "stop"):
        return f"the answer ended by {done.finish_reason}, not by {answer['finish_reason']}"
    return None if answer["text_sha256"] == text_sha256(done.text) else "the same tokens have another text"


def first_difference(expected: Sequence[int], found: Sequence[int]) -> str | None:
    """A description of the first difference between a receipt's tokens and those generated now; None if there is
    none."""
    for i, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"token {i + 1} of {len(expected)} is {other}, not {one}"
    if len(expected) != len(found):
        return f"the answer has {len(found)} tokens, not {len(expected)}"
    return None
